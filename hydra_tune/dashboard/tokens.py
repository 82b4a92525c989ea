"""The token of a dashboard: a random word in a file that only its owner may read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from hydra_tune.core.errors import InputError, quoted

SHORTEST = 16


def token_of(path: Path) -> str:
    """Return the token in the file, creating one if there is no file. Raises InputError if others could read it."""
    shown = quoted(str(path), limit=200)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(path, shown)
    except OSError as error:
        raise InputError(f"token file {shown} cannot be made ({error.strerror})", "name another one") from error
    token = secrets.token_urlsafe(32)
    with open(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def _read(path: Path, shown: str) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"token file {shown} cannot be read", "name a file of text") from error
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"token file {shown} can be read by others", f"chmod 600 {path}")
    if len(text) < SHORTEST or not text.isascii() or not text.isprintable() or " " in text:
        hint = "delete it, and a new one is made"
        raise InputError(f"token file {shown} holds no word of at least {SHORTEST} characters", hint)
    return text
