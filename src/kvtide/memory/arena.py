# SPDX-License-Identifier: Apache-2.0
"""The arena: one anonymous shared-memory file that holds every slot of the DRAM tier.

A memfd, so that it can be handed to other processes by its file descriptor and leaves nothing behind
when the last of them ends. Its size is sealed: nobody who maps it can shrink it under the others.

Fresh pages cost far more than the copy into them, so a background thread touches the whole arena, lowest
offsets first (the order in which slots are given out). Until it is done everything works, only slower.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
from pathlib import Path
from typing import Literal

import numpy as np

from kvtide.errors import ConfigError
from kvtide.layout import Memory

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
PageKind = Literal["hugetlb", "transparent", "base"]

_HUGE_PAGE_BYTES = 2 << 20
_TOUCH_BYTES = 16 << 20  # a step of the background touch: a few milliseconds, so close() never waits long
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL and pages are faulted in by writers
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4

# Through ctypes rather than mmap.madvise, which would hold the interpreter lock while pages are zeroed.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def round_up(size_bytes: int, unit: int = PAGE_BYTES) -> int:
    return -(-size_bytes // unit) * unit


def memory_available_bytes() -> int:
    """What the machine, or the container this runs in, can still give without swapping."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


class Arena:
    """Shared memory of a fixed size, mapped here as one array of bytes."""

    def __init__(self, size_bytes: int, *, huge_pages: bool = True, touch: bool = True) -> None:
        self.size_bytes = round_up(size_bytes)
        if self.size_bytes > (available := memory_available_bytes()):
            raise ConfigError(
                f"dram.bytes_max asks for {self.size_bytes:,} bytes, but only {available:,} are available here: "
                "lower dram.bytes_max or give the container more memory",
                bytes_max=self.size_bytes,
            )
        self.fd, self.page_kind, self._map = _map_memfd(self.size_bytes, huge_pages)
        self.memory: Memory = np.frombuffer(self._map, np.uint8)
        self._base = self.memory.ctypes.data
        self.touched_bytes = 0
        self._stop = threading.Event()
        self._toucher = threading.Thread(target=self._touch_all, name="kvtide-arena-touch", daemon=True)
        if touch:
            self._toucher.start()

    def wait_touched(self) -> None:
        """Block until every page is there. For benchmarks and tests; nothing else needs to wait."""
        if self._toucher.ident is not None:
            self._toucher.join()

    def close(self) -> None:
        """Give the memory back. Views that somebody still holds stay valid until they are dropped."""
        if self.fd < 0:
            return
        self._stop.set()
        self.wait_touched()
        os.close(self.fd)
        self.fd = -1
        self.memory = np.empty(0, np.uint8)
        del self._map  # unmapped with the last view; closing it here would raise while one exists

    def _touch_all(self) -> None:
        for offset in range(0, self.size_bytes, _TOUCH_BYTES):
            if self._stop.is_set():
                return
            step = min(_TOUCH_BYTES, self.size_bytes - offset)
            try:
                os.posix_fallocate(self.fd, offset, step)
            except OSError as error:
                log.warning("arena.touch_stopped offset=%d error=%s", offset, error.strerror)
                return
            _libc.madvise(self._base + offset, step, _MADV_POPULATE_WRITE)
            self.touched_bytes = offset + step


def _map_memfd(size_bytes: int, huge_pages: bool) -> tuple[int, PageKind, mmap.mmap]:
    """Huge pages where the machine has reserved or allows them, ordinary ones otherwise."""
    if huge_pages and size_bytes % _HUGE_PAGE_BYTES == 0 and _free_hugetlb_bytes() >= size_bytes:
        fd = os.memfd_create("kvtide-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        try:
            return fd, "hugetlb", _map_sealed(fd, size_bytes)
        except OSError as error:  # somebody else was faster
            os.close(fd)
            log.info("arena.no_hugetlb error=%s", error.strerror)
    fd = os.memfd_create("kvtide-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    mapped = _map_sealed(fd, size_bytes)
    if huge_pages and _shared_memory_takes_huge_pages():
        base = np.frombuffer(mapped, np.uint8).ctypes.data
        if _libc.madvise(base, size_bytes, _MADV_HUGEPAGE) == 0:
            return fd, "transparent", mapped
    return fd, "base", mapped


def _map_sealed(fd: int, size_bytes: int) -> mmap.mmap:
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    return mmap.mmap(fd, size_bytes)


def _free_hugetlb_bytes() -> int:
    pages = Path(f"/sys/kernel/mm/hugepages/hugepages-{_HUGE_PAGE_BYTES // 1024}kB/free_hugepages")
    return int(pages.read_text()) * _HUGE_PAGE_BYTES if pages.exists() else 0


def _shared_memory_takes_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return setting.exists() and any(word in setting.read_text() for word in ("[always]", "[within_size]", "[advise]"))
