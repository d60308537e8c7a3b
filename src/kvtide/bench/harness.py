# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of a benchmark, so that both sides of a pair meet the same machine.

Machines drift: chips heat up, neighbours wake, disks tidy up. So both sides run in one process, one right
after the other, and the order turns with every round: baseline-subject, subject-baseline, and so on.
What drifts slowly cancels in the ratio of a round; what the first call does to the second hits both sides
equally often. Warm-up rounds come first and are not counted.

The garbage collector stays on, because users pay for it too: with it off, a side that allocates much would
look better than it is. But it also runs before each call, outside the timing, so that a call pays for its
own garbage and not for what the other side left.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from kvtide.bench.case import QUICK_BUDGET_S as QUICK_BUDGET_S
from kvtide.bench.case import Benchmark, Case, Measure, Measured, Setting, Trial
from kvtide.bench.machine import describe_machine
from kvtide.bench.progress import Progress
from kvtide.bench.report import Report
from kvtide.bench.row import Difference, LeftOut, Ratio, Row
from kvtide.deadline import NEVER, Clock, Deadline
from kvtide.errors import ConfigError

# Fewer rounds than this say nothing, so every case gets them even when the time is up.
ROUNDS_MIN = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """What of a benchmark to run: the cases named in `only` (empty: all), and `runs` instead of their own."""

    only: tuple[str, ...] = ()
    runs: int | None = None
    is_quick: bool = False

    def rounds(self, case: Case) -> int:
        if self.runs is not None:
            return self.runs
        return case.quick_runs if self.is_quick else case.runs


def run_benchmark(
    benchmark: Benchmark,
    choice: Choice,
    folder: Path,
    progress: Progress,
    clock: Clock = time.perf_counter,
) -> Report:
    """Run the chosen cases in their order. `folder` has to exist; what cases write there is removed again.

    In a quick run every case gets an equal share of the time that is left, so a slow one cannot starve the
    next; what it does not use goes to those after it.
    """
    cases, left_out = choose_cases(benchmark, choice)
    if left_out:
        progress.say("left out: " + ", ".join(f"{row.name} ({row.reason})" for row in left_out))
    machine = describe_machine(folder)
    budget = Deadline.after(benchmark.quick_budget_s, clock) if choice.is_quick else NEVER
    rows = []
    try:
        for index, case in enumerate(cases):
            share = Deadline.after(budget.left_s / (len(cases) - index), clock)
            with TemporaryDirectory(dir=folder, prefix="case-") as own:
                rows.append(_run_case(case, choice, Path(own), share, progress))
    finally:
        progress.clear()
    return Report(tuple(rows), machine, left_out)


def choose_cases(benchmark: Benchmark, choice: Choice) -> tuple[list[Case], tuple[LeftOut, ...]]:
    """Split the cases into those to run and those left out, with the reason. At least one is to run."""
    known = [case.name for case in benchmark.cases]
    unknown = [name for name in choice.only if name not in known]
    if unknown:
        raise ConfigError(f"{benchmark.name} has no row {', '.join(unknown)}; it has {', '.join(known)}")
    cases: list[Case] = []
    left_out: list[LeftOut] = []
    for case in benchmark.cases:
        if choice.only and case.name not in choice.only:
            left_out.append(LeftOut(case.name, "not in --only"))
        elif choice.is_quick and case.is_long:
            left_out.append(LeftOut(case.name, "too long for --quick"))
        else:
            cases.append(case)
    if not cases:
        raise ConfigError("nothing to run: every chosen row is too long for --quick")
    return cases, tuple(left_out)


def _run_case(case: Case, choice: Choice, folder: Path, share: Deadline, progress: Progress) -> Row:
    progress.update(f"{case.name}: set-up")

    def tell(text: str) -> None:
        progress.update(f"{case.name}: {text}")

    with contextmanager(case.setup)(Setting(folder, choice.is_quick, tell)) as trial:
        for index in range(case.warmups):
            progress.update(f"{case.name}: warm-up {index + 1}/{case.warmups}")
            _run_round(trial, index, share.clock)
        rounds = choice.rounds(case)
        samples: list[_Sample] = []
        while len(samples) < rounds and not (len(samples) >= ROUNDS_MIN and share.has_passed):
            progress.update(f"{case.name}: round {len(samples) + 1}/{rounds}")
            samples.append(_run_round(trial, len(samples), share.clock))
        note = trial.note() if callable(trial.note) else trial.note
    notes = [note] if note else []
    if len(samples) < rounds:
        notes.append(f"stopped after {len(samples)} of {rounds} rounds: its share of the --quick time is up")
        progress.say(f"{case.name}: {notes[-1]}")
    return _make_row(case, trial, samples, notes, choice.is_quick)


@dataclass(frozen=True, slots=True)
class _Sample:
    """What one round measured; `baseline` is None in a plain case."""

    subject: float
    baseline: float | None


def _run_round(trial: Trial, index: int, clock: Clock) -> _Sample:
    if trial.baseline is None:
        return _Sample(_measure(trial.subject, clock), None)
    if index % 2 == 0:
        baseline = _measure(trial.baseline, clock)
        return _Sample(_measure(trial.subject, clock), baseline)
    subject = _measure(trial.subject, clock)
    return _Sample(subject, _measure(trial.baseline, clock))


def _measure(call: Measure, clock: Clock) -> float:
    gc.collect()
    start_s = clock()
    measured = call()
    elapsed_s = clock() - start_s
    assert measured is None or isinstance(measured, Measured), "a call returns nothing, or what it Measured"
    return elapsed_s if measured is None else measured.figure


def _make_row(case: Case, trial: Trial, samples: Sequence[_Sample], notes: list[str], is_quick: bool) -> Row:
    values = [case.unit.value(sample.subject, trial.work) for sample in samples]
    baselines = [case.unit.value(s.baseline, trial.work) for s in samples if s.baseline is not None]
    ratio = difference = None
    if baselines:
        ratio = Ratio.of([value / baseline for value, baseline in zip(values, baselines, strict=True)])
        if case.compare == "difference":
            difference = Difference.of([value - base for value, base in zip(values, baselines, strict=True)])
        if not ratio.is_bounded:
            notes = [*notes, "too few rounds for 90 % bounds; shown are the smallest and the largest ratio"]
    return Row(
        name=case.name,
        value=median(values),
        unit=case.unit.name,
        baseline=median(baselines) if baselines else None,
        ratio=ratio,
        runs=len(samples),
        note="; ".join(notes),
        difference=difference,
        is_quick=is_quick,
    )
