# SPDX-License-Identifier: Apache-2.0
"""The store where callers, tiers and exits are at their worst: nothing hangs, leaks, or shows what is another's."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kvtide.deadline import NEVER, Deadline
from kvtide.errors import BadField, Rejected
from kvtide.frame import Frame, Header
from kvtide.keys import NO_PARENT, Address, Key, Shelf
from kvtide.layout import Layout, Memory
from kvtide.outcome import Outcome
from kvtide.store import Lower, Store
from kvtide.testing.blocks import chain_keys, pattern, shelf
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk.files import RawFile
from kvtide.tiers.disk.folder import DATA, INDEX
from kvtide.tiers.dram import DramTier

HERE = shelf()
LAYOUT = Layout(layers=1, pages=1, page_tokens=16, page_bytes=8192)
LARGE = Layout(layers=1, pages=1, page_tokens=16, page_bytes=65_536)
KEYS = chain_keys("prompt", 4)


def make_store(folder: Path, *, dram_bytes: int = 1 << 20, open_file: Callable[..., RawFile] = RawFile) -> Store:
    disk = DiskTier(folder, 8 << 20, open_file=open_file)
    return Store(DramTier(dram_bytes, huge_pages=False), [Lower(disk)])


def save(store: Store, keys: Sequence[Key], layout: Layout = LAYOUT, on: Shelf = HERE) -> list[Outcome]:
    reservation = store.reserve(on, keys, layout).result
    for key, slot in zip(keys, reservation.payloads, strict=True):
        if slot is not None:
            np.copyto(slot, pattern(Address(on, key), layout.payload_bytes))
    return store.publish(reservation).result


def fetch(store: Store, keys: Sequence[Key], on: Shelf = HERE) -> tuple[int, Outcome]:
    ticket = store.fetch(store.plan(store.match([on], keys).result))
    assert store.wait(ticket, 60)
    fetched = ticket.result
    for key, payload in zip(keys, fetched.payloads, strict=False):
        assert np.array_equal(payload, pattern(Address(on, key), len(payload)))
    store.release(fetched)
    return fetched.blocks, fetched.outcome


@pytest.mark.parametrize(
    ("position", "parent", "keys"),
    [
        (0, KEYS[0], KEYS[1:]),
        (3, NO_PARENT, KEYS),
        (-1, KEYS[0], KEYS),
        ((1 << 32) - 1, KEYS[0], KEYS[1:]),
        (1.0, KEYS[0], KEYS[1:]),
        (1, b"short", KEYS[1:]),
        (0, NO_PARENT, [KEYS[0], b"short"]),
        (0, NO_PARENT, [KEYS[0], "a string of thirty-two characters"[:32]]),
        (0, NO_PARENT, [KEYS[0], bytearray(32)]),
        (0, NO_PARENT, [KEYS[0], NO_PARENT]),
    ],
)
def test_what_cannot_be_a_chain_is_refused_and_takes_nothing(
    tmp_path: Path, position: int, parent: Key, keys: list[Key]
) -> None:
    with make_store(tmp_path) as store:
        with pytest.raises(Rejected):
            store.reserve(HERE, keys, LAYOUT, position=position, parent=parent)
        assert store.stats().leases == 0
        assert store.stats().tiers["dram"].bytes_used == 0
        assert save(store, KEYS) == [Outcome.HIT] * 4
        assert store.drain()


def test_a_list_of_keys_that_grows_after_the_call_does_no_harm(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        keys = list(KEYS[:2])
        reservation = store.reserve(HERE, keys, LAYOUT).result
        keys += KEYS[2:]
        assert store.publish(reservation).result == [Outcome.HIT] * 2
        assert store.stats().leases == 0
        match = store.match([HERE], keys).result
        keys.clear()
        assert len(store.plan(match).keys) == 2


def test_a_match_without_shelves_fetches_nothing(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        plan = store.plan(store.match([], KEYS).result)
        assert store.fetch(plan).result.blocks == 0
        assert store.prefetch(plan).result == 0


def test_a_block_written_anew_and_shorter_shows_nothing_of_who_had_the_slot_before(tmp_path: Path) -> None:
    victim = shelf("victim")
    with make_store(tmp_path) as store:
        save(store, KEYS[:1], LARGE)
        assert store.drain()
        store.dram.clear()
        plan = store.plan(store.match([HERE], KEYS[:1]).result)  # remembers the block as long as it was
        store.clear(tenant=HERE.tenant)
        save(store, KEYS[:1])
        save(store, chain_keys("secret", 6), LARGE, on=victim)
        assert store.drain()
        store.dram.clear()
        ticket = store.fetch(plan)
        assert store.wait(ticket, 60)
        assert (ticket.result.payloads, ticket.result.outcome) == ([], Outcome.MISS)
        assert fetch(store, KEYS[:1]) == (1, Outcome.HIT)


def test_slots_of_several_sizes_make_room_for_all_of_a_request(tmp_path: Path) -> None:
    with Store(DramTier(4 << 20, huge_pages=False)) as store:
        drawn = np.random.Generator(np.random.PCG64(1))
        layouts = [Layout(layers=1, pages=1, page_tokens=16, page_bytes=4096 * pages) for pages in (1, 3, 7)]
        for i in range(900):
            save(store, chain_keys(i, 1), layouts[drawn.integers(3)])
        assert store.stats().tiers["dram"].evicted_blocks > 300
        large = Layout(layers=1, pages=1, page_tokens=16, page_bytes=4096 * 40)
        assert store.reserve(HERE, chain_keys("large", 8), large).result.outcomes == [Outcome.MISS] * 8


def test_a_store_without_a_free_shelf_says_that_a_block_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tiers.table.SHELVES_MAX", 1)
    with Store(DramTier(1 << 20, huge_pages=False)) as store:
        assert save(store, KEYS) == [Outcome.HIT] * 4
        assert save(store, KEYS, on=shelf("another")) == [Outcome.REJECTED] * 4
        assert store.match([shelf("another")], KEYS).result.blocks == 0
        assert store.stats().leases == 0


class Mistaken(DiskTier):
    """A tier with mistakes in it."""

    is_mistaken = False

    def read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline = NEVER) -> list[Outcome]:
        if self.is_mistaken:
            raise ZeroDivisionError
        return super().read(addresses, into, deadline)

    def write(self, frames: Sequence[Frame], deadline: Deadline = NEVER) -> list[Outcome]:
        if self.is_mistaken:
            raise ZeroDivisionError
        return super().write(frames, deadline)


def test_a_mistake_in_a_tier_costs_its_blocks_and_not_those_that_come_after(tmp_path: Path) -> None:
    disk = Mistaken(tmp_path, 8 << 20)
    with Store(DramTier(1 << 20, huge_pages=False), [Lower(disk)]) as store:
        save(store, KEYS)
        assert store.drain()
        store.dram.clear()
        disk.is_mistaken = True
        for i in range(4):  # more often than there are threads
            assert fetch(store, KEYS) == (0, Outcome.ERROR)
            save(store, chain_keys(i, 2))
            assert store.drain()
        assert store.stats().spill["disk"].dropped_refused == 8
        disk.is_mistaken = False
        store.dram.clear()
        assert fetch(store, KEYS) == (4, Outcome.HIT)
        save(store, chain_keys("after", 2))
        assert store.drain()
        assert store.stats().spill["disk"].queued_bytes == 0
        assert disk.lookup(HERE, chain_keys("after", 2)).all()


def test_a_frame_that_cannot_be_sealed_leaves_nothing_behind_on_disk(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 8 << 20)
    tier.open()
    good = Frame(_header(KEYS[0]), np.zeros(4096 + 8192, np.uint8))
    bad = Frame(_header(KEYS[1], position=7), np.zeros(4096 + 8192, np.uint8))
    with pytest.raises(BadField):
        tier.write([good, bad])
    assert tier.stats().bytes_used in (0, 4096 + 8192)
    assert tier.write([Frame(_header(KEYS[1]), np.zeros(4096 + 8192, np.uint8))]) == [Outcome.HIT]
    assert tier.clear() >= 1
    tier.close()


def _header(key: Key, position: int = 0) -> Header:
    return Header(HERE, key, NO_PARENT, position, 16, (1, 1, 8192), 8192)


class GatedFile(RawFile):
    """Growing and writing the index wait until the gate is open."""

    gate = threading.Event()
    reached = threading.Event()

    def write(self, parts: list[Memory], offset: int) -> None:
        if self.path.name == INDEX and not self.gate.is_set():
            self.reached.set()
            self.gate.wait(60)
        super().write(parts, offset)


def test_no_call_of_an_engine_waits_for_an_index_that_hangs(tmp_path: Path) -> None:
    GatedFile.gate.set()
    GatedFile.reached.clear()
    with make_store(tmp_path, open_file=GatedFile) as store:
        save(store, KEYS)
        assert store.drain()
        plan = store.plan(store.match([HERE], KEYS).result)
        store.dram.clear()
        GatedFile.gate.clear()
        try:
            save(store, chain_keys("next", 2), on=shelf("another"))  # a new shelf: its record is written first
            assert GatedFile.reached.wait(60)
            assert store.match([HERE], KEYS).result.blocks == 0  # on disk, but the disk does not answer
            assert store.fetch(plan, deadline_s=0.0) is not None
            assert store.reserve(HERE, chain_keys("more", 1), LAYOUT).result.outcomes == [Outcome.MISS]
            store.poll()
        finally:
            GatedFile.gate.set()
        assert store.drain()
        assert fetch(store, KEYS)[0] == 4


def test_what_an_exit_closes_is_kept(tmp_path: Path) -> None:
    program = f"""
import atexit
from pathlib import Path
from typing import ClassVar
from kvtide.store import Lower, Store
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.dram import DramTier
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_store_edges import KEYS, save
store = Store(DramTier(1 << 20, huge_pages=False), [Lower(DiskTier(Path({str(tmp_path)!r}), 8 << 20), "second_use")])
atexit.register(store.close)
save(store, KEYS)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    with make_store(tmp_path) as store:
        assert fetch(store, KEYS) == (4, Outcome.HIT)


class SlowFile(RawFile):
    """Frames take long, and meanwhile somebody loses patience: once, though several threads write."""

    impatience: ClassVar[Iterator[None]]

    def write(self, parts: list[Memory], offset: int) -> None:
        if self.path.name == DATA:
            for _ in self.impatience:
                os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(0.2)
        super().write(parts, offset)


def test_an_interrupt_while_closing_still_closes_everything(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    SlowFile.impatience = iter([None])
    # A shell that runs the tests in the background lets them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    disk = DiskTier(tmp_path, 8 << 20, open_file=SlowFile)
    store = Store(DramTier(1 << 20, huge_pages=False), [Lower(disk, "second_use")])
    save(store, KEYS)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    with make_store(tmp_path) as again:  # the folder is free
        assert fetch(again, chain_keys("other", 1))[0] == 0


@pytest.mark.parametrize("code", [errno.EIO, errno.EREMOTEIO])
def test_a_block_that_could_not_be_read_does_not_come_back_after_it_was_cleared(tmp_path: Path, code: int) -> None:
    class Failing(RawFile):
        is_failing = False

        def read(self, parts: list[Memory], offset: int) -> int:
            if self.is_failing and self.path.name == DATA:
                raise OSError(code, os.strerror(code))
            return super().read(parts, offset)

    with make_store(tmp_path, open_file=Failing) as store:
        save(store, KEYS)
        assert store.drain()
        store.dram.clear()
        Failing.is_failing = True
        assert fetch(store, KEYS) == (0, Outcome.ERROR)
        Failing.is_failing = False
        store.clear(tenant=HERE.tenant)
    with make_store(tmp_path) as store:
        assert store.match([HERE], KEYS).result.blocks == 0


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ETIMEDOUT])
def test_an_error_that_passes_leaves_the_block_where_it_is(tmp_path: Path, code: int) -> None:
    class Passing(RawFile):
        is_failing = False

        def read(self, parts: list[Memory], offset: int) -> int:
            if self.is_failing and self.path.name == DATA:
                raise OSError(code, os.strerror(code))
            return super().read(parts, offset)

    with make_store(tmp_path, open_file=Passing) as store:
        save(store, KEYS)
        assert store.drain()
        store.dram.clear()
        Passing.is_failing = True
        assert fetch(store, KEYS) == (0, Outcome.ERROR)
        Passing.is_failing = False
        assert fetch(store, KEYS) == (4, Outcome.HIT)


def test_a_record_that_could_not_be_erased_is_erased_by_the_clear_that_comes_later(tmp_path: Path) -> None:
    class Failing(RawFile):
        is_failing = False

        def write(self, parts: list[Memory], offset: int) -> None:
            if self.is_failing and self.path.name == INDEX:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().write(parts, offset)

    with make_store(tmp_path, open_file=Failing) as store:
        save(store, KEYS)
        assert store.drain()
        Failing.is_failing = True
        store.tiers[1].delete([Address(HERE, key) for key in KEYS[:2]])
        Failing.is_failing = False
        store.clear(tenant=HERE.tenant)
    with make_store(tmp_path) as store:
        assert not store.tiers[1].lookup(HERE, KEYS).any()
