"""Lightning in a worker keeps quiet: the search has a display of its own, and two would tear each other apart.

Bars, summaries and news go; warnings stay, but for the advice that Lightning gives on every run.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from hydra_tune.lightning.bases import home_of

ADVICE = (
    r".*does not have many workers.*",
    r".*is smaller than the logging interval.*",
    r".*isinstance\(treespec, LeafSpec\). is deprecated.*",  # what Lightning 2.6 does with torch 2.13
)
LOGGERS = ("pytorch_lightning", "lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric")


def quieten_logs() -> None:
    """Before a Trainer is made: it announces devices at once."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for advice in ADVICE:
        warnings.filterwarnings("ignore", message=advice)


def quieten_trainer(trainer: Any) -> None:
    """Turn a Trainer's progress bar off, and its summary of the model."""
    if trainer.progress_bar_callback is not None:
        trainer.progress_bar_callback.disable()
    for index, callback in enumerate(trainer.callbacks):
        if any(kind.__name__ == "ModelSummary" for kind in type(callback).__mro__):
            # Not taken out: the Trainer may be in the middle of the list.
            trainer.callbacks[index] = home_of(trainer).Callback()
