# SPDX-License-Identifier: Apache-2.0
"""The processes that a crash campaign kills: a disk tier under load, with a trap in its files.

`python -m kvtide.testing.crash_worker` is a nursery. It reads plans from stdin, one a line; for each it forks
a worker, sees to it that the worker is dead in time, and answers how it died. Forking from a process that has
imported everything and has no threads makes a worker in milliseconds, where a fresh interpreter takes longer
than a worker lives.

A worker tells what it knows through its journal, an append-only file: what it has written there is in the
kernel's hands and outlives it. Names of chains and sizes of blocks follow from the plan's name, so the journal
need not say more than numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import select
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvtide.frame import HEADER_BYTES, Frame, Header
from kvtide.keys import NO_PARENT, Address, Shelf
from kvtide.layout import Memory
from kvtide.outcome import Outcome
from kvtide.testing.blocks import chain_keys, header, pattern, shelf
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk.files import RawFile, aligned_memory
from kvtide.tiers.disk.folder import DATA
from kvtide.tiers.disk.index import RECORDS_AT

ANY_TIME = "at any time"
NEW_FOLDER, IN_OPEN, IN_CLOSE = "new folder", "in open", "in close"
CUT_DATA, GROW_DATA, GROW_INDEX = "cut data", "grow data", "grow index"
AT_OPEN = (NEW_FOLDER, IN_OPEN, CUT_DATA)
ERASES = ("before erase", "torn erase", "after erase")
WRITES = ("before data", "torn data", "after data", "before record", "torn record", "after record")
POINTS = (ANY_TIME, *AT_OPEN, *WRITES, *ERASES, GROW_DATA, GROW_INDEX, IN_CLOSE)

THREADS = 3
SHARED = THREADS  # stands for the thread in the names of chains that every thread writes
CHAIN_BLOCKS_MAX = 8
# Payloads on both sides of a page and of a sector, none at all, and ones that need a place of many pages.
PAYLOAD_BYTES = (0, 1, 511, 4096, 4097, 20_000, 61_440, 131_072, 200_001)

_CHAINS_MAX = 400  # of one thread; from then on it writes old ones again
_SECTOR_BYTES = 512
_CLOSE_STEPS = 12  # of each thread before a worker closes its tier
_LATE_S = 5.0  # a worker that outlives its plan by this much ends itself: its nursery must be gone


class Plan(msgspec.Struct, frozen=True):
    """One life: what to do, and where to die. `quota_bytes` None: write on, and let blocks be evicted."""

    name: str
    folder: str
    journal: str
    bytes_max: int
    quota_bytes: int | None
    point: str
    nth: int  # the time it comes by the point that it dies
    cut: float  # how far into what it is writing, from 0 to 1
    kill_after_s: float

    @property
    def is_roomy(self) -> bool:
        return self.quota_bytes is not None


class Death(msgspec.Struct, frozen=True):
    """How a worker ended: `status` as subprocess has it, so -9 is SIGKILL."""

    status: int


# Names -----------------------------------------------------------------------------------------------------


def shelf_of(thread: int) -> Shelf:
    """A tenant for each thread, so that it can clear its own without touching what others wrote."""
    return shelf(f"thread {thread}")


def chain_headers(name: str, thread: int, chain: int) -> list[Header]:
    """The blocks of a chain: length and sizes follow from the keys."""
    place = shelf_of(thread)
    keys = chain_keys(f"{name}/{thread}/{chain}", CHAIN_BLOCKS_MAX)
    keys = keys[: 1 + keys[0][1] % CHAIN_BLOCKS_MAX]
    parents = [NO_PARENT, *keys]
    sizes = [PAYLOAD_BYTES[key[0] % len(PAYLOAD_BYTES)] for key in keys]
    return [header(Address(place, keys[i]), sizes[i], position=i, parent=parents[i]) for i in range(len(keys))]


def frame_of(its: Header, *, aligned: bool = False) -> Frame:
    """The frame that belongs to a header; aligned memory goes to the device without a copy."""
    memory = aligned_memory(its.frame_bytes) if aligned else np.zeros(its.frame_bytes, np.uint8)
    memory = memory[: its.frame_bytes]
    memory[HEADER_BYTES:] = pattern(its.address, its.stored_bytes)
    return Frame(its, memory)


def is_right(its: Header, memory: Memory) -> bool:
    """Is this, to the last byte, the frame that was written for that header?"""
    wanted = frame_of(its)
    wanted.seal()
    return np.array_equal(wanted.memory, memory)


# The journal -----------------------------------------------------------------------------------------------


class Event(IntEnum):
    OPENED = 1
    BEGUN = 2  # a chain: noted before its first block is written
    ACKNOWLEDGED = 3  # a block: the tier has said that it is stored
    DELETING, DELETED = 4, 5  # a block: before the call, and after it returned
    CLEARING, CLEARED = 6, 7  # all blocks of a thread, likewise
    WRONG = 8  # a block was read with wrong bytes
    LOST = 9  # a block was acknowledged, could not have left, and was not there
    EVICTED = 10  # where the plan leaves room for everything
    SPRUNG = 11  # the trap; `chain` is the place of its point in POINTS
    FAILED = 12  # an exception that no cache may raise


class Entry(NamedTuple):
    event: Event
    thread: int = 0
    chain: int = 0
    position: int = 0


_ENTRY = struct.Struct("<HHHH")
assert mmap.PAGESIZE % _ENTRY.size == 0  # a kill can cut a write between two pages only, so it tears no entry


class Journal:
    """Each note is one append, which the kernel does not mix with those of other threads."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, *entries: Entry) -> None:
        if entries:
            os.write(self._fd, b"".join(_ENTRY.pack(*entry) for entry in entries))

    def close(self) -> None:
        os.close(self._fd)


def read_journal(path: Path) -> list[Entry]:
    raw = path.read_bytes() if path.exists() else b""
    return [Entry(Event(event), *rest) for event, *rest in _ENTRY.iter_unpack(raw)]


# The trap --------------------------------------------------------------------------------------------------


class Phase(Enum):
    OPENING = 1
    LOAD = 2
    CLOSING = 3


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # the signal is on its way; nothing may happen before it arrives


class Trap:
    """Counts how often the process comes by the plan's point, and kills it there at the n-th time."""

    def __init__(self, plan: Plan, journal: Journal, kill: Callable[[], None] = _die) -> None:
        self.phase = Phase.OPENING
        self.cut = plan.cut
        self._point = plan.point
        self._left = plan.nth
        self._journal = journal
        self._kill = kill
        self._lock = threading.Lock()

    def is_due(self, stage: str, what: str) -> bool:
        """Is it time to die? While opening and closing, every stage of every operation is a chance to."""
        if self.phase is Phase.OPENING:
            names: tuple[str, ...] = (NEW_FOLDER, IN_OPEN, what)
        elif self.phase is Phase.CLOSING:
            names = (IN_CLOSE,)
        else:
            names = (what, f"{stage} {what}")
        if self._point not in names:
            return False
        with self._lock:
            self._left -= 1
            return self._left == 0

    def at(self, stage: str, what: str) -> None:
        if self.is_due(stage, what):
            self.spring()

    def spring(self, *, is_reached: bool = True) -> None:
        if is_reached:
            self._journal.note(Entry(Event.SPRUNG, chain=POINTS.index(self._point)))
        self._kill()


class TrappedFile(RawFile):
    """A file of the disk tier. `torn`: the operation is done in part, as far as the trap's cut."""

    def __init__(self, trap: Trap, path: Path, *, direct: bool = False) -> None:
        self._trap = trap
        trap.at("before", "file")
        super().__init__(path, direct=direct)
        trap.at("after", "file")

    @property
    def _is_data(self) -> bool:
        return self.path.name == DATA

    def read(self, parts: list[Memory], offset: int) -> int:
        self._trap.at("before", "read")
        return super().read(parts, offset)

    def write(self, parts: list[Memory], offset: int) -> None:
        what = self._written(parts, offset)
        self._trap.at("before", what)
        if self._trap.is_due("torn", what):
            self._write_torn(parts, offset, what)
            self._trap.spring()
        super().write(parts, offset)
        self._trap.at("after", what)

    def allocate(self, offset: int, length: int) -> None:
        what = GROW_DATA if self._is_data else GROW_INDEX if offset else "head"
        self._trap.at("before", what)
        if self._trap.is_due("torn", what):
            pages = int(length * self._trap.cut) // mmap.PAGESIZE
            super().allocate(offset, max(1, pages) * mmap.PAGESIZE)
            self._trap.spring()
        super().allocate(offset, length)
        self._trap.at("after", what)

    def truncate(self, size_bytes: int) -> None:
        what = CUT_DATA if self._is_data else "cut index"
        self._trap.at("before", what)
        super().truncate(size_bytes)
        self._trap.at("after", what)

    def sync(self) -> None:
        self._trap.at("before", "sync")
        super().sync()

    def close(self) -> None:
        self._trap.at("before", "close")
        super().close()

    def _written(self, parts: list[Memory], offset: int) -> str:
        if self._is_data:
            return "data"
        if offset < RECORDS_AT:
            return "head"
        return "record" if any(part.any() for part in parts) else "erase"

    def _write_torn(self, parts: list[Memory], offset: int, what: str) -> None:
        # New records may tear anywhere: nobody has been told of them. What is rewritten while opening or closing
        # is of blocks that must stay; devices tear between sectors, the kernel between pages, and so do we.
        is_fresh = self._trap.phase is Phase.LOAD and what in ("record", "erase")
        raw = b"".join(part.tobytes() for part in parts)
        prefix = _prefix_bytes(len(raw), offset, 1 if is_fresh else _SECTOR_BYTES, self._trap.cut)
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)  # not direct: that might not take a single sector
        os.pwrite(fd, raw[:prefix], offset)
        os.close(fd)


def _prefix_bytes(length: int, offset: int, unit: int, cut: float) -> int:
    """How much of a write gets done that tears at a multiple of `unit` in the file; less than all of it if it can."""
    units = -(-(offset + length) // unit) - offset // unit
    return min(length, max(0, (offset // unit + int(cut * units)) * unit - offset))


# The load --------------------------------------------------------------------------------------------------


class Load:
    """What one thread does to the tier: mostly writing, and looking after what it wrote."""

    def __init__(self, tier: DiskTier, plan: Plan, journal: Journal, thread: int) -> None:
        self._tier = tier
        self._plan = plan
        self._journal = journal
        self._thread = thread
        self._random = random.Random(f"{plan.name}/{thread}")
        self._chains = 0  # begun so far
        self._first = 0  # chains before this one were cleared
        self._deleted: set[int] = set()
        self._acknowledged: dict[Entry, Header] = {}
        self._quota_bytes = None if plan.quota_bytes is None else plan.quota_bytes // THREADS

    def step(self) -> None:
        chance = self._random.random()
        if chance < 0.60:
            self._write(self._thread, self._next_chain())
        elif chance < 0.70:
            self._write(SHARED, self._random.randrange(12))
        elif chance < 0.90:
            self._read()
        elif chance < 0.99:
            self._delete()
        else:
            self._clear()

    def _next_chain(self) -> int:
        """A new chain, or one of before: the latter is there still, or was evicted and comes back."""
        kept = [chain for chain in range(self._first, self._chains) if chain not in self._deleted]
        if kept and (self._chains == _CHAINS_MAX or self._random.random() < 0.2):
            return self._random.choice(kept)
        self._chains = min(self._chains + 1, _CHAINS_MAX)
        return self._chains - 1

    def _write(self, thread: int, chain: int) -> None:
        headers = chain_headers(self._plan.name, thread, chain)
        if self._quota_bytes is not None:
            if self._quota_bytes <= 0:
                return
            self._quota_bytes -= sum(its.frame_bytes for its in headers)
        self._journal.note(Entry(Event.BEGUN, thread, chain))
        is_aligned = self._random.random() < 0.5
        order = headers if self._random.random() < 0.8 else headers[::-1]  # children before their parents
        half = self._random.randint(0, len(order))
        for batch in (order[:half], order[half:]):
            outcomes = self._tier.write([frame_of(its, aligned=is_aligned) for its in batch])
            hits = [its for its, outcome in zip(batch, outcomes, strict=True) if outcome is Outcome.HIT]
            stored = {Entry(Event.ACKNOWLEDGED, thread, chain, its.position): its for its in hits}
            self._journal.note(*stored)
            self._acknowledged.update(stored)

    def _read(self) -> None:
        entries = list(self._acknowledged)
        some = self._random.sample(entries, min(len(entries), 8))
        wanted = [self._acknowledged[entry] for entry in some]
        into = [np.empty(its.frame_bytes, np.uint8) for its in wanted]
        outcomes = self._tier.read([its.address for its in wanted], into)
        for entry, its, memory, outcome in zip(some, wanted, into, outcomes, strict=True):
            if outcome is Outcome.HIT and not is_right(its, memory):
                self._journal.note(entry._replace(event=Event.WRONG))
            if outcome is not Outcome.HIT and self._plan.is_roomy:
                self._journal.note(entry._replace(event=Event.LOST))
        if self._plan.is_roomy and self._tier.stats().evicted_blocks:
            self._journal.note(Entry(Event.EVICTED))

    def _delete(self) -> None:
        own = sorted({entry.chain for entry in self._acknowledged if entry.thread == self._thread})
        if not own:
            return
        chain = self._random.choice(own)
        self._deleted.add(chain)
        headers = chain_headers(self._plan.name, self._thread, chain)
        entries = [Entry(Event.DELETING, self._thread, chain, its.position) for its in headers]
        self._journal.note(*entries)
        self._tier.delete([its.address for its in headers])
        self._journal.note(*(entry._replace(event=Event.DELETED) for entry in entries))
        for entry in entries:
            self._acknowledged.pop(entry._replace(event=Event.ACKNOWLEDGED), None)

    def _clear(self) -> None:
        self._journal.note(Entry(Event.CLEARING, self._thread))
        self._tier.clear(tenant=shelf_of(self._thread).tenant)
        self._journal.note(Entry(Event.CLEARED, self._thread))
        self._first = self._chains
        self._acknowledged = {entry: its for entry, its in self._acknowledged.items() if entry.thread == SHARED}


def work(plan: Plan, kill: Callable[[], None] = _die) -> None:
    """Live as planned, and come to the planned end unless the nursery is faster."""
    journal = Journal(Path(plan.journal))
    trap = Trap(plan, journal, kill)
    tier = DiskTier(Path(plan.folder), plan.bytes_max, open_file=partial(TrappedFile, trap))
    tier.open()
    journal.note(Entry(Event.OPENED))
    if plan.point not in AT_OPEN:
        trap.phase = Phase.LOAD
        _load(tier, plan, journal)
        trap.phase = Phase.CLOSING
        tier.close()
    trap.spring(is_reached=plan.point != CUT_DATA)  # it had fewer operations than the plan had guessed
    tier.close()
    journal.close()


def _load(tier: DiskTier, plan: Plan, journal: Journal) -> None:
    steps = range(_CLOSE_STEPS) if plan.point == IN_CLOSE else itertools.count()
    until_s = time.monotonic() + plan.kill_after_s + _LATE_S
    failures: list[BaseException] = []

    def run(load: Load, steps: Iterable[int]) -> None:
        try:
            for _ in steps:
                if failures or time.monotonic() > until_s:
                    break
                load.step()
        except BaseException as error:  # whatever it is, it ends the worker loudly below
            failures.append(error)

    loads = [Load(tier, plan, journal, thread) for thread in range(THREADS)]
    threads = [threading.Thread(target=run, args=(load, steps), daemon=True) for load in loads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# The nursery -----------------------------------------------------------------------------------------------


def _fork(plan: Plan) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work(plan)
    except BaseException:  # a worker never returns into its nursery's code
        traceback.print_exc()
        sys.stderr.flush()
        Journal(Path(plan.journal)).note(Entry(Event.FAILED))
    os._exit(1)


def _attend(pid: int, kill_after_s: float) -> Death:
    """Wait for a worker's end, and bring it about when it is time."""
    handle = os.pidfd_open(pid)
    end = select.poll()
    end.register(handle, select.POLLIN)
    if not end.poll(kill_after_s * 1000):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(handle)
    return Death(os.waitstatus_to_exitcode(status))


def main() -> None:
    decoder = msgspec.json.Decoder(Plan)
    frame_of(chain_headers("", 0, 0)[0]).seal()  # what numpy and xxhash load at first use, workers find loaded
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        for line in sys.stdin.buffer:
            plan = decoder.decode(line)
            death = _attend(_fork(plan), plan.kill_after_s)
            sys.stdout.buffer.write(msgspec.json.encode(death) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
