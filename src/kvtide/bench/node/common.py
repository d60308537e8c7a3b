# SPDX-License-Identifier: Apache-2.0
"""What the rows of the node service share: how blocks are saved, services opened, and figures made of latencies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.bench.case import Case, Measured, Setting, Trial, Unit
from kvtide.client import Client, connect
from kvtide.config import CallSettings
from kvtide.keys import NO_PARENT, Digest, Key, Shelf
from kvtide.layout import Layout, Memory
from kvtide.outcome import Outcome
from kvtide.tenant import Scope
from kvtide.testing.node import ServedNode
from kvtide.tickets import Reservation, Ticket

T = TypeVar("T")

PATIENT = CallSettings(match_s=10.0, control_s=10.0)  # a slow machine must not look like a miss
SMALL = Layout(layers=1, pages=16, page_tokens=16, page_bytes=256)  # the smallest slot: 4 KiB of payload
NAMESPACE = Digest(bytes(range(32)))
_SPILL_S = 60.0


def open_node(folder: Path, *, dram_bytes: int, disk_bytes: int = 0, config: str | None = None) -> ServedNode:
    """A service that is about to start, with what the row needs and no more."""
    sizes = ("--dram-bytes-max", str(dram_bytes), "--disk-bytes-max", str(disk_bytes))
    return ServedNode(folder, *sizes, "--disk-io-threads", "4", "--admin-port", "0", config=config)


def open_client(socket: str | Path, *, token: str = "", calls: CallSettings = PATIENT) -> Client:
    return connect(f"unix:{socket}", token=token, tenant="", calls=calls)


def done(client: Client, ticket: Ticket[T]) -> T:
    """The result of a call. Every ticket has a deadline of its own, so this ends."""
    client.wait(ticket)
    return ticket.result


def open_scope(client: Client, name: str = "") -> Scope:
    scope = done(client, client.open_scope(NAMESPACE, name))
    assert scope is not None, "the service did not open a scope for the benchmark"
    return scope


class Saver(Protocol):
    """A client, or a store: what blocks are saved through."""

    def reserve(self, shelf: Shelf, keys: Sequence[Key], layout: Layout) -> Ticket[Reservation]: ...

    def publish(self, reservation: Reservation) -> Ticket[list[Outcome]]: ...

    def wait(self, ticket: Ticket[Any]) -> bool: ...


def save_chain(
    saver: Saver, shelf: Shelf, keys: Sequence[Key], layout: Layout, fill: Callable[[Memory, Key], None] | None = None
) -> None:
    """Save a whole chain that is not there yet."""
    ticket = saver.reserve(shelf, keys, layout)
    saver.wait(ticket)
    reservation = ticket.result
    if fill is not None:
        for key, payload in zip(keys, reservation.payloads, strict=True):
            assert payload is not None, "there was no slot for the benchmark"
            fill(payload, key)
    published = saver.publish(reservation)
    saver.wait(published)
    assert set(published.result) == {Outcome.HIT}, "the blocks of the benchmark were not taken"


def wait_spilled(client: Client, below_bytes: int = 0) -> int:
    """Wait until so little is left to be written to disk. Returns how many blocks were written since the start."""
    end_s = time.monotonic() + _SPILL_S
    while True:
        spill = client.stats()["spill"]["disk"]
        if spill["queued_bytes"] <= below_bytes:
            lost = spill["dropped_full"] + spill["dropped_refused"] + spill["evicted_unspilled"]
            assert not lost, f"{lost} blocks of the benchmark did not get to disk"
            return int(spill["spilled_blocks"])
        assert time.monotonic() < end_s, f"the service did not write its blocks to disk in {_SPILL_S:g} s"
        time.sleep(0.01)


def parents(keys: Sequence[Key]) -> list[Key]:
    return [NO_PARENT, *keys[:-1]]


def quantile(seconds: Sequence[float], share: float) -> float:
    assert seconds, "nothing was measured"
    return float(np.quantile(np.asarray(seconds), share))


def auc(lower: npt.ArrayLike, higher: npt.ArrayLike) -> float:
    """How often a figure of `higher` is above one of `lower`; ties count half. 0.5: nobody can tell them apart.

    By ranks (Mann and Whitney): the ranks of `higher` among all, less what they would be among themselves.
    """
    low, high = np.asarray(lower, np.float64), np.asarray(higher, np.float64)
    _, place, counts = np.unique(np.concatenate((low, high)), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # the average rank of those that are equal
    return float((ranks[len(low) :].sum() - len(high) * (len(high) + 1) / 2) / (len(low) * len(high)))


def resident_bytes(pid: int) -> int:
    """Memory of a process without what it shares with others: arenas are no part of it."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@dataclass(slots=True)
class Campaign(Generic[T]):
    """One long run, shared by the rows that are read from its result: it runs for the first of them."""

    run: Callable[[Setting], T]
    note: Callable[[T], str]
    _results: dict[bool, T] = field(default_factory=dict)  # by whether it was quick

    def case(self, name: str, unit: Unit, figure: Callable[[T], float]) -> Case:
        def setup(setting: Setting) -> Iterator[Trial]:
            if setting.is_quick not in self._results:
                self._results[setting.is_quick] = self.run(setting)
            result = self._results[setting.is_quick]
            yield Trial(lambda: Measured(figure(result)), note=self.note(result))

        return Case(name, unit, setup, runs=1, quick_runs=1, warmups=0)
