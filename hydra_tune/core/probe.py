"""Asks for the accelerators of this machine in a process of its own.

To ask an accelerator for its free memory makes a context on it, which takes memory there for as long as the process
lives: hundreds of megabytes of each GPU, if the coordinator did it.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

from hydra_tune.core.errors import SpecError


def free_bytes(backends: str = "") -> dict[str, int]:
    """Return the free bytes of each accelerator by name, in index order; `backends` as in HYDRA_TUNE_BACKENDS."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "hydra_tune.core.probe", backends]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise SpecError(f"the accelerators of this machine cannot be asked ({why})", "devices cpu always works")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@functools.cache
def names(backends: str) -> tuple[str, ...]:
    """Return the names of the accelerators that a process finds once it has loaded these backends."""
    return tuple(free_bytes(backends))


def main(backends: str) -> None:
    """Print the free bytes of each accelerator as JSON."""
    from hydra_tune.core import accelerator

    for kind in accelerator.named_backends(backends):
        accelerator.load_backend(kind, backends)
    print(json.dumps({str(device): accelerator.free_bytes(device) for device in accelerator.available()}))


if __name__ == "__main__":
    main(sys.argv[1])
