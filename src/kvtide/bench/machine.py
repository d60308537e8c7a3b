# SPDX-License-Identifier: Apache-2.0
"""Where a benchmark ran: what one needs to compare two reports, and nothing that names a host or a user."""

from __future__ import annotations

import mmap
import os
import platform
import re
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import kvtide

_PROBE_BYTES = 4096  # aligned for every sector size in use


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores` are those this process may use; `filesystem` and `has_o_direct` are about the bench folder."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    kvtide: str
    filesystem: str
    has_o_direct: bool
    date: str


def describe_machine(folder: Path) -> Machine:
    """Look at this machine. Writes a page to `folder`, which has to exist, and removes it."""
    return Machine(
        cpu=cpu_model(_read_text(Path("/proc/cpuinfo"))),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        kvtide=kvtide.__version__,
        filesystem=filesystem_type(folder.resolve(), _read_text(Path("/proc/self/mountinfo"))),
        has_o_direct=_has_o_direct(folder),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def cpu_model(cpuinfo: str) -> str:
    """Name the CPU from the text of /proc/cpuinfo. Arm kernels have no name for it, only two numbers."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, text = line.partition(":")
        fields.setdefault(name.strip(), text.strip())
    if "model name" in fields:
        return fields["model name"]
    if "CPU part" in fields:
        return f"{platform.machine()} implementer {fields['CPU implementer']} part {fields['CPU part']}"
    return platform.machine()


def filesystem_type(folder: Path, mountinfo: str) -> str:
    """Find the type of the filesystem that holds `folder` in the text of /proc/self/mountinfo.

    The deepest mount point above it wins, and of two mounts on one point the later, which hides the other.
    """
    deepest, found = -1, "unknown"
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        point = Path(_unescape(mount.split()[4]))
        if folder.is_relative_to(point) and len(point.parts) >= deepest:
            deepest, found = len(point.parts), source.split()[0]
    return found


def _unescape(path: str) -> str:
    """Undo the kernel's octal escapes: a space in a mount point is written as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _has_o_direct(folder: Path) -> bool:
    """Try one aligned page: some filesystems refuse O_DIRECT at open, others at the first write."""
    with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, _PROBE_BYTES) as page:
        try:
            descriptor = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
        except OSError:
            return False
        try:
            return os.write(descriptor, page) == _PROBE_BYTES
        except OSError:
            return False
        finally:
            os.close(descriptor)


def _read_text(path: Path) -> str:
    """Read a file of the kernel; a container may hide it, which costs a detail and not the benchmark."""
    try:
        return path.read_text()
    except OSError:
        return ""
