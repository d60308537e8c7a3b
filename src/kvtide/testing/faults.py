# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, on demand: a tier, a device and a clock that do as a test says.

Each wraps the real thing and is transparent until told otherwise. `FaultyTier` answers in a tier's place,
or stops its calls at a `Gate`, so that a test can put two threads in any order without sleeping.
`FailingDevice` makes a disk tier's files fail. Nothing here waits longer than `PATIENCE_S`: a test that
forgets to open a gate fails instead of hanging.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtide.deadline import NEVER, Deadline
from kvtide.frame import Frame
from kvtide.keys import Address, Digest, Key, Shelf
from kvtide.layout import Memory
from kvtide.outcome import Outcome
from kvtide.tiers.disk.files import RawFile
from kvtide.tiers.tier import Tier, TierStats

PATIENCE_S = 60.0

Op = Literal["read", "write", "clear"]
When = Literal["before", "after"]


class VirtualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Gate:
    """Where calls stop until it is opened. Once open it stays open."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived = 0
        self._is_open = False

    def enter(self) -> None:
        """Stand here until the gate opens."""
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_open, PATIENCE_S), "nobody opened the gate"

    def wait_reached(self, calls: int = 1) -> None:
        """Return when that many calls have come to the gate."""
        with self._changed:
            has_come = self._changed.wait_for(lambda: self._arrived >= calls, PATIENCE_S)
            assert has_come, f"only {self._arrived} of {calls} calls came to the gate"

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


class FaultyTier(Tier):
    """A tier around a tier: counts what each address costs, and answers, delays or stops calls when told to."""

    def __init__(self, tier: Tier, *, pause: Callable[[float], None] = time.sleep) -> None:
        self.tier = tier
        self.traits = tier.traits
        self.reads: Counter[Address] = Counter()
        self.writes: Counter[Address] = Counter()
        self.lookups: list[int] = []  # how many keys each lookup was about
        self.answers: dict[Op, Outcome] = {}  # given for each address instead of asking the tier
        self.mistakes: dict[Op, Exception] = {}  # raised instead of asking the tier: what no tier should do
        self.delay_s: dict[Op, float] = {}
        self._pause = pause
        self._gates: dict[tuple[Op, When], tuple[Gate, Address | None]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def gate(self, op: Op, when: When = "before", *, of: Address | None = None) -> Iterator[Gate]:
        """Stop calls of this kind, before or after the tier has done them, until the gate or the block ends.

        With `of`, only those that are about this address, among others.
        """
        gate = Gate()
        self._gates[op, when] = gate, of
        try:
            yield gate
        finally:
            del self._gates[op, when]
            gate.open()

    def is_stopped(self, op: Op) -> bool:
        """Whether a gate is in the way of calls of this kind."""
        return any(gated == op for gated, _ in self._gates)

    def _stop(self, op: Op, when: When, addresses: Sequence[Address] = ()) -> None:
        gate, of = self._gates.get((op, when), (None, None))
        if gate is not None and (of is None or of in addresses):
            gate.enter()

    def _begin(self, op: Op, addresses: Sequence[Address] = ()) -> None:
        if delay_s := self.delay_s.get(op):
            self._pause(delay_s)
        self._stop(op, "before", addresses)
        if mistake := self.mistakes.get(op):
            raise mistake

    def open(self) -> None:
        self.tier.open()

    def close(self) -> None:
        self.tier.close()

    def lookup(self, shelf: Shelf, keys: Sequence[Key], deadline: Deadline = NEVER) -> npt.NDArray[np.int64]:
        self.lookups.append(len(keys))
        return self.tier.lookup(shelf, keys, deadline)

    def read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline = NEVER) -> list[Outcome]:
        with self._lock:
            self.reads.update(addresses)
        self._begin("read", addresses)
        answer = self.answers.get("read")
        outcomes = [answer] * len(addresses) if answer else self.tier.read(addresses, into, deadline)
        self._stop("read", "after", addresses)
        return outcomes

    def write(self, frames: Sequence[Frame], deadline: Deadline = NEVER) -> list[Outcome]:
        addresses = [frame.address for frame in frames]
        with self._lock:
            self.writes.update(addresses)
        self._begin("write", addresses)
        answer = self.answers.get("write")
        outcomes = [answer] * len(frames) if answer else self.tier.write(frames, deadline)
        self._stop("write", "after", addresses)
        return outcomes

    def delete(self, addresses: Sequence[Address]) -> list[Outcome]:
        return self.tier.delete(addresses)

    def clear(self, *, namespace: Digest | None = None, tenant: Digest | None = None, prefix: Key | None = None) -> int:
        self._begin("clear")
        count = self.tier.clear(namespace=namespace, tenant=tenant, prefix=prefix)
        self._stop("clear", "after")
        return count

    def stats(self) -> TierStats:
        return self.tier.stats()


class FailingDevice:
    """Files that fail while `failing` says so: `DiskTier(open_file=device.open)`.

    `failing` maps an operation (read, write, allocate, sync) to the number of the error it raises.
    """

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}

    def open(self, path: Path, *, direct: bool = False) -> RawFile:
        return _FailingFile(path, self.meet, direct=direct)

    def meet(self, operation: str) -> None:
        if code := self.failing.get(operation):
            raise OSError(code, os.strerror(code))


class _FailingFile(RawFile):
    def __init__(self, path: Path, meet: Callable[[str], None], *, direct: bool) -> None:
        super().__init__(path, direct=direct)
        self._meet = meet

    def read(self, parts: list[Memory], offset: int) -> int:
        self._meet("read")
        return super().read(parts, offset)

    def write(self, parts: list[Memory], offset: int) -> None:
        self._meet("write")
        super().write(parts, offset)

    def allocate(self, offset: int, length: int) -> None:
        self._meet("allocate")
        super().allocate(offset, length)

    def sync(self) -> None:
        self._meet("sync")
        super().sync()
