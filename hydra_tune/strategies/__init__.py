"""How a candidate is trained: one file for each strategy, the contract in `base`, the names in `registry`."""
