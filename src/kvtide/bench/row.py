# SPDX-License-Identifier: Apache-2.0
"""What comes out of a case, and how far its ratio can be trusted.

Timings are skewed and have outliers, so nothing here assumes a distribution: values are medians, and the
bounds of the median ratio are order statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

# 90 % between the bounds, so at most 5 % beyond each of them.
_TAIL_MAX = 0.05


def median_ranks(count: int) -> tuple[int, int] | None:
    """Give the ranks (from 1) of the two sorted samples that hold the true median between them at 90 %.

    A sample falls below the true median with probability 1/2, so how many do is binomial. The lower rank is
    the highest r for which fewer than r fall below it at most 5 times in 100; the upper rank mirrors it.
    None where even the smallest and the largest sample do not reach 90 %, which is below 5 samples.
    """
    assert count >= 1
    rank = 0
    ways = 1  # to have at most `rank` of `count` samples below the median
    while ways / (1 << count) <= _TAIL_MAX:
        rank += 1
        ways += math.comb(count, rank)
    return (rank, count + 1 - rank) if rank else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios, in its 90 % bounds; `is_bounded` is False where they are the extremes."""

    median: float
    low: float
    high: float
    is_bounded: bool

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        ordered = sorted(samples)
        ranks = median_ranks(len(ordered))
        low, high = ranks or (1, len(ordered))
        return cls(median(ordered), ordered[low - 1], ordered[high - 1], is_bounded=ranks is not None)


class Difference(Ratio):
    """The same of paired differences, in the row's unit: for what is promised in milliseconds, not in percent."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report. `baseline` and `ratio` are None in the row of a plain case, `difference` in all but
    those that compare by it. `is_quick`: of a quick run, whose bars may be wider."""

    name: str
    value: float
    unit: str
    baseline: float | None
    ratio: Ratio | None
    runs: int
    note: str = ""
    difference: Difference | None = None
    is_quick: bool = False

    def as_json(self) -> dict[str, object]:
        """Flatten to the published form; keys are never renamed, only added."""
        ratio = self.ratio
        document: dict[str, object] = {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "baseline": self.baseline,
            "ratio": ratio and ratio.median,
            "ratio_low": ratio and ratio.low,
            "ratio_high": ratio and ratio.high,
            "runs": self.runs,
            "note": self.note,
        }
        if (difference := self.difference) is not None:
            document |= {
                "difference": difference.median,
                "difference_low": difference.low,
                "difference_high": difference.high,
            }
        return document


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that was not measured because somebody asked so."""

    name: str
    reason: str
