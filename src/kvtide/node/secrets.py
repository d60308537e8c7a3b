# SPDX-License-Identifier: Apache-2.0
"""Files that hold secrets: made once with mode 0600, never shown, never accepted when others can read them."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.keys import SECRET_BYTES_MIN

_FILE_BYTES_MAX = 4096


def kept_secret(path: Path) -> bytes:
    """The secret in this file; a new random one if there is no such file yet."""
    _make_private(path.parent)
    text = secrets.token_hex(32) + "\n"
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    try:
        os.link(scratch, path)  # whole or not at all, and never over an existing one
    except FileExistsError:
        return given_secret(path)
    finally:
        scratch.unlink()
    return text.strip().encode()


def _make_private(folder: Path) -> None:
    """With all folders above it that do not exist; `parents=True` would give the mode to the last one only."""
    if not folder.exists():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def given_secret(path: Path) -> bytes:
    """The secret in a file that somebody else made, or ConfigError that says what is wrong with it."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_FILE_BYTES_MAX + 1).strip()
    except OSError as error:
        raise ConfigError(f"secret file {path} cannot be read: {error.strerror}", path=str(path)) from error
    if mode & 0o077:
        raise ConfigError(f"secret file {path} can be read by others: chmod 600 {path}", path=str(path))
    if not SECRET_BYTES_MIN <= len(content) <= _FILE_BYTES_MAX:
        raise ConfigError(
            f"secret file {path} holds {len(content)} bytes: give it {SECRET_BYTES_MIN} or more random ones, "
            "for example from `openssl rand -hex 32`",
            path=str(path),
        )
    return content
