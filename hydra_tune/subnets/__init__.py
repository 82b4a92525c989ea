"""Independent subnets (arXiv 1910.02120): what of a model can be dealt out, and dealing it out and putting it back."""
