# SPDX-License-Identifier: Apache-2.0
"""How fast a folder takes and gives blocks: a file of 256 MiB, written and read as the disk tier would.

The file has no name from the start (or loses it at once), so it is gone however this ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PROBE_BYTES = 256 << 20
_STEP_BYTES = 4 << 20  # the size of a block
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes a second. Not direct: past the page cache where the kernel lets go of it, so with a grain of salt."""

    write: float
    read: float
    is_direct: bool


def measure(folder: Path, io_threads: int, progress: Progress, size_bytes: int = PROBE_BYTES) -> Speed:
    """Write and read a nameless file in an existing folder. Raises OSError."""
    fd, is_direct = _open(folder)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        with ThreadPoolExecutor(io_threads, "kvtide-doctor") as pool, mmap.mmap(-1, _STEP_BYTES) as source:
            source[:] = secrets.token_bytes(_STEP_BYTES)  # no filesystem compresses it
            write_s = _timed(pool, "disk: writing", progress, size_bytes, lambda at: os.pwrite(fd, source, at))
            start_s = time.perf_counter()
            os.fdatasync(fd)
            write_s += time.perf_counter() - start_s
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read_s = _timed(pool, "disk: reading", progress, size_bytes, lambda at: _read(fd, at))
    finally:
        os.close(fd)
    return Speed(size_bytes / write_s, size_bytes / read_s, is_direct)


def _timed(
    pool: ThreadPoolExecutor, what: str, progress: Progress, size_bytes: int, move: Callable[[int], int]
) -> float:
    start_s = time.perf_counter()
    done = 0
    for moved in pool.map(move, range(0, size_bytes, _STEP_BYTES)):
        if moved != _STEP_BYTES:
            raise OSError(errno.EIO, "less was moved than asked for")
        done += moved
        progress(f"{what} {100 * done // size_bytes} %")
    return time.perf_counter() - start_s


def _read(fd: int, at: int) -> int:
    with mmap.mmap(-1, _STEP_BYTES) as target:  # page-aligned, as O_DIRECT wants it
        return os.preadv(fd, [target], at)


def _open(folder: Path) -> tuple[int, bool]:
    """A nameless file, and whether it goes past the page cache: some filesystems refuse that only at a write."""
    try:
        fd = _open_nameless(folder, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _open_nameless(folder, 0), False
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.pwrite(fd, page, 0)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EINVAL:
            raise
        return _open_nameless(folder, 0), False
    return fd, True


def _open_nameless(folder: Path, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    path = folder / f".kvtide-doctor-{secrets.token_hex(8)}"
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        path.unlink(missing_ok=True)  # O_DIRECT may be refused after the file was made
