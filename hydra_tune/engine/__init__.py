"""The engine: worker processes, the units they run, and the scheduler that hands units to free devices.

The engine knows nothing of Optuna, candidates or strategies: a unit names the function to run and its arguments.
"""
