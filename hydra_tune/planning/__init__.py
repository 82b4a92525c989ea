"""Choosing a strategy for each trial: what is measured of a candidate, what each strategy would take, and the choice.

`survey` runs in the worker that has the candidate; `estimates` and `choice` are pure.
"""
