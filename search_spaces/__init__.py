"""The built-in model families: what can be searched, on which data, and how a candidate is built from it.

`FamilyBuild` is the build function that the command line uses; `FAMILIES` lists what there is; `Space`
declares a search space of your own. Importing this package does not import torch.
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
