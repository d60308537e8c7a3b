# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a short one as a whole, and its parts."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.demo.plot import plot
from kvtide.demo.rows import Row, write_json
from kvtide.demo.screen import Screen, bar, seconds_text

ROWS = [
    Row("new", "What?", "That.", 50.0, 51.0, 6055, 0, "", True),
    Row("again", "What else?", "This.", 0.6, 51.0, 6056, 6016, "dram", True),
]


def test_a_short_demo_plays_every_scene_with_the_same_tokens(tmp_path: Path, smollm2_folder: Path) -> None:
    del smollm2_folder  # it is converted now, by one test at a time
    command = [sys.executable, "-m", "kvtide", "demo", "--tokens", "600"]
    command += ["--json", str(tmp_path / "demo.json"), "--plot", str(tmp_path / "demo.png")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "demo.json").read_text())
    rows = found["rows"]
    assert [row["tier"] for row in rows] == ["", "dram", "disk", "dram", "dram", "dram", "dram"]
    assert all(row["identical"] is True for row in rows)
    assert rows[0]["tokens_reused"] == 0
    assert all(row["tokens_reused"] >= found["document_tokens"] - 64 for row in rows[1:])
    assert all(row["ttft_s"] > 0 and row["name"] for row in rows)
    assert rows[-1]["tokens_reused"] > rows[-3]["tokens_reused"], "the answers of a chat are not reused"
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "same" in ended.stdout
    assert "Where to go next" in ended.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tokens", "12"], "give 500 to 6000"),
        (["--json", "/nowhere/at/all.json"], "cannot be written"),
        (["--plot", "/"], "cannot be written"),
    ],
)
def test_what_cannot_work_is_said_before_the_work(flags: list[str], said: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "kvtide", "demo", *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_figures_are_written_with_their_names(tmp_path: Path) -> None:
    write_json(tmp_path / "figures.json", {"model": "m"}, ROWS)
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["model"] == "m"
    assert {"name", "ttft_s", "tokens_reused", "tier", "identical", "speedup"} <= set(found["rows"][0])
    assert found["rows"][1]["speedup"] == 85.0


def test_a_table_tells_of_a_difference() -> None:
    stream = io.StringIO()
    Screen(stream).table([*ROWS, Row("wrong", "What?", "No.", 1.0, 51.0, 10, 5, "disk", False)])
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert [line.split()[-1] for line in lines[1:]] == ["yes", "yes", "NO"]
    assert "6,016 of 6,056" in lines[2]
    assert "85x" in lines[2]
    assert max(map(len, lines)) <= 100


def test_a_step_that_fails_is_marked() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    with pytest.raises(RuntimeError), screen.step("something"):
        raise RuntimeError
    with screen.step("something else"):
        pass
    failed, done = stream.getvalue().splitlines()
    assert failed.startswith("✗ something")
    assert done.startswith("✓ something else")


def test_a_bar_shows_little_as_little_and_nothing_as_nothing() -> None:
    assert bar(0, " ").strip() == ""
    assert bar(1e-9, " ").strip() == "▏"
    assert bar(1, " ") == "█" * len(bar(1, " "))
    assert len({len(bar(share / 97)) for share in range(98)}) == 1


def test_seconds_have_three_digits_at_most() -> None:
    assert [seconds_text(s) for s in (0.123, 9.94, 9.96, 51.26)] == ["0.12 s", "9.94 s", "10.0 s", "51.3 s"]


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    plot(tmp_path / "plot.png", "a title", ROWS)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
