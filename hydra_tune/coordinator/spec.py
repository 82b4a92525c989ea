"""Reads the specification of a search: a YAML file or the name of a build function, overridden by flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_tune.coordinator.making import is_unfinished
from hydra_tune.coordinator.settings import NAMES, SearchSettings, make_settings
from hydra_tune.coordinator.trust import check_trusted
from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.search_spaces.source import FamilySource
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import study_summary
from hydra_tune.training.source import Source, parse_source, source_from

SPACE_KEYS = ("space", "data", "overrides", "epochs")
DEFAULT_EPOCHS = 5


@dataclass(frozen=True)
class SearchSpec:
    """A search that is ready to run: the source of candidates, the settings, and the declared space, if any."""

    source: Source
    settings: SearchSettings
    space: Any = None


def read_spec(text: str, flags: Mapping[str, Any]) -> SearchSpec:
    """Return the search for `text`: a YAML file, `file.py:build` or `package.module:build`; `flags` override it."""
    given: dict[str, Any] = {}
    folder = Path.cwd()
    if text.endswith((".yaml", ".yml")):
        given = read_yaml(Path(text))
        folder = Path(text).resolve().parent
    elif not text.endswith(".py") and ":" not in text:
        raise SpecError(
            f"{quoted(text)} is no specification", "give a .yaml file, file.py:build or package.module:build"
        )
    else:
        given["space"] = text
    given |= {name: _said(name, value) for name, value in flags.items() if value is not None}
    return make_spec(given, folder)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, its keys checked. Tags that would create Python objects are refused."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SpecError(f"there is no file {quoted(str(path))}", "give the path of a YAML file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read ({error})", "give a YAML file in UTF-8") from error
    except yaml.YAMLError as error:
        raise SpecError(f"{path} is not plain YAML ({' '.join(str(error).split())})", "mend that line") from error
    if not isinstance(content, dict):
        raise SpecError(f"{path} holds {quoted(content)}", "give keys and values, such as `trials: 20`")
    for key in content:
        if key not in known_keys():
            raise SpecError(f"{path} has the unknown key {quoted(key)}", nearest(str(key), known_keys()))
    return content


def _said(name: str, value: Any) -> Any:
    """Return a flag's value in YAML form: a list of one becomes its item, a strategy in braces a mapping."""
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    if name not in ("strategy", "sampler", "pruner") or not value.lstrip().startswith(("{", "[")):
        return value
    import yaml

    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(
            f"--{name} {quoted(value)} cannot be read", "write it as in YAML: '{name: pipeline, microbatches: 8}'"
        ) from error


def known_keys() -> tuple[str, ...]:
    """Return the keys of a YAML file: the arguments of `ht.search`, and the keys of the space."""
    return (*NAMES, *SPACE_KEYS)


def make_spec(given: Mapping[str, Any], folder: Path) -> SearchSpec:
    """Return a search from keys and values; relative paths start at `folder`."""
    options = {name: value for name, value in given.items() if name not in SPACE_KEYS}
    for name in ("sampler", "pruner"):
        options |= {name: _beside_part(options[name], folder)} if options.get(name) is not None else {}
    if "space" not in given:
        raise SpecError("the search space is missing", "give `space: mlp`, a list of families, or file.py:build")
    space = given["space"]
    if isinstance(space, str) and (":" in space or space.endswith(".py")):
        return _from_function(space, given, options, folder)
    return _from_families(space, given, options, folder)


def stored_spec(storage: str, study: str, flags: Mapping[str, Any], trusted: Sequence[str] = ()) -> SearchSpec:
    """Return the search of a study to be resumed, with its recorded settings overridden by `flags`.

    Code that the study's record names must be under the current folder, or in `trusted`.
    """
    with open_storage(storage, read_only=True) as opened:
        summary = study_summary(opened, study)
    if is_unfinished(summary):
        raise SpecError(f"study {study!r} has no trials: its search was killed while it began", "start it again")
    if summary.spec is None:
        raise SpecError(
            f"study {study!r} was started from Python, where its build function is",
            "run that script again with resume=True",
        )
    check_trusted(summary.spec, study, trusted)
    source = source_from(summary.spec)
    options = {name: value for name, value in summary.settings.items() if name in NAMES and value is not None}
    options |= {name: value for name, value in flags.items() if value is not None}
    if flags.get("n_trials") is not None and flags.get("trials") is None:
        del options["trials"]  # the recorded total
    options |= {"metric": list(summary.metrics), "direction": list(summary.directions)}
    options |= {"study": study, "storage": storage, "resume": True}
    space = getattr(source.load(), "space", None) if isinstance(source, FamilySource) else None
    return SearchSpec(source, make_settings(**options), space)


def _from_function(space: str, given: Mapping[str, Any], options: dict[str, Any], folder: Path) -> SearchSpec:
    for key in ("data", "overrides", "epochs"):
        if given.get(key) is not None:
            raise SpecError(f"{key} cannot be given with a build function", f"only families take {key}: drop it")
    return SearchSpec(parse_source(_beside(space, folder)), make_settings(**options))


def _from_families(space: Any, given: Mapping[str, Any], options: dict[str, Any], folder: Path) -> SearchSpec:
    from hydra_tune.search_spaces.families import default_objective

    families = space if isinstance(space, list | tuple) else [space]
    if not families or not all(isinstance(name, str) for name in families):
        raise SpecError(f"space cannot be {quoted(space)}", "give a family, a list of families, or file.py:build")
    overrides = given.get("overrides") or {}
    if not isinstance(overrides, Mapping):
        raise SpecError(f"overrides cannot be {quoted(overrides)}", "give names with a value, a list or low and high")
    source = FamilySource(
        tuple(families), _beside_data(given.get("data", "digits"), folder), dict(overrides),
        given.get("epochs", DEFAULT_EPOCHS),
    )  # fmt: skip
    build: Any = source.load()
    metric, direction = default_objective(build.task)
    if "metric" not in options:
        options["metric"] = metric
        options.setdefault("direction", direction)
    elif "direction" not in options and options["metric"] == metric:
        options["direction"] = direction
    settings = make_settings(**options)
    for name in settings.metrics:
        if name not in build.metrics:
            raise SpecError(f"candidates on this data have no metric {name!r}", nearest(name, build.metrics))
    return SearchSpec(source, settings, build.space)


def _beside(text: str, folder: Path) -> str:
    """Resolve a path in a specification relative to the specification's folder."""
    place, colon, function = text.rpartition(":")
    if place.endswith(".py") and (folder / place).is_file():
        return f"{folder / place}{colon}{function}"
    return text


def _beside_part(part: Any, folder: Path) -> Any:
    """Resolve the path of a sampler or pruner of the user's, by itself or in a mapping with options."""
    if isinstance(part, Mapping) and isinstance(part.get("name"), str):
        return {**part, "name": _beside(part["name"], folder)}
    return _beside(part, folder) if isinstance(part, str) and ".py:" in part else part


def _beside_data(data: Any, folder: Path) -> Any:
    if isinstance(data, str):
        if ".py:" in data:
            return _beside(data, folder)
        return str(folder / data) if "." in data and (folder / data).is_file() else data
    if isinstance(data, Mapping):
        return {key: _beside_data(value, folder) if isinstance(value, str) else value for key, value in data.items()}
    return data
