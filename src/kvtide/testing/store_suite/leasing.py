# SPDX-License-Identifier: Apache-2.0
"""Match and lease in one call: what an engine asks for each request."""

from __future__ import annotations

import pytest

from kvtide.testing.blocks import chain_keys
from kvtide.testing.store_suite.tools import HIT, KEYS, LAYOUT, CacheFacts, User, assert_bytes, eventually
from kvtide.tickets import Leased


def release(user: User, leased: Leased) -> None:
    for fetched in leased.fetched:
        user.cache.release(fetched)


class LeasingFacts(CacheFacts):
    """Match and lease in one call: what an engine asks for each request."""

    @pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])
    def test_all_blocks_of_a_request_are_leased_at_once(self, user: User, is_cold: bool) -> None:
        user.save()
        if is_cold:
            self.cool(user)
        leased = user.lease()
        assert (leased.matched_blocks, leased.first_block, leased.blocks) == (6, 0, 6)
        user.assert_right(leased.fetched[0])
        assert user.leases == 1
        release(user, leased)
        assert user.leases == 0

    @pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])
    @pytest.mark.parametrize("parts", [2, 3])
    def test_all_parts_of_a_request_are_leased_at_once(self, user: User, parts: int, is_cold: bool) -> None:
        ranks = user.ranks(parts)
        for rank in ranks:
            user.save(KEYS, rank)
        if is_cold:
            self.cool(user, KEYS, ranks[0])
        leased = user.lease(KEYS, ranks)
        assert (leased.matched_blocks, leased.blocks, len(leased.fetched)) == (6, 6, parts)
        for rank, fetched in zip(ranks, leased.fetched, strict=True):
            user.assert_right(fetched, KEYS, rank)
        assert user.leases == parts
        release(user, leased)
        assert user.leases == 0

    def test_a_known_beginning_is_leased(self, user: User) -> None:
        user.save(KEYS[:4])
        leased = user.lease()
        assert (leased.matched_blocks, leased.first_block, leased.blocks) == (4, 0, 4)
        user.assert_right(leased.fetched[0], KEYS[:4])

    def test_only_blocks_with_all_their_parts_are_leased(self, user: User) -> None:
        ranks = user.ranks()
        user.save(KEYS, ranks[0])
        user.save(KEYS[:2], ranks[1])
        leased = user.lease(KEYS, ranks)
        assert (leased.matched_blocks, leased.blocks) == (2, 2)
        for rank, fetched in zip(ranks, leased.fetched, strict=True):
            user.assert_right(fetched, KEYS[:2], rank)

    @pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])
    @pytest.mark.parametrize("first_page", [1, 4, 7, 23])
    def test_a_lease_may_start_at_any_page(self, user: User, first_page: int, is_cold: bool) -> None:
        user.save()
        if is_cold:
            self.cool(user)
        leased = user.lease(first_page=first_page, pages_per_block=LAYOUT.pages)
        block, page = divmod(first_page, LAYOUT.pages)
        (fetched,) = leased.fetched
        assert (leased.matched_blocks, leased.first_block, leased.blocks) == (6, block, 6 - block)
        assert (fetched.first_page, fetched.outcome) == (page, HIT)
        assert_bytes(fetched, KEYS[block:], user.here)

    @pytest.mark.parametrize("first_page", [24, 25, 1000])
    def test_a_lease_from_behind_the_last_block_is_empty(self, user: User, first_page: int) -> None:
        user.save()
        leased = user.lease(first_page=first_page, pages_per_block=LAYOUT.pages)
        assert (leased.matched_blocks, leased.first_block, leased.blocks) == (6, 6, 0)
        assert [fetched.lease for fetched in leased.fetched] == [None]
        assert user.leases == 0

    def test_a_lease_from_behind_a_known_beginning_is_empty(self, user: User) -> None:
        user.save(KEYS[:2])
        leased = user.lease(first_page=4 * LAYOUT.pages, pages_per_block=LAYOUT.pages)
        assert (leased.matched_blocks, leased.first_block, leased.blocks) == (2, 2, 0)
        assert user.leases == 0

    @pytest.mark.parametrize("parts", [1, 2])
    def test_nothing_is_leased_of_what_nobody_saved(self, user: User, parts: int) -> None:
        leased = user.lease(KEYS, user.ranks(parts))
        assert (leased.matched_blocks, leased.blocks, len(leased.fetched)) == (0, 0, parts)
        release(user, leased)
        assert user.leases == 0

    def test_nothing_is_leased_without_keys_or_shelves(self, user: User) -> None:
        user.save()
        assert (user.lease([]).blocks, len(user.lease([]).fetched)) == (0, 1)
        assert (user.lease(KEYS, []).blocks, user.lease(KEYS, []).fetched) == (0, ())
        assert user.leases == 0

    def test_a_lease_is_cut_to_the_requests_share(self, user: User) -> None:
        keys = chain_keys("long", self.slots * 3 // 4)
        user.save(keys)
        leased = user.lease(keys)
        assert (leased.matched_blocks, leased.blocks) == (len(keys), self.slots // 2)
        user.assert_right(leased.fetched[0], keys[: self.slots // 2])
        rest = user.lease(keys, first_page=(len(keys) - 4) * LAYOUT.pages, pages_per_block=LAYOUT.pages)
        user.assert_right(rest.fetched[0], keys[-4:])
        release(user, leased)
        release(user, rest)
        assert user.leases == 0

    def test_the_parts_of_a_lease_share_the_requests_share(self, user: User) -> None:
        keys, ranks = chain_keys("long", self.slots * 3 // 8), user.ranks()
        for rank in ranks:
            user.save(keys, rank)
        leased = user.lease(keys, ranks)
        assert (leased.matched_blocks, leased.blocks) == (len(keys), self.slots // 4)
        for rank, fetched in zip(ranks, leased.fetched, strict=True):
            user.assert_right(fetched, keys[: self.slots // 4], rank)

    def test_many_requests_under_way_are_all_answered(self, user: User) -> None:
        user.save()
        self.cool(user)
        tickets = [user.cache.match_and_lease([user.here], KEYS) for _ in range(32)]
        for ticket in tickets:
            leased = user.done(ticket)
            user.assert_right(leased.fetched[0])
            release(user, leased)
        eventually(lambda: user.leases == 0, "every lease is back")
