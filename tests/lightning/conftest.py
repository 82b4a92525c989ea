"""Both names of Lightning are imported once, and what a Trainer sets in the environment is set before each test."""

from __future__ import annotations

import os

import lightning.pytorch  # noqa: F401
import pytorch_lightning  # noqa: F401

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
