"""Strategy `pack`: trials of one shape trained as one batched model."""
