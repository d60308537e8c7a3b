# SPDX-License-Identifier: Apache-2.0
"""Who gets slots to fill, and when others see what is in them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvtide.errors import Rejected
from kvtide.keys import KEY_BYTES, NO_PARENT, Key
from kvtide.layout import Layout
from kvtide.testing.blocks import chain_keys
from kvtide.testing.store_suite.tools import (
    HIT,
    KEYS,
    LAYOUT,
    MISS,
    PENDING,
    REJECTED,
    CacheFacts,
    User,
    assert_bytes,
)
from kvtide.tickets import Reservation

NO_CHAINS: dict[str, dict[str, Any]] = {
    "a parent at the start": {"parent": KEYS[0]},
    "no parent in the middle": {"position": 3},
    "a negative position": {"position": -1, "parent": KEYS[0]},
    "a position too high": {"position": 1 << 32, "parent": KEYS[0]},
    "a position that is no number": {"position": "3", "parent": KEYS[0]},
    "a parent too short": {"position": 1, "parent": b"short"},
    "a key too long": {"keys": [b"x" * (KEY_BYTES + 1)]},
    "a key that is no bytes": {"keys": ["x" * KEY_BYTES]},
    "a key of zeros": {"keys": [KEYS[0], NO_PARENT]},
}


class WritingFacts(CacheFacts):
    """Who gets slots to fill, and when others see what is in them."""

    # Reserving ----------------------------------------------------------------------------------------------

    def test_a_reservation_says_of_each_block_what_to_do(self, user: User) -> None:
        user.save(KEYS[:1])
        other = user.reserved(KEYS[:3])
        assert other.outcomes == [HIT, MISS, MISS]
        mine = user.reserved()
        assert mine.outcomes == [HIT, PENDING, PENDING, MISS, MISS, MISS]
        assert [payload is None for payload in mine.payloads] == [True, True, True, False, False, False]

    @pytest.mark.parametrize("layout", [LAYOUT, Layout(3, 5, 8, 777), Layout(1, 1, 1, 1)], ids=str)
    def test_each_slot_is_as_long_as_a_payload_and_nobody_elses(self, user: User, layout: Layout) -> None:
        reservation = user.reserved(layout=layout)
        sizes = [len(payload) for payload in reservation.payloads if payload is not None]
        assert sizes == [layout.payload_bytes] * 6
        begins = sorted(reservation.slots.offsets.tolist())
        assert all(after - before >= layout.payload_bytes for before, after in pairwise(begins))

    def test_others_shelves_are_nobodys_concern(self, user: User) -> None:
        first, second = user.ranks()
        assert user.reserved(KEYS, first).outcomes == [MISS] * 6
        assert user.reserved(KEYS, second).outcomes == [MISS] * 6

    def test_a_chain_is_saved_piece_by_piece(self, user: User) -> None:
        for first in (0, 2, 5):
            user.save(KEYS[: {0: 2, 2: 5, 5: 6}[first]], first=first)
        user.assert_right(user.fetch())

    def test_a_block_that_is_only_below_may_be_saved_again(self, user: User) -> None:
        user.save()
        self.cool(user)
        assert user.reserved().outcomes == [MISS] * 6

    def test_nothing_is_reserved_for_no_keys(self, user: User) -> None:
        reservation = user.reserved([])
        assert (reservation.outcomes, reservation.payloads, reservation.lease) == ([], [], None)
        assert user.done(user.cache.publish(reservation)) == []
        user.cache.abort(reservation)
        assert user.leases == 0

    @pytest.mark.parametrize("wrong", NO_CHAINS.values(), ids=NO_CHAINS.keys())
    def test_what_cannot_be_a_chain_is_refused_before_anything_is_done(self, user: User, wrong: dict[str, Any]) -> None:
        arguments: dict[str, Any] = {"keys": KEYS, "layout": LAYOUT} | wrong
        with pytest.raises(Rejected):
            user.cache.reserve(user.here, **arguments)
        assert user.leases == 0
        assert user.reserved().outcomes == [MISS] * 6

    def test_a_full_arena_rejects_at_once_and_has_room_when_slots_come_back(self, user: User) -> None:
        held = self.reserve_all(user)
        assert sum(reservation.outcomes.count(MISS) for reservation in held) > self.slots * 3 // 4
        refused = user.reserved()
        assert (refused.outcomes, refused.payloads, refused.lease) == ([REJECTED] * 6, [None] * 6, None)
        assert user.done(user.cache.publish(refused)) == [REJECTED] * 6
        user.cache.abort(held[0])
        assert user.done(user.cache.publish(user.reserved())) == [HIT] * 6
        user.assert_right(user.fetch())

    def test_what_is_leased_makes_no_room(self, user: User) -> None:
        keys = chain_keys("kept", self.slots // 2)
        user.save(keys)
        fetched = user.fetch(keys)
        self.reserve_all(user)
        assert user.reserved().outcomes == [REJECTED] * 6
        user.assert_right(fetched, keys)
        user.cache.release(fetched)
        assert user.reserved().outcomes == [MISS] * 6

    def reserve_all(self, user: User) -> list[Reservation]:
        """Whatever slots there are. Fewer than `slots` when what was there before has left gaps."""
        held: list[Reservation] = []
        while MISS in (reservation := user.reserved(chain_keys(("held", len(held)), 8))).outcomes:
            held.append(reservation)
        return held

    def test_a_reservation_gets_no_more_than_the_requests_share(self, user: User) -> None:
        half, keys = self.slots // 2, chain_keys("long", self.slots // 2 + 8)
        reservation = user.reserved(keys)
        assert reservation.outcomes == [MISS] * half + [REJECTED] * 8
        assert user.done(user.cache.publish(reservation)) == [HIT] * half + [REJECTED] * 8
        assert user.matched(keys).blocks == half

    def test_a_block_larger_than_the_requests_share_is_rejected(self, user: User) -> None:
        layout = Layout(1, 1, 16, self.arena_bytes)
        assert user.reserved(KEYS[:2], layout=layout).outcomes == [REJECTED] * 2

    def test_more_keys_than_one_call_looks_at_are_rejected_and_no_error(self, user: User) -> None:
        layout = Layout(1, 1, 1, 1)
        keys = chain_keys("a book", (self.keys_max or 10_000) + 100)
        reservation = user.reserved(keys, layout=layout)
        given = reservation.outcomes.count(MISS)
        assert given > 0
        assert reservation.outcomes == [MISS] * given + [REJECTED] * (len(keys) - given)
        assert user.done(user.cache.publish(reservation)) == [HIT] * given + [REJECTED] * (len(keys) - given)
        assert user.matched(keys).blocks == given

    # Publishing ---------------------------------------------------------------------------------------------

    def test_nobody_sees_a_block_before_it_is_published(self, user: User) -> None:
        reservation = user.reserved()
        assert user.matched().blocks == 0
        assert user.lease().blocks == 0
        assert user.done(user.cache.publish(reservation)) == [HIT] * 6
        user.assert_right(user.fetch())

    def test_some_may_be_published_and_the_rest_comes_back(self, user: User) -> None:
        outcomes = user.done(user.cache.publish(user.reserved(), [0, 1, 4]))
        assert outcomes == [HIT, HIT, MISS, MISS, HIT, MISS]
        assert user.matched().blocks == 2
        assert user.leases == 0
        assert user.reserved().outcomes == [HIT, HIT, MISS, MISS, HIT, MISS]

    def test_none_may_be_published(self, user: User) -> None:
        assert user.done(user.cache.publish(user.reserved(), [])) == [MISS] * 6
        assert (user.matched().blocks, user.leases) == (0, 0)

    def test_to_publish_all_is_to_publish_what_was_given(self, user: User) -> None:
        user.save(KEYS[:2])
        other = user.reserved([*KEYS[:2], KEYS[4]])
        mine = user.reserved()
        assert user.done(user.cache.publish(mine)) == [HIT, HIT, HIT, HIT, PENDING, HIT]
        assert user.done(user.cache.publish(other, [2])) == [HIT, HIT, HIT]
        user.assert_right(user.fetch())

    def test_to_publish_twice_is_too_late_and_harms_nothing(self, user: User) -> None:
        reservation = user.reserved()
        assert user.done(user.cache.publish(reservation)) == [HIT] * 6
        assert user.done(user.cache.publish(reservation)) == [REJECTED] * 6
        assert user.done(user.cache.publish(reservation, [1])) == [MISS, REJECTED, *[MISS] * 4]
        user.assert_right(user.fetch())

    def test_the_rest_of_a_reservation_cannot_be_published_later(self, user: User) -> None:
        reservation = user.reserved()
        user.done(user.cache.publish(reservation, [0]))
        assert user.done(user.cache.publish(reservation, [1])) == [MISS, REJECTED, *[MISS] * 4]
        assert user.matched().blocks == 1

    def test_what_was_cleared_meanwhile_is_not_published(self, user: User) -> None:
        reservation = user.reserved()
        user.cache.clear(namespace=user.scope.namespace)
        assert user.done(user.cache.publish(reservation)) == [REJECTED] * 6
        assert (user.matched().blocks, user.leases) == (0, 0)

    # Aborting -----------------------------------------------------------------------------------------------

    def test_aborted_slots_come_back_unseen(self, user: User) -> None:
        reservation = user.reserved()
        assert user.leases == 1
        for _ in range(3):
            user.cache.abort(reservation)
        assert (user.matched().blocks, user.leases) == (0, 0)
        assert user.reserved().outcomes == [MISS] * 6

    def test_an_abort_twice_does_not_take_the_next_writers_slots(self, user: User) -> None:
        first = user.reserved()
        user.cache.abort(first)
        second = user.reserved()
        user.cache.abort(first)
        assert user.reserved().outcomes == [PENDING] * 6
        assert user.done(user.cache.publish(second)) == [HIT] * 6
        user.assert_right(user.fetch())

    def test_what_was_aborted_is_not_published(self, user: User) -> None:
        reservation = user.reserved()
        user.cache.abort(reservation)
        assert user.done(user.cache.publish(reservation)) == [REJECTED] * 6
        assert user.matched().blocks == 0

    def test_an_abort_after_the_publish_changes_nothing(self, user: User) -> None:
        reservation = user.reserved()
        user.done(user.cache.publish(reservation))
        user.cache.abort(reservation)
        user.assert_right(user.fetch())

    # Reporting ----------------------------------------------------------------------------------------------

    def test_a_report_of_what_computing_took_changes_nothing(self, user: User) -> None:
        user.save()
        fetched, reservation = user.fetch(), user.reserved(chain_keys("more", 2))
        for tokens, seconds in ((0, 0.0), (1, 0.001), (1 << 40, 1e9)):
            user.cache.report_prefill(user.scope.namespace, tokens, seconds)
        user.assert_right(fetched)
        assert user.leases == 2
        assert user.matched().blocks == 6
        assert user.done(user.cache.publish(reservation)) == [HIT] * 2

    def test_a_report_of_a_namespace_that_nobody_knows_is_no_error(self, user: User) -> None:
        user.cache.report_prefill(type(user.scope.namespace)(bytes(KEY_BYTES)), 1000, 1.0)
        user.save()
        user.assert_right(user.fetch())

    # Clearing -----------------------------------------------------------------------------------------------

    def test_a_namespace_is_cleared_and_others_stay(self, user: User) -> None:
        user.save()
        other = self.user_of(user.cache, type(user.scope.namespace)(bytes(reversed(user.scope.namespace))))
        other.save(KEYS[:2])
        assert user.cache.clear(namespace=user.scope.namespace) >= 6
        assert user.matched().blocks == 0
        other.assert_right(other.fetch(KEYS[:2]), KEYS[:2])
        assert user.cache.clear(namespace=user.scope.namespace) == 0

    def test_a_namespace_is_cleared_on_every_tier(self, user: User) -> None:
        user.save()
        self.cool(user)
        assert user.cache.clear(namespace=user.scope.namespace) >= 6
        assert user.matched().blocks == 0

    def test_a_block_is_cleared_with_those_that_follow_it(self, user: User) -> None:
        user.save()
        branch: list[Key] = [*KEYS[:3], *chain_keys("branch", 2)]
        user.save(branch, first=3)
        assert user.cache.clear(prefix=KEYS[3]) >= 3
        assert user.matched().blocks == 3
        assert user.matched(KEYS[4:]).blocks == 0
        user.assert_right(user.fetch(branch), branch)

    def test_what_was_cleared_can_be_saved_again(self, user: User) -> None:
        user.save()
        user.cache.clear(namespace=user.scope.namespace)
        user.save()
        fetched = user.fetch()
        user.assert_right(fetched)
        assert_bytes(fetched, KEYS, user.here)
