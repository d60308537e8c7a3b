# SPDX-License-Identifier: Apache-2.0
"""Quotas by name: how a tenant's share is split among its scopes, and whose use is whose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.config import (
    ArenaSettings,
    DiskSettings,
    DramSettings,
    QuotaSettings,
    ScopeSettings,
    Settings,
    ShareGroupSettings,
    TenantSettings,
)
from kvtide.errors import ConfigError
from kvtide.keys import Part, Shelf, scope_digest, tenant_digest
from kvtide.node.domains import arena_sizes
from kvtide.node.quotas import Shares, disk_shares, dram_shares
from kvtide.policy.pools import Quota
from kvtide.testing import blocks

MIB = 1 << 20


def quota(reserved: int = 0, most: int | None = None) -> QuotaSettings:
    return QuotaSettings(bytes_reserved=reserved, bytes_max=most)


def settings(**tenants: TenantSettings) -> Settings:
    return Settings(dram=DramSettings(bytes_max=64 * MIB), disk=DiskSettings(), tenants=tenants)


def shelf_of(tenant: str, scope: str = "") -> Shelf:
    return Shelf(blocks.shelf().namespace, tenant_digest(tenant), scope_digest(scope), Part())


def bounds(shares: Shares) -> dict[tuple[str, str | None], tuple[int, int | None]]:
    """What each owner may have, as the pools know it."""
    uses = shares.uses("disk", shares.pools.use())
    return {(use.tenant, use.scope): (use.bytes_reserved, use.bytes_max) for use in uses}


def owner_of(shares: Shares, shelf: Shelf) -> tuple[str, str | None] | None:
    number = shares.pools.pool_of(shelf)
    return shares.owners[number - 1] if number else None


def test_a_service_without_tenants_has_one_share_of_everything() -> None:
    shares = disk_shares(settings(), {})
    assert bounds(shares) == {("default", None): (0, None)}
    assert owner_of(shares, shelf_of("default", "anybody")) == ("default", None)


def test_blocks_of_a_tenant_that_was_removed_are_nobodys() -> None:
    shares = disk_shares(settings(search=TenantSettings()), {})
    assert owner_of(shares, shelf_of("gone")) is None
    assert owner_of(shares, shelf_of("default")) is None


def test_each_tenant_has_its_own_share() -> None:
    shares = disk_shares(settings(search=TenantSettings(disk=quota(10, 30)), chat=TenantSettings(disk=quota(5))), {})
    assert bounds(shares) == {("search", None): (10, 30), ("chat", None): (5, None)}
    assert owner_of(shares, shelf_of("chat", "x")) == ("chat", None)


def test_a_scope_with_a_quota_is_cut_out_of_its_tenants() -> None:
    tenant = TenantSettings(disk=quota(30, 100), scopes={"a": ScopeSettings(disk=quota(10, 40))})
    shares = disk_shares(settings(search=tenant), {})
    assert bounds(shares) == {("search", None): (20, 60), ("search", "a"): (10, 40)}
    assert owner_of(shares, shelf_of("search", "a")) == ("search", "a")
    assert owner_of(shares, shelf_of("search", "b")) == ("search", None)


def test_a_scope_of_the_same_name_of_another_tenant_is_another_scope() -> None:
    with_scope = TenantSettings(scopes={"a": ScopeSettings(disk=quota(0, 40))})
    shares = disk_shares(settings(search=with_scope, chat=TenantSettings()), {})
    assert owner_of(shares, shelf_of("chat", "a")) == ("chat", None)


def test_a_scope_without_a_quota_of_this_medium_has_no_pool_of_its_own() -> None:
    tenant = TenantSettings(scopes={"a": ScopeSettings(dram=quota(MIB)), "b": ScopeSettings()})
    shares = disk_shares(settings(search=tenant), {})
    assert bounds(shares) == {("search", None): (0, None)}


def test_scopes_may_reserve_more_than_their_tenant_has_reserved() -> None:
    tenant = TenantSettings(disk=quota(5), scopes={"a": ScopeSettings(disk=quota(10))})
    assert bounds(disk_shares(settings(search=tenant), {})) == {
        ("search", None): (0, None),
        ("search", "a"): (10, None),
    }


def test_a_scope_without_a_bound_in_a_tenant_with_one_is_refused_by_its_name() -> None:
    tenant = TenantSettings(disk=quota(0, 100), scopes={"a": ScopeSettings(disk=quota(10))})
    with pytest.raises(ConfigError, match=r"tenants\.search\.scopes\.a\.disk\.bytes_max"):
        disk_shares(settings(search=tenant), {})


def test_scopes_that_may_take_more_than_their_tenant_together_are_refused() -> None:
    scopes = {name: ScopeSettings(disk=quota(0, 60)) for name in ("a", "b")}
    with pytest.raises(ConfigError, match=r"tenants\.search may take more"):
        disk_shares(settings(search=TenantSettings(disk=quota(0, 100), scopes=scopes)), {})


def test_a_reserve_that_the_scopes_leave_no_room_for_is_refused() -> None:
    tenant = TenantSettings(disk=quota(50, 100), scopes={"a": ScopeSettings(disk=quota(0, 60))})
    with pytest.raises(ConfigError, match="may take more"):
        disk_shares(settings(search=tenant), {})


def test_share_groups_have_shares_under_the_name_of_their_blocks() -> None:
    configured = Settings(
        disk=DiskSettings(),
        tenants={"search": TenantSettings()},
        share_groups={"prompts": ShareGroupSettings(disk=quota(7, 9))},
    )
    shares = disk_shares(configured, {"prompts": "group:prompts"})
    assert bounds(shares) == {("search", None): (0, None), ("group:prompts", None): (7, 9)}
    assert owner_of(shares, shelf_of("group:prompts")) == ("group:prompts", None)
    assert owner_of(shares, shelf_of("prompts")) is None


def test_an_arena_is_split_among_the_scopes_of_its_tenant() -> None:
    tenant = TenantSettings(scopes={"a": ScopeSettings(dram=quota(MIB, 2 * MIB))})
    shares = dram_shares(settings(search=tenant), "search", 8 * MIB)
    assert bounds(shares) == {("search", None): (0, None), ("search", "a"): (MIB, 2 * MIB)}


def test_scopes_that_reserve_more_than_the_arena_are_refused() -> None:
    tenant = TenantSettings(scopes={name: ScopeSettings(dram=quota(5 * MIB)) for name in "ab"})
    with pytest.raises(ConfigError, match="more than its arena"):
        dram_shares(settings(search=tenant), "search", 8 * MIB)


def test_the_arena_of_a_share_group_is_one_share() -> None:
    assert bounds(dram_shares(settings(), "group:prompts", MIB)) == {("group:prompts", None): (0, None)}


def test_a_share_is_asked_for_by_its_names() -> None:
    tenant = TenantSettings(scopes={"a": ScopeSettings(disk=quota(1))})
    shares = disk_shares(settings(search=tenant, chat=TenantSettings()), {})
    numbers = [shares.number("search", None), shares.number("search", "a"), shares.number("chat", None)]
    assert sorted(numbers) == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"tenants\.\*\.scopes"):
        shares.number("search", "b")
    with pytest.raises(ConfigError, match="no share"):
        shares.number("nobody", None)


def test_use_is_told_by_name() -> None:
    shares = Shares({("search", None): Quota(), ("search", "a"): Quota(10, 20)})
    shares.pools.add(shares.number("search", "a"), 15)
    (whole, scope) = shares.uses("dram", shares.pools.use())
    assert (whole.tenant, whole.scope, whole.bytes_used) == ("search", None, 0)
    assert (scope.tenant, scope.scope, scope.tier, scope.bytes_used, scope.bytes_reserved, scope.bytes_max) == (
        "search",
        "a",
        "dram",
        15,
        10,
        20,
    )


@given(
    st.integers(0, 1000),
    st.one_of(st.none(), st.integers(0, 1000)),
    st.lists(st.tuples(st.integers(0, 300), st.one_of(st.none(), st.integers(0, 300))), max_size=5),
)
def test_the_shares_of_a_tenant_together_are_never_more_than_its_own(
    reserved: int, most: int | None, scopes: list[tuple[int, int | None]]
) -> None:
    tenant = TenantSettings(
        disk=quota(reserved, most), scopes={f"s{i}": ScopeSettings(disk=quota(*each)) for i, each in enumerate(scopes)}
    )
    try:
        shares = disk_shares(settings(search=tenant), {})
    except ConfigError:
        return
    split = list(bounds(shares).values())
    if most is not None:
        assert sum(each or 0 for _, each in split) <= most
        assert all(each is not None for _, each in split)
    assert sum(each for each, _ in split) == max(reserved, sum(each for each, _ in split[1:]))
    assert all(each is None or low <= each for low, each in split)


# Arenas ------------------------------------------------------------------------------------------------------


def sizes(total: int, **wishes: int | None) -> dict[str, int]:
    tenants = {name: TenantSettings(dram=ArenaSettings(bytes_max=wish)) for name, wish in wishes.items()}
    return arena_sizes(Settings(dram=DramSettings(bytes_max=total), tenants=tenants))


def test_one_user_has_all_of_the_memory() -> None:
    assert sizes(64 * MIB) == {"default": 64 * MIB}


def test_tenants_without_a_wish_share_what_the_others_leave() -> None:
    assert sizes(64 * MIB, a=32 * MIB, b=None, c=None) == {"a": 32 * MIB, "b": 16 * MIB, "c": 16 * MIB}


def test_arenas_are_whole_pages_and_no_more_than_there_is() -> None:
    got = sizes(MIB, a=None, b=None, c=None)
    assert all(size % 4096 == 0 for size in got.values())
    assert sum(got.values()) <= MIB


def test_wishes_beyond_what_there_is_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dram\.bytes_max"):
        sizes(64 * MIB, a=60 * MIB, b=5 * MIB)


def test_wishes_that_leave_nothing_for_the_others_are_refused() -> None:
    with pytest.raises(ConfigError, match="b"):
        sizes(64 * MIB, a=64 * MIB, b=None)
