# SPDX-License-Identifier: Apache-2.0
"""The arena: memory of a fixed size that other processes can map, and that nobody can shrink under them."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtide.errors import ConfigError
from kvtide.machine import memory_available_bytes
from kvtide.memory import arena as arena_module
from kvtide.memory.arena import PAGE_BYTES, Arena, round_up

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(4 * MIB)
    yield arena
    arena.close()


@pytest.mark.parametrize(("size", "rounded"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_sizes_are_rounded_up_to_pages(size: int, rounded: int) -> None:
    assert round_up(size) == rounded


def test_an_arena_is_zeroed_memory_that_begins_at_a_page() -> None:
    arena = Arena(MIB + 1)
    assert arena.size_bytes == len(arena.memory) == MIB + PAGE_BYTES
    assert arena.memory.ctypes.data % PAGE_BYTES == 0
    assert not arena.memory.any()
    arena.memory[:] = 7
    assert (arena.memory == 7).all()
    arena.close()


@pytest.mark.parametrize("size_bytes", [0, MIB, 8 * MIB])
def test_nobody_can_change_the_size(arena: Arena, size_bytes: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size_bytes)
    assert os.fstat(arena.fd).st_size == 4 * MIB


def test_every_page_is_touched_in_the_end(arena: Arena) -> None:
    arena.wait_touched()
    assert arena.touched_bytes == arena.size_bytes
    assert os.fstat(arena.fd).st_blocks * 512 >= arena.size_bytes


def test_touching_changes_no_byte_that_somebody_has_written() -> None:
    arena = Arena(64 * MIB)
    arena.memory[::PAGE_BYTES] = 9
    arena.wait_touched()
    assert (arena.memory[::PAGE_BYTES] == 9).all()
    arena.close()


def test_an_arena_can_be_left_untouched() -> None:
    arena = Arena(4 * MIB, touch=False)
    arena.wait_touched()
    assert arena.touched_bytes == 0
    assert os.fstat(arena.fd).st_blocks == 0
    arena.close()


def test_more_memory_than_there_is_is_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ConfigError, match=r"dram\.bytes_max"):
        Arena(memory_available_bytes() + 64 * MIB)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose files under /sys are in this folder."""
    monkeypatch.setattr(arena_module, "Path", lambda path: tmp_path / Path(path).name)
    return tmp_path


def test_closing_leaves_views_that_somebody_holds() -> None:
    arena = Arena(4 * MIB)
    view = arena.memory[5000:6000]
    view[:] = 3
    arena.close()
    assert (view == 3).all()
    view[:] = 4
    assert (view == 4).all()
    assert len(arena.memory) == 0


def test_closing_gives_the_memory_back() -> None:
    arena = Arena(4 * MIB)
    files = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) == arena.fd}
    assert any("kvtide-arena" in name for name in files)
    arena.close()
    gc.collect()
    assert "kvtide-arena" not in Path("/proc/self/maps").read_text()


def test_closing_again_does_nothing(arena: Arena) -> None:
    arena.close()
    arena.close()
    assert arena.fd == -1


def test_closing_does_not_wait_for_all_the_touching() -> None:
    arena = Arena(512 * MIB)
    arena.close()
    assert arena.touched_bytes <= arena.size_bytes


def test_another_process_that_maps_it_sees_the_same_bytes(arena: Arena) -> None:
    arena.memory[1234] = 77
    code = (
        "import mmap, sys\n"
        "fd, size = map(int, sys.argv[1:])\n"
        "with mmap.mmap(fd, size) as memory:\n"
        "    print(memory[1234])\n"
        "    memory[5678] = 88\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(arena.fd), str(arena.size_bytes)],
        pass_fds=[arena.fd],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said == "77\n"
    assert arena.memory[5678] == 88


def test_memory_that_cannot_be_touched_works_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    arena = Arena(4 * MIB)
    arena.wait_touched()
    assert arena.touched_bytes == 0
    arena.memory[:] = 1
    assert arena.memory.all()
    arena.close()


@pytest.mark.parametrize("setting", ["always [never]", "[always] never", "within_size [advise] never", None])
def test_transparent_huge_pages_are_used_only_where_the_machine_allows_them(machine: Path, setting: str | None) -> None:
    if setting is not None:
        (machine / "shmem_enabled").write_text(setting)
    is_allowed = setting is not None and "[never]" not in setting
    arena = Arena(4 * MIB)
    assert arena.page_kind in (("transparent", "base") if is_allowed else ("base",))
    arena.close()


def test_huge_pages_can_be_declined(machine: Path) -> None:
    (machine / "shmem_enabled").write_text("[always]")
    (machine / "free_hugepages").write_text("1000")
    arena = Arena(4 * MIB, huge_pages=False)
    assert arena.page_kind == "base"
    arena.close()


def test_reserved_huge_pages_that_are_gone_are_replaced_by_ordinary_ones(machine: Path) -> None:
    (machine / "free_hugepages").write_text("1000")
    arena = Arena(4 * MIB)
    assert arena.page_kind in ("hugetlb", "base")
    arena.memory[:] = 5
    assert np.all(arena.memory == 5)
    assert os.fstat(arena.fd).st_size == 4 * MIB
    arena.close()
