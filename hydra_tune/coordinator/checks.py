"""Checks of settings. Each takes the setting's name and its value, and raises SpecError."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra_tune.core.errors import SpecError, quoted

LONGEST_NAME = 200


def name(what: str, value: object) -> None:
    """Check a name for terminals, pages and logs: short, printable, on one line."""
    text = value if isinstance(value, str) else ""
    if not 0 < len(text) <= LONGEST_NAME or not text.isprintable() or text != text.strip():
        hint = f"give 1 to {LONGEST_NAME} printable characters on one line"
        raise SpecError(f"{what} cannot be named {quoted(value)}", hint)


def several(what: str, value: object) -> tuple[str, ...]:
    """Return one name, or the names in a list, as a tuple."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and value:
        return tuple(value)
    raise SpecError(f"{what} cannot be {quoted(value)}", "give a name, or a list of names for several objectives")


def metrics(what: str, value: object) -> None:
    """Check for one or several metrics, each named once."""
    found = several(what, value)
    for metric in found:
        name(what, metric)
    if len(set(found)) < len(found):
        raise SpecError(f"{what} cannot be {quoted(list(found))}", "name each metric once")


def directions(what: str, value: object) -> None:
    """Check for one or several directions."""
    for direction in several(what, value):
        if direction not in ("minimize", "maximize"):
            raise SpecError(f"{what} cannot be {quoted(direction)}", "give minimize or maximize")


def whole(what: str, value: object, least: int = 1) -> None:
    """Check for a whole number, by default of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{what} cannot be {quoted(value)}", f"give a whole number of at least {least}")


def seed(what: str, value: Any) -> None:
    """Check for a seed that numpy and torch both accept."""
    whole(what, value, least=0)
    if value >= 2**32:
        raise SpecError(f"{what} cannot be {quoted(value)}", "give a number below 2**32")


def seconds(what: str, value: object) -> None:
    """Check for a number of seconds greater than zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise SpecError(f"{what} cannot be {quoted(value)}", "give seconds, more than 0")


def cluster(what: str, value: object) -> None:
    """Check for the address of a Ray cluster: auto, or HOST:PORT."""
    text = value if isinstance(value, str) else ""
    if text.startswith("ray://"):
        raise SpecError(
            f"{what} cannot be {quoted(value)}: a search does not run through Ray's client",
            "run it on a machine of the cluster: ray job submit -- hydra-tune search ... --cluster auto",
        )
    host, _, port = text.rpartition(":")
    if text != "auto" and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise SpecError(f"{what} cannot be {quoted(value)}", "give auto, or the head's address such as 10.0.0.1:6379")


def directory(what: str, value: object) -> None:
    """Check for an existing directory."""
    if not (isinstance(value, str | Path) and Path(value).is_dir()):
        raise SpecError(f"{what} cannot be {quoted(value)}", "give a directory that exists")


def url(what: str, value: object) -> None:
    """Check for text; the storage itself refuses invalid URLs."""
    if not isinstance(value, str):
        raise SpecError(f"{what} cannot be {quoted(value)}", "give a database URL, such as sqlite:///x.db")


def parameters(what: str, value: object) -> None:
    """Check for a list of mappings from a parameter's name to its value."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, Mapping) for each in value):
        raise SpecError(f"{what} cannot be {quoted(value)}", "give a list of parameters, such as [{'lr': 0.01}]")


def callables(what: str, value: object) -> None:
    """Check for a list of functions."""
    if not isinstance(value, list | tuple) or not all(callable(each) for each in value):
        raise SpecError(f"{what} cannot be {quoted(value)}", "give a list of functions of a study and a trial")


def errors(what: str, value: object) -> None:
    """Check for one or several classes of exceptions."""
    for each in value if isinstance(value, tuple) else (value,):
        if not (isinstance(each, type) and issubclass(each, Exception)):
            raise SpecError(f"{what} cannot be {quoted(value)}", "give an exception's class, or a tuple of them")
