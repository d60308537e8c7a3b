# SPDX-License-Identifier: Apache-2.0
"""What a benchmark promises, as data beside it, and whether a run kept it.

A value is compared as it is. A ratio or a difference gets the benefit of the doubt: it misses its bar only
where the 90 % bounds lie wholly on the wrong side, so noise alone seldom turns a check red. In return a check may
not pass by looking away: a bar whose row or ratio is missing is missed, unless the row was left out on purpose.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from kvtide.bench.row import LeftOut, Ratio, Row

Field = Literal["value", "ratio", "difference"]
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
    """`Bar("write", "ratio", ">=", 0.9)`: what the row of that name has to reach.

    `quick_limit`: in place of `limit` where a quick run is too short, or too small, to tell as much.
    """

    row: str
    field: Field
    operator: Operator
    limit: float
    quick_limit: float | None = None

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
    if row.is_quick and bar.quick_limit is not None:
        verdict = _judge_figure(replace(bar, limit=bar.quick_limit), row)
        return replace(verdict, reason=f"{verdict.reason}; a quick run's limit, in a full one it is {bar.limit:g}")
    return _judge_figure(bar, row)


def _judge_figure(bar: Bar, row: Row) -> Verdict:
    if bar.field == "value":
        return _judge_value(bar, row)
    paired = row.ratio if bar.field == "ratio" else row.difference
    if paired is None:
        return Verdict(bar, State.MISSED, f"the row has no {bar.field}")
    return _judge_paired(bar, paired, "" if bar.field == "ratio" else f" {row.unit}")


def _judge_value(bar: Bar, row: Row) -> Verdict:
    figure = f"{row.value:.6g} {row.unit}"
    if _COMPARE[bar.operator](row.value, bar.limit):
        return Verdict(bar, State.MET, figure)
    return Verdict(bar, State.MISSED, f"{figure}, {_gap(row.value, bar.limit)}")


def _judge_paired(bar: Bar, paired: Ratio, unit: str) -> Verdict:
    bounds = "90 % bounds" if paired.is_bounded else "too few rounds for 90 % bounds: smallest and largest"
    figure = f"{paired.median:.4g}{unit} ({bounds} {paired.low:.4g} to {paired.high:.4g})"
    compare = _COMPARE[bar.operator]
    if compare(paired.median, bar.limit):
        return Verdict(bar, State.MET, figure)
    gap = _gap(paired.median, bar.limit)
    if compare(_most_favourable(paired, bar), bar.limit):
        return Verdict(bar, State.MET, f"{figure}, {gap}, which may be noise")
    return Verdict(bar, State.MISSED, f"{figure}, {gap}")


def _most_favourable(paired: Ratio, bar: Bar) -> float:
    """Pick the point between the bounds that is best for the bar."""
    if bar.operator in ("<=", "<"):
        return paired.low
    if bar.operator in (">=", ">"):
        return paired.high
    return min(max(bar.limit, paired.low), paired.high)


def _gap(figure: float, limit: float) -> str:
    gap = abs(figure - limit)
    share = f" ({100 * gap / abs(limit):.1f} %)" if limit else ""
    side = "above" if figure > limit else "below" if figure < limit else "at"
    return f"{gap:.4g}{share} {side} the limit"
