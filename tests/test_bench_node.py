# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the node service, in sizes that say nothing about speed: that every row runs and ends."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtide.bench.bars import Bar, State, judge
from kvtide.bench.case import MILLISECONDS, SECONDS, Benchmark, Case, Measured, Setting, Trial
from kvtide.bench.harness import Choice, run_benchmark
from kvtide.bench.node import BENCHMARK, copies, kill, load, rpc, timing
from kvtide.bench.node.common import Campaign, auc, open_files, quantile, resident_bytes
from kvtide.bench.node.crew import Job, Orders, Tally, Worker, crew, together
from kvtide.bench.progress import Progress
from kvtide.bench.report import Report, as_table
from kvtide.bench.row import Difference, Ratio, Row

_MIB = 1 << 20


def run(*cases: Case, folder: Path, is_quick: bool = False, runs: int | None = 1) -> Report:
    choice = Choice(runs=runs, is_quick=is_quick)
    return run_benchmark(Benchmark("node", cases), choice, folder, Progress(io.StringIO()))


def case(*samples: tuple[float, float], compare: str = "difference") -> Case:
    """One whose rounds measure these pairs of subject and baseline, in seconds."""
    subjects, baselines = (iter([pair[i] for pair in samples]) for i in (0, 1))

    def setup(setting: Setting) -> Iterator[Trial]:
        yield Trial(lambda: Measured(next(subjects)), lambda: Measured(next(baselines)), note=lambda: "late")

    assert compare in ("ratio", "difference")
    return Case("call", MILLISECONDS, setup, runs=len(samples), quick_runs=len(samples), warmups=0, compare=compare)  # type: ignore[arg-type]  # just checked


# The harness: differences, bars of quick runs, notes that come late, progress in logs ------------------------


def test_a_difference_is_the_median_of_pairs_in_the_rows_unit(tmp_path: Path) -> None:
    pairs = [(0.003, 0.001), (0.009, 0.005), (0.004, 0.001), (0.013, 0.010), (0.003, 0.002)]
    (row,) = run(case(*pairs), folder=tmp_path, runs=None).rows
    assert row.difference is not None
    assert row.difference.median == pytest.approx(3.0)
    assert (row.difference.low, row.difference.high) == (pytest.approx(1.0), pytest.approx(4.0))
    assert row.as_json()["difference"] == row.difference.median
    assert row.note == "late"


def test_only_rows_that_compare_by_difference_have_one(tmp_path: Path) -> None:
    (row,) = run(case((2.0, 1.0), compare="ratio"), folder=tmp_path).rows
    assert row.difference is None
    assert "difference" not in row.as_json()


def difference_row(low: float, middle: float, high: float) -> Row:
    spread = Difference(middle, low, high, is_bounded=True)
    return Row("call", 1.0, "ms", 0.5, Ratio(2.0, 2.0, 2.0, is_bounded=True), 11, difference=spread)


def test_a_difference_misses_its_bar_only_where_its_bounds_lie_beyond_it() -> None:
    bar = Bar("call", "difference", "<=", 0.5)
    states = [judge([bar], [difference_row(*bounds)], [])[0].state for bounds in [(0.2, 0.6, 0.7), (0.51, 0.6, 0.7)]]
    assert states == [State.MET, State.MISSED]


def test_a_bar_on_a_difference_that_was_not_made_is_missed() -> None:
    plain = Row("call", 1.0, "ms", None, None, 11)
    (verdict,) = judge([Bar("call", "difference", "<=", 0.5)], [plain], [])
    assert verdict.state is State.MISSED
    assert "no difference" in verdict.reason


def test_a_difference_is_shown_with_its_sign() -> None:
    report = run_report(difference_row(0.2, 0.25, 0.3))
    assert "+0.250  +0.200..+0.300" in as_table(report)


def run_report(row: Row) -> Report:
    from kvtide.bench.machine import describe_machine

    return Report((row,), describe_machine(Path.cwd()))


@pytest.mark.parametrize(("is_quick", "state"), [(True, State.MET), (False, State.MISSED)])
def test_a_quick_run_is_held_to_the_bar_of_quick_runs_and_says_so(is_quick: bool, state: State, tmp_path: Path) -> None:
    report = run(case((0.005, 0.001)), folder=tmp_path, is_quick=is_quick)
    (verdict,) = judge([Bar("call", "value", "<=", 2, quick_limit=9)], report.rows, [])
    assert verdict.state is state
    assert ("a quick run's limit" in verdict.reason) == is_quick


def test_a_log_hears_of_a_long_topic_now_and_then() -> None:
    now_s = [0.0]
    log = io.StringIO()
    progress = Progress(log, clock=lambda: now_s[0])
    for second in range(0, 100, 10):
        now_s[0] = float(second)
        progress.update(f"load: {second} s")
    assert log.getvalue().splitlines() == ["load: 0 s", "load: 30 s", "load: 60 s", "load: 90 s"]


def test_a_setup_can_tell_how_far_it_is(tmp_path: Path) -> None:
    def setup(setting: Setting) -> Iterator[Trial]:
        setting.tell("half")
        yield Trial(lambda: Measured(1.0))

    log = io.StringIO()
    log.isatty = lambda: True  # type: ignore[method-assign]  # a terminal shows every line
    run_benchmark(Benchmark("b", (Case("fill", SECONDS, setup),)), Choice(runs=1), tmp_path, Progress(log))
    assert "fill: half" in log.getvalue()


# Figures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lower", "higher", "area"),
    [
        ([1, 2, 3], [4, 5], 1.0),
        ([4, 5], [1, 2, 3], 0.0),
        ([1, 1], [1, 1, 1], 0.5),
        ([1, 2], [2, 3], 0.875),
        ([1, 4], [2, 3], 0.5),
    ],
)
def test_auc_counts_pairs_and_ties_half(lower: list[float], higher: list[float], area: float) -> None:
    assert auc(lower, higher) == pytest.approx(area)
    pairs = [(low < high) + (low == high) / 2 for low in lower for high in higher]
    assert auc(lower, higher) == pytest.approx(np.mean(pairs))


def test_a_quantile_of_nothing_is_a_mistake() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    with pytest.raises(AssertionError):
        quantile([], 0.5)


def test_a_process_has_memory_and_files() -> None:
    assert resident_bytes(os.getpid()) > _MIB
    assert open_files(os.getpid()) >= 3


def test_an_open_loop_counts_from_when_a_call_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(rpc.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(rpc.time, "sleep", lambda seconds: now_s.__setitem__(0, now_s[0] + seconds))
    takes_s = iter([0.25, 0.01, 0.01])  # the first is late for two more

    def ask() -> float:
        now_s[0] += next(takes_s)
        return now_s[0]

    assert rpc.open_loop(ask, 0.3, 10) == pytest.approx([0.25, 0.16, 0.07])


def test_a_campaign_runs_once_for_all_its_rows(tmp_path: Path) -> None:
    runs: list[bool] = []

    def campaign_run(setting: Setting) -> int:
        runs.append(setting.is_quick)
        return len(runs)

    campaign = Campaign(campaign_run, str)
    report = run(campaign.case("a", SECONDS, float), campaign.case("b", SECONDS, lambda n: n + 1), folder=tmp_path)
    assert [row.value for row in report.rows] == [1, 2]
    assert runs == [False]


# Workers ---------------------------------------------------------------------------------------------------


class Echo(Job):
    """What the tests below have a worker do."""

    def __init__(self, orders: Orders, tally: str) -> None:
        super().__init__(orders)
        self._tally = Tally(Path(tally), ("said", "ended"))

    def say(self, start_s: float, word: str) -> str:
        self._tally.add("said")
        return word

    def until_told(self) -> str:
        while not self.orders.are_waiting:
            pass
        return "told"

    def fail(self) -> None:
        os._exit(1)

    def close(self) -> None:
        self._tally.add("ended")


ECHO = "test_bench_node:Echo"


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a worker import this file."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.usefixtures("as_worker")
def test_workers_answer_count_where_it_outlives_them_and_end(tmp_path: Path) -> None:
    paths = [tmp_path / "0", tmp_path / "1"]
    tallies = [Tally(path, ("said", "ended")) for path in paths]
    with crew(ECHO, [{"tally": str(path)} for path in paths]) as workers:
        _, answers = together(workers, "say", word="hello")
        workers[0].tell("until_told")
        assert workers[0].ask("say", start_s=0.0, word="last") == "told"
        assert workers[0].hear() == "last"
        assert workers[1].is_alive
        workers[1].kill()
        assert not workers[1].is_alive
        workers[1] = Worker(ECHO, tally=str(paths[1]))
        workers[1].hear()
    assert answers == ["hello", "hello"]
    assert [(tally["said"], tally["ended"]) for tally in tallies] == [(2, 1), (1, 1)]


@pytest.mark.usefixtures("as_worker")
def test_a_worker_that_dies_fails_the_row_and_takes_the_others_with_it(tmp_path: Path) -> None:
    started: list[Worker] = []

    def fail() -> None:
        with crew(ECHO, [{"tally": str(tmp_path / name)} for name in "ab"]) as workers:
            started.extend(workers)
            workers[0].ask("fail")

    with pytest.raises(AssertionError, match="has died"):
        fail()
    assert [worker.is_alive for worker in started] == [False, False]


# Rows, in small --------------------------------------------------------------------------------------------


def test_every_bar_has_its_row() -> None:
    assert {bar.row for bar in BENCHMARK.bars} <= {each.name for each in BENCHMARK.cases}


def test_rows_of_calls_run_and_end(tmp_path: Path) -> None:
    size = rpc.Size(
        blocks=8,
        clients=2,
        loop_s=0.01,
        crowd_s=0.05,
        paced_s=0.05,
        beside_s=0.1,
        dram_bytes=16 * _MIB,
        stream_page_bytes=64,
        stream_chains=3,
        stream_chain_blocks=2,
    )
    cases = [each for each in rpc.make_cases(size) if each.name not in ("rpc-one", "rpc-eight-p99")]  # as others
    report = run(*cases, folder=tmp_path)
    assert all(row.value > 0 and row.baseline for row in report.rows)
    assert [row.name for row in report.rows if row.difference] == ["rpc-eight-p50"]


def test_rows_of_copies_run_and_end(tmp_path: Path) -> None:
    size = copies.Size(blocks=4, passes=2, page_bytes=64, many=2)
    chosen = ("client-read-4", "client-write-single")
    report = run(*(each for each in copies.make_cases(size) if each.name in chosen), folder=tmp_path)
    assert all(row.ratio is not None and row.unit == "GB/s" for row in report.rows)


def test_a_load_ends_with_nothing_wrong_and_nothing_left(tmp_path: Path) -> None:
    told: list[str] = []
    size = load.Size(
        duration_s=6.0,  # on a crowded machine the first second may pass before anything is saved
        clients=2,
        dram_bytes=32 * _MIB,
        disk_bytes=256 * _MIB,
        filled_chains=2,
        filled_chain_blocks=16,
        chains_first=8,
        chains_last=12,
        kill_every_s=1.0,
    )
    result = load.run_load(tmp_path, size, 1, told.append)
    assert result.counts["compared"] > 0
    assert (result.counts["wrong"], result.leases_left, result.files_grown, result.clients_lost) == (0, 0, 0, 0)
    assert (result.kills >= 1, result.blocks_known, len(result.resident) >= 2) == (True, 32, True)
    assert "blocks compared" in told[-1]
    assert "killed" in str(result)


def test_growth_is_from_the_first_half_to_the_second() -> None:
    result = load.Result(1.0, {}, 0, 0, 0, 0, (100, 100, 130, 110, 110, 90), 0, 0)
    assert result.growth_percent == pytest.approx(10.0)


def test_probes_of_another_tenant_are_all_made(tmp_path: Path) -> None:
    size = timing.Size(
        probes=20, control_probes=20, prompts=4, prompt_blocks=4, dram_bytes=32 * _MIB, disk_bytes=64 * _MIB
    )
    result = timing.run_timing(tmp_path, size, 1, lambda _: None)
    areas = (result.attack, result.control, result.flood_attack, result.flood_control)
    assert all(0 <= area <= 1 for area in areas)
    assert "20 probes" in str(result)


def test_clients_survive_kills_of_the_service(tmp_path: Path) -> None:
    size = kill.Size(kills=1, clients=2, chains=4, chain_blocks=2, dram_bytes=32 * _MIB, disk_bytes=64 * _MIB, up_s=0.2)
    result = kill.run_kills(tmp_path, size, 1, lambda _: None)
    assert (result.counts["wrong"], len(result.back_s)) == (0, 1)
    assert result.counts["hits"] > 0
    assert "1 kills" in str(result)
