# SPDX-License-Identifier: Apache-2.0
"""From snapshots of the service to the series of the catalogue, when somebody scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvtide import __version__
from kvtide.node.domains import Domains
from kvtide.node.meter import BUCKETS_S, Meter
from kvtide.node.serve import Node
from kvtide.node.status import Status, StoreStatus, TierStatus, status_of, usage_of
from kvtide.observe.catalogue import ROLES
from kvtide.observe.metrics import Distribution, Sample


def samples(node: Node, started_at_s: float, start_time_s: float) -> Iterator[Sample]:
    """`started_at_s` by the monotonic clock, `start_time_s` since 1970."""
    status = status_of(node, started_at_s)
    yield Sample("kvtide_build_info", 1, (__version__,))
    yield Sample("kvtide_start_time_seconds", start_time_s)
    yield from _sessions(node.service.meter, status)
    yield from _cache(node.domains, status)
    for tier in status.tiers:
        yield from _tier(tier)
    yield from _spill(status.stores)
    yield from _tenants(node.domains)


def _sessions(meter: Meter, status: Status) -> Iterator[Sample]:
    # Copied in one step each: the service's loop goes on counting meanwhile.
    for (op, result), count in dict(meter.requests).items():
        yield Sample("kvtide_requests_total", count, (op, result))
    for op, histogram in dict(meter.seconds).items():
        yield Sample("kvtide_request_seconds", Distribution(BUCKETS_S, list(histogram.counts), histogram.sum_s), (op,))
    for role in ROLES:
        count = sum(each.sessions for each in status.sessions if each.role == role)
        yield Sample("kvtide_sessions", count, (role,))
    yield Sample("kvtide_logins_total", meter.sessions_total)
    for reason, count in dict(meter.cut_off).items():
        yield Sample("kvtide_sessions_cut_off_total", count, (reason,))
    yield Sample("kvtide_sessions_lingering", status.sessions_lingering)


def _cache(domains: Domains, status: Status) -> Iterator[Sample]:
    stores = [domain.store.stats([]) for domain in domains]
    yield Sample("kvtide_asked_blocks_total", sum(each.asked_blocks for each in stores))
    yield Sample("kvtide_matched_blocks_total", sum(each.matched_blocks for each in stores))
    yield Sample("kvtide_published_blocks_total", sum(each.published_blocks for each in stores))
    yield Sample("kvtide_rejected_blocks_total", sum(each.rejected_blocks for each in stores))
    yield Sample("kvtide_stale_publishes_total", sum(each.stale_publishes for each in stores))
    yield Sample("kvtide_shared_flights_total", sum(each.shared_flights for each in stores))
    yield Sample("kvtide_leases", status.leases)
    yield Sample("kvtide_pinned_bytes", status.pinned_bytes)
    yield Sample("kvtide_quarantined_bytes", status.quarantined_bytes)
    yield Sample("kvtide_quarantines_total", sum(each.quarantined_total for each in stores))


def _tier(tier: TierStatus) -> Iterator[Sample]:
    yield Sample("kvtide_tier_blocks", tier.blocks, (tier.name,))
    yield Sample("kvtide_tier_used_bytes", tier.bytes_used, (tier.name,))
    yield Sample("kvtide_tier_max_bytes", tier.bytes_max, (tier.name,))
    yield Sample("kvtide_tier_evicted_blocks_total", tier.evicted_blocks, (tier.name,))
    if tier.is_bypassed is None:
        return
    yield Sample("kvtide_tier_bypassed", tier.is_bypassed, (tier.name,))
    yield Sample("kvtide_tier_read_bytes_total", tier.read_bytes, (tier.name,))
    yield Sample("kvtide_tier_written_bytes_total", tier.written_bytes, (tier.name,))
    for op, results in tier.results.items():
        for result, count in results.items():
            yield Sample("kvtide_tier_operations_total", count, (tier.name, op, result))


def _spill(stores: list[StoreStatus]) -> Iterator[Sample]:
    queued: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    size: Counter[str] = Counter()
    dropped: Counter[tuple[str, str]] = Counter()
    for spill in (spill for store in stores for spill in store.spill):
        queued[spill.target] += spill.queued_bytes
        blocks[spill.target] += spill.spilled_blocks
        size[spill.target] += spill.spilled_bytes
        dropped[spill.target, "queue_full"] += spill.dropped_queue_full
        dropped[spill.target, "refused"] += spill.dropped_refused
        dropped[spill.target, "evicted"] += spill.evicted_unspilled
    for target in queued:
        yield Sample("kvtide_spill_queued_bytes", queued[target], (target,))
        yield Sample("kvtide_spilled_blocks_total", blocks[target], (target,))
        yield Sample("kvtide_spilled_bytes_total", size[target], (target,))
    for labels, count in dropped.items():
        yield Sample("kvtide_spill_dropped_blocks_total", count, labels)


def _tenants(domains: Domains) -> Iterator[Sample]:
    for domain in domains:
        usage = usage_of(domains, domain)
        for tier, bytes_used in usage.bytes_used.items():
            yield Sample("kvtide_tenant_used_bytes", bytes_used, (domain.name, tier))
        for tier, byte_seconds in usage.byte_seconds.items():
            yield Sample("kvtide_tenant_byte_seconds_total", byte_seconds, (domain.name, tier))
        yield Sample("kvtide_tenant_blocks_served_total", usage.blocks_served, (domain.name,))
        yield Sample("kvtide_tenant_tokens_served_total", usage.tokens_served, (domain.name,))
        if usage.compute_seconds_saved is not None:
            seconds = usage.compute_seconds_saved
            yield Sample("kvtide_tenant_compute_seconds_saved_total", seconds, (domain.name,))
