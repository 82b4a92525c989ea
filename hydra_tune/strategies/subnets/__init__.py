"""Strategy `ist`, independent subnets (arXiv 1910.02120): dealing out a model's parts and merging the results."""
