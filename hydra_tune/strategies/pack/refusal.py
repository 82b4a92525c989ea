"""The error of candidates that cannot be packed."""

from __future__ import annotations


class CannotPack(Exception):
    """A candidate cannot be trained in a pack; the text is the reason, for the trial's record."""


def reason(error: Exception) -> str:
    """Return the reason in one line for a candidate whose batched form raised an error."""
    if isinstance(error, CannotPack):
        return str(error)
    said = " ".join(str(error).split())
    return f"its batched form failed ({type(error).__name__}: {said[:200]})"
