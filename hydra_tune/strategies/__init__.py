"""Ways to train a candidate: a folder for each strategy, the contract in `base`, the names in `registry`."""
