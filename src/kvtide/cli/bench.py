# SPDX-License-Identifier: Apache-2.0
"""`kvtide bench NAME`: run a benchmark, print its rows, and with `--check` hold them to their bars.

Results go to stdout, progress and verdicts to stderr, so `--format json` can be piped.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtide.bench.bars import State, judge
from kvtide.bench.case import Benchmark
from kvtide.bench.harness import Choice, run_benchmark
from kvtide.bench.progress import Progress
from kvtide.bench.registry import BENCHMARKS, load_benchmark
from kvtide.bench.report import Report, as_json, as_table, write_json
from kvtide.config.defaults import user_cache_folder
from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from kvtide.cli.main import Subparsers

_DESCRIPTION = """\
Run a benchmark of kvtide on this machine.

Rows with a baseline are paired: both sides run in every round, in one process, and their order turns with
each round. The ratio is the median over the rounds; its bounds hold the true median at 90 %."""

_EXIT_MISSED = 1
_EXIT_TERMINATED = 143  # 128 + SIGTERM, as a shell reports it


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=list(BENCHMARKS), help="what to measure")
    parser.add_argument("--only", type=_names, default=(), metavar="NAME[,NAME]", help="run only these rows")
    parser.add_argument("--runs", type=_positive, metavar="N", help="rounds of every row (default: its own)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and shorter ones: a few minutes at most")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--format", choices=["table", "json"], default="table", help="default: table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON to this file as well")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="where rows that use a disk write, and clean up after (default: ~/.cache/kvtide/bench)",
    )


def run(args: argparse.Namespace) -> int:
    benchmark = load_benchmark(args.benchmark)
    output: Path | None = args.output
    if output is not None and not output.parent.is_dir():  # said before minutes of measuring, not after
        raise ConfigError(f"--output {output}: there is no folder {output.parent}")
    choice = Choice(only=args.only, runs=args.runs, is_quick=args.quick)
    with _sigterm_unwinds():
        report = run_benchmark(benchmark, choice, _make_folder(args.folder), Progress(sys.stderr))
    if output is not None:
        write_json(report, output)
    print(as_json(report) if args.format == "json" else as_table(report), flush=True)
    return _check(benchmark, report) if args.check else 0


def _check(benchmark: Benchmark, report: Report) -> int:
    """Print each bar's verdict. A check that judged no bar is a failure too: it could not have failed."""
    verdicts = judge(benchmark.bars, report.rows, report.left_out)
    for verdict in verdicts:
        print(verdict, file=sys.stderr)
    states = [verdict.state for verdict in verdicts]
    if State.MISSED in states:
        return _EXIT_MISSED
    if State.MET not in states:
        print("nothing was checked: no bar belongs to a row that was measured", file=sys.stderr)
        return _EXIT_MISSED
    return 0


def _make_folder(wanted: Path | None) -> Path:
    """Create the folder for disk files. Not under /tmp by default, which is memory on many systems."""
    folder = wanted or user_cache_folder() / "bench"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {folder} ({error.strerror}); choose another --folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to {folder}; choose another --folder")
    return folder


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM, as from `timeout`, end a run through its tear-downs: there may be gigabytes to remove."""

    def leave(_signum: int, _frame: object) -> None:
        sys.exit(_EXIT_TERMINATED)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number
