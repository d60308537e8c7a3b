# SPDX-License-Identifier: Apache-2.0
"""What a benchmark is made of. A case makes one row: its set-up is a generator that builds what it needs,
yields a `Trial`, and tears down after the last round, in a `with` or a `finally`, since a round may fail.

A trial with a baseline is *paired*: both sides run in every round, and the row tells their ratio. One without
is *plain*: the row has a value and nothing to compare it with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtide.bench.bars import Bar


@dataclass(frozen=True, slots=True)
class Unit:
    """How a measured figure becomes the row's value, and with it which way the ratio points.

    The ratio is always subject / baseline in this unit: of two rates it is a speed ratio (0.97: 3 % slower),
    of two times a time ratio (1.2: 20 % slower).
    """

    name: str
    scale: float = 1.0
    is_rate: bool = False

    def value(self, measured: float, work: float) -> float:
        return self.scale * (work / measured if self.is_rate else measured / work)


GIGABYTES_PER_SECOND = Unit("GB/s", scale=1e-9, is_rate=True)
SECONDS = Unit("s")
MILLISECONDS = Unit("ms", scale=1e3)
MICROSECONDS = Unit("us", scale=1e6)
COUNT = Unit("count")

# A quick run has to end within 45 s; the rest is for start-up and for the round that crosses the line.
QUICK_BUDGET_S = 40.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure that a call found by itself: seconds, or the count, where the unit is not one of time.

    A type of its own, because a call such as `pwritev` returns a number that is no measurement.
    """

    figure: float


Measure = Callable[[], Measured | None]


@dataclass(frozen=True, slots=True)
class Trial:
    """What one round runs. A call that returns nothing is timed; one that returns `Measured` did it itself.

    `work` is what one call does, in the unit's own terms: bytes for GB/s, lookups for us per lookup.
    A note that is not known before the rounds is a call, made after the last of them and before the tear-down.
    """

    subject: Measure
    baseline: Measure | None = None
    work: float = 1.0
    note: str | Callable[[], str] = ""

    def __post_init__(self) -> None:
        assert self.work > 0, "a trial does some work"


def _untold(_text: str) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a case is given: a folder of its own that is empty, and removed after it, and whom to tell how far it is."""

    folder: Path
    is_quick: bool
    tell: Callable[[str], None] = _untold


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be. Rounds are odd by default: the median is then a round that happened.

    11 rounds put the 90 % bounds at the third value from either end, so two outliers move nothing;
    5 is the fewest that have such bounds at all. `is_long` leaves the case out of a quick run.
    `compare` says whether the row shows subject / baseline, or subject - baseline in its unit.
    """

    name: str
    unit: Unit
    setup: Callable[[Setting], Iterator[Trial]]
    runs: int = 11
    quick_runs: int = 5
    warmups: int = 1
    is_long: bool = False
    compare: Literal["ratio", "difference"] = "ratio"

    def __post_init__(self) -> None:
        assert self.name and "," not in self.name, "`--only` splits names at commas"
        assert self.runs >= 1 and self.quick_runs >= 1 and self.warmups >= 0


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Cases in the order they run, and the bars that `--check` holds them to.

    `quick_budget_s` is what the rounds of a quick run may take together.
    """

    name: str
    cases: tuple[Case, ...]
    bars: tuple[Bar, ...] = ()
    quick_budget_s: float = QUICK_BUDGET_S

    def __post_init__(self) -> None:
        names = [case.name for case in self.cases]
        assert len(set(names)) == len(names), "two cases share a name"
