"""Training one candidate in a worker: the candidate, its batches, the loop, checkpoints, and build functions."""
