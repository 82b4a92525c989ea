"""Which device runs which node of a graph, after Baechi (arXiv 2301.08695): costs in, a placement out."""

from hydra_tune.errors import PlacementInfeasible
from hydra_tune.graph.placement.placers import ALGORITHMS, Placement, place

__all__ = ["ALGORITHMS", "Placement", "PlacementInfeasible", "place"]
