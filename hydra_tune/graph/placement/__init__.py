"""Placement of a graph's nodes on devices, after Baechi (arXiv 2301.08695): costs in, a placement out."""

from hydra_tune.core.errors import PlacementInfeasible
from hydra_tune.graph.placement.placers import ALGORITHMS, Placement, place

__all__ = ["ALGORITHMS", "Placement", "PlacementInfeasible", "place"]
