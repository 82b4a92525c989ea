"""Benchmarks: `python -m benchmarks.NAME [--quick]` prints a table, then one JSON object on the last line.

Every speed is a ratio between systems measured in the same run, interleaved and repeated, with its spread.
"""
