"""Values of metrics and objectives: user code may return anything, but a study records floats."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from hydra_tune.core.errors import CandidateError, quoted


def is_complex(value: Any) -> bool:
    """True for a complex number of Python, NumPy or torch, with an imaginary part or without."""
    return isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") == "c"


def as_number(value: Any, what: str, *, infinite: bool = False) -> float:
    """Return a value as a float, finite unless `infinite`; raise a CandidateError that quotes any other value."""
    hint = "return one number that is not NaN" if infinite else "return one finite number"
    torch = sys.modules.get("torch")
    # A tensor can exist only if user code has imported torch: do not load torch for an objective without it.
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise CandidateError(f"{what} is a tensor of shape {tuple(value.shape)}", hint)
        value = value.item()
    if value is None or isinstance(value, str | bytes | Mapping | list | tuple):
        raise CandidateError(f"{what} is {quoted(value)}", hint)
    if is_complex(value):  # NumPy would drop the imaginary part with a warning
        raise CandidateError(f"{what} is the complex number {quoted(value)}", hint)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise CandidateError(f"{what} is {quoted(value)}", hint) from error
    if math.isnan(number) or (math.isinf(number) and not infinite):
        raise CandidateError(f"{what} is {quoted(number)}", hint)
    return number
