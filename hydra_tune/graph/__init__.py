"""From a model to its nodes, their measured costs, and a cut into shards or a placement of stages.

Nothing here knows of searches or trials. Two modules of `placement` start processes, to measure transfers and crowded
cores.
"""
