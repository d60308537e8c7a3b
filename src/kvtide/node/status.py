# SPDX-License-Identifier: Apache-2.0
"""What the service is and does at this moment, as values that can be shown. Asks for snapshots, changes nothing.

May be called from any thread but the service's own loop, which it would make wait for locks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from kvtide import __version__
from kvtide.node.domains import Domain, Domains
from kvtide.node.serve import Node
from kvtide.store import StoreStats
from kvtide.tiers.tier import TierStats


class SessionCount(Struct, frozen=True, kw_only=True):
    """Clients that are logged in."""

    tenant: str
    role: str
    sessions: int


class TierStatus(Struct, frozen=True, kw_only=True):
    """A tier, for all tenants together. `results`: blocks read and written, by outcome, of tiers below DRAM."""

    name: str
    blocks: int
    bytes_used: int
    bytes_max: int
    evicted_blocks: int
    read_bytes: int
    written_bytes: int
    results: dict[str, dict[str, int]]
    is_bypassed: bool | None = None  # None: this tier cannot be taken out of use


class SpillStatus(Struct, frozen=True, kw_only=True):
    """The way down to a tier."""

    target: str
    queued_bytes: int
    spilled_blocks: int
    spilled_bytes: int
    dropped_queue_full: int
    dropped_refused: int
    evicted_unspilled: int


class StoreStatus(Struct, frozen=True, kw_only=True):
    """The arena of a tenant or share group, and what is done with it."""

    tenant: str
    blocks: int
    bytes_used: int
    bytes_max: int
    leases: int
    pinned_bytes: int
    quarantined_bytes: int
    spill: list[SpillStatus]


class Status(Struct, frozen=True, kw_only=True):
    """All of it."""

    version: str
    is_serving: bool
    uptime_s: float
    folder: str
    socket: str
    sessions: list[SessionCount]
    sessions_lingering: int
    leases: int
    pinned_bytes: int
    quarantined_bytes: int
    spill_queued_bytes: int
    tiers: list[TierStatus]
    stores: list[StoreStatus]


class QuotaStatus(Struct, frozen=True, kw_only=True):
    """A share of a tier. `scope` null: the tenant without those scopes that have a share of their own."""

    tier: str
    scope: str | None
    bytes_used: int
    bytes_reserved: int
    bytes_max: int | None


class TenantStatus(Struct, frozen=True, kw_only=True):
    """A tenant, or a share group (`group:NAME`)."""

    name: str
    arena_bytes: int
    quotas: list[QuotaStatus]
    scopes: list[str]
    reads: list[str]
    sessions: dict[str, int]


class UsageStatus(Struct, frozen=True, kw_only=True):
    """What a tenant has, by tier, and what it took and got since the service started."""

    tenant: str
    bytes_used: dict[str, int]
    byte_seconds: dict[str, float]
    blocks_served: int
    tokens_served: int
    compute_seconds_saved: float | None  # null: no engine reports how long it takes


def status_of(node: Node, started_at_s: float) -> Status:
    """`started_at_s`: by the monotonic clock."""
    domains, service = node.domains, node.service
    stores = [_store(domain, domain.store.stats(["dram"])) for domain in domains]
    return Status(
        version=__version__,
        is_serving=service.is_serving,
        uptime_s=time.monotonic() - started_at_s,
        folder=node.settings.folder,
        socket=node.settings.node.socket or "",
        sessions=[
            SessionCount(tenant=tenant, role=role, sessions=count)
            for (tenant, role), count in sorted(_sessions(node).items())
        ],
        sessions_lingering=service.lingering,
        leases=sum(store.leases for store in stores),
        pinned_bytes=sum(store.pinned_bytes for store in stores),
        quarantined_bytes=sum(store.quarantined_bytes for store in stores),
        spill_queued_bytes=sum(spill.queued_bytes for store in stores for spill in store.spill),
        tiers=tiers_of(domains),
        stores=stores,
    )


def tiers_of(domains: Domains) -> list[TierStatus]:
    arenas = [domain.store.dram.stats() for domain in domains]
    tiers = [
        TierStatus(
            name="dram",
            blocks=sum(each.blocks for each in arenas),
            bytes_used=sum(each.bytes_used for each in arenas),
            bytes_max=sum(each.bytes_max for each in arenas),
            evicted_blocks=sum(each.evicted_blocks for each in arenas),
            read_bytes=0,
            written_bytes=0,
            results={},
        )
    ]
    tiers += [_lower(name, switch.stats(), switch.is_bypassed) for name, switch in domains.switches.items()]
    return tiers


def tenants_of(node: Node) -> list[TenantStatus]:
    sessions = _sessions(node)
    return [_tenant(node, domain, sessions) for domain in node.domains]


def usage_of(domains: Domains, domain: Domain) -> UsageStatus:
    served = domain.usage.stats()
    bytes_used: dict[str, int] = {}
    byte_seconds: dict[str, float] = {}
    for use in domains.quotas(domain.name):  # scopes with a share of their own count for their tenant
        bytes_used[use.tier] = bytes_used.get(use.tier, 0) + use.bytes_used
        byte_seconds[use.tier] = byte_seconds.get(use.tier, 0.0) + use.byte_seconds
    return UsageStatus(
        tenant=domain.name,
        bytes_used=bytes_used,
        byte_seconds=byte_seconds,
        blocks_served=served.blocks_served,
        tokens_served=served.tokens_served,
        compute_seconds_saved=served.compute_seconds_saved,
    )


def _sessions(node: Node) -> Counter[tuple[str, str]]:
    principals = [session.principal for session in node.service.sessions]
    return Counter((principal.tenant, principal.role) for principal in principals if principal is not None)


def _lower(name: str, stats: TierStats, is_bypassed: bool) -> TierStatus:
    return TierStatus(
        name=name,
        blocks=stats.blocks,
        bytes_used=stats.bytes_used,
        bytes_max=stats.bytes_max,
        evicted_blocks=stats.evicted_blocks,
        read_bytes=stats.read_bytes,
        written_bytes=stats.written_bytes,
        results=stats.outcomes,
        is_bypassed=is_bypassed,
    )


def _store(domain: Domain, stats: StoreStats) -> StoreStatus:
    dram = stats.tiers["dram"]
    return StoreStatus(
        tenant=domain.name,
        blocks=dram.blocks,
        bytes_used=dram.bytes_used,
        bytes_max=dram.bytes_max,
        leases=stats.leases,
        pinned_bytes=stats.pinned_bytes,
        quarantined_bytes=stats.quarantined_bytes,
        spill=[
            SpillStatus(
                target=target,
                queued_bytes=spill.queued_bytes,
                spilled_blocks=spill.spilled_blocks,
                spilled_bytes=spill.spilled_bytes,
                dropped_queue_full=spill.dropped_full,
                dropped_refused=spill.dropped_refused,
                evicted_unspilled=spill.evicted_unspilled,
            )
            for target, spill in stats.spill.items()
        ],
    )


def _tenant(node: Node, domain: Domain, sessions: Counter[tuple[str, str]]) -> TenantStatus:
    configured = node.settings.tenants.get(domain.name)
    if domain.is_group:
        reads: Iterable[str] = ()
    else:
        reads = configured.reads if configured else node.settings.share_groups
    return TenantStatus(
        name=domain.name,
        arena_bytes=domain.store.dram.bytes_max,
        quotas=[
            QuotaStatus(
                tier=use.tier,
                scope=use.scope,
                bytes_used=use.bytes_used,
                bytes_reserved=use.bytes_reserved,
                bytes_max=use.bytes_max,
            )
            for use in node.domains.quotas(domain.name)
        ],
        scopes=list(configured.scopes) if configured else [],
        reads=list(reads),
        sessions={role: count for (tenant, role), count in sorted(sessions.items()) if tenant == domain.name},
    )
