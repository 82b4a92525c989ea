"""Samplers and pruners with options, by Optuna's own class names, and from a user's file.

A class of `file.py:MySampler` is imported in the coordinator, where samplers and pruners run.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from hydra_tune.core.errors import InputError, SpecError, nearest, quoted
from hydra_tune.training.source import parse_source

NESTED = {"base_sampler": "sampler", "independent_sampler": "sampler", "wrapped_pruner": "pruner"}
"""Options that are a sampler or a pruner themselves."""


def split(kind: str, given: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a sampler or pruner."""
    if not isinstance(given, Mapping):
        return given, {}
    options = dict(given)
    name = options.pop("name", None)
    if not isinstance(name, str):
        example = f"{{name: {EXAMPLES[kind]}}}"
        raise SpecError(f"{kind} cannot be {quoted(given)}", f"give a name, or a mapping such as {example}")
    return name, options


EXAMPLES = {"sampler": "tpe, multivariate: true", "pruner": "median, n_warmup_steps: 3"}


def plain(given: Any) -> Any:
    """Return a sampler or pruner for the study's record: its name, with options if they are plain; else its class."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        try:
            return json.loads(json.dumps(dict(given)))
        except (TypeError, ValueError):
            return str(given.get("name"))
    return type(given).__name__


def construct(kind: str, name: str, options: Mapping[str, Any], known: Iterable[str], seed: int | None = None) -> Any:
    """Return an instance of the class `name` of Optuna, or of `file.py:Class`, seeded if it takes a seed."""
    from optuna.exceptions import ExperimentalWarning  # here and below: commands that make none start without Optuna

    made = _class(kind, name, known)
    given = {key: make(NESTED[key], value) if key in NESTED else value for key, value in options.items()}
    takes = inspect.signature(made).parameters
    if seed is not None and "seed" in takes:
        given.setdefault("seed", seed)
    if "warn_independent_sampling" in takes:
        given.setdefault("warn_independent_sampling", False)
    unknown = [key for key in given if key not in takes]
    if unknown and not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        raise SpecError(f"the {kind} {name} has no option {unknown[0]!r}", nearest(unknown[0], takes))
    try:
        with warnings.catch_warnings():
            # Optuna calls some of these experimental; the user has chosen one by name.
            warnings.simplefilter("ignore", ExperimentalWarning)
            return made(**given)
    except (TypeError, ValueError, ImportError) as error:
        raise SpecError(f"the {kind} {name} cannot be made ({error})", f"it takes: {', '.join(takes)}") from error


def make(kind: str, given: Any) -> Any:
    """Return a sampler or pruner that is an option of another."""
    from hydra_tune.coordinator.sampling import make_pruner, make_sampler

    return make_sampler(given, seed=None) if kind == "sampler" else make_pruner(given)


def _class(kind: str, name: str, known: Iterable[str]) -> Any:
    import optuna

    module: Any = optuna.samplers if kind == "sampler" else optuna.pruners
    base: type = optuna.samplers.BaseSampler if kind == "sampler" else optuna.pruners.BasePruner
    by_name = isinstance(name, str)
    if by_name and ":" in name:
        found = _of_user(kind, name)
    else:
        found = getattr(module, name, None) if by_name else None
    if isinstance(found, type) and issubclass(found, base) and not inspect.isabstract(found):
        return found
    if by_name and ":" in name:
        raise SpecError(f"{name} is no {kind}", f"give a subclass of optuna's {base.__name__}")
    names = module.__all__
    classes = [each for each in names if each.endswith(kind.capitalize()) and not each.startswith("Base")]
    raise SpecError(f"there is no {kind} {quoted(name)}", nearest(str(name), [*known, *classes]))


def _of_user(kind: str, name: str) -> Any:
    try:
        return parse_source(name).load()
    except InputError:
        raise
    except Exception as error:
        raise SpecError(f"the {kind} {name} cannot be imported ({type(error).__name__}: {error})", "mend it") from error
