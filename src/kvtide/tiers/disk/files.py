# SPDX-License-Identifier: Apache-2.0
"""Files as the disk tier uses them: whole reads and writes at an offset, past the page cache where possible.

The one seam between the tier and the operating system: tests put a file here that tears its writes, kills
the process at a chosen one, or fails.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np

from kvtide.layout import Memory

ALIGNMENT = 4096


class RawFile:
    """An open file, 0600. Methods raise OSError; reads may be short at the end of the file."""

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        self.path = path
        self.is_direct = direct
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600)

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, parts: list[Memory], offset: int) -> int:
        """Fill the parts one after the other from `offset`. Returns the bytes read: fewer only at the end."""
        want = sum(len(part) for part in parts)
        got = os.preadv(self.fd, parts, offset)
        while got < want:  # signals and memory pressure may split a call
            more = os.preadv(self.fd, _behind(parts, got), offset + got)
            if more == 0:
                break
            got += more
        return got

    def write(self, parts: list[Memory], offset: int) -> None:
        """Write all the parts one after the other at `offset`."""
        want = sum(len(part) for part in parts)
        done = os.pwritev(self.fd, parts, offset)
        while done < want:
            done += os.pwritev(self.fd, _behind(parts, done), offset + done)

    def allocate(self, offset: int, length: int) -> None:
        """Make sure that writing this range later needs no more room on the device."""
        os.posix_fallocate(self.fd, offset, length)

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self.fd, size_bytes)

    def sync(self) -> None:
        os.fdatasync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


def _behind(parts: list[Memory], done: int) -> list[Memory]:
    rest = []
    for part in parts:
        if done < len(part):
            rest.append(part[done:])
        done = max(0, done - len(part))
    return rest


def aligned_memory(size_bytes: int) -> Memory:
    """Fresh page-aligned memory, zeroed."""
    size = -(-size_bytes // ALIGNMENT) * ALIGNMENT
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def supports_direct(folder: Path) -> bool:
    """Try it: a filesystem may accept the flag at open and refuse the write."""
    probe = folder / "direct-probe"
    try:
        file = RawFile(probe, direct=True)
    except OSError:  # EINVAL: tmpfs, some network and overlay filesystems
        probe.unlink(missing_ok=True)
        return False
    page = aligned_memory(ALIGNMENT)
    try:
        file.write([page], 0)
        return file.read([page], 0) == ALIGNMENT
    except OSError:
        return False
    finally:
        file.close()
        probe.unlink()


class Staging(threading.local):
    """Aligned memory of each I/O thread for frames that are not aligned themselves, kept between calls."""

    def __init__(self) -> None:
        self._memory = aligned_memory(ALIGNMENT)

    def of(self, size_bytes: int) -> Memory:
        if len(self._memory) < size_bytes:
            self._memory = aligned_memory(size_bytes)
        return self._memory[:size_bytes]
