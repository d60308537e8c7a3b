# SPDX-License-Identifier: Apache-2.0
"""The disk tier's folder: who owns it, and what belongs in it.

    kvtide.lock    locked while a process owns the folder; holds that process's id
    blocks.data    frames
    blocks.index   which frame is where

The lock is the kernel's (flock), so that it goes with its process however that ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from kvtide.errors import ConfigError, FolderForeign, FolderOwned

log = logging.getLogger(__name__)

LOCK, DATA, INDEX = "kvtide.lock", "blocks.data", "blocks.index"
_OURS = {LOCK, DATA, INDEX, "direct-probe"}
_HARMLESS = {"lost+found"}  # every ext4 mount point has it


class Folder:
    """Ownership of a folder, from construction to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = {entry.name for entry in path.iterdir()} - _HARMLESS
            if names and LOCK not in names:
                raise FolderForeign(
                    f"disk.folder {path} holds files that kvtide did not make ({', '.join(sorted(names)[:3])}): "
                    "nothing was touched; name an empty folder",
                    folder=str(path),
                )
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"disk.folder {path} cannot be used: {error.strerror}; name a folder that this user may write to",
                folder=str(path),
            ) from error
        self._own()
        if strangers := names - _OURS:
            log.warning("disk.foreign_files folder=%s names=%s ignored=yes", path, sorted(strangers)[:5])

    def _own(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            raise FolderOwned(
                f"disk.folder {self.path} belongs to process {owner}: stop it, name another folder, "
                "or run without a disk tier",
                folder=str(self.path),
                owner=owner,
            ) from error
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"disk.folder {self.path} cannot be locked: {error.strerror}; name a folder on a local filesystem",
                folder=str(self.path),
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._lock)
