# SPDX-License-Identifier: Apache-2.0
"""A service under everything at once: eight clients that save, read, pin, prefetch, abort and change their minds,
on more blocks than its DRAM holds, while some of them are killed. What it must not do is lie, leak or grow.

Every block's bytes follow from its address, so each one that is read can be compared. The set of blocks grows
slowly while the load runs, so there is something to save until the end, and disk room for all of it.
"""

from __future__ import annotations

import random
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtide.bench.case import COUNT, Case, Setting, Unit
from kvtide.bench.node.common import (
    SMALL,
    Campaign,
    done,
    open_client,
    open_files,
    open_node,
    open_scope,
    resident_bytes,
    save_chain,
    wait_spilled,
)
from kvtide.bench.node.crew import Job, Orders, Tally, Worker
from kvtide.client import Client
from kvtide.keys import NO_PARENT, Address, Key, Shelf
from kvtide.layout import Layout
from kvtide.outcome import Outcome
from kvtide.testing.blocks import chain_keys, pattern
from kvtide.testing.node import ServedNode
from kvtide.tickets import Fetched, Plan

_MIB, _GIB = 1 << 20, 1 << 30
_SCOPES = 4
_PAYLOADS_KIB = (16, 16, 16, 16, 64, 64, 64, 256, 256, 1024)  # as often as they stand here
_COUNTS = ("calls", "compared", "wrong", "saved", "rejected", "reconnects")
_LAST_S = 20.0  # to the end of what the last clients left behind


@dataclass(frozen=True, slots=True)
class Size:
    duration_s: float = 600.0
    clients: int = 8
    dram_bytes: int = 512 * _MIB
    disk_bytes: int = 10 * _GIB
    filled_chains: int = 400  # of small blocks that are there before the load begins
    filled_chain_blocks: int = 512
    chains_first: int = 400  # of all sizes, about 1.8 MiB each
    chains_last: int = 2400
    kill_every_s: float = 5.0


FULL = Size()
QUICK = Size(
    duration_s=20.0, disk_bytes=3 * _GIB, filled_chains=40, chains_first=200, chains_last=500, kill_every_s=3.0
)


@dataclass(frozen=True, slots=True)
class Result:
    """`resident` are samples of the service's own memory, one a second; the counts are those of all clients."""

    seconds: float
    counts: dict[str, int]
    kills: int
    clients_lost: int  # that ended by themselves, which none should
    leases_left: int
    files_grown: int
    resident: tuple[int, ...]
    blocks_known: int
    seed: int

    @property
    def growth_percent(self) -> float:
        """From the first half of the run to the second."""
        half = len(self.resident) // 2
        first, second = self.resident[:half] or self.resident, self.resident[half:]
        return 100 * (statistics.median(second) / statistics.median(first) - 1)

    def __str__(self) -> str:
        counts = self.counts
        return (
            f"{self.seconds:,.0f} s, {counts['calls']:,} calls, {counts['compared']:,} blocks compared,"
            f" {counts['saved']:,} saved, {self.kills} clients killed, {counts['reconnects']} reconnected,"
            f" seed {self.seed}"
        )


@dataclass(frozen=True, slots=True)
class Chain:
    """The blocks behind a number: same number, same scope, keys, shape and bytes."""

    shelf: Shelf
    keys: list[Key]
    layout: Layout

    @classmethod
    def of(cls, number: int, shelves: list[Shelf]) -> Chain:
        payload_bytes = _PAYLOADS_KIB[number * 7 % len(_PAYLOADS_KIB)] * 1024
        layout = Layout(layers=2, pages=4, page_tokens=16, page_bytes=payload_bytes // 8)
        return cls(shelves[number % len(shelves)], chain_keys(f"load-{number}", 4 + number * 5 % 13), layout)


class Loader(Job):
    """One client, again and again. `run` is made of turns, each of which is one of the ways to use the service."""

    def __init__(self, orders: Orders, socket: str, tally: str, seed: int, first: int, last: int) -> None:
        super().__init__(orders)
        self._socket = socket
        self._tally = Tally(Path(tally), _COUNTS)
        self._random = random.Random(seed)
        self._first, self._last = first, last
        self._held: list[Fetched] = []
        self._connect()

    def _connect(self) -> None:
        self._client: Client = open_client(self._socket)
        self._shelves = [open_scope(self._client, f"customer-{i}").shelf() for i in range(_SCOPES)]

    def run(self, start_s: float, end_s: float) -> None:
        turns: list[tuple[int, Callable[[Chain], None]]] = [
            (40, self._request),
            (20, self._fetch),
            (8, self._pin),
            (8, self._prefetch),
            (8, self._abort),
            (8, self._hold),
            (1, self._reconnect),
        ]
        weights, calls = zip(*turns, strict=True)
        while (now_s := time.monotonic()) < end_s and not self.orders.are_waiting:
            known = self._first + (self._last - self._first) * max(0.0, now_s - start_s) / (end_s - start_s)
            newest = self._random.random() < 0.25
            number = int(known) - self._random.randrange(8) if newest else self._random.randrange(int(known))
            (turn,) = self._random.choices(calls, weights)
            turn(Chain.of(max(number, 0), self._shelves))
            self._tally.add("calls")

    def _request(self, chain: Chain) -> None:
        """What an engine does: read what is there, compute and save the rest."""
        deadline_s = self._random.choice((0.02, 0.2, 2.0))
        ticket = self._client.match_and_lease([chain.shelf], chain.keys, deadline_s=deadline_s)
        leased = done(self._client, ticket)
        self._compare(chain, leased.fetched[0], leased.first_block)
        self._client.release(leased.fetched[0])
        self._save(chain, leased.matched_blocks)

    def _save(self, chain: Chain, first: int, *, is_aborted: bool = False) -> None:
        keys = chain.keys[first:]
        if not keys:
            return
        parent = chain.keys[first - 1] if first else NO_PARENT
        reservation = done(
            self._client, self._client.reserve(chain.shelf, keys, chain.layout, position=first, parent=parent)
        )
        for key, payload in zip(keys, reservation.payloads, strict=True):
            if payload is not None:
                payload[:] = pattern(Address(chain.shelf, key), len(payload))
        if is_aborted:
            self._client.abort(reservation)
            return
        # Now and then an engine is interrupted, and has only the first few.
        which = list(range(len(keys) // 2)) if self._random.random() < 0.1 else None
        outcomes = done(self._client, self._client.publish(reservation, which))
        self._tally.add("saved", sum(outcome is Outcome.HIT for outcome in outcomes))
        self._tally.add("rejected", sum(outcome is Outcome.REJECTED for outcome in outcomes))

    def _plan(self, chain: Chain) -> Plan:
        return self._client.plan(done(self._client, self._client.match([chain.shelf], chain.keys)))

    def _fetch(self, chain: Chain) -> None:
        deadline_s = self._random.choice((0.0005, 0.005, 0.05))
        fetched = done(self._client, self._client.fetch(self._plan(chain), deadline_s=deadline_s))
        self._compare(chain, fetched)
        self._client.release(fetched)

    def _pin(self, chain: Chain) -> None:
        """Half of the pins are left to end by themselves."""
        fetched = done(self._client, self._client.pin(self._plan(chain), ttl_s=self._random.uniform(0.1, 1.0)))
        if self._random.random() < 0.5:
            self._client.release(fetched)

    def _prefetch(self, chain: Chain) -> None:
        done(self._client, self._client.prefetch(self._plan(chain)))

    def _abort(self, chain: Chain) -> None:
        self._save(chain, 0, is_aborted=True)

    def _hold(self, chain: Chain) -> None:
        """Keep a lease over some turns: longer than others want its slots, shorter than it may last."""
        self._held.append(done(self._client, self._client.fetch(self._plan(chain), deadline_s=0.1)))
        if len(self._held) > 6:
            self._client.release(self._held.pop(0))

    def _reconnect(self, _: Chain) -> None:
        """With or without giving back what it holds: goodbye says it all."""
        self._held.clear()
        self._client.close()
        self._connect()
        self._tally.add("reconnects")

    def _compare(self, chain: Chain, fetched: Fetched, first: int = 0) -> None:
        for key, payload in zip(chain.keys[first:], fetched.payloads, strict=False):
            expected = pattern(Address(chain.shelf, key), chain.layout.payload_bytes)
            self._tally.add("compared")
            if not np.array_equal(payload, expected):
                self._tally.add("wrong")

    def close(self) -> None:
        self._client.close()


def run_load(folder: Path, size: Size, seed: int, tell: Callable[[str], None]) -> Result:
    """Fill, load, and look at what is left when all clients are gone."""
    with open_node(folder / "node", dram_bytes=size.dram_bytes, disk_bytes=size.disk_bytes) as node:
        with open_client(node.socket) as client:
            shelf = _fill(client, size, tell)
        files = open_files(node.pid)
        start_s = time.monotonic()
        with_clients = _Load(node, folder, size, seed, tell)
        with_clients.run()
        seconds = time.monotonic() - start_s
        with open_client(node.socket) as client:
            leases_left = _leases_left(client)
            blocks_known = _count_filled(client, shelf, size)
        return Result(
            seconds,
            {name: sum(tally[name] for tally in with_clients.tallies) for name in _COUNTS},
            with_clients.kills,
            with_clients.lost,
            leases_left,
            _files_grown(node.pid, files),
            tuple(with_clients.resident),
            blocks_known,
            seed,
        )


def _fill(client: Client, size: Size, tell: Callable[[str], None]) -> Shelf:
    """Save the small blocks, not faster than they get to disk."""
    shelf = open_scope(client, "filled").shelf()
    total = size.filled_chains * size.filled_chain_blocks
    for number in range(size.filled_chains):
        keys = chain_keys(f"filled-{number}", size.filled_chain_blocks)
        save_chain(client, shelf, keys, SMALL)
        wait_spilled(client, size.dram_bytes // 16)
        tell(f"{(number + 1) * size.filled_chain_blocks:,} of {total:,} small blocks saved")
    wait_spilled(client)
    return shelf


def _count_filled(client: Client, shelf: Shelf, size: Size) -> int:
    """How many of the small blocks the service still knows. Few were asked for, and there was room for all."""
    chains = (chain_keys(f"filled-{number}", size.filled_chain_blocks) for number in range(size.filled_chains))
    return sum(done(client, client.match([shelf], keys)).blocks for keys in chains)


def _leases_left(client: Client) -> int:
    """After a bounded time in which pins end and the dead are noticed."""
    end_s = time.monotonic() + _LAST_S
    while (leases := int(client.stats()["leases"])) and time.monotonic() < end_s:
        time.sleep(0.1)
    return leases


def _files_grown(pid: int, before: int) -> int:
    """Open files more than before, once the last sessions are over."""
    end_s = time.monotonic() + _LAST_S
    while (grown := open_files(pid) - before) > 0 and time.monotonic() < end_s:
        time.sleep(0.1)
    return max(grown, 0)


class _Load:
    """The clients of one run, and what is seen of the service meanwhile."""

    def __init__(self, node: ServedNode, folder: Path, size: Size, seed: int, tell: Callable[[str], None]) -> None:
        self.resident: list[int] = []
        self.kills = self.lost = 0
        self._node = node
        self._size = size
        self._random = random.Random(seed)
        self._tell = tell
        self._paths = [folder / f"tally-{number}" for number in range(size.clients)]
        self.tallies = [Tally(path, _COUNTS) for path in self._paths]

    def run(self) -> None:
        size = self._size
        self._start_s = time.monotonic()
        self._end_s = self._start_s + size.duration_s
        workers: list[Worker] = []
        try:
            for number in range(size.clients):
                workers.append(self._worker(number))
            kill_at_s = self._start_s + size.kill_every_s
            while (now_s := time.monotonic()) < self._end_s:
                self.resident.append(resident_bytes(self._node.pid))
                self._tell(
                    f"{now_s - self._start_s:,.0f} of {size.duration_s:,.0f} s,"
                    f" {sum(tally['compared'] for tally in self.tallies):,} blocks compared,"
                    f" service {self.resident[-1] / 1e6:,.0f} MB"
                )
                for number in range(size.clients):
                    if not workers[number].is_alive:
                        self.lost += 1
                        workers[number] = self._again(workers[number], number)
                if now_s >= kill_at_s:
                    number = self._random.randrange(size.clients)
                    workers[number] = self._again(workers[number], number)
                    self.kills += 1
                    kill_at_s = now_s + size.kill_every_s
                time.sleep(max(0.0, min(1.0, self._end_s - time.monotonic())))
            for worker in workers[::2]:  # half of them say goodbye, the others are killed with what they hold
                worker.end()
        finally:
            for worker in workers:
                worker.kill()

    def _again(self, worker: Worker, number: int) -> Worker:
        worker.kill()
        return self._worker(number)

    def _worker(self, number: int) -> Worker:
        worker = Worker(
            "kvtide.bench.node.load:Loader",
            socket=str(self._node.socket),
            tally=str(self._paths[number]),
            seed=self._random.randrange(1 << 31),
            first=self._size.chains_first,
            last=self._size.chains_last,
        )
        worker.tell("run", start_s=self._start_s, end_s=self._end_s)
        return worker


def _run(setting: Setting) -> Result:
    seed = secrets.randbelow(1 << 31)
    return run_load(setting.folder, QUICK if setting.is_quick else FULL, seed, setting.tell)


_campaign = Campaign(_run, str)
CASES: tuple[Case, ...] = (
    _campaign.case("load-wrong-bytes", COUNT, lambda result: result.counts["wrong"]),
    _campaign.case("load-compared", COUNT, lambda result: result.counts["compared"]),
    _campaign.case("load-lost-clients", COUNT, lambda result: result.clients_lost),
    _campaign.case("load-leaked-leases", COUNT, lambda result: result.leases_left),
    _campaign.case("load-leaked-files", COUNT, lambda result: result.files_grown),
    _campaign.case("load-blocks", COUNT, lambda result: result.blocks_known),
    _campaign.case("load-memory", Unit("MB", scale=1e-6), lambda result: max(result.resident)),
    _campaign.case("load-memory-growth", Unit("%"), lambda result: result.growth_percent),
)
