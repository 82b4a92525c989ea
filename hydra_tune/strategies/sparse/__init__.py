"""Strategy `sparse`: training pruned networks with state compressed to the surviving weights."""
