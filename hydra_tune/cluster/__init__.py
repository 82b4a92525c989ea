"""A search on many machines: an agent on each node of a Ray cluster trains whole trials for one coordinator."""
