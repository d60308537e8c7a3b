# SPDX-License-Identifier: Apache-2.0
"""The service is killed under the hands of its clients, and started again: what they see of it.

No call may take longer than its deadline, nobody may get a wrong byte, and soon after the service is back
everyone hits again, from what was on disk.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvtide.bench.case import COUNT, MILLISECONDS, SECONDS, Case, Setting
from kvtide.bench.node.common import Campaign, open_client, open_node, open_scope, save_chain, wait_spilled
from kvtide.bench.node.crew import Job, Orders, Tally, crew
from kvtide.config import CallSettings
from kvtide.keys import Address, Key
from kvtide.layout import Layout, Memory
from kvtide.outcome import Outcome
from kvtide.testing.blocks import chain_keys, pattern
from kvtide.tickets import Fetched, Ticket

_MIB = 1 << 20
_LAYOUT = Layout(layers=2, pages=16, page_tokens=16, page_bytes=2048)  # 64 KiB
_CALLS = CallSettings()  # what engines have: nothing is patient here
_COUNTS = (
    "calls",
    "hits",
    "compared",
    "wrong",
    "saved",
    "worst_over_ns",
    "worst_queued_ns",
    "worst_call",
    "last_hit_ns",
)
_KINDS = ("match_and_lease", "match", "fetch", "reserve", "publish")
_BACK_S_MAX = 30.0
_SCHEDSTAT = Path("/proc/thread-self/schedstat")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Size:
    kills: int = 20
    clients: int = 4
    chains: int = 64  # on disk before the first kill
    chain_blocks: int = 8
    dram_bytes: int = 256 * _MIB
    disk_bytes: int = 2048 * _MIB
    up_s: float = 1.5  # at most, from everyone's first hit to the next kill


FULL = Size()
QUICK = Size(kills=3, up_s=1.0)


@dataclass(frozen=True, slots=True)
class Result:
    """`worst_over_s`: by how much a call was late at most; `worst_queued_s`: how long it stood in line for a CPU
    meanwhile, which is the machine's doing. `back_s`: from the restart to everyone's hit, each time."""

    kills: int
    counts: dict[str, int]
    worst_over_s: float
    worst_queued_s: float
    worst_call: str
    back_s: tuple[float, ...]
    seed: int

    def __str__(self) -> str:
        counts = self.counts
        return (
            f"{self.kills} kills, {counts['calls']:,} calls, {counts['hits']:,} hits, {counts['compared']:,} blocks"
            f" compared, {counts['saved']:,} saved; the latest call, a {self.worst_call}, waited"
            f" {1e3 * self.worst_queued_s:,.0f} ms for a CPU; seed {self.seed}"
        )


class Caller(Job):
    """An engine that goes on, whatever becomes of the service."""

    def __init__(
        self, orders: Orders, socket: str, tally: str, seed: int, chains: int, chain_blocks: int, number: int
    ) -> None:
        super().__init__(orders)
        self._tally = Tally(Path(tally), _COUNTS)
        self._random = random.Random(seed)
        self._chains, self._chain_blocks, self._number = chains, chain_blocks, number
        self._client = open_client(socket, calls=_CALLS)
        self._shelf = open_scope(self._client).shelf()

    def run(self, end_s: float) -> None:
        turns = (self._read, self._read, self._read, self._fetch, self._save)
        while time.monotonic() < end_s and not self.orders.are_waiting:
            self._random.choice(turns)()

    def stop(self) -> None:
        """Does nothing: that it was told is enough."""

    def _call(self, kind: str, deadline_s: float, begin: Callable[[], Ticket[T]]) -> T:
        """Make a call to its end, which must come by its deadline."""
        queued_ns, start_s = _queued_ns(), time.monotonic()
        ticket = begin()
        self._client.wait(ticket)
        over_ns = int((time.monotonic() - start_s - deadline_s) * 1e9)
        self._tally.add("calls")
        if over_ns > self._tally["worst_over_ns"]:
            self._tally["worst_over_ns"] = over_ns
            self._tally["worst_queued_ns"] = _queued_ns() - queued_ns
            self._tally["worst_call"] = _KINDS.index(kind)
        return ticket.result

    def _read(self) -> None:
        keys = chain_keys(f"kept-{self._random.randrange(self._chains)}", self._chain_blocks)
        deadline_s = self._random.choice((0.02, 0.1, 0.5))
        leased = self._call(
            "match_and_lease",
            deadline_s,
            lambda: self._client.match_and_lease([self._shelf], keys, deadline_s=deadline_s),
        )
        self._use(keys, leased.fetched[0])
        if not self._client.is_connected:
            time.sleep(0.001)  # it would be a loop without a breath, and what is missed costs an engine more

    def _fetch(self) -> None:
        keys = chain_keys(f"kept-{self._random.randrange(self._chains)}", self._chain_blocks)
        match = self._call("match", _CALLS.match_s, lambda: self._client.match([self._shelf], keys))
        plan = self._client.plan(match)
        self._use(keys, self._call("fetch", 0.05, lambda: self._client.fetch(plan, deadline_s=0.05)))

    def _save(self) -> None:
        """A chain of its own, that others never ask for: one of a bounded number, so many are there already."""
        keys = chain_keys(f"own-{self._number}-{self._random.randrange(4 * self._chains)}", self._chain_blocks)
        reservation = self._call("reserve", _CALLS.control_s, lambda: self._client.reserve(self._shelf, keys, _LAYOUT))
        for key, payload in zip(keys, reservation.payloads, strict=True):
            if payload is not None:
                payload[:] = pattern(Address(self._shelf, key), len(payload))
        outcomes = self._call("publish", _CALLS.control_s, lambda: self._client.publish(reservation))
        self._tally.add("saved", sum(outcome is Outcome.HIT for outcome in outcomes))

    def _use(self, keys: list[Key], fetched: Fetched) -> None:
        for key, payload in zip(keys, fetched.payloads, strict=False):
            self._tally.add("compared")
            if not np.array_equal(payload, pattern(Address(self._shelf, key), _LAYOUT.payload_bytes)):
                self._tally.add("wrong")
        self._client.release(fetched)
        if fetched.blocks:
            self._tally.add("hits")
            self._tally["last_hit_ns"] = time.monotonic_ns()

    def close(self) -> None:
        self._client.close()


def _queued_ns() -> int:
    """How long this thread was ready to run and had no CPU, since it began; 0 where the kernel does not count it."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1])
    except OSError:
        return 0


def run_kills(folder: Path, size: Size, seed: int, tell: Callable[[str], None]) -> Result:
    drawn = random.Random(seed)
    paths = [folder / f"tally-{number}" for number in range(size.clients)]
    tallies = [Tally(path, _COUNTS) for path in paths]
    back_s: list[float] = []
    with ExitStack() as stack:
        node = stack.enter_context(open_node(folder / "node", dram_bytes=size.dram_bytes, disk_bytes=size.disk_bytes))
        _keep(node.socket, size)
        options: list[dict[str, object]] = [
            {
                "socket": str(node.socket),
                "tally": str(path),
                "seed": drawn.randrange(1 << 31),
                "chains": size.chains,
                "chain_blocks": size.chain_blocks,
                "number": number,
            }
            for number, path in enumerate(paths)
        ]
        workers = stack.enter_context(crew("kvtide.bench.node.kill:Caller", options))
        for worker in workers:
            worker.tell("run", end_s=time.monotonic() + 60.0 * (size.kills + 1))
        _wait_hits(tallies, time.monotonic_ns())
        for number in range(size.kills):
            tell(f"kill {number + 1} of {size.kills}")
            time.sleep(drawn.uniform(0.1, 1.0) * size.up_s)
            node.kill()
            time.sleep(drawn.uniform(0.0, 0.5))
            node.start()
            back_s.append(_wait_hits(tallies, time.monotonic_ns()))
        for worker in workers:
            worker.tell("stop")
        for worker in workers:
            worker.hear()
            worker.hear()
    counts = {name: sum(tally[name] for tally in tallies) for name in _COUNTS[:5]}
    worst = max(tallies, key=lambda tally: tally["worst_over_ns"])
    return Result(
        size.kills,
        counts,
        worst["worst_over_ns"] / 1e9,
        worst["worst_queued_ns"] / 1e9,
        _KINDS[worst["worst_call"]],
        tuple(back_s),
        seed,
    )


def _keep(socket: Path, size: Size) -> None:
    """What everyone reads: on disk before the first kill."""
    with open_client(socket) as client:
        shelf = open_scope(client).shelf()

        def fill(payload: Memory, key: Key) -> None:
            payload[:] = pattern(Address(shelf, key), len(payload))

        for number in range(size.chains):
            save_chain(client, shelf, chain_keys(f"kept-{number}", size.chain_blocks), _LAYOUT, fill)
            wait_spilled(client, size.dram_bytes // 16)
        wait_spilled(client)


def _wait_hits(tallies: list[Tally], since_ns: int) -> float:
    """Wait until every client has hit since then. How long that took the last of them."""
    worst_ns = 0
    left = list(tallies)
    while left:
        for tally in list(left):
            if (hit_ns := tally["last_hit_ns"]) > since_ns:
                worst_ns = max(worst_ns, hit_ns - since_ns)
                left.remove(tally)
        if time.monotonic_ns() - since_ns > _BACK_S_MAX * 1e9:
            return _BACK_S_MAX
        time.sleep(0.002)
    return worst_ns / 1e9


def _run(setting: Setting) -> Result:
    seed = secrets.randbelow(1 << 31)
    return run_kills(setting.folder, QUICK if setting.is_quick else FULL, seed, setting.tell)


_campaign = Campaign(_run, str)
CASES: tuple[Case, ...] = (
    _campaign.case("kill-worst-lateness", MILLISECONDS, lambda result: result.worst_over_s),
    _campaign.case("kill-hits-again", SECONDS, lambda result: max(result.back_s)),
    _campaign.case("kill-wrong-bytes", COUNT, lambda result: result.counts["wrong"]),
)
