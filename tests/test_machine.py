# SPDX-License-Identifier: Apache-2.0
"""How much memory there is: the machine's, or the tightest limit of a control group that this process is in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide.machine import memory_available_bytes, memory_limit_bytes

GIB = 1 << 30
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A machine in a folder: 2 GiB of memory, 1 GiB of it available, no control groups yet."""

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    write("proc/meminfo", "MemTotal:     2097152 kB\nMemFree: 9 kB\nMemAvailable:    1048576 kB")
    return write


def test_a_machine_without_control_groups_has_what_it_says(write: Write, tmp_path: Path) -> None:
    assert memory_available_bytes(tmp_path) == GIB
    assert memory_limit_bytes(tmp_path) is None


def test_a_container_that_allows_less_than_the_machine_has_is_believed(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/")
    write(f"{V2}/memory.max", "300000000")
    write(f"{V2}/memory.current", "100000000")
    assert memory_available_bytes(tmp_path) == 200_000_000
    assert memory_limit_bytes(tmp_path) == 300_000_000
    write(f"{V2}/memory.current", "400000000")
    assert memory_available_bytes(tmp_path) == 0


@pytest.mark.parametrize(("folder", "limit"), [(V2, "max"), (V1, "9223372036854771712")])
def test_a_group_without_a_limit_sets_none(write: Write, tmp_path: Path, folder: str, limit: str) -> None:
    write("proc/self/cgroup", "0::/" if folder == V2 else "4:memory:/")
    write(f"{folder}/memory.max", limit)
    write(f"{folder}/memory.current", "100000000")
    write(f"{folder}/memory.limit_in_bytes", limit)
    write(f"{folder}/memory.usage_in_bytes", "100000000")
    assert memory_available_bytes(tmp_path) == GIB
    assert memory_limit_bytes(tmp_path) is None


def test_the_older_interface_is_read_too(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/")
    write(f"{V1}/docker/abc/memory.limit_in_bytes", "300000000")
    write(f"{V1}/docker/abc/memory.usage_in_bytes", "250000000")
    write(f"{V1}/docker/abc/memory.stat", "inactive_file 1\ntotal_inactive_file 50000000")
    assert memory_available_bytes(tmp_path) == 100_000_000
    assert memory_limit_bytes(tmp_path) == 300_000_000


def test_the_tightest_of_all_groups_above_holds(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/system.slice/kvtide.service")
    for group, limit in (("/system.slice/kvtide.service", "max"), ("/system.slice", "500000000"), ("", "900000000")):
        write(f"{V2}{group}/memory.max", limit)
        write(f"{V2}{group}/memory.current", "100000000")
    assert memory_available_bytes(tmp_path) == 400_000_000
    assert memory_limit_bytes(tmp_path) == 500_000_000


@pytest.mark.parametrize("path", ["/kubepods/pod1/unseen", "/../../other"])
def test_a_group_that_cannot_be_seen_is_that_of_the_mount(write: Write, tmp_path: Path, path: str) -> None:
    write("proc/self/cgroup", f"0::{path}")
    write(f"{V2}/memory.max", "300000000")
    write(f"{V2}/memory.current", "100000000")
    assert memory_available_bytes(tmp_path) == 200_000_000


def test_files_that_the_kernel_keeps_in_memory_do_not_count_as_used(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/")
    write(f"{V2}/memory.max", "300000000")
    write(f"{V2}/memory.current", "290000000")
    write(f"{V2}/memory.stat", "anon 5\nfile 200000000\ninactive_file 190000000\nactive_file 10000000")
    assert memory_available_bytes(tmp_path) == 200_000_000


def test_a_machine_that_hides_everything_has_nothing_to_give(tmp_path: Path) -> None:
    assert memory_available_bytes(tmp_path) == 0
    assert memory_limit_bytes(tmp_path) is None


def test_this_machine_has_some() -> None:
    assert memory_available_bytes() > 0
