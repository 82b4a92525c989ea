"""The engine: worker processes, the units they run, and the scheduler that assigns units to free devices.

The engine does not depend on Optuna, candidates or strategies: a unit names the function to run and its arguments.
"""
