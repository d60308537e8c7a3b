# SPDX-License-Identifier: Apache-2.0
"""The outcome of a benchmark, as a table for people and as JSON for scripts. The JSON is a published form:

    {"rows": [{"name", "value", "unit", "baseline", "ratio", "ratio_low", "ratio_high", "runs", "note"}],
     "machine": {...}, "left_out": [{"name", "reason"}]}

`baseline` and the ratios are null in plain rows; `left_out` is there only where something was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtide.bench.machine import Machine
from kvtide.bench.row import LeftOut, Row

_LEGEND = (
    "ratio: median over the rounds of kvtide / baseline in the row's unit, and its 90 % bounds.",
    "More is better where the unit is a rate (.../s), less where it is a time.",
    "With a sign it is no ratio but kvtide - baseline, in the row's unit.",
)


@dataclass(frozen=True, slots=True)
class Report:
    rows: tuple[Row, ...]
    machine: Machine
    left_out: tuple[LeftOut, ...] = ()


def as_json(report: Report) -> str:
    document: dict[str, object] = {
        "rows": [row.as_json() for row in report.rows],
        "machine": asdict(report.machine),
    }
    if report.left_out:
        document["left_out"] = [asdict(row) for row in report.left_out]
    # A NaN would be no JSON, and is a fault of the benchmark: better here than in the reader's parser.
    return json.dumps(document, indent=2, allow_nan=False)


def write_json(report: Report, target: Path) -> None:
    """Replace `target` in one step: a reader sees the old report or the new one, never half of it."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(as_json(report) + "\n")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def as_table(report: Report) -> str:
    lines = [("row", "value", "unit", "baseline", "ratio", "bounds", "runs"), *map(_cells, report.rows)]
    notes = [f"{row.name}: {row.note}" for row in report.rows if row.note]
    reasons = dict.fromkeys(row.reason for row in report.left_out)
    left_out = [
        f"left out, {reason}: {', '.join(row.name for row in report.left_out if row.reason == reason)}"
        for reason in reasons
    ]
    paragraphs = [_align(lines), notes + left_out, [*_LEGEND, _machine_line(report.machine)]]
    return "\n\n".join("\n".join(paragraph) for paragraph in paragraphs if paragraph)


def _cells(row: Row) -> tuple[str, ...]:
    baseline = "-" if row.baseline is None else _figure(row.baseline)
    paired, form = (row.ratio, ".3f") if row.difference is None else (row.difference, "+.3f")
    ratio = "-" if paired is None else f"{paired.median:{form}}"
    bounds = "-" if paired is None else f"{paired.low:{form}}..{paired.high:{form}}"
    return (row.name, _figure(row.value), row.unit, baseline, ratio, bounds, str(row.runs))


def _align(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Pad columns: words to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_word = [name in ("row", "unit") for name in lines[0]]
    return [
        "  ".join(
            cell.ljust(width) if word else cell.rjust(width)
            for cell, width, word in zip(line, widths, is_word, strict=True)
        ).rstrip()
        for line in lines
    ]


def _figure(value: float) -> str:
    """Three significant digits, without exponents for large values."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def _machine_line(machine: Machine) -> str:
    direct = "with" if machine.has_o_direct else "without"
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.1f} GiB,"
        f" {machine.filesystem} {direct} O_DIRECT, {machine.kernel}, Python {machine.python},"
        f" kvtide {machine.kvtide}, {machine.date}"
    )
