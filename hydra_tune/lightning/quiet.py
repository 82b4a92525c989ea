"""Silences Lightning in a worker: its output would disturb the display of the search.

Progress bars, summaries and messages are off; warnings stay, except for advice that Lightning repeats on every run.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from hydra_tune.lightning.bases import home_of

ADVICE = (
    r".*does not have many workers.*",
    r".*is smaller than the logging interval.*",
    r".*isinstance\(treespec, LeafSpec\). is deprecated.*",  # Lightning 2.6 with torch 2.13
)
LOGGERS = ("pytorch_lightning", "lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric")


def quieten_logs() -> None:
    """Silence loggers and repeated advice; call before a Trainer is made, which logs its devices at once."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for advice in ADVICE:
        warnings.filterwarnings("ignore", message=advice)


def quieten_trainer(trainer: Any) -> None:
    """Disable a Trainer's progress bar and model summary."""
    if trainer.progress_bar_callback is not None:
        trainer.progress_bar_callback.disable()
    for index, callback in enumerate(trainer.callbacks):
        if any(kind.__name__ == "ModelSummary" for kind in type(callback).__mro__):
            # Replaced, not removed: the Trainer may be iterating over the list.
            trainer.callbacks[index] = home_of(trainer).Callback()
