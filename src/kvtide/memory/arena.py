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

from kvtide.errors import ConfigError, ProtocolError
from kvtide.layout import Memory
from kvtide.machine import memory_available_bytes

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
PageKind = Literal["hugetlb", "transparent", "base"]

_HUGE_PAGE_BYTES = 2 << 20
_TOUCH_BYTES = 16 << 20  # a step of the background touch: a few milliseconds, so close() never waits long
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL and pages are faulted in by writers
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1, 2, 4, 16

# Through ctypes rather than mmap.madvise, which would hold the interpreter lock while pages are zeroed.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def round_up(size_bytes: int, unit: int = PAGE_BYTES) -> int:
    return -(-size_bytes // unit) * unit


class Arena:
    """Shared memory of a fixed size, mapped here as one array of bytes.

    `is_private_to_write`: other processes can map it to read only, whatever they try.
    """

    def __init__(
        self, size_bytes: int, *, huge_pages: bool = True, touch: bool = True, is_private_to_write: bool = False
    ) -> None:
        self.size_bytes = round_up(size_bytes)
        if self.size_bytes > (available := memory_available_bytes()):
            raise ConfigError(
                f"dram.bytes_max asks for {self.size_bytes:,} bytes, but only {available:,} are available here: "
                "lower dram.bytes_max or give the container more memory",
                bytes_max=self.size_bytes,
            )
        self.fd, self.page_kind, self._map = _map_memfd(self.size_bytes, huge_pages, is_private_to_write)
        self.memory: Memory = np.frombuffer(self._map, np.uint8)
        self._base = self.memory.ctypes.data
        self.touched_bytes = 0
        self._stop = threading.Event()
        self._toucher = threading.Thread(target=self._touch_all, name="kvtide-arena-touch", daemon=True)
        if touch:
            self._toucher.start()

    def reopen_to_read(self) -> int:
        """Another file descriptor of the same memory, with which it cannot be written. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

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


def map_arena(fd: int, size_bytes: int, *, is_writable: bool) -> Memory:
    """The arena of another process, by its file descriptor, which may be closed afterwards.

    The memory stays mapped as long as a view of it is alive, even after its maker has ended.
    """
    if os.fstat(fd).st_size < size_bytes:  # reading behind the end would kill this process
        raise ProtocolError(f"an arena of {os.fstat(fd).st_size:,} bytes, not {size_bytes:,}")
    mapped = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0))
    return np.frombuffer(mapped, np.uint8)


def populate(memory: Memory, is_stopped: threading.Event, *, is_writable: bool) -> None:
    """Enter the pages of a mapped arena into this process's tables, before the first copy has to. Blocks."""
    advice = _MADV_POPULATE_WRITE if is_writable else _MADV_POPULATE_READ
    base, size = memory.ctypes.data, len(memory)
    for offset in range(0, size, _TOUCH_BYTES):
        if is_stopped.is_set() or _libc.madvise(base + offset, min(_TOUCH_BYTES, size - offset), advice) != 0:
            return


def _map_memfd(size_bytes: int, huge_pages: bool, is_private_to_write: bool) -> tuple[int, PageKind, mmap.mmap]:
    """Huge pages where the machine has reserved or allows them, ordinary ones otherwise."""
    if huge_pages and size_bytes % _HUGE_PAGE_BYTES == 0 and free_hugetlb_bytes() >= size_bytes:
        fd = os.memfd_create("kvtide-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        try:
            return fd, "hugetlb", _map_sealed(fd, size_bytes, is_private_to_write)
        except OSError as error:  # somebody else was faster
            os.close(fd)
            log.info("arena.no_hugetlb error=%s", error.strerror)
    fd = os.memfd_create("kvtide-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    mapped = _map_sealed(fd, size_bytes, is_private_to_write)
    if huge_pages and shared_memory_takes_huge_pages():
        base = np.frombuffer(mapped, np.uint8).ctypes.data
        if _libc.madvise(base, size_bytes, _MADV_HUGEPAGE) == 0:
            return fd, "transparent", mapped
    return fd, "base", mapped


def _map_sealed(fd: int, size_bytes: int, is_private_to_write: bool) -> mmap.mmap:
    os.fchmod(fd, 0o600)  # who was given it to read cannot open it again to write, unless he is its owner
    os.ftruncate(fd, size_bytes)
    mapped = mmap.mmap(fd, size_bytes)
    # FUTURE_WRITE spares the mapping that exists: nobody can make another one to write through.
    more = _F_SEAL_FUTURE_WRITE if is_private_to_write else 0
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | more | _F_SEAL_SEAL)
    return mapped


def free_hugetlb_bytes() -> int:
    pages = Path(f"/sys/kernel/mm/hugepages/hugepages-{_HUGE_PAGE_BYTES // 1024}kB/free_hugepages")
    return int(pages.read_text()) * _HUGE_PAGE_BYTES if pages.exists() else 0


def shared_memory_takes_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return setting.exists() and any(word in setting.read_text() for word in ("[always]", "[within_size]", "[advise]"))
