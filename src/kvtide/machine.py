# SPDX-License-Identifier: Apache-2.0
"""How much memory there is: of the machine, and of the container this process runs in.

A container's limit is that of its control group and of every group above it; the tightest one holds. What a
group uses includes files that the kernel keeps in memory and drops when somebody needs the room: a process that
has read a large model would seem to have nothing left, so those do not count as used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Files:
    """What the files of a control group are called, in one of the two versions of the interface."""

    mount: str
    limit: str
    used: str
    droppable: str  # a line of memory.stat


_V2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def memory_available_bytes(root: Path = _ROOT) -> int:
    """What the machine, or the container this runs in, can still give without swapping."""
    available = _line_value(_read(root / "proc/meminfo"), "MemAvailable:") * 1024
    for limit_bytes, used_bytes in _limits(root):
        available = min(available, max(0, limit_bytes - used_bytes))
    return available


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """What the container may use in all; None where nothing but the machine sets a limit."""
    total = _line_value(_read(root / "proc/meminfo"), "MemTotal:") * 1024
    tightest = min((limit_bytes for limit_bytes, _ in _limits(root)), default=total)
    return tightest if tightest < total else None


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each group that this process is in and that has a limit, in bytes."""
    for files, group in _groups(root):
        limit, used = _read(group / files.limit), _read(group / files.used)
        if limit.isdecimal() and used.isdecimal():  # "max": no limit
            droppable = _line_value(_read(group / "memory.stat"), files.droppable)
            yield int(limit), max(0, int(used) - droppable)


def _groups(root: Path) -> Iterator[tuple[_Files, Path]]:
    """The folders of this process's groups, from its own up to the mount.

    A container that sees the path its group has on the host does not see the folder: then the mount is its own.
    """
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            files = _V2
        elif "memory" in controllers.split(","):
            files = _V1
        else:
            continue
        mount = root / files.mount
        group = mount / path.lstrip("/")
        if ".." in group.parts:  # of a process that was moved out of its namespace
            group = mount
        while group != mount:
            yield files, group
            group = group.parent
        yield files, mount


def _line_value(text: str, name: str) -> int:
    for line in text.splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
