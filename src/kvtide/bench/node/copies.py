# SPDX-License-Identifier: Apache-2.0
"""Blocks of 4 MiB between engines and the service's DRAM, against processes that only copy.

As many processes, pieces of the same size, equally large working sets, private memory on one side and shared
memory on the other: what is left is the bookkeeping and the socket. All of it is warm, and there is no disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

import numpy as np

from kvtide.bench.case import GIGABYTES_PER_SECOND, Case, Measured, Setting, Trial
from kvtide.bench.node.common import done, open_client, open_node, open_scope
from kvtide.bench.node.crew import Job, Orders, Worker, crew, together, wait_until
from kvtide.frame import HEADER_BYTES
from kvtide.keys import NO_PARENT, Key
from kvtide.layout import Layout, Memory
from kvtide.memory.arena import Arena
from kvtide.outcome import Outcome
from kvtide.testing.blocks import chain_keys
from kvtide.tickets import Leased, Reservation, Ticket

T = TypeVar("T")
Order = TypeVar("Order")


@dataclass(frozen=True, slots=True)
class Size:
    """`blocks` of one client; a segment moves all of them `passes` times."""

    blocks: int = 64
    passes: int = 4
    page_bytes: int = 8192
    many: int = 4  # clients, where it is not one


FULL = Size()
QUICK = Size(passes=2)


def _layout(page_bytes: int) -> Layout:
    return Layout(layers=32, pages=16, page_tokens=16, page_bytes=page_bytes)


class Copier(Job):
    """An engine: KV memory of its own, a client, and memory like the service's for the plain copies."""

    def __init__(
        self,
        orders: Orders,
        socket: str,
        number: int,
        blocks: int,
        passes: int,
        batch: int,
        page_bytes: int,
        is_ahead: bool,
    ) -> None:
        super().__init__(orders)
        self._is_ahead = is_ahead
        self._number, self._blocks, self._passes, self._batch = number, blocks, passes, batch
        self._layout = _layout(page_bytes)
        size = self._layout.payload_bytes
        memory = np.full(blocks * size, 7, np.uint8)
        self._own = [memory[i * size : (i + 1) * size] for i in range(blocks)]
        slot_bytes = HEADER_BYTES + size
        self._arena = Arena(2 * blocks * slot_bytes)
        self._arena.wait_touched()
        starts = range(HEADER_BYTES, 2 * blocks * slot_bytes, slot_bytes)
        self._plain = [self._arena.memory[at : at + size] for at in starts]
        self._client = open_client(socket)
        self._client.wait_populated()
        self._shelf = open_scope(self._client).shelf()
        self._kept = chain_keys(f"kept-{number}", blocks)
        self._names = count()
        self._halves = count()

    def keep(self) -> None:
        """Save the blocks that `read` reads."""
        self._write([self._kept])

    def read(self, start_s: float) -> float:
        """Lease, copy out, release. The moment when it was done, as of the next three."""
        wait_until(start_s)
        batches = [first for _ in range(self._passes) for first in range(0, self._blocks, self._batch)]
        for first, ticket in self._asked(batches, self._ask_to_read):
            leased = done(self._client, ticket)
            assert leased.blocks == self._batch, "the service had lost a block of the benchmark"
            [fetched] = leased.fetched
            _copy(fetched.payloads, self._own[first : first + self._batch])
            self._client.release(fetched)
        return time.monotonic()

    def _ask_to_read(self, first: int) -> Ticket[Leased]:
        return self._client.match_and_lease([self._shelf], self._kept[first : first + self._batch])

    def _asked(self, orders: Sequence[Order], ask: Callable[[Order], Ticket[T]]) -> Iterator[tuple[Order, Ticket[T]]]:
        """Each order with its ticket. Ahead: the next one is asked for while this one is copied, as an engine does."""
        if not self._is_ahead:
            yield from ((order, ask(order)) for order in orders)
            return
        before: tuple[Order, Ticket[T]] | None = None
        for order in orders:
            ticket = ask(order)
            if before is not None:
                yield before
            before = order, ticket
        if before is not None:
            yield before

    def write(self, start_s: float) -> float:
        """Reserve, copy in, publish: fresh keys each time, in place of the oldest blocks."""
        chains = [chain_keys(f"{self._number}-{next(self._names)}", self._blocks) for _ in range(self._passes)]
        wait_until(start_s)
        self._write(chains)
        return time.monotonic()

    def _write(self, chains: list[list[Key]]) -> None:
        """Nobody waits for one publish before the next reserve, but all of them are over at the end."""
        batches = [(keys, first) for keys in chains for first in range(0, self._blocks, self._batch)]
        published = []
        for (_, first), ticket in self._asked(batches, self._ask_to_write):
            reservation = done(self._client, ticket)
            targets = [target for target in reservation.payloads if target is not None]
            assert len(targets) == self._batch, "the service had no slot for the benchmark"
            _copy(self._own[first : first + self._batch], targets)
            published.append(self._client.publish(reservation))
        for confirmed in published:
            outcomes = done(self._client, confirmed)
            assert set(outcomes) == {Outcome.HIT}, "the service did not take the blocks"

    def _ask_to_write(self, batch: tuple[list[Key], int]) -> Ticket[Reservation]:
        keys, first = batch
        parent = keys[first - 1] if first else NO_PARENT
        some = keys[first : first + self._batch]
        return self._client.reserve(self._shelf, some, self._layout, position=first, parent=parent)

    def copy_out(self, start_s: float) -> float:
        wait_until(start_s)
        for _ in range(self._passes):
            _copy(self._plain[: self._blocks], self._own)
        return time.monotonic()

    def copy_in(self, start_s: float) -> float:
        wait_until(start_s)
        for _ in range(self._passes):
            half = next(self._halves) % 2 * self._blocks
            _copy(self._own, self._plain[half : half + self._blocks])
        return time.monotonic()

    def close(self) -> None:
        self._client.close()
        self._plain.clear()
        self._arena.close()


def _copy(sources: Sequence[Memory], targets: Sequence[Memory]) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


def _moves(
    setting: Setting, *, fixed: Size | None, is_read: bool, is_many: bool, is_single: bool, is_ahead: bool
) -> Iterator[Trial]:
    size = fixed or (QUICK if setting.is_quick else FULL)
    clients = size.many if is_many else 1
    batch = 1 if is_single else size.blocks
    slot_bytes = HEADER_BYTES + _layout(size.page_bytes).payload_bytes
    # Twice what a pass of all clients writes, and a batch that is asked for ahead: every pass also evicts what an
    # earlier one wrote.
    dram_bytes = clients * (2 * size.blocks + batch) * slot_bytes
    with open_node(setting.folder / "node", dram_bytes=dram_bytes) as node:
        options: list[dict[str, object]] = [
            {
                "socket": str(node.socket),
                "number": number,
                "blocks": size.blocks,
                "passes": size.passes,
                "batch": batch,
                "page_bytes": size.page_bytes,
                "is_ahead": is_ahead,
            }
            for number in range(clients)
        ]
        with crew("kvtide.bench.node.copies:Copier", options) as copiers:
            if is_read:
                for copier in copiers:
                    copier.ask("keep")
            yield Trial(
                partial(_segment, copiers, "read" if is_read else "write"),
                partial(_segment, copiers, "copy_out" if is_read else "copy_in"),
                work=clients * size.passes * size.blocks * _layout(size.page_bytes).payload_bytes,
                note=f"{clients} client{'s' * (clients > 1)}, {batch} block{'s' * (batch > 1)} a request,"
                f" {'the next asked for while one is copied' if is_ahead else 'each waited for'};"
                f" baseline: as many processes that only copy",
            )


def _segment(copiers: Sequence[Worker], order: str) -> Measured:
    """From the common start to the end of the last one."""
    start_s, ends_s = together(copiers, order)
    return Measured(max(ends_s) - start_s)


def make_cases(size: Size | None = None) -> tuple[Case, ...]:
    def case(
        name: str, *, is_read: bool, is_many: bool = False, is_single: bool = False, is_ahead: bool = True
    ) -> Case:
        setup = partial(_moves, fixed=size, is_read=is_read, is_many=is_many, is_single=is_single, is_ahead=is_ahead)
        return Case(name, GIGABYTES_PER_SECOND, setup, runs=21, quick_runs=7, warmups=2)

    return (
        case("client-read-1", is_read=True),
        case("client-read-4", is_read=True, is_many=True),
        case("client-write-1", is_read=False),
        case("client-write-4", is_read=False, is_many=True),
        case("client-read-single", is_read=True, is_single=True),
        case("client-write-single", is_read=False, is_single=True),
        case("client-read-single-waiting", is_read=True, is_single=True, is_ahead=False),
        case("client-write-single-waiting", is_read=False, is_single=True, is_ahead=False),
    )


CASES = make_cases()
