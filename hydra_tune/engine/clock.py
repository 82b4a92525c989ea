"""The clock by which work is measured that others may disturb.

A pilot batch runs beside the training of other trials. Where cores are scarce the wall clock counts their turns too,
and the processor time of the thread that computes does not. With several threads, or on an accelerator, there is no
such clock, and the wall's is used.
"""

from __future__ import annotations

import time

import torch


def work_seconds(device: torch.device | str = "cpu") -> float:
    """Seconds of work so far, by the best clock there is; only differences mean something."""
    if torch.device(device).type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()
