"""Builds the test accelerator's library with g++, once for each state of its source and version of torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("csrc")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")


def compiler() -> str | None:
    """Return the path of the C++ compiler; None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def library() -> Path:
    """Return the built library; builds it if no process has done so before."""
    folder = _cache()
    path = folder / f"testdev-{_key()}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _build(path)
    return path


def _cache() -> Path:
    # Not below XDG_CACHE_HOME, which each test has of its own.
    return Path(os.environ.get("TESTDEV_CACHE", Path.home() / ".cache" / "hydra-tune-testdev"))


def _key() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {compiler()} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _build(path: Path) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("the test accelerator needs a C++ compiler: install g++, or set CXX")
    torch_folder = Path(torch.__file__).parent
    headers = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include"]
    include = [f"-I{header}" for header in headers]
    libraries = torch_folder / "lib"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:

        def compile(source: Path) -> str:
            target = f"{folder}/{source.stem}.o"
            _run([found, *FLAGS, *include, "-c", str(source), "-o", target])
            return target

        with ThreadPoolExecutor(2) as threads:
            objects = list(threads.map(compile, sorted(SOURCES.glob("*.cpp"))))
        linked = f"{folder}/linked.so"
        rest = [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}", "-o", linked]
        _run([found, "-shared", *objects, *rest])
        os.replace(linked, path)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the test accelerator cannot be built: {done.stderr[-2000:]}")
