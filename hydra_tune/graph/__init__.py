"""From a model to shards: what each node costs, and where to cut so that every shard fits a device.

Nothing here knows of processes, devices in use or trials: costs in, a partition out.
"""
