# SPDX-License-Identifier: Apache-2.0
"""What a benchmark promises, as data beside it, and whether a run kept it.

A value is compared as it is. A ratio gets the benefit of the doubt: it misses its bar only where the 90 %
bounds lie wholly on the wrong side, so noise alone seldom turns a check red. In return a check may not pass
by looking away: a bar whose row or ratio is missing is missed, unless the row was left out on purpose.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from kvtide.bench.row import LeftOut, Ratio, Row

Field = Literal["value", "ratio"]
Operator = Literal["<=", ">=", "==", "<", ">"]

_COMPARE: Mapping[Operator, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True, slots=True)
class Bar:
    """`Bar("write", "ratio", ">=", 0.9)`: what the row of that name has to reach."""

    row: str
    field: Field
    operator: Operator
    limit: float

    def __str__(self) -> str:
        return f"{self.row} {self.field} {self.operator} {self.limit:g}"


class State(Enum):
    MET = "met"
    MISSED = "MISSED"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Verdict:
    bar: Bar
    state: State
    reason: str

    def __str__(self) -> str:
        return f"{self.state.value}: {self.bar}: {self.reason}"


def judge(bars: Sequence[Bar], rows: Sequence[Row], left_out: Sequence[LeftOut]) -> list[Verdict]:
    """Hold the rows to the bars, one verdict for each bar."""
    measured = {row.name: row for row in rows}
    reasons = {row.name: row.reason for row in left_out}
    return [_judge_bar(bar, measured.get(bar.row), reasons.get(bar.row)) for bar in bars]


def _judge_bar(bar: Bar, row: Row | None, left_out: str | None) -> Verdict:
    if row is None and left_out is not None:
        return Verdict(bar, State.NOT_MEASURED, left_out)
    if row is None:
        return Verdict(bar, State.MISSED, "there is no such row")
    if bar.field == "value":
        return _judge_value(bar, row)
    if row.ratio is None:
        return Verdict(bar, State.MISSED, "the row has no ratio")
    return _judge_ratio(bar, row.ratio)


def _judge_value(bar: Bar, row: Row) -> Verdict:
    figure = f"{row.value:.6g} {row.unit}"
    if _COMPARE[bar.operator](row.value, bar.limit):
        return Verdict(bar, State.MET, figure)
    return Verdict(bar, State.MISSED, f"{figure}, {_gap(row.value, bar.limit)}")


def _judge_ratio(bar: Bar, ratio: Ratio) -> Verdict:
    bounds = "90 % bounds" if ratio.is_bounded else "too few rounds for 90 % bounds: smallest and largest"
    figure = f"{ratio.median:.4g} ({bounds} {ratio.low:.4g} to {ratio.high:.4g})"
    compare = _COMPARE[bar.operator]
    if compare(ratio.median, bar.limit):
        return Verdict(bar, State.MET, figure)
    gap = _gap(ratio.median, bar.limit)
    if compare(_most_favourable(ratio, bar), bar.limit):
        return Verdict(bar, State.MET, f"{figure}, {gap}, which may be noise")
    return Verdict(bar, State.MISSED, f"{figure}, {gap}")


def _most_favourable(ratio: Ratio, bar: Bar) -> float:
    """Pick the point between the bounds that is best for the bar."""
    if bar.operator in ("<=", "<"):
        return ratio.low
    if bar.operator in (">=", ">"):
        return ratio.high
    return min(max(bar.limit, ratio.low), ratio.high)


def _gap(figure: float, limit: float) -> str:
    gap = abs(figure - limit)
    share = f" ({100 * gap / abs(limit):.1f} %)" if limit else ""
    side = "above" if figure > limit else "below" if figure < limit else "at"
    return f"{gap:.4g}{share} {side} the limit"
