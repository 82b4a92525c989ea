"""Elastic training between parameter server and collectives (arXiv 1801.03855): the centre and its clients."""
