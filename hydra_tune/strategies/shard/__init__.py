"""Strategy `shard`: the coroutine (`strategy.py`), its units in workers (`units.py`), and what both need.

A trial's state lies in blocks, its model is cut into shards, and one shard at a time is on a device.
"""
