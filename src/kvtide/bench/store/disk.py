# SPDX-License-Identifier: Apache-2.0
"""Blocks of 4 MiB to and from the disk tier, sealed and verified, against bare O_DIRECT calls.

Same sizes, same number of threads, and both sides on extents that were allocated and written before: the
state of a cache that has been full once. Two more rows go through the whole store and have no bar.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np

from kvtide.bench.case import GIGABYTES_PER_SECOND, Case, Setting, Trial
from kvtide.bench.store.dram import BLOCKS, LAYOUT, SLOT_BYTES, engine_pages, fresh_keys, load, save
from kvtide.config import DiskSettings, DramSettings, Settings
from kvtide.frame import Frame, Header
from kvtide.keys import NO_PARENT, Address
from kvtide.layout import Memory
from kvtide.memory.arena import Arena
from kvtide.outcome import Outcome
from kvtide.store import open_store
from kvtide.testing.blocks import shelf
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk.files import RawFile, supports_direct

_THREADS = 4
_SHELF = shelf("bench")
_WORK = BLOCKS * SLOT_BYTES
_DISK_BYTES = 3 * _WORK  # room for the blocks of two rounds, and for the index


class _Raw:
    """Bare calls on a file that was written once, from and to slots like the tier's."""

    def __init__(self, folder: Path, slots: list[Memory]) -> None:
        self._file = RawFile(folder / "raw", direct=supports_direct(folder))
        self._file.allocate(0, _WORK)
        self._slots = slots
        self._pool = ThreadPoolExecutor(_THREADS)
        self.write()

    def write(self) -> None:
        self._each(lambda i: os.pwritev(self._file.fd, [self._slots[i]], i * SLOT_BYTES))

    def read(self) -> None:
        self._each(lambda i: os.preadv(self._file.fd, [self._slots[i]], i * SLOT_BYTES))

    def _each(self, move: Callable[[int], int]) -> None:
        moved = sum(self._pool.map(move, range(BLOCKS)))
        assert moved == _WORK, "the device moved less than it was asked to"

    def close(self) -> None:
        self._pool.shutdown()
        self._file.close()


def _slots() -> tuple[Arena, list[Memory]]:
    arena = Arena(_WORK)
    arena.wait_touched()
    arena.memory[:] = 7
    return arena, [arena.memory[at : at + SLOT_BYTES] for at in range(0, _WORK, SLOT_BYTES)]


def _frames(name: object, slots: list[Memory]) -> list[Frame]:
    size = LAYOUT.payload_bytes
    headers = (Header(_SHELF, key, NO_PARENT, 0, 256, LAYOUT.shape, size) for key in fresh_keys(name))
    return [Frame(header, slot) for header, slot in zip(headers, slots, strict=True)]


def _write(setting: Setting) -> Iterator[Trial]:
    yield from _tier_trial(setting, is_read=False)


def _read(setting: Setting) -> Iterator[Trial]:
    yield from _tier_trial(setting, is_read=True)


def _tier_trial(setting: Setting, *, is_read: bool) -> Iterator[Trial]:
    arena, slots = _slots()
    raw = _Raw(setting.folder, slots)
    tier = DiskTier(setting.folder / "tier", _DISK_BYTES, io_threads=_THREADS)
    tier.open()
    rounds = count()

    def write() -> None:
        outcomes = tier.write(_frames(next(rounds), slots))
        assert set(outcomes) == {Outcome.HIT}, "the disk tier did not take the benchmark's blocks"

    for _ in range(3):  # now every place in the tier's file has been written once
        write()
    addresses = [Address(_SHELF, key) for key in fresh_keys(2)]

    def read() -> None:
        outcomes = tier.read(addresses, slots)
        assert set(outcomes) == {Outcome.HIT}, "the disk tier did not give the benchmark's blocks back"

    note = f"baseline: bare {'O_DIRECT' if tier.is_direct else 'buffered'} calls, {_THREADS} threads"
    try:
        yield Trial(read if is_read else write, raw.read if is_read else raw.write, work=_WORK, note=note)
    finally:
        tier.close()
        raw.close()
        arena.close()


def _spill(setting: Setting) -> Iterator[Trial]:
    """Publish a round's blocks and wait until they are all on disk."""
    arena, slots = _slots()
    raw = _Raw(setting.folder, slots)
    sources = engine_pages()
    rounds = count()
    with open_store(_settings(setting)) as store:
        store.dram.arena.wait_touched()

        def subject() -> None:
            save(store, fresh_keys(next(rounds)), sources)
            assert store.drain()

        for _ in range(3):
            subject()
        yield Trial(subject, raw.write, work=_WORK, note="reserve, copy, publish, spill; baseline: bare writes")
    raw.close()
    arena.close()


def _fetch(setting: Setting) -> Iterator[Trial]:
    """Fetch a round's blocks from disk through the store, DRAM having been filled with others."""
    arena, slots = _slots()
    raw = _Raw(setting.folder, slots)
    targets = engine_pages()
    names = [fresh_keys(i) for i in range(4)]
    turns = count()
    with open_store(_settings(setting)) as store:
        store.dram.arena.wait_touched()
        for keys in names:
            save(store, keys, targets)
            assert store.drain()

        def subject() -> None:
            load(store, names[next(turns) % 4], targets)

        yield Trial(subject, raw.read, work=_WORK, note="match, fetch, copy, release; baseline: bare reads")
        assert np.all(targets[0] == 7)
    raw.close()
    arena.close()


def _settings(setting: Setting) -> Settings:
    # DRAM for two rounds and a bit: of four that are used in turn, each has left it before it is wanted again.
    dram_bytes = _WORK * 9 // 4
    folder = str(setting.folder / "store")
    disk = DiskSettings(folder=folder, bytes_max=5 * _WORK, spill_queue_bytes_max=dram_bytes // 2)
    return Settings(dram=DramSettings(bytes_max=dram_bytes), disk=disk)


CASES = (
    Case("disk-write-4mib", GIGABYTES_PER_SECOND, _write, runs=31, quick_runs=11, warmups=2),
    Case("disk-read-4mib", GIGABYTES_PER_SECOND, _read, runs=31, quick_runs=11, warmups=2),
    Case("store-spill-4mib", GIGABYTES_PER_SECOND, _spill, runs=11, is_long=True),
    Case("store-fetch-4mib", GIGABYTES_PER_SECOND, _fetch, runs=11, is_long=True),
)
