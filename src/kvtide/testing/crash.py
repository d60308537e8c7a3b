# SPDX-License-Identifier: Apache-2.0
"""The crash campaign: kill the owner of a disk folder again and again, and hold the folder to its promises.

One folder lives through all kills, so that what each of them leaves behind meets the next. After every round
the folder is opened and every block in it compared with the bytes that its address demands. Promised are:

    it opens again                        whatever was under way
    no wrong byte                         a block is as it was written, or not there
    never above its bound                 seen from outside, before and after every kill
    what was acknowledged is there        where nothing had to be evicted; SIGKILL loses no page cache
    what was deleted stays away

Rounds are drawn from the seed: which point of the code, which time it is reached, how far a torn write gets,
and how large the bound is. Threads race as they like inside a round; a seed brings the same kills back, and
with them, within a few tries, the same failure. `python -m kvtide.testing.crash --help` runs a campaign by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

import kvtide
from kvtide.frame import HEADER_BYTES, Header
from kvtide.keys import Address
from kvtide.memory.arena import round_up
from kvtide.outcome import Outcome
from kvtide.testing import crash_worker
from kvtide.testing.crash_worker import (
    ANY_TIME,
    CHAIN_BLOCKS_MAX,
    CUT_DATA,
    ERASES,
    GROW_DATA,
    GROW_INDEX,
    IN_CLOSE,
    IN_OPEN,
    NEW_FOLDER,
    PAYLOAD_BYTES,
    POINTS,
    SHARED,
    THREADS,
    WRITES,
    Death,
    Entry,
    Event,
    Plan,
    chain_headers,
    is_right,
    read_journal,
    shelf_of,
)
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.tier import Tier

BYTES_MAX = 4 << 20
_FAILURES_MAX = 20
_LOOK_S = 0.004  # between two looks at a folder's size
_READ_BLOCKS = 32
_POINT_S = 3.0  # a point that is not reached by then is missed, and the kill one at any time
# How often a point is passed before it kills, at most. Opening and closing count each stage of each operation.
_TIMES = {NEW_FOLDER: 12, IN_OPEN: 12, CUT_DATA: 2, GROW_DATA: 6, GROW_INDEX: 3, IN_CLOSE: 24}
_TIMES |= dict.fromkeys(WRITES, 80) | dict.fromkeys(ERASES, 40)
# What a life can write in which nothing may be evicted: its quota, and the chain of each thread that breaks it.
_QUOTA_BYTES = 12 << 20
_LIFE_BYTES = _QUOTA_BYTES + THREADS * CHAIN_BLOCKS_MAX * round_up(HEADER_BYTES + max(PAYLOAD_BYTES))

OpenTier = Callable[[Path, int], Tier]


@dataclass(frozen=True, slots=True)
class CampaignResult:
    """Counts over all rounds. Whatever is not as promised has a line in `failures`, or was one too many for it."""

    seed: int
    kills: int
    reopened: int  # kills that the folder survived
    failures_to_reopen: int  # kills that it did not
    blocks_checked: int
    blocks_corrupt: int  # found damaged and refused: no lie, but a loss
    blocks_unknown: int  # in the folder, and nobody wrote them
    wrong_bytes: int  # blocks that were served with content that is not theirs
    bytes_max_exceeded: int  # looks at a folder that was larger than its bound
    lost_but_acknowledged: int
    deleted_but_back: int
    worker_errors: int  # workers that ended by an exception
    kill_points: dict[str, int]
    failures: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        lines = [
            f"{self.kills} kills: {self.reopened} survived, {self.failures_to_reopen} not; "
            f"{self.worker_errors} errors under load",
            f"{self.blocks_checked} blocks checked: {self.wrong_bytes} wrong, {self.blocks_corrupt} corrupt, "
            f"{self.lost_but_acknowledged} lost, {self.deleted_but_back} back after deletion, "
            f"{self.blocks_unknown} unknown; bound exceeded {self.bytes_max_exceeded} times",
            "killed " + ", ".join(f"{point} ({count})" for point, count in sorted(self.kill_points.items())),
            *self.failures,
            f"replay: python -m kvtide.testing.crash FOLDER --kills {self.kills} --seed {self.seed}",
        ]
        return "\n".join(lines)


def run_campaign(
    folder: Path,
    kills: int,
    seed: int,
    *,
    progress: Callable[[int, int], None] | None = None,
    bytes_max: int = BYTES_MAX,
    open_tier: OpenTier = DiskTier,
) -> CampaignResult:
    """Kill that many workers over folders below `folder`, which is made when missing and should be empty.

    `bytes_max` is the usual bound; rounds lower and raise it. `open_tier` makes the tier that checks a folder
    after a kill (a worker's own is always a DiskTier): with a broken one the campaign must fail. A folder that
    does not open is kept, and the next round begins a new one. `progress` hears of kills done and kills to do.
    """
    assert kills > 0
    folder.mkdir(parents=True, exist_ok=True)
    with open_nursery(folder / "worker.log") as nursery:
        campaign = _Campaign(folder, seed, bytes_max, open_tier, nursery)
        for number, point in enumerate(draw_points(kills, random.Random(f"{seed}/points"))):
            campaign.round(number, point)
            if progress is not None:
                progress(campaign.tally.kills, kills)
    return campaign.tally.result(seed)


def draw_points(kills: int, draw: random.Random) -> list[str]:
    """A point for each round: three of four named, in turn, the others at any time; in random order."""
    named = itertools.cycle(point for point in POINTS if point != ANY_TIME)
    points: list[str] = []
    while kills > 0:
        point = next(named) if len(points) % 4 < 3 else ANY_TIME
        points.append(point if kills >= _kills_of(point) else ANY_TIME)
        kills -= _kills_of(points[-1])
    draw.shuffle(points)
    return points


def _kills_of(point: str) -> int:
    """A kill while opening is worth it where another kill has left a mess, so such a round has two."""
    return 2 if point in (IN_OPEN, CUT_DATA) else 1


def folder_bytes(folder: Path) -> tuple[int, int]:
    """What its files are long, and what they take on the device."""
    length_bytes = device_bytes = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a probe that lives for a moment only
                status = entry.stat()
                length_bytes += status.st_size
                device_bytes += status.st_blocks * 512
    return length_bytes, device_bytes


@dataclass
class _Tally:
    """The result while it grows."""

    kills: int = 0
    reopened: int = 0
    failures_to_reopen: int = 0
    blocks_checked: int = 0
    blocks_corrupt: int = 0
    blocks_unknown: int = 0
    wrong_bytes: int = 0
    bytes_max_exceeded: int = 0
    lost_but_acknowledged: int = 0
    deleted_but_back: int = 0
    worker_errors: int = 0
    kill_points: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, plan: Plan, count: int, what: str) -> int:
        """Keep a line about something that is not as promised, if anything is. Returns the count."""
        life = f"point={plan.point!r} nth={plan.nth} cut={plan.cut:.3f} bytes_max={plan.bytes_max}"
        line = f"life {plan.name} ({life} roomy={plan.is_roomy}): {count} {what}"
        if count and len(self.failures) < _FAILURES_MAX and line not in self.failures:
            self.failures.append(line)
        return count

    def result(self, seed: int) -> CampaignResult:
        counts = vars(self) | {"kill_points": dict(self.kill_points), "failures": tuple(self.failures)}
        return CampaignResult(seed=seed, **counts)


@dataclass
class _Books:
    """What may, must and must not be in one folder, by what its workers have noted."""

    path: Path
    bytes_max: int = 0  # the folder is not larger than this
    known: dict[Address, Header] = field(default_factory=dict)  # may be there
    owed: set[Address] = field(default_factory=set)  # must be there
    gone: set[Address] = field(default_factory=set)  # must not be there
    kills: int = 0  # since the last check

    def enter(self, plan: Plan, entries: list[Entry]) -> None:
        """Follow a life, in the order in which things happened."""
        if not plan.is_roomy:
            self.owed.clear()  # anything may be evicted, or cut off by a lower bound
        for event, thread, chain, position in entries:
            if event is Event.BEGUN:
                self.known |= {its.address: its for its in chain_headers(plan.name, thread, chain)}
            elif event is Event.CLEARING:
                self.owed -= self._on_shelf_of(thread)
            elif event is Event.CLEARED:
                self.gone |= self._on_shelf_of(thread)
            elif event in (Event.ACKNOWLEDGED, Event.DELETING, Event.DELETED):
                address = chain_headers(plan.name, thread, chain)[position].address
                if event is Event.ACKNOWLEDGED and plan.is_roomy:
                    self.owed.add(address)
                elif event is Event.DELETING:
                    self.owed.discard(address)
                elif event is Event.DELETED:
                    self.gone.add(address)

    def settle(self, found: set[Address]) -> None:
        """A check has found these, so they are owed from now on. Nothing else can come back any more."""
        self.known = {address: its for address, its in self.known.items() if address in found}
        self.owed = found
        self.gone.clear()
        self.kills = 0

    def _on_shelf_of(self, thread: int) -> set[Address]:
        place = shelf_of(thread)
        return {address for address in self.known if address.shelf == place}


class _Campaign:
    """Rounds of kills and checks."""

    def __init__(
        self, folder: Path, seed: int, bytes_max: int, open_tier: OpenTier, nursery: subprocess.Popen[bytes]
    ) -> None:
        self.tally = _Tally()
        self._folder = folder
        self._seed = seed
        self._bytes_max = bytes_max
        self._open_tier = open_tier
        self._nursery = nursery
        self._lives = itertools.count()
        self._main = _Books(folder / "blocks")

    def round(self, number: int, point: str) -> None:
        """One life or two, each killed, and a check of what they leave."""
        books = self._main
        if point in (NEW_FOLDER, GROW_INDEX):  # an index grows while it is young
            books = _Books(self._folder / f"new-{number}")
        lives = self._draw_lives(books, point, random.Random(f"{self._seed}/{number}"))
        is_fine = all(self._live(books, plan) for plan in lives) and self._check(books, lives[-1])
        if books is not self._main:
            if is_fine:
                shutil.rmtree(books.path)
        elif not is_fine:
            self._main = _Books(self._folder / f"blocks-after-{number}")

    def _draw_lives(self, books: _Books, point: str, draw: random.Random) -> list[Plan]:
        if point == IN_OPEN:
            mess = draw.choice(("torn record", "torn erase", "after data", ANY_TIME))
            first = self._plan(books, draw, mess, is_roomy=mess != "torn erase")
            second = self._plan(books, draw, point)
            return [first, replace(second, bytes_max=first.bytes_max, quota_bytes=first.quota_bytes)]
        if point == CUT_DATA:
            first = self._plan(books, draw, ANY_TIME, is_roomy=True)
            second = self._plan(books, draw, point)
            return [replace(first, kill_after_s=0.4), replace(second, bytes_max=self._bytes_max // 2)]
        is_roomy = draw.random() < 0.4 and point not in (*ERASES, GROW_INDEX)
        return [self._plan(books, draw, point, is_roomy=is_roomy or point == GROW_DATA)]

    def _plan(self, books: _Books, draw: random.Random, point: str, *, is_roomy: bool = False) -> Plan:
        life = next(self._lives)
        bytes_max = self._bytes_max * draw.choice((2, 4, 4, 6)) // 4
        if is_roomy:  # for all that is there and all that a life can write, even if no place were used twice
            bytes_max = 2 * (folder_bytes(books.path)[0] + _LIFE_BYTES)
        kill_after_s = draw.choice((0.03, 0.4, 0.8)) * draw.random()
        return Plan(
            name=f"{self._seed}/{life}",
            folder=str(books.path),
            journal=str(self._folder / f"journal-{life}"),
            bytes_max=bytes_max,
            quota_bytes=_QUOTA_BYTES if is_roomy else None,
            point=point,
            nth=draw.randint(1, _TIMES.get(point, 1)),
            cut=draw.random(),
            kill_after_s=kill_after_s if point == ANY_TIME else _POINT_S,
        )

    def _live(self, books: _Books, plan: Plan) -> bool:
        """Let a worker live and die, and look at its folder all the while. False: it failed, and was not killed."""
        journal = Path(plan.journal)
        bytes_max = max(books.bytes_max, plan.bytes_max)  # a lower one holds from the moment it has opened
        death = None
        send(self._nursery, plan)
        while death is None:
            death = hear(self._nursery, _LOOK_S)
            has_opened = Event.OPENED in (entry.event for entry in read_journal(journal))
            bytes_max = plan.bytes_max if has_opened else bytes_max
            self._look(books, plan, bytes_max)
        entries = read_journal(journal)
        books.bytes_max = bytes_max
        books.enter(plan, entries)
        is_killed = death.status == -signal.SIGKILL
        self._count(books, plan, entries, is_killed=is_killed)
        journal.unlink(missing_ok=True)
        return is_killed

    def _count(self, books: _Books, plan: Plan, entries: list[Entry], *, is_killed: bool) -> None:
        tally, events = self.tally, Counter(entry.event for entry in entries)
        tally.wrong_bytes += tally.fail(plan, events[Event.WRONG], "blocks had wrong bytes under load")
        tally.lost_but_acknowledged += tally.fail(plan, events[Event.LOST], "blocks were lost under load")
        tally.fail(plan, events[Event.EVICTED], "times blocks had been evicted although there was room")
        if is_killed:
            sprung = [POINTS[entry.chain] for entry in entries if entry.event is Event.SPRUNG]
            tally.kill_points[sprung[0] if sprung else ANY_TIME] += 1
            tally.kills += 1
            books.kills += 1
            return
        log = (self._folder / "worker.log").read_text(errors="replace")
        tally.worker_errors += tally.fail(plan, 1, f"worker failed: {log[-1500:]}")
        if not events[Event.OPENED]:
            tally.failures_to_reopen += books.kills

    def _look(self, books: _Books, plan: Plan, bytes_max: int) -> None:
        size_bytes = max(folder_bytes(books.path))
        is_over = self.tally.fail(plan, int(size_bytes > bytes_max), f"look at {size_bytes} bytes of {bytes_max}")
        self.tally.bytes_max_exceeded += is_over

    def _check(self, books: _Books, plan: Plan) -> bool:
        """Open the folder and compare all that is in it. False: it does not open."""
        tally = self.tally
        tier = self._open_tier(books.path, plan.bytes_max)
        try:
            tier.open()
        except Exception as error:  # whatever it is, the folder has not survived; counted
            tally.failures_to_reopen += tally.fail(plan, books.kills, f"kills, and the folder does not open: {error!r}")
            return False
        tally.reopened += books.kills
        try:
            books.bytes_max = plan.bytes_max
            self._look(books, plan, books.bytes_max)
            books.settle(self._compare(books, plan, tier))
        finally:
            tier.close()
        self._look(books, plan, books.bytes_max)
        return True

    def _compare(self, books: _Books, plan: Plan, tier: Tier) -> set[Address]:
        """Read every block; returns the addresses of those that are right."""
        tally = self.tally
        present = [its for thread in range(SHARED + 1) for its in _present(books, tier, thread)]
        unknown = abs(tier.stats().blocks - len(present))
        tally.blocks_unknown += tally.fail(plan, unknown, "blocks that nobody wrote")
        right: set[Address] = set()
        for i in range(0, len(present), _READ_BLOCKS):
            wanted = present[i : i + _READ_BLOCKS]
            into = [np.empty(its.frame_bytes, np.uint8) for its in wanted]
            outcomes = tier.read([its.address for its in wanted], into)
            served = [j for j, outcome in enumerate(outcomes) if outcome is Outcome.HIT]
            good = {wanted[j].address for j in served if is_right(wanted[j], into[j])}
            right |= good
            tally.blocks_checked += len(wanted)
            tally.blocks_corrupt += outcomes.count(Outcome.CORRUPT)
            tally.wrong_bytes += tally.fail(plan, len(served) - len(good), "blocks with wrong bytes")
        lost, back = len(books.owed - right), len(books.gone & right)
        tally.lost_but_acknowledged += tally.fail(plan, lost, "acknowledged blocks are not there")
        tally.deleted_but_back += tally.fail(plan, back, "deleted blocks are back")
        return right


def _present(books: _Books, tier: Tier, thread: int) -> list[Header]:
    place = shelf_of(thread)
    headers = [its for its in books.known.values() if its.shelf == place]
    sizes = tier.lookup(place, [its.key for its in headers])
    return [its for its, size in zip(headers, sizes, strict=True) if size]


# The nursery's other side ----------------------------------------------------------------------------------


@contextlib.contextmanager
def open_nursery(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that forks workers, one at a time: `send` it a plan, then `hear` what became of the worker."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(kvtide.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OPENBLAS_NUM_THREADS": "1",  # a process that forks must not have threads, not even idle ones
    }
    with (
        open(log, "ab") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", crash_worker.__name__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=env,
        ) as nursery,
    ):
        yield nursery


def send(nursery: subprocess.Popen[bytes], plan: Plan) -> None:
    assert nursery.stdin is not None
    nursery.stdin.write(msgspec.json.encode(plan) + b"\n")


def hear(nursery: subprocess.Popen[bytes], timeout_s: float | None = None) -> Death | None:
    """How the worker died; None: after that time it has not yet."""
    assert nursery.stdout is not None
    ready, _, _ = select.select([nursery.stdout], [], [], timeout_s)
    if not ready:
        return None
    line = nursery.stdout.readline()
    assert line, "the nursery itself has died: its log says why"
    return msgspec.json.decode(line, type=Death)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m kvtide.testing.crash", description="Run a crash campaign.")
    parser.add_argument("folder", type=Path, help="where to make the folders that suffer; empty or new")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    result = run_campaign(given.folder, given.kills, given.seed)
    print(result)
    return 0 if result.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
