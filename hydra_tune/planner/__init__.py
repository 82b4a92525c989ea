"""Choice of a strategy for each trial: measurements of a candidate, estimates for each strategy, and the choice.

`survey` runs in the worker that has the candidate; `estimates` and `choice` are pure.
"""
