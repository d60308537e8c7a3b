# SPDX-License-Identifier: Apache-2.0
"""The ledger of leases: who holds what, what happens when the time is over, and who gets nothing new."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.memory.leases import Lease, Ledger, Use


def lease(holder: int = 1, *, use: Use = Use.READ, size_bytes: int = 100, until_s: float = 10.0) -> Lease:
    return Lease(use, holder, np.array([0]), size_bytes, until_s)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(quarantine_bytes_max=150)


def test_a_new_ledger_is_empty(ledger: Ledger) -> None:
    assert (len(ledger), list(ledger), ledger.quarantined_bytes, ledger.quarantined_total) == (0, [], 0, 0)
    assert ledger.may_take(1)
    assert ledger.expire(1e9) == []


def test_leases_are_listed_until_they_are_returned(ledger: Ledger) -> None:
    first, second = lease(), lease()
    ledger.add(first)
    ledger.add(second)
    assert list(ledger) == [first, second]
    ledger.remove(first)
    assert (list(ledger), len(ledger)) == ([second], 1)
    assert first.is_over
    assert not second.is_over


def test_no_two_leases_have_one_number(ledger: Ledger) -> None:
    leases = [lease() for _ in range(4)]
    for each in leases[:3]:
        ledger.add(each)
    ledger.remove(leases[2])
    ledger.add(leases[3])
    assert len({each.number for each in leases}) == 4


def test_a_lease_is_returned_once(ledger: Ledger) -> None:
    ledger.add(mine := lease())
    ledger.remove(mine)
    with pytest.raises(KeyError):
        ledger.remove(mine)


def test_the_leases_of_one_holder_are_found(ledger: Ledger) -> None:
    mine, his = [lease(1), lease(1, use=Use.PIN)], lease(2)
    for each in (*mine, his):
        ledger.add(each)
    assert ledger.of(1) == mine
    assert ledger.of(2) == [his]
    assert ledger.of(3) == []


def test_a_lease_is_due_when_its_time_has_come_and_not_before(ledger: Ledger) -> None:
    ledger.add(mine := lease(until_s=10.0))
    assert ledger.expire(9.999) == []
    assert ledger.expire(10.0) == [mine]


def test_a_lease_is_due_once(ledger: Ledger) -> None:
    ledger.add(lease(until_s=10.0))
    ledger.add(later := lease(until_s=20.0))
    assert len(ledger.expire(15.0)) == 1
    assert ledger.expire(16.0) == []
    assert ledger.expire(30.0) == [later]
    assert ledger.expire(40.0) == []


def test_leases_are_due_in_the_order_of_their_time_whatever_order_they_came_in(ledger: Ledger) -> None:
    by_end = {until_s: lease(until_s=until_s) for until_s in (30.0, 10.0, 20.0)}
    for each in by_end.values():
        ledger.add(each)
    for until_s in (10.0, 20.0, 30.0):
        assert ledger.expire(until_s) == [by_end[until_s]]


def test_a_lease_added_after_others_were_due_is_due_in_its_turn(ledger: Ledger) -> None:
    ledger.add(lease(until_s=10.0))
    ledger.expire(10.0)
    ledger.add(later := lease(until_s=11.0))
    assert ledger.expire(12.0) == [later]


def test_what_was_returned_is_not_due(ledger: Ledger) -> None:
    ledger.add(mine := lease())
    ledger.remove(mine)
    assert ledger.expire(1e9) == []
    assert not mine.is_quarantined


@pytest.mark.parametrize("use", [Use.READ, Use.WRITE])
def test_a_lease_past_its_time_is_quarantined_and_still_held(ledger: Ledger, use: Use) -> None:
    ledger.add(mine := lease(use=use))
    ledger.expire(10.0)
    assert mine.is_quarantined
    assert not mine.is_over
    assert list(ledger) == [mine]
    assert (ledger.quarantined_bytes, ledger.quarantined_total) == (100, 1)


def test_a_pin_past_its_time_simply_ends(ledger: Ledger) -> None:
    ledger.add(pin := lease(use=Use.PIN))
    assert ledger.expire(10.0) == [pin]
    assert not pin.is_quarantined
    assert (ledger.quarantined_bytes, ledger.quarantined_total) == (0, 0)


def test_what_is_returned_leaves_quarantine_and_the_count_of_all_stays(ledger: Ledger) -> None:
    ledger.add(mine := lease())
    ledger.expire(10.0)
    ledger.remove(mine)
    assert (ledger.quarantined_bytes, ledger.quarantined_total, len(ledger)) == (0, 1, 0)


def test_who_has_too_much_in_quarantine_gets_nothing_new_and_others_do(ledger: Ledger) -> None:
    mine = [lease(1), lease(1)]
    for each in mine:
        ledger.add(each)
    ledger.add(lease(2))
    ledger.expire(10.0)
    assert not ledger.may_take(1)
    assert ledger.may_take(2)
    assert ledger.may_take(3)
    ledger.remove(mine[0])
    assert ledger.may_take(1)
    assert ledger.quarantined_bytes == 200


def test_as_much_in_quarantine_as_the_bound_is_not_too_much(ledger: Ledger) -> None:
    ledger.add(lease(size_bytes=150))
    ledger.add(pin := lease(use=Use.PIN, size_bytes=1000))
    ledger.expire(10.0)
    assert ledger.may_take(1)
    ledger.remove(pin)
    ledger.add(lease(size_bytes=1, until_s=11.0))
    ledger.expire(11.0)
    assert not ledger.may_take(1)
