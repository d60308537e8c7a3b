# SPDX-License-Identifier: Apache-2.0
"""A cache around a cache that does as a test says: gives nothing, raises, is late, or stops at a gate."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from kvtide.cache import Cache
from kvtide.errors import Closed
from kvtide.keys import Key, Shelf
from kvtide.layout import Layout
from kvtide.outcome import Outcome
from kvtide.testing.faults import Gate
from kvtide.tickets import NO_SLOTS, Fetched, Leased, Match, Plan, Reservation, Ticket

Fault = Literal["nothing", "closed", "error", "late"]
# What the interface lets a closed cache raise Closed from.
MAY_BE_CLOSED = ("open_scope", "match", "fetch", "reserve", "publish", "report_prefill")
LATE_S = 0.02


class FaultyCache:
    """`faults` says of each call how it fails: "late" gives nothing when its time is up. Otherwise transparent."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.faults: dict[str, Fault] = {}
        self.calls: Counter[str] = Counter()
        self._gates: dict[str, Gate] = {}
        self._withheld: set[str] = set()
        self._changed = threading.Condition()
        self._pending: list[tuple[Ticket[Any], Callable[[], bool], Callable[[], Any]]] = []

    @contextmanager
    def gate(self, call: str) -> Iterator[Gate]:
        """Stop whoever makes this call, until the gate or the block ends."""
        gate = self._gates[call] = Gate()
        try:
            yield gate
        finally:
            del self._gates[call]
            gate.open()

    def withhold(self, call: str) -> None:
        """Tickets of this call are not done until `give`."""
        self._withheld.add(call)

    def give(self) -> None:
        with self._changed:
            self._withheld.clear()
            self._changed.notify_all()

    @property
    def tier_names(self) -> tuple[str, ...]:
        return self.cache.tier_names

    def open_scope(self, namespace: Any, name: str = "") -> Ticket[Any]:
        return self._call("open_scope", lambda: self.cache.open_scope(namespace, name), lambda: None)

    def match(self, shelves: Sequence[Shelf], keys: Sequence[Key]) -> Ticket[Match]:
        none = np.empty(0, np.int64), np.empty(0, np.int8)
        return self._call(
            "match",
            lambda: self.cache.match(shelves, keys),
            lambda: Match(tuple(shelves), keys, 0, (none[0],) * len(shelves), (none[1],) * len(shelves)),
        )

    def plan(self, match: Match, **pages: int) -> Plan:
        self._fail("plan")
        return Plan(match, 0, 0, 0) if self.faults.get("plan") else self.cache.plan(match, **pages)

    def fetch(self, plan: Plan, shelf: Shelf | None = None, *, deadline_s: float | None = None) -> Ticket[Fetched]:
        return self._call(
            "fetch",
            lambda: self.cache.fetch(plan, shelf, deadline_s=deadline_s),
            lambda: Fetched(0, 0, None, outcome=Outcome.TIMEOUT),
        )

    def reserve(self, shelf: Shelf, keys: Sequence[Key], layout: Layout, **place: Any) -> Ticket[Reservation]:
        return self._call(
            "reserve",
            lambda: self.cache.reserve(shelf, keys, layout, **place),
            lambda: Reservation(shelf, keys, [Outcome.REJECTED] * len(keys), NO_SLOTS, []),
        )

    def publish(self, reservation: Reservation, which: Sequence[int] | None = None) -> Ticket[list[Outcome]]:
        def nothing() -> list[Outcome]:
            self.cache.abort(reservation)
            return [Outcome.REJECTED] * len(reservation.keys)

        return self._call("publish", lambda: self.cache.publish(reservation, which), nothing)

    def report_prefill(self, namespace: Any, tokens: int, seconds: float) -> None:
        self._fail("report_prefill")
        self.cache.report_prefill(namespace, tokens, seconds)

    def release(self, fetched: Fetched) -> None:
        self.cache.release(fetched)  # first: a cache that fails is to be blamed for nothing else
        self._fail("release")

    def abort(self, reservation: Reservation) -> None:
        self.cache.abort(reservation)
        self._fail("abort")

    def poll(self) -> list[Ticket[Any]]:
        self._fail("poll")
        self._settle()
        return self.cache.poll()

    def wait(self, ticket: Ticket[Any], timeout_s: float | None = None) -> bool:
        self._fail("wait")
        end_s = time.monotonic() + (1e6 if timeout_s is None else timeout_s)
        while True:
            self._settle()
            if ticket.is_done or time.monotonic() >= end_s:
                return ticket.is_done
            if any(ticket is own for own, _, _ in self._pending):
                with self._changed:
                    self._changed.wait(min(LATE_S, max(0.0, end_s - time.monotonic())))
            else:
                self.cache.wait(ticket, min(0.05, max(0.0, end_s - time.monotonic())))

    def close(self) -> None:
        self.cache.close()

    # Of the interface, but of no use to these engines.

    def match_and_lease(self, *arguments: Any, **options: Any) -> Ticket[Leased]:
        return self.cache.match_and_lease(*arguments, **options)

    def pin(self, *arguments: Any, **options: Any) -> Ticket[Fetched]:
        return self.cache.pin(*arguments, **options)

    def prefetch(self, *arguments: Any, **options: Any) -> Ticket[int]:
        return self.cache.prefetch(*arguments, **options)

    # How ------------------------------------------------------------------------------------------------------

    def _fail(self, name: str) -> None:
        self.calls[name] += 1
        if (gate := self._gates.get(name)) is not None:
            gate.enter()
        if (fault := self.faults.get(name)) == "closed":
            raise Closed("the cache is closed")
        if fault == "error":
            raise RuntimeError("a cache that has lost its mind")

    def _call(self, name: str, ask: Callable[[], Ticket[Any]], nothing: Callable[[], Any]) -> Ticket[Any]:
        self._fail(name)
        fault = self.faults.get(name)
        if fault == "nothing":
            return Ticket.done(nothing())
        if fault == "late":
            due_s = time.monotonic() + LATE_S
            return self._later(lambda: time.monotonic() >= due_s, nothing)
        asked = ask()
        if name not in self._withheld:
            return asked
        return self._later(lambda: name not in self._withheld and asked.is_done, lambda: asked.result)

    def _later(self, is_due: Callable[[], bool], result: Callable[[], Any]) -> Ticket[Any]:
        ticket: Ticket[Any] = Ticket()
        with self._changed:
            self._pending.append((ticket, is_due, result))
        return ticket

    def _settle(self) -> None:
        with self._changed:
            due = [each for each in self._pending if each[1]()]
            for each in due:
                self._pending.remove(each)
                each[0].complete(each[2]())
            if due:
                self._changed.notify_all()
