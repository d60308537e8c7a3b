# SPDX-License-Identifier: Apache-2.0
"""Quotas by name: which tenants and scopes have a share of a medium, and how they use it.

Pools are flat, so a scope's share is cut out of its tenant's: the tenant's other scopes have what is left. Together
they never take more than the tenant may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtide.config import QuotaSettings, Settings
from kvtide.errors import ConfigError
from kvtide.keys import Digest, scope_digest, tenant_digest
from kvtide.policy.pools import Pools, PoolUse, Quota
from kvtide.tenant import DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """A share of one tier. `scope` None: the tenant without those scopes that have a share of their own."""

    tenant: str
    scope: str | None
    tier: str
    bytes_used: int
    bytes_reserved: int
    bytes_max: int | None
    byte_seconds: float


class Shares:
    """The pools of one medium and whose they are. Pool 0 has no owner: blocks of tenants that were removed."""

    def __init__(self, quotas: Mapping[tuple[str, str | None], Quota]) -> None:
        self.owners: list[tuple[str, str | None]] = list(quotas)
        members: dict[tuple[Digest, Digest | None], int] = {
            (tenant_digest(tenant), None if scope is None else scope_digest(scope)): number
            for number, (tenant, scope) in enumerate(self.owners, 1)
        }
        self.pools = Pools([Quota(), *quotas.values()], members)

    def number(self, tenant: str, scope: str | None) -> int:
        try:
            return self.owners.index((tenant, scope)) + 1
        except ValueError:
            raise ConfigError(
                f"{scope!r} of tenant {tenant!r} has no share of its own: give it one in tenants.*.scopes and restart"
                if scope is not None
                else f"tenant {tenant!r} has no share of this tier to change"
            ) from None

    def uses(self, tier: str, pools: Sequence[PoolUse]) -> list[QuotaUse]:
        return [
            QuotaUse(tenant, scope, tier, use.bytes_used, use.bytes_reserved, use.bytes_max, use.byte_seconds)
            for (tenant, scope), use in zip(self.owners, pools[1:], strict=True)
        ]


def disk_shares(settings: Settings, groups: Mapping[str, str]) -> Shares:
    """Of the disk below all tenants. `groups`: the tenant names under which share groups have their blocks."""
    quotas: dict[tuple[str, str | None], Quota] = {}
    if not settings.tenants:
        quotas[DEFAULT_TENANT, None] = Quota()
    for name, tenant in settings.tenants.items():
        scopes = {scope: each.disk for scope, each in tenant.scopes.items()}
        quotas |= _split(name, tenant.disk, scopes, f"tenants.{name}", "disk")
    for name, group in settings.share_groups.items():
        quotas[groups[name], None] = Quota(group.disk.bytes_reserved, group.disk.bytes_max)
    return Shares(quotas)


def dram_shares(settings: Settings, tenant: str, size_bytes: int) -> Shares:
    """Of one tenant's arena, which is nobody else's."""
    configured = settings.tenants.get(tenant)
    scopes = {scope: each.dram for scope, each in configured.scopes.items()} if configured else {}
    if sum(scope.bytes_reserved for scope in scopes.values()) > size_bytes:
        raise ConfigError(
            f"the scopes of tenants.{tenant} reserve more than its arena of {size_bytes:,} bytes: "
            f"lower their dram.bytes_reserved or raise tenants.{tenant}.dram.bytes_max"
        )
    return Shares(_split(tenant, QuotaSettings(), scopes, f"tenants.{tenant}", "dram"))


def _split(
    tenant: str, whole: QuotaSettings, scopes: Mapping[str, QuotaSettings], where: str, tier: str
) -> dict[tuple[str, str | None], Quota]:
    quotas: dict[tuple[str, str | None], Quota] = {}
    reserved, bytes_max = whole.bytes_reserved, whole.bytes_max
    for name, scope in scopes.items():
        if scope == QuotaSettings():
            continue
        if bytes_max is not None:
            if scope.bytes_max is None:
                raise ConfigError(
                    f"{where}.{tier} has a bytes_max, so its scopes with a quota need one, too: "
                    f"give {where}.scopes.{name}.{tier}.bytes_max"
                )
            bytes_max -= scope.bytes_max
        reserved -= scope.bytes_reserved
        quotas[tenant, name] = Quota(scope.bytes_reserved, scope.bytes_max)
    if bytes_max is not None and bytes_max < max(reserved, 0):
        raise ConfigError(
            f"the scopes of {where} may take more than its {tier}.bytes_max together: lower theirs or raise it"
        )
    return {(tenant, None): Quota(max(reserved, 0), bytes_max), **quotas}
