# SPDX-License-Identifier: Apache-2.0
"""Tables and sizes for people to read."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def as_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they must be: words to the left, numbers to the right."""
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]
    is_number = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(head))]
    lines = []
    for row in [list(head), *cells]:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "all"
    for unit, factor in _UNITS:
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} bytes"


def duration(seconds: float) -> str:
    for unit, factor in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.0f} s"


def _text(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.1f}" if isinstance(cell, float) else str(cell)
