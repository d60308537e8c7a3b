# SPDX-License-Identifier: Apache-2.0
"""What settings must fulfil to work together. Every message says what to write instead, and shows no secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import islice
from typing import NoReturn

from kvtide.config.settings import (
    MIB,
    AdminSettings,
    ArenaSettings,
    CallSettings,
    ClientSettings,
    DiskSettings,
    LeaseSettings,
    NodeSettings,
    QuotaSettings,
    Settings,
    TenantSettings,
)
from kvtide.config.values import size_text
from kvtide.errors import ConfigError

SOCKET_PATH_BYTES_MAX = 107  # sun_path holds 108, with the zero at its end
_ARENA_BYTES_MIN = MIB
_SCOPE_CHARS_MAX = 256
_NAMES_SHOWN = 5
_NAME = re.compile(r"[a-z0-9_-][a-z0-9._-]{0,63}")  # no dot in front: names become names of files
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def check(settings: Settings) -> None:
    _check_path("folder", settings.folder)
    if settings.dram.bytes_max is not None and settings.dram.bytes_max < 1:
        _refuse("dram.bytes_max", settings.dram.bytes_max, "give it 64MiB or more, or leave it out")
    if settings.disk is not None:
        _check_disk(settings.disk, settings.dram.bytes_max)
    _check_times(settings.leases, settings.calls)
    _check_shares(settings.leases)
    _check_node(settings.node)
    _check_admin(settings.admin)
    _check_tenants(settings)
    _check_arenas(settings)
    _check_disk_reserved(settings)


def check_socket(path: str) -> None:
    """Raise ConfigError for a path that the kernel takes for no socket."""
    _check_path("node.socket", path)
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"node.socket is {path}, longer than {SOCKET_PATH_BYTES_MAX} bytes, which no socket's path may be: "
            "name a shorter one, such as /run/kvtide/kvtide.sock"
        )


def _check_disk(disk: DiskSettings, dram_bytes: int | None) -> None:
    if disk.folder is not None:
        _check_path("disk.folder", disk.folder)
    if disk.bytes_max is not None and disk.bytes_max < 0:
        _refuse("disk.bytes_max", disk.bytes_max, "give it a size such as 64GiB, or 0 for no disk tier")
    if disk.io_threads < 1:
        _refuse("disk.io_threads", disk.io_threads, "give it 1 or more")
    queue = disk.spill_queue_bytes_max
    if queue is not None and queue < 1 and dram_bytes is None:
        _refuse("disk.spill_queue_bytes_max", queue, "give it a size such as 256MiB, or leave it out")
    if queue is not None and dram_bytes is not None and not 0 < queue <= dram_bytes // 2:
        raise ConfigError(
            f"disk.spill_queue_bytes_max is {queue}: what waits to be written stays in DRAM, "
            f"so give it at most half of dram.bytes_max ({dram_bytes // 2})"
        )
    if disk.bytes_written_daily_max is not None and disk.bytes_written_daily_max < 0:
        _refuse("disk.bytes_written_daily_max", disk.bytes_written_daily_max, "give it a size such as 1TB, or none")


def _check_times(leases: LeaseSettings, calls: CallSettings) -> None:
    times = {f"leases.{name}": getattr(leases, name) for name in ("lease_s", "fetch_s")}
    times |= {f"calls.{name}": getattr(calls, name) for name in calls.__struct_fields__}
    for name, time_s in times.items():
        if not 0 < time_s < float("inf"):
            _refuse(name, time_s, "give it more than 0 seconds")


def _check_shares(leases: LeaseSettings) -> None:
    for name in ("request_share", "pinned_share", "quarantine_share"):
        if not 0 < getattr(leases, name) <= 1:
            _refuse(f"leases.{name}", getattr(leases, name), "give it a share between 0 and 1")


def _check_node(node: NodeSettings) -> None:
    if node.socket is not None:
        check_socket(os.path.expanduser(node.socket))
    if not 0 <= node.socket_mode <= 0o777:
        _refuse("node.socket_mode", oct(node.socket_mode), 'give it permissions in octal, such as "0660"')
    for name in ("sessions_max", "requests_max"):
        if getattr(node, name) < 1:
            _refuse(f"node.{name}", getattr(node, name), "give it 1 or more")
    if not 0 <= node.drain_s < float("inf"):
        _refuse("node.drain_s", node.drain_s, "give it 0 or more seconds")


def _check_admin(admin: AdminSettings) -> None:
    if not admin.host:
        raise ConfigError("admin.host is empty: name an address, such as 127.0.0.1")
    if not 0 <= admin.port <= 65_535:
        _refuse("admin.port", admin.port, "give it a port up to 65535, or 0 for any that is free")
    names: set[str] = set()
    for place, client in enumerate(admin.clients):
        _check_name(f"admin.clients[{place}].name", client.name)
        _check_sha256(f"admin.clients[{place}].token_sha256", client.token_sha256)
        if client.name in names:
            raise ConfigError(f"admin.clients[{place}].name is {client.name!r} once more: give each client his own")
        names.add(client.name)


def _check_tenants(settings: Settings) -> None:
    for name, tenant in settings.tenants.items():
        where = f"tenants.{name}"
        _check_name(f"the name of {where}", name)
        _check_secret_file(where, tenant.secret_file)
        for place, client in enumerate(tenant.clients):
            _check_client(f"{where}.clients[{place}]", client)
        for group in tenant.reads:
            if group not in settings.share_groups:
                known = f"name one of {', '.join(settings.share_groups)}" if settings.share_groups else "there is none"
                raise ConfigError(f"{where}.reads names {group!r}, which is no share group: {known}, or add it")
        _check_arena(f"{where}.dram", tenant.dram)
        _check_quota(f"{where}.disk", tenant.disk)
        _check_scopes(where, tenant)
    for name, share_group in settings.share_groups.items():
        where = f"share_groups.{name}"
        _check_name(f"the name of {where}", name)
        _check_secret_file(where, share_group.secret_file)
        _check_arena(f"{where}.dram", share_group.dram)
        _check_quota(f"{where}.disk", share_group.disk)


def _check_client(where: str, client: ClientSettings) -> None:
    if (client.uid is None) == (client.token_sha256 is None):
        raise ConfigError(f"{where} has {'neither' if client.uid is None else 'both'}: give it uid or token_sha256")
    if client.uid is not None and client.uid < 0:
        _refuse(f"{where}.uid", client.uid, "give it a user id, as `id -u` shows it")
    if client.token_sha256 is not None:
        _check_sha256(f"{where}.token_sha256", client.token_sha256)


def _check_scopes(where: str, tenant: TenantSettings) -> None:
    """A scope's reservation is kept from everybody, other tenants too: so it comes out of the tenant's own."""
    for name, scope in tenant.scopes.items():
        if not 1 <= len(name) <= _SCOPE_CHARS_MAX:
            raise ConfigError(f"a scope of {where} has a name of {len(name)} characters: give it 1 to 256")
        of_scope = f"{where}.scopes.{name}"
        _check_quota(f"{of_scope}.dram", scope.dram)
        _check_quota(f"{of_scope}.disk", scope.disk)
        _check_fits(
            f"{of_scope}.dram.bytes_max", scope.dram.bytes_max, f"{where}.dram.bytes_max", tenant.dram.bytes_max
        )
        _check_fits(
            f"{of_scope}.disk.bytes_max", scope.disk.bytes_max, f"{where}.disk.bytes_max", tenant.disk.bytes_max
        )
    dram = _reserved(scope.dram for scope in tenant.scopes.values())
    if tenant.dram.bytes_max is not None and dram > tenant.dram.bytes_max:
        raise ConfigError(
            f"the scopes of {where} reserve {size_text(dram)} of DRAM, more than its arena has: lower their "
            f"dram.bytes_reserved, or raise {where}.dram.bytes_max from {size_text(tenant.dram.bytes_max)}"
        )
    disk = _reserved(scope.disk for scope in tenant.scopes.values())
    if disk > tenant.disk.bytes_reserved:
        raise ConfigError(
            f"the scopes of {where} reserve {size_text(disk)} of the disk, more than is reserved for it: lower their "
            f"disk.bytes_reserved, or raise {where}.disk.bytes_reserved from {size_text(tenant.disk.bytes_reserved)}"
        )


def _check_arenas(settings: Settings) -> None:
    total = settings.dram.bytes_max
    arenas: dict[str, ArenaSettings] = {f"tenants.{name}": tenant.dram for name, tenant in settings.tenants.items()}
    arenas |= {f"share_groups.{name}": group.dram for name, group in settings.share_groups.items()}
    if total is None or not arenas:
        return
    given = sum(arena.bytes_max or 0 for arena in arenas.values())
    if given > total:
        raise ConfigError(
            f"the arenas of {_listed(arenas)} take {size_text(given)} together, more than dram.bytes_max "
            f"({size_text(total)}): raise that, or lower their dram.bytes_max"
        )
    others = [where for where, arena in arenas.items() if arena.bytes_max is None]
    if others and (total - given) // len(others) < _ARENA_BYTES_MIN:
        raise ConfigError(
            f"of dram.bytes_max ({size_text(total)}), {size_text(total - given)} are left for {_listed(others)}, and "
            f"each needs {size_text(_ARENA_BYTES_MIN)} or more: raise dram.bytes_max, or lower the dram.bytes_max "
            "of the others"
        )


def _check_disk_reserved(settings: Settings) -> None:
    quotas: dict[str, QuotaSettings] = {f"tenants.{name}": tenant.disk for name, tenant in settings.tenants.items()}
    quotas |= {f"share_groups.{name}": group.disk for name, group in settings.share_groups.items()}
    holders = [where for where, quota in quotas.items() if quota.bytes_reserved]
    reserved = _reserved(quotas.values())
    total = 0 if settings.disk is None else settings.disk.bytes_max
    if total is not None and reserved > total:
        have = f"more than disk.bytes_max ({size_text(total)})" if total else "and there is no disk tier"
        raise ConfigError(
            f"{_listed(holders)} reserve {size_text(reserved)} of the disk, {have}: raise disk.bytes_max, "
            "or lower their disk.bytes_reserved"
        )


def _check_arena(where: str, arena: ArenaSettings) -> None:
    if arena.bytes_max is not None and arena.bytes_max < _ARENA_BYTES_MIN:
        _refuse(
            f"{where}.bytes_max", arena.bytes_max, f"give it {size_text(_ARENA_BYTES_MIN)} or more, or leave it out"
        )


def _check_quota(where: str, quota: QuotaSettings) -> None:
    if quota.bytes_reserved < 0:
        _refuse(f"{where}.bytes_reserved", quota.bytes_reserved, "give it 0 or a size such as 4GiB")
    if quota.bytes_max is not None and quota.bytes_max < 0:
        _refuse(f"{where}.bytes_max", quota.bytes_max, "give it a size such as 16GiB, or leave it out")
    if quota.bytes_max is not None and quota.bytes_reserved > quota.bytes_max:
        raise ConfigError(
            f"{where}.bytes_reserved is {size_text(quota.bytes_reserved)}, more than {where}.bytes_max "
            f"({size_text(quota.bytes_max)}): lower the first or raise the second"
        )


def _check_fits(where: str, inner: int | None, of_tenant: str, outer: int | None) -> None:
    if inner is not None and outer is not None and inner > outer:
        raise ConfigError(
            f"{where} is {size_text(inner)}, more than {of_tenant} ({size_text(outer)}): lower the first or raise "
            "the second"
        )


def _check_name(where: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where} is {name[:80]!r}: give it 1 to 64 lower-case letters, digits, dots, underscores and dashes, "
            "with no dot in front"
        )


def _check_path(where: str, path: str) -> None:
    if not path or "\0" in path:
        raise ConfigError(f"{where} is {path!r}: name a path, such as /var/lib/kvtide")


def _check_secret_file(where: str, path: str | None) -> None:
    if path is not None:
        _check_path(f"{where}.secret_file", path)


def _check_sha256(where: str, text: str) -> None:
    if not _SHA256.fullmatch(text):
        raise ConfigError(
            f"{where} is not the SHA-256 of a token, 64 hex digits: write what `printf %s TOKEN | sha256sum` prints"
        )


def _reserved(quotas: Iterable[QuotaSettings]) -> int:
    return sum(quota.bytes_reserved for quota in quotas)


def _listed(names: Iterable[str]) -> str:
    first = list(islice(names, _NAMES_SHOWN + 1))
    return ", ".join(first[:_NAMES_SHOWN]) + (" and others" if len(first) > _NAMES_SHOWN else "")


def _refuse(where: str, value: object, mend: str) -> NoReturn:
    raise ConfigError(f"{where} is {value}: {mend}")
