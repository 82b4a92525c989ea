"""Training pruned networks with compressed state: masks, the survivors' state, and the loop over them."""
