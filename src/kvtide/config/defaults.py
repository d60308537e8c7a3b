# SPDX-License-Identifier: Apache-2.0
"""What settings are on this machine, where nobody set them: sizes by what there is, paths inside `folder`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from kvtide.config.checks import check_socket
from kvtide.config.settings import GIB, MIB, DiskSettings, Settings, ShareGroupSettings, TenantSettings
from kvtide.errors import ConfigError
from kvtide.machine import memory_available_bytes

DRAM_BYTES_MIN, DRAM_BYTES_MAX = 64 * MIB, 64 * GIB
DISK_BYTES_MIN, DISK_BYTES_MAX = 64 * MIB, 256 * GIB
_HUGE_PAGE_BYTES = 2 * MIB


def resolve(settings: Settings) -> Settings:
    """Settings without a None that depends on the machine, and with every `~` expanded. Does nothing twice.

    Raises ConfigError where no value would work.
    """
    settings = resolve_tiers(settings)
    node = settings.node
    socket = os.path.expanduser(node.socket) if node.socket else str(Path(settings.folder) / "kvtide.sock")
    check_socket(socket)
    return replace(
        settings,
        node=replace(node, socket=socket),
        tenants={name: _expand_tenant(tenant) for name, tenant in settings.tenants.items()},
        share_groups={name: _expand_group(group) for name, group in settings.share_groups.items()},
    )


def resolve_tiers(settings: Settings, available: Callable[[], int] = memory_available_bytes) -> Settings:
    """As `resolve`, but only what a store needs: a process without a service has no socket to find a place for."""
    folder = os.path.expanduser(settings.folder)
    dram, disk = settings.dram, settings.disk
    if dram.bytes_max is None:
        quarter = max(DRAM_BYTES_MIN, min(available() // 4, DRAM_BYTES_MAX))
        dram = replace(dram, bytes_max=quarter // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
    if disk is not None:
        disk = None if disk.bytes_max == 0 else _resolve_disk(disk, folder)
    return replace(settings, folder=folder, dram=dram, disk=disk)


def user_cache_folder() -> Path:
    """Where this user keeps what kvtide can make again: models that were converted, files of benchmarks."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtide"


def existing_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists: they will share a filesystem."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def held_bytes(folder: Path) -> int:
    """What the files of a folder occupy; 0 where it is not there or cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries if entry.is_file())
    except OSError:
        return 0


def _resolve_disk(disk: DiskSettings, folder: str) -> DiskSettings:
    path = Path(os.path.expanduser(disk.folder) if disk.folder else Path(folder) / "blocks")
    bytes_max = disk.bytes_max
    if bytes_max is None:
        try:
            room = os.statvfs(existing_folder(path.absolute()))
        except OSError as error:
            raise ConfigError(
                f"disk.folder {path} cannot be used: {error.strerror}; name a folder that this user may write to"
            ) from error
        # What kvtide holds counts as free, so that the bound is the same after every restart.
        quarter = (room.f_bavail * room.f_frsize + held_bytes(path)) // 4
        bytes_max = min(quarter, DISK_BYTES_MAX) // MIB * MIB
        if bytes_max < DISK_BYTES_MIN:
            raise ConfigError(
                f"disk.folder {path} has {quarter * 4:,} bytes to offer, too few for a disk tier: free some, name "
                "another folder, set disk.bytes_max, or write disk.bytes_max: 0 for no disk tier"
            )
    return replace(disk, folder=str(path), bytes_max=bytes_max)


def _expand_tenant(tenant: TenantSettings) -> TenantSettings:
    return replace(tenant, secret_file=os.path.expanduser(tenant.secret_file)) if tenant.secret_file else tenant


def _expand_group(group: ShareGroupSettings) -> ShareGroupSettings:
    return replace(group, secret_file=os.path.expanduser(group.secret_file)) if group.secret_file else group
