# SPDX-License-Identifier: Apache-2.0
"""The demonstration's figures as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtide.demo.rows import Row
from kvtide.demo.screen import seconds_text
from kvtide.errors import MissingExtra

_COLOURS = {"": "#9aa5b1", "dram": "#0b7285", "disk": "#e8590c"}
_NAMES = {"": "computed", "dram": "from DRAM", "disk": "from NVMe"}


def plot(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Write a PNG. Raises MissingExtra without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise MissingExtra("the plot needs matplotlib: pip install 'kvtide[demo]'") from error
    figure = Figure(figsize=(9, 0.62 * len(rows) + 1.6), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    names = [row.name for row in rows]
    colours = [_COLOURS.get(row.tier, "#5f3dc4") for row in rows]
    axes.barh(names, [row.ttft_s for row in rows], color=colours, height=0.62)
    longest_s = max(row.ttft_s for row in rows)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g} s"))
    axes.set_xlim(min(row.ttft_s for row in rows) / 2, longest_s * 6)
    for number, row in enumerate(rows):
        faster = "" if not row.tokens_reused else f"   {row.speedup:.0f}x"
        axes.text(row.ttft_s * 1.12, number, f"{seconds_text(row.ttft_s)}{faster}", va="center", fontsize=10)
    axes.invert_yaxis()
    axes.set_xlabel("time to first token (logarithmic)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    used = dict.fromkeys(row.tier for row in rows)
    handles = [Patch(color=_COLOURS.get(tier, "#5f3dc4"), label=_NAMES.get(tier, tier)) for tier in used]
    axes.legend(handles=handles, frameon=False, loc="lower right")
    figure.savefig(path, format="png")
