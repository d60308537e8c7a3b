# SPDX-License-Identifier: Apache-2.0
"""Tickets, plans and slots: plain values, whoever made them."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.outcome import Outcome
from kvtide.testing.blocks import chain_keys, shelf
from kvtide.tickets import NO_SLOTS, Fetched, Leased, Match, Reservation, Slots, Ticket, slot_bytes

KEYS = chain_keys("chain", 6)
HERE = shelf()


def match_of(blocks: int, frame_bytes: int = 8192, shelves: int = 1) -> Match:
    sizes = tuple(np.full(blocks, frame_bytes, np.int64) for _ in range(shelves))
    tiers = tuple(np.zeros(blocks, np.int8) for _ in range(shelves))
    return Match((HERE,) * shelves, KEYS, blocks, sizes, tiers)


def test_a_ticket_has_no_result_before_it_is_done_and_one_result_afterwards() -> None:
    ticket: Ticket[int] = Ticket()
    assert not ticket.is_done
    with pytest.raises(AssertionError, match="not done"):
        _ = ticket.result
    ticket.complete(3)
    assert (ticket.is_done, ticket.result) == (True, 3)
    with pytest.raises(AssertionError):
        ticket.complete(4)
    assert ticket.result == 3


def test_a_ticket_may_be_done_from_the_start_and_its_result_may_be_none() -> None:
    ticket = Ticket[int | None].done(None)
    assert (ticket.is_done, ticket.result) == (True, None)


@pytest.mark.parametrize(("frame_bytes", "taken"), [(1, 4096), (4096, 4096), (4097, 8192), (12_288, 12_288)])
def test_a_frame_takes_whole_pages(frame_bytes: int, taken: int) -> None:
    assert slot_bytes(np.array([frame_bytes, frame_bytes])).tolist() == [taken, taken]


@pytest.mark.parametrize(
    ("first_page", "planned"), [(0, (0, 5, 0)), (3, (0, 5, 3)), (4, (1, 5, 0)), (19, (4, 5, 3)), (20, (5, 5, 0))]
)
def test_a_plan_starts_at_any_page(first_page: int, planned: tuple[int, int, int]) -> None:
    plan = match_of(5).plan(1 << 20, first_page, 4)
    assert (plan.first_block, plan.end_block, plan.first_page) == planned
    assert list(plan.keys) == KEYS[plan.first_block : plan.end_block]
    assert plan.reasons == ()


@pytest.mark.parametrize(("bytes_max", "end"), [(0, 0), (8191, 0), (8192, 1), (3 * 8192, 3), (5 * 8192, 5)])
def test_a_plan_goes_as_far_as_its_bound(bytes_max: int, end: int) -> None:
    plan = match_of(5).plan(bytes_max)
    assert plan.end_block == end
    assert plan.reasons == (() if end == 5 else (f"{5 - end} blocks beyond the request's share of DRAM",))


def test_a_plan_from_inside_a_block_that_does_not_fit_is_empty() -> None:
    plan = match_of(5).plan(100, 3, 4)
    assert (plan.first_block, plan.end_block, plan.first_page) == (0, 0, 0)


def test_the_bound_of_a_plan_holds_for_all_its_parts_together() -> None:
    assert match_of(5, shelves=2).plan(5 * 8192).end_block == 2


def test_a_plan_of_blocks_of_several_sizes_counts_each_by_its_own() -> None:
    match = Match((HERE,), KEYS, 3, (np.array([100, 20_000, 100]),), (np.zeros(3, np.int8),))
    assert match.plan(4096 + 20_480).end_block == 2
    assert match.plan(4096 + 20_480, 1).end_block == 3


def test_slots_are_seen_where_they_stand_in_the_arena() -> None:
    arena = np.arange(100, dtype=np.uint8)
    slots = Slots(arena, np.array([90, 0, 40]), np.array([10, 2, 0]))
    assert [view.tolist() for view in slots.views()] == [list(range(90, 100)), [0, 1], []]
    slots.views()[1][0] = 77
    assert arena[0] == 77
    assert NO_SLOTS.views() == []


def test_payloads_of_a_reservation_stand_at_the_places_of_their_keys() -> None:
    outcomes = [Outcome.HIT, Outcome.MISS, Outcome.PENDING, Outcome.MISS, Outcome.REJECTED]
    slots = Slots(np.arange(100, dtype=np.uint8), np.array([10, 20]), np.array([1, 1]))
    payloads = Reservation(HERE, KEYS[:5], outcomes, slots, []).payloads
    assert [None if payload is None else payload.tolist() for payload in payloads] == [None, [10], None, [20], None]


def test_of_several_parts_the_shortest_counts() -> None:
    parts = tuple(Fetched(blocks, 0, None) for blocks in (5, 2, 4))
    assert Leased(6, 0, parts).blocks == 2
    assert Leased(6, 0, ()).blocks == 0
