"""Strategy `pipeline`: one model in stages across several devices, which pass micro-batches to each other."""
