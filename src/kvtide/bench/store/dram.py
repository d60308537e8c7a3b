# SPDX-License-Identifier: Apache-2.0
"""Blocks of 4 MiB into and out of DRAM, with all the bookkeeping, against plain copies of the same pieces.

Both sides walk through the same amount of memory of the same kind: one hot buffer would flatter whoever
has it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

import numpy as np

from kvtide.bench.case import GIGABYTES_PER_SECOND, Case, Measured, Setting, Trial
from kvtide.config import DramSettings, Settings
from kvtide.frame import HEADER_BYTES
from kvtide.keys import Key
from kvtide.layout import Layout, Memory
from kvtide.memory.arena import Arena
from kvtide.store import Store, open_store
from kvtide.testing.blocks import chain_keys, shelf

LAYOUT = Layout(layers=32, pages=16, page_tokens=16, page_bytes=8192)  # 4 MiB of payload
BLOCKS = 64  # 256 MiB a round
REQUEST = 64  # blocks of one request, leased together: a prompt of 2,048 tokens of a model of Llama-3-8B's shape
SLOT_BYTES = HEADER_BYTES + LAYOUT.payload_bytes
_SHELF = shelf("bench")
# Twice what a round moves, so that every round of writing also evicts what an earlier one wrote.
_ARENA_BYTES = 2 * BLOCKS * SLOT_BYTES


def _store() -> Store:
    store = open_store(Settings(dram=DramSettings(bytes_max=_ARENA_BYTES)))
    store.dram.arena.wait_touched()
    return store


def _plain_slots() -> tuple[Arena, list[Memory]]:
    """Memory like the store's, cut as the store cuts it, used in turn as the store uses its slots."""
    arena = Arena(_ARENA_BYTES)
    arena.wait_touched()
    starts = range(HEADER_BYTES, _ARENA_BYTES, SLOT_BYTES)
    return arena, [arena.memory[at : at + LAYOUT.payload_bytes] for at in starts]


def engine_pages() -> list[Memory]:
    """What stands in for the engine's own KV memory."""
    memory = np.full(BLOCKS * LAYOUT.payload_bytes, 7, np.uint8)
    return [memory[i * LAYOUT.payload_bytes :][: LAYOUT.payload_bytes] for i in range(BLOCKS)]


def save(store: Store, keys: list[Key], sources: list[Memory]) -> None:
    for first in range(0, len(keys), REQUEST):
        chain = keys[first : first + REQUEST]
        reservation = store.reserve(_SHELF, chain, LAYOUT).result
        for target, source in zip(reservation.payloads, sources[first : first + REQUEST], strict=True):
            assert target is not None, "the store had no slot for the benchmark"
            np.copyto(target, source)
        store.publish(reservation)


def load(store: Store, keys: list[Key], targets: list[Memory]) -> None:
    for first in range(0, len(keys), REQUEST):
        match = store.match([_SHELF], keys[first : first + REQUEST]).result
        ticket = store.fetch(store.plan(match))
        store.wait(ticket)
        fetched = ticket.result
        assert fetched.blocks == REQUEST, "the store had lost a block of the benchmark"
        for source, target in zip(fetched.payloads, targets[first : first + REQUEST], strict=True):
            np.copyto(target, source)
        store.release(fetched)


def fresh_keys(name: object) -> list[Key]:
    return [key for i in range(BLOCKS // REQUEST) for key in chain_keys(f"{name}-{i}", REQUEST)]


def _write(setting: Setting) -> Iterator[Trial]:
    del setting
    sources = engine_pages()
    arena, slots = _plain_slots()
    rounds, turns = count(), count()
    with _store() as store:

        def baseline() -> None:
            half = next(turns) % 2 * BLOCKS
            for source, target in zip(sources, slots[half : half + BLOCKS], strict=True):
                np.copyto(target, source)

        def subject() -> Measured:
            keys = fresh_keys(next(rounds))
            start_s = time.perf_counter()
            save(store, keys, sources)
            return Measured(time.perf_counter() - start_s)

        yield Trial(subject, baseline, work=BLOCKS * LAYOUT.payload_bytes, note="baseline: memcpy")
    arena.close()


def _read(setting: Setting) -> Iterator[Trial]:
    del setting
    targets = engine_pages()
    arena, slots = _plain_slots()
    keys = fresh_keys("read")
    with _store() as store:
        save(store, keys, targets)

        def baseline() -> None:
            for source, target in zip(slots[:BLOCKS], targets, strict=True):
                np.copyto(target, source)

        def subject() -> None:
            load(store, keys, targets)

        yield Trial(subject, baseline, work=BLOCKS * LAYOUT.payload_bytes, note="baseline: memcpy")
    arena.close()


CASES = (
    Case("dram-write-4mib", GIGABYTES_PER_SECOND, _write, runs=31, quick_runs=11, warmups=3),
    Case("dram-read-4mib", GIGABYTES_PER_SECOND, _read, runs=31, quick_runs=11, warmups=3),
)
