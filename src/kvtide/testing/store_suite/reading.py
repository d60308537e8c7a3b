# SPDX-License-Identifier: Apache-2.0
"""What was saved comes back byte for byte, and stays as it is while somebody holds it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvtide.keys import Address
from kvtide.layout import Layout
from kvtide.testing.blocks import chain_keys, pattern
from kvtide.testing.store_suite.tools import (
    HIT,
    KEYS,
    LAYOUT,
    PATIENCE_S,
    REJECTED,
    TIMEOUT,
    CacheFacts,
    User,
    assert_bytes,
    eventually,
)
from kvtide.tickets import Fetched, Ticket

LAYOUTS = [
    Layout(1, 1, 1, 1),
    Layout(1, 1, 16, 4095),
    Layout(1, 1, 16, 4096),
    Layout(1, 1, 16, 4097),
    Layout(3, 5, 8, 777),
    Layout(32, 2, 16, 1024),
    Layout(4, 16, 16, 6000),
]


class ReadingFacts(CacheFacts):
    """What was saved comes back byte for byte, and stays as it is while somebody holds it."""

    # Bytes --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.payload_bytes} bytes")
    @pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])
    def test_blocks_of_any_shape_come_back(self, user: User, layout: Layout, is_cold: bool) -> None:
        user.save(KEYS[:3], layout=layout)
        if is_cold:
            self.cool(user, KEYS[:3])
        fetched = user.fetch(KEYS[:3])
        assert (fetched.blocks, fetched.outcome) == (3, HIT)
        assert_bytes(fetched, KEYS, user.here, layout)
        assert [len(payload) for payload in fetched.payloads] == [layout.payload_bytes] * 3

    def test_blocks_of_several_shapes_come_back_together(self, user: User) -> None:
        shelves = user.ranks(len(LAYOUTS))
        for shelf, layout in zip(shelves, LAYOUTS, strict=True):
            user.save(KEYS[:2], shelf, layout)
        leased = user.lease(KEYS, shelves)
        assert leased.blocks == 2
        for shelf, layout, fetched in zip(shelves, LAYOUTS, leased.fetched, strict=True):
            assert_bytes(fetched, KEYS, shelf, layout)

    def test_a_chain_of_blocks_of_several_sizes_comes_back(self, user: User) -> None:
        layouts = [Layout(1, 1, 16, size) for size in (100, 5000, 60_000)]
        for place, layout in enumerate(layouts):
            user.save(KEYS[: place + 1], layout=layout, first=place)
        fetched = user.fetch(KEYS[:3])
        assert fetched.blocks == 3
        for key, layout, payload in zip(KEYS, layouts, fetched.payloads, strict=False):
            assert np.array_equal(payload, pattern(Address(user.here, key), layout.payload_bytes))

    @pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])
    def test_a_fetch_may_start_at_a_page_inside_a_block(self, user: User, is_cold: bool) -> None:
        user.save()
        if is_cold:
            self.cool(user)
        fetched = user.done(user.cache.fetch(user.plan(first_page=7, pages_per_block=LAYOUT.pages)))
        assert (fetched.blocks, fetched.first_page) == (5, 3)
        assert_bytes(fetched, KEYS[1:], user.here)

    def test_each_part_is_fetched_on_its_own(self, user: User) -> None:
        ranks = user.ranks()
        for rank in ranks:
            user.save(KEYS[:3], rank)
        plan = user.plan(KEYS, ranks)
        for rank in reversed(ranks):
            user.assert_right(user.done(user.cache.fetch(plan, rank)), KEYS[:3], rank)
        user.assert_right(user.done(user.cache.fetch(plan)), KEYS[:3], ranks[0])

    def test_what_was_fetched_from_below_is_in_dram_the_next_time(self, user: User) -> None:
        user.save()
        self.cool(user)
        user.cache.release(user.fetch())
        assert user.matched().tiers[0][:6].tolist() == [0] * 6
        user.assert_right(user.fetch())

    def test_blocks_that_left_dram_since_the_match_are_fetched_from_below(self, user: User) -> None:
        user.save()
        plan = user.plan()
        self.cool(user)
        user.assert_right(user.done(user.cache.fetch(plan)))

    def test_blocks_that_are_gone_since_the_match_are_not_fetched(self, user: User) -> None:
        user.save()
        plan = user.plan()
        user.cache.clear(prefix=KEYS[2])
        fetched = user.done(user.cache.fetch(plan))
        assert fetched.blocks == 2
        assert fetched.outcome is not HIT
        assert_bytes(fetched, KEYS, user.here)

    # Leases -------------------------------------------------------------------------------------------------

    def test_a_fetch_is_one_lease_until_it_is_released(self, user: User) -> None:
        user.save()
        assert user.leases == 0
        first, second = user.fetch(), user.fetch(KEYS[:3])
        assert user.leases == 2
        user.cache.release(first)
        assert user.leases == 1
        user.cache.release(second)
        assert user.leases == 0

    def test_releasing_twice_is_releasing_once(self, user: User) -> None:
        user.save()
        first, second = user.fetch(), user.fetch()
        for _ in range(3):
            user.cache.release(first)
        assert user.leases == 1
        self.churn(user)
        user.assert_right(second)

    def test_to_release_nothing_does_nothing(self, user: User) -> None:
        user.cache.release(user.fetch())
        user.cache.release(Fetched(0, 0, None))
        assert user.leases == 0

    def test_nobody_changes_what_is_leased_though_the_arena_is_filled_again_and_again(self, user: User) -> None:
        user.save()
        held = [user.fetch(), user.fetch(KEYS[:2]), *user.lease().fetched]
        for number in range(3):
            self.churn(user, number)
        user.assert_right(held[0])
        user.assert_right(held[1], KEYS[:2])
        user.assert_right(held[2])
        assert user.matched().tiers[0][:6].tolist() == [0] * 6

    def test_what_was_released_leaves_when_others_need_the_room(self, user: User) -> None:
        user.save()
        for fetched in (user.fetch(), user.fetch()):
            user.cache.release(fetched)
        self.cool(user)

    def test_what_is_leased_when_it_is_cleared_stays_readable_and_nobody_else_finds_it(self, user: User) -> None:
        user.save()
        fetched = user.fetch()
        user.cache.clear(namespace=user.scope.namespace)
        assert user.matched().blocks == 0
        self.churn(user)
        user.assert_right(fetched)
        user.cache.release(fetched)
        assert user.leases == 0

    # Pins and prefetches ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("ttl_s", [600.0, 1e12, math.inf])
    def test_pinned_blocks_stay_in_dram(self, user: User, ttl_s: float) -> None:
        user.save()
        pin = user.done(user.cache.pin(user.plan(), ttl_s=ttl_s))
        user.assert_right(pin)
        self.churn(user)
        assert user.matched().tiers[0][:6].tolist() == [0] * 6
        for _ in range(2):
            user.cache.release(pin)
        assert user.leases == 0
        self.cool(user)

    @pytest.mark.parametrize("ttl_s", [0.0, 0.01])
    def test_a_pin_ends_with_its_time(self, user: User, ttl_s: float) -> None:
        user.save()
        pin = user.done(user.cache.pin(user.plan(), ttl_s=ttl_s))

        def is_over() -> bool:
            user.cache.poll()
            return user.leases == 0

        eventually(is_over, "the pin is over")
        user.cache.release(pin)
        assert user.leases == 0

    def test_a_pin_brings_blocks_up(self, user: User) -> None:
        user.save()
        self.cool(user)
        pin = user.done(user.cache.pin(user.plan(), ttl_s=600.0))
        user.assert_right(pin)
        user.cache.release(pin)

    def test_all_pins_together_get_a_share(self, user: User) -> None:
        keys = chain_keys("pinned", self.slots // 2)
        user.save(keys)
        first = user.done(user.cache.pin(user.plan(keys[:-2]), ttl_s=600.0))
        user.assert_right(first, keys[:-2])
        refused = user.done(user.cache.pin(user.plan(keys[:3]), ttl_s=600.0))
        assert (refused.blocks, refused.lease, refused.outcome) == (0, None, REJECTED)
        user.cache.release(first)
        user.assert_right(user.done(user.cache.pin(user.plan(keys[:3]), ttl_s=600.0)), keys[:3])

    def test_a_prefetch_brings_blocks_up_without_a_lease(self, user: User) -> None:
        user.save()
        self.cool(user)
        assert user.done(user.cache.prefetch(user.plan())) == 6
        eventually(lambda: not user.matched().tiers[0][:6].any(), "all of them are in DRAM")
        assert user.leases == 0
        user.assert_right(user.fetch())

    def test_a_prefetch_counts_what_is_there_already(self, user: User) -> None:
        user.save()
        assert user.done(user.cache.prefetch(user.plan())) == 6
        assert user.done(user.cache.prefetch(user.plan(KEYS[:2]))) == 2
        assert user.done(user.cache.prefetch(user.plan([]))) == 0

    # Waiting ------------------------------------------------------------------------------------------------

    def test_to_wait_ends_with_its_timeout(self, user: User) -> None:
        never: Ticket[int] = Ticket()
        assert not user.cache.wait(never, 0.01)
        assert not user.cache.wait(never, 0.0)
        user.save(KEYS[:1])
        user.assert_right(user.fetch(KEYS[:1]), KEYS[:1])

    def test_to_wait_for_what_is_done_ends_at_once(self, user: User) -> None:
        assert user.cache.wait(Ticket.done(3))
        assert user.cache.wait(Ticket.done(3), 0.0)

    def test_poll_returns_each_completed_ticket_once(self, user: User) -> None:
        user.save()
        self.cool(user)
        plan = user.plan()
        user.cache.poll()
        tickets: list[Ticket[Fetched]] = [user.cache.fetch(plan) for _ in range(3)]
        polled: list[Ticket[Fetched]] = []
        eventually(lambda: len(polled.__iadd__(user.cache.poll())) == 3, "all three have been polled")
        assert {*map(id, polled)} == {*map(id, tickets)}
        assert user.cache.poll() == []
        for ticket in tickets:
            user.assert_right(ticket.result)

    @pytest.mark.parametrize("deadline_s", [-1.0, 0.0, 1e-6, 1e-3])
    @pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])
    def test_a_fetch_ends_with_its_deadline_and_holds_what_had_come(
        self, user: User, deadline_s: float, is_cold: bool
    ) -> None:
        user.save()
        if is_cold:
            self.cool(user)
        plan = user.plan()
        tickets = [user.cache.fetch(plan, deadline_s=deadline_s) for _ in range(3)]
        for ticket in tickets:
            fetched = user.done(ticket)
            assert (fetched.blocks == 6) if fetched.outcome is HIT else fetched.outcome is TIMEOUT
            assert_bytes(fetched, KEYS, user.here)
            user.cache.release(fetched)
        leased = user.done(user.cache.match_and_lease([user.here], KEYS, deadline_s=deadline_s))
        for fetched in leased.fetched:
            assert_bytes(fetched, KEYS, user.here)
            user.cache.release(fetched)

        def is_all_back() -> bool:
            user.cache.poll()  # what came too late goes back from here
            return user.leases == 0

        eventually(is_all_back, "every lease is back")

    @pytest.mark.parametrize("deadline_s", [PATIENCE_S, math.inf])
    def test_a_generous_deadline_is_enough(self, user: User, deadline_s: float) -> None:
        user.save()
        self.cool(user)
        user.assert_right(user.done(user.cache.fetch(user.plan(), deadline_s=deadline_s)))
