# SPDX-License-Identifier: Apache-2.0
"""The harness of the benchmarks: how rounds are run, what a row says, and when a bar is missed."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide.bench.bars import Bar, State, judge
from kvtide.bench.case import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    MILLISECONDS,
    SECONDS,
    Benchmark,
    Case,
    Measured,
    Setting,
    Trial,
    Unit,
)
from kvtide.bench.harness import QUICK_BUDGET_S, ROUNDS_MIN, Choice, choose_cases, run_benchmark
from kvtide.bench.machine import Machine, cpu_model, describe_machine, filesystem_type
from kvtide.bench.progress import Progress
from kvtide.bench.report import Report, as_json, as_table, write_json
from kvtide.bench.row import LeftOut, Ratio, Row, median_ranks
from kvtide.errors import ConfigError

MACHINE = Machine("a CPU", 8, 16 << 30, "Linux 6", "3.11.0", "0.1.0", "ext4", True, "2026-01-01T00:00:00+00:00")


class FakeClock:
    """Time that passes only where a test says so, and a diary of who was called."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now_s

    def takes(self, name: str, *seconds: float) -> Callable[[], None]:
        """Make a call that takes these times in turn, and the last one from then on."""
        left = list(seconds)

        def call() -> None:
            self.calls.append(name)
            self.now_s += left.pop(0) if len(left) > 1 else left[0]

        return call


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def yields(trial: Trial) -> Callable[[Setting], Iterator[Trial]]:
    def setup(setting: Setting) -> Iterator[Trial]:
        yield trial

    return setup


def run(
    *cases: Case,
    folder: Path,
    choice: Choice | None = None,
    clock: FakeClock | None = None,
    log: io.StringIO | None = None,
) -> Report:
    return run_benchmark(
        Benchmark("fake", cases),
        choice or Choice(),
        folder,
        Progress(log or io.StringIO()),
        clock or FakeClock(),
    )


def row(name: str = "write", *, value: float = 1.0, ratio: Ratio | None = None, note: str = "") -> Row:
    baseline = None if ratio is None else value / ratio.median
    return Row(name, value, "GB/s", baseline, ratio, runs=11, note=note)


# Critical values of the two-sided sign test at 10 % for 5 to 25 samples, as statistics books print them.
SIGN_TEST = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 5, 6, 6, 7, 7, 7]


@pytest.mark.parametrize(("count", "critical"), [*enumerate(SIGN_TEST, start=5), (30, 10), (50, 18)])
def test_ranks_are_those_of_the_sign_test_table(count: int, critical: int) -> None:
    assert median_ranks(count) == (critical + 1, count - critical)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_fewer_than_five_samples_have_no_90_percent_bounds(count: int) -> None:
    assert median_ranks(count) is None


def test_bounds_of_few_samples_are_the_extremes_and_say_so() -> None:
    assert Ratio.of([1.2, 0.9, 1.0]) == Ratio(1.0, 0.9, 1.2, is_bounded=False)


def test_two_outliers_among_eleven_samples_do_not_move_the_bounds() -> None:
    ratio = Ratio.of([100.0, 1.03, 1.0, 0.99, 1.01, 0.97, 0.98, 1.02, 0.96, 1.04, 50.0])
    assert ratio == Ratio(1.01, 0.98, 1.04, is_bounded=True)


def test_sides_alternate_who_runs_first(tmp_path: Path) -> None:
    clock = FakeClock()
    trial = Trial(subject=clock.takes("s", 1.0), baseline=clock.takes("b", 1.0))
    run(Case("pair", SECONDS, yields(trial), warmups=0), folder=tmp_path, choice=Choice(runs=4), clock=clock)
    assert "".join(clock.calls) == "bssbbssb"


def test_warm_up_rounds_are_not_counted(tmp_path: Path) -> None:
    clock = FakeClock()
    trial = Trial(subject=clock.takes("s", 99.0, 99.0, 2.0), baseline=clock.takes("b", 99.0, 99.0, 1.0))
    report = run(Case("pair", SECONDS, yields(trial), warmups=2, runs=5), folder=tmp_path, clock=clock)
    (result,) = report.rows
    assert (result.value, result.baseline, result.runs) == (2.0, 1.0, 5)


def test_ratio_is_the_median_of_pairs_and_not_the_ratio_of_medians(tmp_path: Path) -> None:
    clock = FakeClock()
    # The machine slows down under the rounds: medians hide that each round said 2, 2, 2, 3, 2.
    trial = Trial(clock.takes("s", 2.0, 4.0, 8.0, 30.0, 12.0), clock.takes("b", 1.0, 2.0, 4.0, 10.0, 6.0))
    (result,) = run(Case("pair", SECONDS, yields(trial), warmups=0, runs=5), folder=tmp_path, clock=clock).rows
    assert (result.value, result.baseline) == (8.0, 4.0)
    assert result.ratio == Ratio(2.0, 2.0, 3.0, is_bounded=True)


def test_ratio_of_rates_is_a_speed_ratio(tmp_path: Path) -> None:
    clock = FakeClock()
    trial = Trial(clock.takes("s", 2.0), clock.takes("b", 1.0), work=4e9)
    (result,) = run(Case("write", GIGABYTES_PER_SECOND, yields(trial)), folder=tmp_path, clock=clock).rows
    assert (result.value, result.baseline, result.unit) == (2.0, 4.0, "GB/s")
    assert result.ratio is not None
    assert result.ratio.median == 0.5


def test_ratio_of_times_is_a_time_ratio(tmp_path: Path) -> None:
    clock = FakeClock()
    trial = Trial(clock.takes("s", 2.0), clock.takes("b", 1.0), work=1000)
    (result,) = run(Case("match", MICROSECONDS, yields(trial)), folder=tmp_path, clock=clock).rows
    assert (result.value, result.baseline, result.unit) == (2000.0, 1000.0, "us")
    assert result.ratio is not None
    assert result.ratio.median == 2.0


def test_plain_case_has_neither_baseline_nor_ratio(tmp_path: Path) -> None:
    trial = Trial(lambda: Measured(181.0))
    (result,) = run(Case("memory", Unit("bytes/block"), yields(trial), runs=1), folder=tmp_path).rows
    assert result == Row("memory", 181.0, "bytes/block", None, None, runs=1)


def test_call_that_measured_itself_is_believed(tmp_path: Path) -> None:
    clock = FakeClock()

    def percentile() -> Measured:
        clock.now_s += 10.0
        return Measured(0.004)

    (result,) = run(Case("p99", MILLISECONDS, yields(Trial(percentile))), folder=tmp_path, clock=clock).rows
    assert result.value == 4.0


def test_number_returned_by_chance_is_no_measurement(tmp_path: Path) -> None:
    trial = Trial(lambda: 4096)  # type: ignore[arg-type, return-value]  # what the type checker would refuse
    with pytest.raises(AssertionError, match="Measured"):
        run(Case("write", SECONDS, yields(trial)), folder=tmp_path)


def test_garbage_of_one_side_is_collected_before_the_other_is_timed(tmp_path: Path) -> None:
    alive: list[bool] = []

    class Node:
        itself: Node

    def litter() -> None:
        node = Node()
        node.itself = node

    def count() -> None:
        # By type, which asks the objects nothing: there are libraries whose objects answer with warnings.
        alive.append(any(type(thing) is Node for thing in gc.get_objects()))
        assert gc.isenabled()

    trial = Trial(subject=count, baseline=litter)
    run(Case("pair", SECONDS, yields(trial)), folder=tmp_path, choice=Choice(runs=2), clock=_ticking())
    assert alive == [False] * 3


def _ticking() -> FakeClock:
    """A clock that moves with every look, for calls that do not move it themselves."""

    class Ticking(FakeClock):
        def __call__(self) -> float:
            self.now_s += 1.0
            return self.now_s

    return Ticking()


def test_note_says_where_rounds_are_too_few_for_bounds(tmp_path: Path) -> None:
    clock = FakeClock()
    trial = Trial(clock.takes("s", 1.0), clock.takes("b", 1.0), note="buffered")
    case = Case("pair", SECONDS, yields(trial))
    assert run(case, folder=tmp_path, choice=Choice(runs=5), clock=clock).rows[0].note == "buffered"
    assert "too few rounds" in run(case, folder=tmp_path, choice=Choice(runs=4), clock=clock).rows[0].note


def test_each_case_has_an_empty_folder_that_is_removed(tmp_path: Path) -> None:
    folders: list[Path] = []

    def setup(setting: Setting) -> Iterator[Trial]:
        assert list(setting.folder.iterdir()) == []
        (setting.folder / "segment").write_bytes(b"x")
        folders.append(setting.folder)
        yield Trial(lambda: Measured(1.0))

    run(Case("a", SECONDS, setup), Case("b", SECONDS, setup), folder=tmp_path)
    assert len(set(folders)) == 2
    assert list(tmp_path.iterdir()) == []


def test_failed_round_tears_down_and_leaves_no_file(tmp_path: Path) -> None:
    torn_down: list[bool] = []

    def setup(setting: Setting) -> Iterator[Trial]:
        (setting.folder / "segment").write_bytes(b"x")
        try:
            yield Trial(fail)
        finally:
            torn_down.append(True)

    def fail() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        run(Case("a", SECONDS, setup), folder=tmp_path)
    assert torn_down == [True]
    assert list(tmp_path.iterdir()) == []


def plain(name: str, *, is_long: bool = False) -> Case:
    return Case(name, SECONDS, yields(Trial(lambda: Measured(1.0))), runs=7, quick_runs=3, is_long=is_long)


def test_quick_leaves_out_long_cases_and_says_so(tmp_path: Path) -> None:
    log = io.StringIO()
    choice = Choice(is_quick=True)
    report = run(plain("short"), plain("reopen", is_long=True), folder=tmp_path, choice=choice, log=log)
    assert [(result.name, result.runs) for result in report.rows] == [("short", 3)]
    assert report.left_out == (LeftOut("reopen", "too long for --quick"),)
    assert "left out: reopen (too long for --quick)" in log.getvalue()


def test_only_runs_the_named_cases_and_runs_sets_their_rounds(tmp_path: Path) -> None:
    choice = Choice(only=("b",), runs=2)
    report = run(plain("a"), plain("b", is_long=True), folder=tmp_path, choice=choice)
    assert [(result.name, result.runs) for result in report.rows] == [("b", 2)]
    assert report.left_out == (LeftOut("a", "not in --only"),)


def test_unknown_name_in_only_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="fake has no row c; it has a, b"):
        choose_cases(Benchmark("fake", (plain("a"), plain("b"))), Choice(only=("a", "c")))


def test_nothing_left_to_run_is_an_error() -> None:
    with pytest.raises(ConfigError, match="too long for --quick"):
        choose_cases(Benchmark("fake", (plain("a", is_long=True),)), Choice(is_quick=True))


def test_quick_gives_each_case_a_share_of_the_time_and_at_least_three_rounds(tmp_path: Path) -> None:
    clock = FakeClock()
    log = io.StringIO()
    slow = Case("slow", SECONDS, yields(Trial(clock.takes("slow", QUICK_BUDGET_S))), quick_runs=9, warmups=0)
    # After the slow case nothing is left of the budget, so the next one gets the least there is.
    next_one = Case("next", SECONDS, yields(Trial(clock.takes("next", 1.0))), quick_runs=9, warmups=0)
    report = run(slow, next_one, folder=tmp_path, choice=Choice(is_quick=True), clock=clock, log=log)
    assert [result.runs for result in report.rows] == [ROUNDS_MIN, ROUNDS_MIN]
    assert report.rows[0].note.startswith("stopped after 3 of 9 rounds")
    assert "slow: stopped after 3 of 9 rounds" in log.getvalue()


def test_time_a_case_does_not_use_goes_to_the_next(tmp_path: Path) -> None:
    clock = FakeClock()
    fast = Case("fast", SECONDS, yields(Trial(clock.takes("fast", 0.1))), quick_runs=5, warmups=0)
    # Five rounds of 7 s are 35 s: more than half of the budget, less than what the fast case leaves.
    slow = Case("slow", SECONDS, yields(Trial(clock.takes("slow", 7.0))), quick_runs=5, warmups=0)
    report = run(fast, slow, folder=tmp_path, choice=Choice(is_quick=True), clock=clock)
    assert [result.runs for result in report.rows] == [5, 5]


def test_full_run_has_no_time_budget(tmp_path: Path) -> None:
    clock = FakeClock()
    slow = Case("slow", SECONDS, yields(Trial(clock.takes("slow", 1000.0))), runs=5, warmups=0)
    assert run(slow, folder=tmp_path, clock=clock).rows[0].runs == 5


def test_two_cases_of_one_name_are_refused() -> None:
    with pytest.raises(AssertionError, match="share a name"):
        Benchmark("fake", (plain("a"), plain("a")))


def test_progress_in_a_log_is_a_line_for_each_case(tmp_path: Path) -> None:
    log = io.StringIO()
    run(plain("a"), plain("b"), folder=tmp_path, choice=Choice(runs=2), log=log)
    assert log.getvalue().splitlines() == ["a: set-up", "b: set-up"]


def test_progress_on_a_terminal_is_one_line_that_is_cleared_at_the_end(tmp_path: Path) -> None:
    log = Terminal()
    run(plain("a"), folder=tmp_path, choice=Choice(runs=2), log=log)
    assert "\n" not in log.getvalue()
    assert log.getvalue().endswith("\r\x1b[Ka: round 2/2\r\x1b[K")


def verdict(bar: Bar, *rows: Row, left_out: tuple[LeftOut, ...] = ()) -> tuple[State, str]:
    (only,) = judge([bar], rows, left_out)
    return only.state, str(only)


@pytest.mark.parametrize(
    ("operator", "limit", "state"),
    [
        ("<=", 2.0, State.MET),
        ("<=", 1.9, State.MISSED),
        ("<", 2.0, State.MISSED),
        ("<", 2.1, State.MET),
        (">=", 2.0, State.MET),
        (">=", 2.1, State.MISSED),
        (">", 2.0, State.MISSED),
        (">", 1.9, State.MET),
        ("==", 2.0, State.MET),
        ("==", 2.1, State.MISSED),
    ],
)
def test_value_bar_compares_the_value(operator: str, limit: float, state: State) -> None:
    bar = Bar("write", "value", operator, limit)  # type: ignore[arg-type]  # all of them are operators
    assert verdict(bar, row(value=2.0))[0] is state


@pytest.mark.parametrize(
    ("operator", "limit", "state"),
    [
        (">=", 0.95, State.MET),  # on the good side of the median
        (">=", 0.99, State.MET),  # between the median and the upper bound: may be noise
        (">=", 1.0, State.MET),
        (">=", 1.01, State.MISSED),
        (">", 1.0, State.MISSED),
        ("<=", 0.92, State.MET),
        ("<=", 0.9, State.MET),
        ("<=", 0.89, State.MISSED),
        ("<", 0.9, State.MISSED),
        ("==", 0.91, State.MET),
        ("==", 0.89, State.MISSED),
        ("==", 1.01, State.MISSED),
    ],
)
def test_ratio_bar_is_missed_only_beyond_the_bounds(operator: str, limit: float, state: State) -> None:
    bar = Bar("write", "ratio", operator, limit)  # type: ignore[arg-type]  # all of them are operators
    assert verdict(bar, row(ratio=Ratio(0.96, 0.9, 1.0, is_bounded=True)))[0] is state


def test_missed_bar_says_by_how_much_and_what_the_bounds_were() -> None:
    ratio = Ratio(0.8, 0.78, 0.83, is_bounded=True)
    assert verdict(Bar("write", "ratio", ">=", 0.9), row(ratio=ratio))[1] == (
        "MISSED: write ratio >= 0.9: 0.8 (90 % bounds 0.78 to 0.83), 0.1 (11.1 %) below the limit"
    )
    assert verdict(Bar("write", "value", "<=", 3), row(value=3.3))[1] == (
        "MISSED: write value <= 3: 3.3 GB/s, 0.3 (10.0 %) above the limit"
    )
    assert verdict(Bar("write", "value", "==", 0), row(value=2))[1] == (
        "MISSED: write value == 0: 2 GB/s, 2 above the limit"
    )


def test_bar_met_by_the_bounds_alone_says_so() -> None:
    text = verdict(Bar("write", "ratio", ">=", 0.9), row(ratio=Ratio(0.88, 0.8, 0.92, is_bounded=False)))[1]
    assert text.startswith("met: ")
    assert "which may be noise" in text
    assert "too few rounds for 90 % bounds" in text


def test_bar_of_a_row_left_out_is_not_measured() -> None:
    left_out = (LeftOut("reopen", "too long for --quick"),)
    state, text = verdict(Bar("reopen", "value", "<=", 3), row("write"), left_out=left_out)
    assert state is State.NOT_MEASURED
    assert text == "not measured: reopen value <= 3: too long for --quick"


def test_bar_without_a_row_is_missed() -> None:
    assert verdict(Bar("typo", "value", "<=", 3), row("write"))[0] is State.MISSED


def test_ratio_bar_of_a_plain_row_is_missed() -> None:
    assert verdict(Bar("write", "ratio", ">=", 0.9), row(ratio=None))[0] is State.MISSED


def test_json_has_the_published_shape() -> None:
    paired = row(ratio=Ratio(0.5, 0.4, 0.6, is_bounded=True))
    document = json.loads(as_json(Report((paired, row("plain")), MACHINE)))
    assert list(document) == ["rows", "machine"]
    assert document["rows"][0] == {
        "name": "write",
        "value": 1.0,
        "unit": "GB/s",
        "baseline": 2.0,
        "ratio": 0.5,
        "ratio_low": 0.4,
        "ratio_high": 0.6,
        "runs": 11,
        "note": "",
    }
    assert document["rows"][1]["baseline"] is document["rows"][1]["ratio"] is None
    assert document["machine"]["cpu"] == "a CPU"


def test_json_names_what_was_left_out_and_why() -> None:
    document = json.loads(as_json(Report((row(),), MACHINE, (LeftOut("reopen", "long"),))))
    assert document["left_out"] == [{"name": "reopen", "reason": "long"}]


def test_not_a_number_is_refused_by_the_report() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json(Report((row(value=float("nan")),), MACHINE))


def test_output_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    write_json(Report((row(),), MACHINE), target)
    assert json.loads(target.read_text())["rows"][0]["name"] == "write"
    assert list(tmp_path.iterdir()) == [target]


def test_report_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(Report((row(value=float("inf")),), MACHINE), target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_table_lines_up_and_shows_notes_and_what_was_left_out() -> None:
    rows = (
        row("write", value=1.8234, ratio=Ratio(0.962, 0.951, 0.97, is_bounded=True)),
        row("blocks", value=1_000_000, note="counted"),
        row("tiny", value=0.000123),
    )
    lines = as_table(Report(rows, MACHINE, (LeftOut("reopen", "long"),))).splitlines()
    assert lines[:7] == [
        "row         value  unit  baseline  ratio        bounds  runs",
        "write        1.82  GB/s      1.90  0.962  0.951..0.970    11",
        "blocks  1,000,000  GB/s         -      -             -    11",
        "tiny     0.000123  GB/s         -      -             -    11",
        "",
        "blocks: counted",
        "left out, long: reopen",
    ]
    assert lines[-1].startswith("a CPU, 8 cores, 16.0 GiB, ext4 with O_DIRECT, Linux 6")


def test_machine_is_described_without_leaving_a_file(tmp_path: Path) -> None:
    machine = describe_machine(tmp_path)
    assert machine.cores >= 1
    assert machine.memory_bytes > 0
    assert machine.cpu
    assert machine.date.endswith("+00:00")
    assert list(tmp_path.iterdir()) == []


def test_hidden_files_of_the_kernel_cost_a_detail_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hide(path: Path) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_text", hide)
    assert describe_machine(tmp_path).filesystem == "unknown"


@pytest.mark.parametrize("refusal", ["open", "write"])
def test_filesystem_may_refuse_o_direct_at_open_or_at_the_first_write(
    refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if refusal == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        # Without the right to write, the write is what fails.
        return real_open(path, os.O_RDONLY if flags & os.O_DIRECT else flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    assert not describe_machine(tmp_path).has_o_direct
    assert list(tmp_path.iterdir()) == []


def test_cpu_is_named_on_x86_and_on_arm_and_where_nothing_is_known() -> None:
    assert cpu_model("processor : 0\nmodel name : Fast 9000\nmodel name : Fast 9000\n") == "Fast 9000"
    assert "implementer 0x41 part 0xd0c" in cpu_model("CPU implementer : 0x41\nCPU part : 0xd0c\n")
    assert cpu_model("")


def test_filesystem_is_that_of_the_deepest_and_latest_mount() -> None:
    mountinfo = "\n".join(
        [
            "29 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
            "30 29 0:27 / /mnt/my\\040disk rw shared:1 - tmpfs tmpfs rw",
            "31 30 0:28 / /mnt/my\\040disk rw - xfs /dev/nvme0n1 rw",
            "32 29 0:29 / /mnt/my rw - nfs4 server:/ rw",
        ]
    )
    assert filesystem_type(Path("/mnt/my disk/bench"), mountinfo) == "xfs"
    assert filesystem_type(Path("/mnt/mine"), mountinfo) == "ext4"
    assert filesystem_type(Path("/mnt"), "") == "unknown"
