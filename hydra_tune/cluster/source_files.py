"""The user's modules that a build function needs, as files to send to the nodes.

Sent are the file of the function, what it imports from its folder, and every module that this process has loaded from
the folders where Python looks for the user's own. Installed packages, and data, must be on every node.
"""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hydra_tune.core.errors import SpecError
from hydra_tune.training.imports import files_with_imports
from hydra_tune.training.source import FileSource, ModuleSource, Source

LARGEST_BYTES = 64 * 2**20


def source_files(source: Source) -> dict[str, bytes]:
    """Return the user's modules by path relative to the folder from which they are imported."""
    beginnings: dict[Path, list[Path]] = {}
    for folder, file in _beginnings(source):
        beginnings.setdefault(folder, []).append(file)
    found: dict[str, bytes] = {}
    for folder, files in beginnings.items():
        names = {path.relative_to(folder): path for path in files_with_imports(files, folder)}
        # This package is installed on every node: a part of it would hide the whole.
        ours = {name.as_posix(): path for name, path in names.items() if name.parts[0] != "hydra_tune"}
        found = {name: path.read_bytes() for name, path in ours.items()} | found
    size = sum(map(len, found.values()))
    if size > LARGEST_BYTES:
        raise SpecError(
            f"the modules beside the build function have {size} bytes, too many to send to nodes",
            f"install them on the nodes as a package, or keep them below {LARGEST_BYTES} bytes",
        )
    return found


def source_at(source: Source, folder: Path) -> Source:
    """Return the source on a node that has the sent files in `folder`."""
    return replace(source, path=str(folder / Path(source.path).name)) if isinstance(source, FileSource) else source


def write_files(files: dict[str, bytes], folder: Path) -> None:
    """Write the sent files into a folder of this node."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise SpecError(f"a module is called {name!r}, which leads out of its folder", "rename it")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _beginnings(source: Source) -> Iterator[tuple[Path, Path]]:
    """Yield the folder and the file of each module from which imports are followed."""
    if isinstance(source, FileSource):
        path = Path(source.path)
        yield path.parent, path
    elif isinstance(source, ModuleSource):
        file = Path.cwd().joinpath(*source.module.split("."))
        yield from ((Path.cwd(), path) for path in (file.with_suffix(".py"), file / "__init__.py") if path.is_file())
    else:
        yield from _loaded()


def _loaded() -> Iterator[tuple[Path, Path]]:
    """Yield the modules that this process has loaded from the user's folders, each with its folder."""
    folders, installed = _user_folders(), _installed()
    for name, module in list(sys.modules.items()):
        text = getattr(module, "__file__", None)
        if not isinstance(text, str) or not text.endswith(".py") or name.partition(".")[0] == "hydra_tune":
            continue
        path = Path(text).resolve()
        folder = _folder_of(getattr(getattr(module, "__spec__", None), "name", name), path)
        if folder in folders and not any(path.is_relative_to(place) for place in installed):
            yield folder, path


def _folder_of(name: str, path: Path) -> Path:
    """Return the folder from which a module of this name was imported; a script's own folder."""
    parts = name.split(".")
    tail = (*parts, "__init__.py") if path.name == "__init__.py" else (*parts[:-1], f"{parts[-1]}.py")
    return path.parents[len(tail) - 1] if path.parts[-len(tail) :] == tail else path.parent


def _user_folders() -> list[Path]:
    """Return the folders on Python's path that hold no installed packages."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    places = [*sys.path, *([str(Path(main).parent)] if main else [])]
    folders = {Path(place or ".").resolve() for place in places}
    installed = _installed()
    return [each for each in folders if each.is_dir() and not any(each.is_relative_to(place) for place in installed)]


def _installed() -> list[Path]:
    paths = sysconfig.get_paths()
    given = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    given += [place for place in sys.path if place.endswith(("site-packages", "dist-packages", "lib-dynload"))]
    return [Path(place).resolve() for place in given]
