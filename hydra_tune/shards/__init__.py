"""A trial in shards: where its state lies, how it is taken apart and put together, and how one shard is run.

The pieces that the strategy `shard` is made of. They know candidates and devices' memory, not searches or processes.
"""
