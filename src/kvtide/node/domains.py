# SPDX-License-Identifier: Apache-2.0
"""Trust domains: one arena, and so one store, for each tenant and each share group; one disk below all of them.

Processes that map the same arena trust each other, so tenants never share one. What they share below DRAM is
kept apart by shelves, and bounded by quotas. One bound covers all arenas together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvtide.config import ArenaSettings, Settings
from kvtide.deadline import Deadline
from kvtide.errors import ConfigError
from kvtide.keys import Digest, Key
from kvtide.memory.arena import PAGE_BYTES
from kvtide.node.quotas import QuotaUse, Shares, disk_shares, dram_shares
from kvtide.node.secrets import given_secret, kept_secret
from kvtide.node.usage import Usage
from kvtide.policy.pools import Quota
from kvtide.store import Lower, Store, StoreStats
from kvtide.tenant import DEFAULT_TENANT, Tenant
from kvtide.tickets import Ticket
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.dram import DramTier
from kvtide.tiers.wrappers import Borrowed, Switch

_LOOKUP_S = 0.002  # everybody waits for the loop: a disk that is busy for longer has a miss
GROUP_PREFIX = "group:"  # no tenant's name can contain a colon


@dataclass(slots=True, eq=False)
class Domain:
    """A tenant, or a share group, with its store."""

    tenant: Tenant
    store: Store
    usage: Usage
    shares: Shares  # of its arena
    _read_fd: int

    def arena_fd(self, is_writable: bool) -> int:
        """What to hand to a client."""
        return self.store.dram.arena.fd if is_writable else self._read_fd

    @property
    def name(self) -> str:
        return self.tenant.name

    @property
    def is_group(self) -> bool:
        return self.tenant.name.startswith(GROUP_PREFIX)

    def own_stats(self) -> StoreStats:
        """What this tenant may know: nothing of a tier that it shares with others."""
        return self.store.stats(["dram"])


class Domains:
    """All of them. Opened at once, closed at once."""

    def __init__(self, settings: Settings) -> None:
        """`settings` are resolved. Raises ConfigError, and leaves nothing open, when something cannot work."""
        self.settings = settings
        self.folder = Path(settings.folder)
        self.tenants: dict[str, Domain] = {}
        self.groups: dict[str, Domain] = {}
        self.switches: dict[str, Switch] = {}
        self.on_complete: Callable[[], None] = lambda: None
        self._disk: DiskTier | None = None
        self._disk_shares = disk_shares(settings, {name: GROUP_PREFIX + name for name in settings.share_groups})
        self._workers = ThreadPoolExecutor(1, "kvtide-clear")
        with ExitStack() as undo:
            undo.callback(self._workers.shutdown)
            disk = self._open_disk(undo)
            sizes = arena_sizes(settings)
            for tenant, file, is_group in self._who():
                secret = given_secret(Path(file).expanduser()) if file else self._secret(tenant)
                domain = self._open_domain(Tenant(tenant, secret), sizes[tenant], disk, undo, is_group)
                if is_group:
                    self.groups[tenant.removeprefix(GROUP_PREFIX)] = domain
                else:
                    self.tenants[tenant] = domain
            self._undo = undo.pop_all()

    def __iter__(self) -> Iterator[Domain]:
        yield from self.tenants.values()
        yield from self.groups.values()

    def _who(self) -> Iterator[tuple[str, str | None, bool]]:
        if not self.settings.tenants:
            yield DEFAULT_TENANT, None, False
        for name, tenant in self.settings.tenants.items():
            yield name, tenant.secret_file, False
        for name, group in self.settings.share_groups.items():
            yield GROUP_PREFIX + name, group.secret_file, True

    def _secret(self, tenant: str) -> bytes:
        if not self.settings.tenants and tenant == DEFAULT_TENANT:
            return Tenant().secret  # one user, nobody to hide from: blocks of an embedded store are found, too
        kind = "groups" if tenant.startswith(GROUP_PREFIX) else "tenants"
        return kept_secret(self.folder / "secrets" / kind / tenant.removeprefix(GROUP_PREFIX))

    def _open_disk(self, undo: ExitStack) -> DiskTier | None:
        settings = self.settings.disk
        if settings is None:
            return None
        assert settings.folder is not None and settings.bytes_max is not None, "resolved settings"
        disk = DiskTier(
            Path(settings.folder),
            settings.bytes_max,
            io_threads=settings.io_threads,
            bytes_written_daily_max=settings.bytes_written_daily_max,
            pools=self._disk_shares.pools,
        )
        disk.open()
        undo.callback(disk.close)
        self.switches["disk"] = Switch(Borrowed(disk))
        self._disk = disk
        return disk

    def _open_domain(
        self, tenant: Tenant, size_bytes: int, disk: DiskTier | None, undo: ExitStack, is_group: bool
    ) -> Domain:
        shares = dram_shares(self.settings, tenant.name, size_bytes)
        dram = DramTier(
            size_bytes,
            huge_pages=self.settings.dram.huge_pages,
            pools=shares.pools,
            is_private_to_write=is_group,
        )
        lower = []
        if disk is not None and (settings := self.settings.disk) is not None:
            lower.append(Lower(self.switches["disk"], settings.spill_when, settings.spill_queue_bytes_max))
        store = Store(dram, lower, leases=self.settings.leases, tenant=tenant, lookup_s=_LOOKUP_S)
        undo.callback(store.close, 0)
        store.on_complete = self._completed
        read_fd = dram.arena.reopen_to_read()
        undo.callback(os.close, read_fd)
        return Domain(tenant, store, Usage(store), shares, read_fd)

    def quotas(self, tenant: str) -> list[QuotaUse]:
        """What a tenant (by name, or a share group by `group:name`) uses of each tier, scope by scope."""
        domain = self._domain(tenant)
        uses = domain.shares.uses("dram", domain.store.dram.stats().pools)
        if self._disk is not None:
            uses += self._disk_shares.uses("disk", self._disk.stats().pools)
        return [use for use in uses if use.tenant == tenant]

    def set_quota(self, tenant: str, scope: str | None, tier: str, quota: Quota) -> None:
        """Change a share until the next start. Raises ConfigError for one that does not exist or does not fit."""
        domain = self._domain(tenant)
        medium: DramTier | DiskTier | None = domain.store.dram if tier == "dram" else self._disk
        shares = domain.shares if tier == "dram" else self._disk_shares
        if tier not in ("dram", "disk") or medium is None:
            raise ConfigError(f"there is no tier {tier!r} with quotas here")
        number = shares.number(tenant, scope)
        reserved = shares.pools.bytes_reserved - medium.stats().pools[number].bytes_reserved
        if reserved + quota.bytes_reserved > medium.bytes_max:
            raise ConfigError(
                f"{reserved:,} bytes of {tier} are reserved for others: no more than "
                f"{medium.bytes_max - reserved:,} are left to reserve"
            )
        medium.set_quota(number, quota)

    def _domain(self, tenant: str) -> Domain:
        for domain in self:
            if domain.name == tenant:
                return domain
        raise ConfigError(f"there is no tenant {tenant!r}")

    def disk_blocks(self) -> int:
        return self.switches["disk"].stats().blocks if "disk" in self.switches else 0

    def _completed(self) -> None:
        self.on_complete()

    def clear_later(self, domain: Domain, namespace: Digest | None, prefix: Key | None) -> Ticket[int | Exception]:
        """Clear blocks of one tenant on a thread of its own: it waits for media."""
        ticket: Ticket[int | Exception] = Ticket()

        def clear() -> None:
            try:
                ticket.complete(domain.store.clear(namespace=namespace, tenant=domain.tenant.digest, prefix=prefix))
            except Exception as error:  # whoever asked for it gets it
                ticket.complete(error)
            self.on_complete()

        self._workers.submit(clear)
        return ticket

    def close(self, drain_s: float = 0.0) -> None:
        """Spill what is in DRAM for at most `drain_s` seconds, then let go of everything."""
        deadline = Deadline.after(drain_s)
        drains = [
            threading.Thread(target=domain.store.close, args=(deadline.left_s,), name=f"kvtide-drain-{domain.name}")
            for domain in self
        ]
        for thread in drains:
            thread.start()
        for thread in drains:
            thread.join()
        self._undo.close()


def arena_sizes(settings: Settings) -> dict[str, int]:
    """How dram.bytes_max is divided: what each asks for, and equal shares of the rest for the others."""
    wishes: dict[str, ArenaSettings] = {name: each.dram for name, each in settings.tenants.items()}
    wishes = wishes or {DEFAULT_TENANT: ArenaSettings()}
    wishes |= {GROUP_PREFIX + name: each.dram for name, each in settings.share_groups.items()}
    total = settings.dram.bytes_max
    assert total is not None, "resolved settings"
    given = sum(wish.bytes_max or 0 for wish in wishes.values())
    others = [name for name, wish in wishes.items() if wish.bytes_max is None]
    share = (total - given) // len(others) // PAGE_BYTES * PAGE_BYTES if others else 0
    if given > total or (others and share <= 0):
        raise ConfigError(
            f"tenants.*.dram.bytes_max and share_groups.*.dram.bytes_max ask for {given:,} bytes, which leaves nothing "
            f"of dram.bytes_max ({total:,}) for {', '.join(others) or 'all of them'}: raise it or lower theirs"
        )
    return {name: share if wish.bytes_max is None else wish.bytes_max for name, wish in wishes.items()}
