# SPDX-License-Identifier: Apache-2.0
"""What the way through the socket costs: the same call, `match_and_lease` of a prompt that is in DRAM, through a
client of a real service and on a store in this process. Leases go back after each call, outside of its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtide.bench.case import MILLISECONDS, Case, Measured, Setting, Trial
from kvtide.bench.node.common import (
    NAMESPACE,
    SMALL,
    open_client,
    open_node,
    open_scope,
    quantile,
    save_chain,
    wait_spilled,
)
from kvtide.bench.node.crew import Job, Orders, Worker, crew, together, wait_until
from kvtide.client import Client
from kvtide.config import DramSettings, Settings
from kvtide.frame import HEADER_BYTES
from kvtide.keys import Key, Shelf
from kvtide.layout import Layout
from kvtide.store import Store, open_store
from kvtide.testing.blocks import chain_keys
from kvtide.testing.node import ServedNode
from kvtide.tickets import Leased, Ticket

# Leases a prompt, gives it back, and returns the moment (perf_counter) at which it was leased.
Ask = Callable[[], float]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. A segment is what one side of a round runs; `*_s` are seconds of one."""

    blocks: int = 512
    clients: int = 8
    loop_s: float = 0.5
    crowd_s: float = 2.0
    paced_s: float = 5.0
    paced_per_s: float = 200.0
    beside_s: float = 3.0
    dram_bytes: int = 256 * _MIB
    stream_page_bytes: int = 8192  # blocks of 4 MiB
    stream_chains: int = 24
    stream_chain_blocks: int = 8

    @property
    def stream_layout(self) -> Layout:
        return Layout(layers=32, pages=16, page_tokens=16, page_bytes=self.stream_page_bytes)

    @property
    def stream_bytes(self) -> int:
        return self.stream_chains * self.stream_chain_blocks * (HEADER_BYTES + self.stream_layout.payload_bytes)


FULL = Size()
QUICK = Size(crowd_s=1.0, paced_s=2.0, beside_s=1.0, loop_s=0.3)


def ask_client(client: Client, shelf: Shelf, keys: Sequence[Key]) -> Ask:
    shelves = [shelf]

    def ask() -> float:
        ticket = client.match_and_lease(shelves, keys)
        client.wait(ticket)
        leased = ticket.result
        at_s = time.perf_counter()
        _check(leased, keys)
        client.release(leased.fetched[0])
        return at_s

    return ask


def ask_store(store: Store, shelf: Shelf, keys: Sequence[Key]) -> Ask:
    shelves = [shelf]

    def ask() -> float:
        leased = store.match_and_lease(shelves, keys).result
        at_s = time.perf_counter()
        _check(leased, keys)
        store.release(leased.fetched[0])
        return at_s

    return ask


def _check(leased: Leased, keys: Sequence[Key]) -> None:
    assert leased.blocks == len(keys), f"{leased.blocks} of {len(keys)} blocks of the benchmark were leased"


def closed_loop(ask: Ask, seconds: float) -> list[float]:
    """One call after the other. The latency of each."""
    latencies = []
    end_s = time.perf_counter() + seconds
    while (start_s := time.perf_counter()) < end_s:
        latencies.append(ask() - start_s)
    return latencies


def open_loop(ask: Ask, seconds: float, per_s: float) -> list[float]:
    """Calls that are due at fixed moments, whatever became of the last one. Latency from when each was due."""
    latencies = []
    start_s = time.perf_counter()
    for number in range(max(1, int(seconds * per_s))):
        due_s = start_s + number / per_s
        if (left_s := due_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        latencies.append(ask() - due_s)
    return latencies


class Asker(Job):
    """A client process with a prompt of its own."""

    def __init__(self, orders: Orders, socket: str, name: str, blocks: int) -> None:
        super().__init__(orders)
        self._client = open_client(socket)
        shelf, keys = open_scope(self._client).shelf(), chain_keys(name, blocks)
        save_chain(self._client, shelf, keys, SMALL)
        self._ask = ask_client(self._client, shelf, keys)

    def loop(self, start_s: float, seconds: float) -> list[float]:
        wait_until(start_s)
        return closed_loop(self._ask, seconds)

    def close(self) -> None:
        self._client.close()


class Streamer(Job):
    """A client process that fetches blocks that are on disk, two chains at a time, and does nothing with them."""

    def __init__(self, orders: Orders, socket: str, chains: int, chain_blocks: int, page_bytes: int) -> None:
        super().__init__(orders)
        self._client = open_client(socket)
        self._shelf = open_scope(self._client, "stream").shelf()
        self._layout = Layout(layers=32, pages=16, page_tokens=16, page_bytes=page_bytes)
        self._chains = [chain_keys(f"stream-{i}", chain_blocks) for i in range(chains)]
        self._turn = 0
        for keys in self._chains:
            save_chain(self._client, self._shelf, keys, self._layout)
            wait_spilled(self._client)

    def stream(self, start_s: float, seconds: float) -> int:
        """Bytes that were leased."""
        wait_until(start_s)
        end_s = time.monotonic() + seconds
        first = self._begin()
        blocks = 0
        while time.monotonic() < end_s:
            second = self._begin()
            blocks += self._finish(first)
            first = second
        return (blocks + self._finish(first)) * self._layout.payload_bytes

    def _begin(self) -> Ticket[Leased]:
        keys = self._chains[self._turn % len(self._chains)]
        self._turn += 1
        return self._client.match_and_lease([self._shelf], keys)

    def _finish(self, ticket: Ticket[Leased]) -> int:
        self._client.wait(ticket)
        leased = ticket.result
        for fetched in leased.fetched:
            self._client.release(fetched)
        return leased.blocks

    def close(self) -> None:
        self._client.close()


@contextmanager
def _world(folder: Path, size: Size, disk_bytes: int = 0) -> Iterator[tuple[ServedNode, Ask, Ask]]:
    """A service with a prompt in its DRAM, the call through it, and the call on a store of this process."""
    keys = chain_keys("prompt", size.blocks)
    with ExitStack() as stack:
        node = stack.enter_context(open_node(folder / "node", dram_bytes=size.dram_bytes, disk_bytes=disk_bytes))
        client = stack.enter_context(open_client(node.socket))
        store = stack.enter_context(open_store(Settings(dram=DramSettings(bytes_max=size.dram_bytes))))
        store.dram.arena.wait_touched()
        client.wait_populated()
        shelf = open_scope(client).shelf()
        save_chain(client, shelf, keys, SMALL)
        save_chain(store, shelf, keys, SMALL)
        yield node, ask_client(client, shelf, keys), ask_store(store, shelf, keys)


def _size(setting: Setting, size: Size | None) -> Size:
    return size or (QUICK if setting.is_quick else FULL)


def _one(setting: Setting, *, fixed: Size | None) -> Iterator[Trial]:
    size = _size(setting, fixed)
    with _world(setting.folder, size) as (_, served, local):
        yield Trial(
            lambda: Measured(quantile(closed_loop(served, size.loop_s), 0.5)),
            lambda: Measured(quantile(closed_loop(local, size.loop_s), 0.5)),
            note=f"p50 of match_and_lease of {size.blocks} blocks, 1 client; baseline: the call in this process",
        )


def _crowd(setting: Setting, *, fixed: Size | None, share: float) -> Iterator[Trial]:
    size = _size(setting, fixed)
    with _world(setting.folder, size) as (node, _, local):
        options: list[dict[str, object]] = [
            {"socket": str(node.socket), "name": f"crowd-{i}", "blocks": size.blocks} for i in range(size.clients)
        ]
        with crew("kvtide.bench.node.rpc:Asker", options) as askers:
            calls: list[int] = []

            def subject() -> Measured:
                _, answers = together(askers, "loop", seconds=size.crowd_s)
                latencies = [each for some in answers for each in some]
                calls.append(len(latencies))
                return Measured(quantile(latencies, share))

            yield Trial(
                subject,
                lambda: Measured(quantile(closed_loop(local, size.loop_s), share)),
                note=lambda: (
                    f"p{100 * share:g}, {size.clients} client processes in a closed loop,"
                    f" {sum(calls) / len(calls) / size.crowd_s:,.0f} calls/s; baseline: one caller in this process"
                ),
            )


def _threads(setting: Setting, *, fixed: Size | None) -> Iterator[Trial]:
    """What the interpreter alone makes of as many callers."""
    size = _size(setting, fixed)
    keys = [chain_keys(f"crowd-{i}", size.blocks) for i in range(size.clients)]
    with _local_store(size, keys) as asks:
        p99_s: list[float] = []

        def subject() -> Measured:
            latencies: list[list[float]] = [[] for _ in asks]

            def loop(number: int) -> None:
                latencies[number] = closed_loop(asks[number], size.crowd_s)

            threads = [threading.Thread(target=loop, args=(number,)) for number in range(len(asks))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            p99_s.append(quantile([each for some in latencies for each in some], 0.99))
            return Measured(quantile([each for some in latencies for each in some], 0.5))

        yield Trial(
            subject,
            lambda: Measured(quantile(closed_loop(asks[0], size.loop_s), 0.5)),
            note=lambda: (
                f"p50, {size.clients} threads in a closed loop on one store in this process,"
                f" p99 {1e3 * quantile(p99_s, 0.5):.3g} ms; baseline: one thread"
            ),
        )


@contextmanager
def _local_store(size: Size, prompts: Sequence[Sequence[Key]]) -> Iterator[list[Ask]]:
    with open_store(Settings(dram=DramSettings(bytes_max=size.dram_bytes))) as store:
        scope = store.open_scope(NAMESPACE).result
        assert scope is not None
        for keys in prompts:
            save_chain(store, scope.shelf(), keys, SMALL)
        yield [ask_store(store, scope.shelf(), keys) for keys in prompts]


def _paced(setting: Setting, *, fixed: Size | None) -> Iterator[Trial]:
    size = _size(setting, fixed)
    with _world(setting.folder, size) as (_, served, local):

        def measure(ask: Ask) -> Measured:
            return Measured(quantile(open_loop(ask, size.paced_s, size.paced_per_s), 0.99))

        yield Trial(
            partial(measure, served),
            partial(measure, local),
            note=f"p99 from when each call was due, {size.paced_per_s:g}/s; baseline: in this process, paced alike",
        )


def _beside_disk(setting: Setting, *, fixed: Size | None) -> Iterator[Trial]:
    size = _size(setting, fixed)
    with _world(setting.folder, size, disk_bytes=2 * size.stream_bytes + 256 * _MIB) as (node, served, _):
        setting.tell(f"writing {size.stream_bytes / 1e6:,.0f} MB to disk")
        options: dict[str, object] = {
            "socket": str(node.socket),
            "chains": size.stream_chains,
            "chain_blocks": size.stream_chain_blocks,
            "page_bytes": size.stream_page_bytes,
        }
        with crew("kvtide.bench.node.rpc:Streamer", [options]) as (streamer,):
            streamed: list[float] = []

            def alone() -> Measured:
                return Measured(quantile(closed_loop(served, size.beside_s), 0.99))

            def beside() -> Measured:
                read_bytes = _read_bytes(node.pid)
                latencies = _while_streaming(streamer, size.beside_s, served)
                streamed.append((_read_bytes(node.pid) - read_bytes) / 1e9 / (size.beside_s + _LEAD_S))
                return Measured(quantile(latencies, 0.99))

            yield Trial(
                beside,
                alone,
                note=lambda: (
                    f"p99 of one client while another one makes the service read"
                    f" {sum(streamed) / len(streamed):.2f} GB/s from disk; baseline: p99 without"
                ),
            )


_LEAD_S = 0.2  # the stream runs before the first call, and until after the last


def _while_streaming(streamer: Worker, seconds: float, ask: Ask) -> list[float]:
    start_s = time.monotonic()
    streamer.tell("stream", start_s=start_s, seconds=seconds + 2 * _LEAD_S)
    wait_until(start_s + _LEAD_S)
    latencies = closed_loop(ask, seconds)
    assert streamer.hear() > 0, "nothing was streamed"
    return latencies


def _read_bytes(pid: int) -> int:
    """What a process has had read from a device."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["read_bytes"])


def make_cases(size: Size | None = None) -> tuple[Case, ...]:
    """All of them; `size` instead of what they have in a full and in a quick run."""
    return (
        Case("rpc-one", MILLISECONDS, partial(_one, fixed=size), runs=21, compare="difference"),
        Case("rpc-eight-p50", MILLISECONDS, partial(_crowd, fixed=size, share=0.5), compare="difference"),
        Case("rpc-eight-p99", MILLISECONDS, partial(_crowd, fixed=size, share=0.99)),
        Case("rpc-eight-threads", MILLISECONDS, partial(_threads, fixed=size)),
        Case("rpc-beside-disk", MILLISECONDS, partial(_beside_disk, fixed=size)),
        Case("rpc-open-loop", MILLISECONDS, partial(_paced, fixed=size)),
    )


CASES = make_cases()
