"""Built-in model families: their search spaces, their data, and the building of candidates.

`FamilyBuild` is the build function of the command line; `FAMILIES` lists the families; `Space` declares a search space
of your own. Importing this package does not import torch.
"""

from hydra_tune.search_spaces.families import FAMILIES, Family, FamilyBuild, default_objective, family
from hydra_tune.search_spaces.space import Above, OneOf, Param, Space

__all__ = [
    "FAMILIES",
    "Above",
    "Family",
    "FamilyBuild",
    "OneOf",
    "Param",
    "Space",
    "default_objective",
    "family",
]
