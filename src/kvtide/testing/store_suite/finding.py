# SPDX-License-Identifier: Apache-2.0
"""What is found, for whom, and how much of it is planned."""

from __future__ import annotations

import pytest

from kvtide.keys import Digest, Part
from kvtide.testing.blocks import chain_keys
from kvtide.testing.store_suite.tools import HIT, KEYS, LAYOUT, SLOT_BYTES, CacheFacts, ClearableCache, User


class FindingFacts(CacheFacts):
    """What is found, for whom, and how much of it is planned."""

    # Matching -----------------------------------------------------------------------------------------------

    def test_a_match_is_the_longest_prefix_that_is_there(self, user: User) -> None:
        user.save(KEYS[:4])
        assert user.matched(KEYS).blocks == 4
        assert user.matched(KEYS[:2]).blocks == 2
        assert user.matched(KEYS[2:]).blocks == 2

    def test_what_nobody_saved_is_not_matched(self, user: User) -> None:
        user.save()
        assert user.matched(chain_keys("another", 3)).blocks == 0
        assert user.matched([]).blocks == 0
        assert user.matched(KEYS, []).blocks == 0

    def test_a_hole_ends_a_match(self, user: User) -> None:
        user.done(user.cache.publish(user.reserved(), [0, 1, 3, 4, 5]))
        assert user.matched().blocks == 2
        assert user.matched(KEYS[3:]).blocks == 3

    def test_a_block_without_all_its_parts_ends_a_match(self, user: User) -> None:
        ranks = user.ranks(3)
        for count, rank in zip((5, 2, 6), ranks, strict=True):
            user.save(KEYS[:count], rank)
        assert user.matched(KEYS, ranks).blocks == 2
        assert user.matched(KEYS, [ranks[0], ranks[2]]).blocks == 5
        assert user.matched(KEYS, [*ranks, user.here]).blocks == 0

    def test_a_match_says_what_it_found(self, user: User) -> None:
        ranks = user.ranks()
        for rank in ranks:
            user.save(KEYS[:3], rank)
        match = user.matched(KEYS, ranks)
        assert match.shelves == tuple(ranks)
        assert list(match.keys) == KEYS
        for sizes, tiers in zip(match.frame_bytes, match.tiers, strict=True):
            assert sizes[: match.blocks].tolist() == [SLOT_BYTES] * 3
            assert tiers[: match.blocks].tolist() == [0] * 3

    def test_a_match_goes_on_below_dram(self, user: User) -> None:
        user.save()
        self.cool(user)
        match = user.matched([*KEYS, *chain_keys("the rest", 100)])
        assert match.blocks == 6
        assert match.tiers[0][:6].tolist() == [1] * 6

    def test_every_tier_has_a_name_of_its_own_and_dram_comes_first(self, cache: ClearableCache) -> None:
        names = cache.tier_names
        assert names[0] == "dram"
        assert len({*names}) == len(names)
        assert (len(names) > 1) == self.has_lower_tier
        assert cache.tier_names == names

    def test_a_match_tells_tiers_by_the_numbers_of_their_names(self, user: User) -> None:
        user.save()
        names = user.cache.tier_names
        assert [names[number] for number in user.matched().tiers[0].tolist()] == ["dram"] * 6
        self.cool(user)
        user.cache.release(user.fetch(KEYS[:2]))
        assert [names[number] for number in user.matched().tiers[0].tolist()] == ["dram"] * 2 + [names[1]] * 4

    def test_a_match_is_of_the_keys_as_they_were_when_it_was_asked_for(self, user: User) -> None:
        user.save()
        keys = KEYS[:3]
        ticket = user.cache.match([user.here], keys)
        keys += KEYS[3:]
        match = user.done(ticket)
        assert (match.blocks, list(match.keys)) == (3, KEYS[:3])

    def test_a_long_prompt_with_a_known_beginning_is_matched(self, user: User) -> None:
        user.save()
        assert user.matched([*KEYS, *chain_keys("the rest", 1000)]).blocks == 6

    def test_more_keys_than_one_call_looks_at_are_cut_and_no_error(self, user: User) -> None:
        user.save()
        keys = [*KEYS, *chain_keys("a book", (self.keys_max or 10_000) + 100)]
        match = user.matched(keys)
        assert match.blocks == 6
        assert len(match.keys) == min(len(keys), self.keys_max or len(keys))
        leased = user.lease(keys)
        user.assert_right(leased.fetched[0])
        assert leased.matched_blocks == 6

    def test_many_keys_on_many_shelves_are_cut_and_no_error(self, user: User) -> None:
        user.save()
        fetched = user.fetch()
        blocks = user.matched(KEYS[:1] * 3000, [user.here] * 64).blocks
        assert blocks == 3000 or (self.keys_max and 500 < blocks < 3000)
        assert user.leases == 1, "it is the same connection, with what it holds"
        user.assert_right(fetched)

    # Scopes -------------------------------------------------------------------------------------------------

    def test_a_scope_is_the_same_each_time(self, user: User, namespace: Digest) -> None:
        again = self.user_of(user.cache, namespace)
        assert again.scope == user.scope
        assert user.scope.namespace == namespace

    def test_blocks_are_found_by_whoever_opens_the_same_scope(self, user: User, namespace: Digest) -> None:
        ada = self.user_of(user.cache, namespace, "ada")
        ada.save()
        again = self.user_of(user.cache, namespace, "ada")
        again.assert_right(again.fetch())

    @pytest.mark.parametrize("name", ["bob", "Ada", "ada ", "äda", "x" * 500])
    def test_scopes_of_other_names_share_neither_keys_nor_blocks(
        self, user: User, namespace: Digest, name: str
    ) -> None:
        ada, other = self.user_of(user.cache, namespace, "ada"), self.user_of(user.cache, namespace, name)
        ada.save()
        assert ada.scope.root != other.scope.root
        assert ada.scope.tenant == other.scope.tenant
        assert other.matched().blocks == 0
        assert other.lease().blocks == 0
        other.save(KEYS[:2])
        other.assert_right(other.fetch(KEYS[:2]), KEYS[:2])
        ada.assert_right(ada.fetch())

    def test_namespaces_share_neither_keys_nor_blocks(self, user: User, namespace: Digest) -> None:
        user.save()
        other = self.user_of(user.cache, Digest(bytes(reversed(namespace))))
        assert other.scope.root != user.scope.root
        assert other.matched().blocks == 0

    def test_parts_are_no_copies_of_each_other(self, user: User) -> None:
        ranks = user.ranks()
        user.save(KEYS, ranks[0])
        assert user.matched(KEYS, ranks[1:]).blocks == 0
        assert user.matched(KEYS, [user.scope.shelf(Part(rank=0, ranks=4))]).blocks == 0

    # Planning -----------------------------------------------------------------------------------------------

    def test_a_plan_is_everything_that_was_matched(self, user: User) -> None:
        user.save()
        plan = user.plan()
        assert (plan.first_block, plan.end_block, plan.first_page, plan.reasons) == (0, 6, 0, ())
        assert list(plan.keys) == KEYS

    @pytest.mark.parametrize("first_page", range(0, 24, 5))
    def test_a_plan_may_start_at_any_page(self, user: User, first_page: int) -> None:
        user.save()
        plan = user.plan(first_page=first_page, pages_per_block=LAYOUT.pages)
        assert (plan.first_block, plan.first_page) == divmod(first_page, LAYOUT.pages)
        assert plan.end_block == 6

    @pytest.mark.parametrize("first_page", [24, 25, 1000])
    def test_a_plan_beyond_the_match_is_empty(self, user: User, first_page: int) -> None:
        user.save()
        plan = user.plan(first_page=first_page, pages_per_block=LAYOUT.pages)
        assert (plan.first_block, plan.end_block, plan.first_page, plan.reasons) == (6, 6, 0, ())
        fetched = user.done(user.cache.fetch(plan))
        assert (fetched.blocks, fetched.lease, fetched.outcome) == (0, None, HIT)

    def test_a_plan_is_cut_to_the_requests_share_and_says_so(self, user: User) -> None:
        keys = chain_keys("long", self.slots * 3 // 4)
        user.save(keys)
        plan = user.plan(keys)
        assert (plan.first_block, plan.end_block) == (0, self.slots // 2)
        assert len(plan.reasons) == 1
        user.assert_right(user.done(user.cache.fetch(plan)), keys[: self.slots // 2])

    def test_the_parts_of_a_request_share_its_share(self, user: User) -> None:
        keys, ranks = chain_keys("long", self.slots * 3 // 8), user.ranks()
        for rank in ranks:
            user.save(keys, rank)
        assert user.plan(keys, ranks).end_block == self.slots // 4

    def test_a_plan_without_parts_is_empty(self, user: User, cache: ClearableCache) -> None:
        user.save()
        plan = user.plan(KEYS, [])
        assert (plan.first_block, plan.end_block) == (0, 0)
        assert user.done(cache.fetch(plan)).blocks == 0
        assert user.done(cache.prefetch(plan)) == 0
