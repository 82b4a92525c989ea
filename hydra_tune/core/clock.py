"""Clock for measuring work while other processes compete for the cores.

A pilot batch runs beside the training of other trials. When cores are scarce, wall time includes the other trials'
turns; the CPU time of the computing thread does not. With several threads, or on an accelerator, no such clock exists
and wall time is used.
"""

from __future__ import annotations

import time

import torch


def work_seconds(device: torch.device | str = "cpu") -> float:
    """Return seconds of work so far by the best available clock; only differences are meaningful."""
    if torch.device(device).type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()
