"""Strategy `elastic` (arXiv 1801.03855): clients that train by themselves and exchange with a centre."""
