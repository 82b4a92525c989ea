"""Options that several commands share, and flags that follow from the settings of a search."""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from hydra_tune.coordinator.settings import SearchSettings

Command: TypeAlias = Callable[..., int]
SETTINGS = {field.name: field.metadata for field in fields(SearchSettings)}


def option(setting: str, help: str | None = None) -> Any:
    """Return the flag of a setting, as declared in `SearchSettings`, or with another help text."""
    about = SETTINGS[setting]
    flag = [f"--{setting.replace('_', '-')}"] if about["flag"] is bool else []  # without a --no- form
    return typer.Option(*flag, help=help or about["help"])


def with_settings(**helps: str | None) -> Callable[[Command], Command]:
    """Give a command these settings as flags in place of its `**flags`; by default all that have a flag.

    Each gets the help text given here, or the declared one for None. An omitted flag is None in `flags`. In the
    command's help they come before its keyword-only arguments.
    """
    helps = helps or {name: None for name, about in SETTINGS.items() if about["flag"] is not None}

    def decorated(command: Command) -> Command:
        plain = inspect.signature(command, eval_str=True)
        own = [each for each in plain.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        first = [each for each in own if each.kind is not Parameter.KEYWORD_ONLY]
        flags = [_parameter(name, help) for name, help in helps.items()]
        parameters = [*first, *flags, *own[len(first) :]]
        command.__signature__ = plain.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorated


def _parameter(setting: str, help: str | None) -> Parameter:
    kind = SETTINGS[setting]["flag"] | None
    return Parameter(setting, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option(setting, help)])


Spec = Annotated[str, typer.Argument(help="A YAML file, file.py:build, or package.module:build.", metavar="SPEC")]
Storage = Annotated[str | None, option("storage")]
Epochs = Annotated[int | None, typer.Option(help="Epochs of each candidate of a built-in family.")]
Data = Annotated[str | None, typer.Option(help="Data set for built-in families.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(help="A file, folder or module whose code the study may run, outside the current folder."),
]
Study = Annotated[str, typer.Argument(help="Name of the study.")]


def program() -> str:
    """Return the command to print for the user to type: the name if it is on the PATH, else the path."""
    started = sys.argv[0]
    if shutil.which("hydra-tune") or Path(started).name != "hydra-tune":
        return "hydra-tune"
    return started
