"""Parts of the strategy `shard`: its state in blocks, its cut into shards, and the running of one shard at a time.

They know candidates and devices' memory, not searches or processes.
"""
