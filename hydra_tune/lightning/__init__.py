"""Hydra Tune for users of Lightning: the callback for objectives, and LightningModules as candidates."""

from hydra_tune.lightning.callback import HydraTuneCallback as HydraTuneCallback
from hydra_tune.lightning.scripts import optimize_ddp as optimize_ddp
