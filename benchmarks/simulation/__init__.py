"""A simulation of the real coordinator on a virtual clock, with simulated workers; see `benchmarks/schedules.py`."""
