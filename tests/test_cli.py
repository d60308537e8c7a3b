# SPDX-License-Identifier: Apache-2.0
"""The command `kvtide`: what it prints where, and with which code it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvtide import __version__
from kvtide.bench.bars import Bar
from kvtide.bench.case import SECONDS, Benchmark, Case, Measured, Setting, Trial
from kvtide.bench.registry import BENCHMARKS
from kvtide.cli.main import VERBS, Verb, main
from kvtide.errors import ConfigError

Register = Callable[[Benchmark], None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Register:
    """Add a benchmark to the command, and keep its files under the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def register(benchmark: Benchmark) -> None:
        module = ModuleType("fake_bench")
        module.BENCHMARK = benchmark  # type: ignore[attr-defined]  # a module has what one puts there
        monkeypatch.setitem(sys.modules, "fake_bench", module)
        monkeypatch.setitem(BENCHMARKS, benchmark.name, "fake_bench:BENCHMARK")

    return register


def case(name: str, seconds: float, *, baseline: float | None = None, is_long: bool = False) -> Case:
    def setup(setting: Setting) -> Iterator[Trial]:
        side = None if baseline is None else lambda: Measured(baseline)
        yield Trial(lambda: Measured(seconds), side)

    return Case(name, SECONDS, setup, is_long=is_long)


def fake(*bars: Bar) -> Benchmark:
    return Benchmark("fake", (case("fetch", 3.0, baseline=2.0), case("reopen", 9.0, is_long=True)), bars)


def raises(error: BaseException) -> Benchmark:
    def fail() -> None:
        raise error

    def setup(setting: Setting) -> Iterator[Trial]:
        yield Trial(fail)

    return Benchmark("fake", (Case("a", SECONDS, setup),))


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"kvtide {__version__}\n"


def test_help_names_every_verb_and_imports_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERBS, "absent", Verb("kvtide.cli.no_such_module", "is never imported"))
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text and verb.summary in text for name, verb in VERBS.items())


def test_unknown_verb_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["nonsense"])
    assert "bench" in capsys.readouterr().err


def test_no_verb_is_a_usage_error() -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_error_of_kvtide_is_one_line_and_exit_2(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(raises(ConfigError("the disk is a teapot")))
    assert main(["bench", "fake"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "kvtide: error: the disk is a teapot"


def test_interrupt_exits_130_and_says_nothing_more(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(raises(KeyboardInterrupt()))
    assert main(["bench", "fake"]) == 130
    assert capsys.readouterr().err == "a: set-up\n"


def test_reader_that_goes_away_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = (
        "import sys, kvtide.cli.bench as bench; from kvtide.cli.main import main;"
        "bench.run = lambda args: print('a row') or 0; sys.exit(main(['bench', 'store']))"
    )
    try:
        ended = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_missing_extra_is_told_with_its_pip_line(
    register: Register, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_extra.py").write_text(
        "from kvtide.errors import MissingExtra\n"
        "raise MissingExtra(\"this needs the package gold: pip install 'kvtide[gold]'\")\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(BENCHMARKS, "fake", "needs_extra:BENCHMARK")
    assert main(["bench", "fake"]) == 2
    assert "kvtide: error: this needs the package gold: pip install" in capsys.readouterr().err


def test_unknown_benchmark_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "nonsense"])
    assert "store" in capsys.readouterr().err


def test_json_is_alone_on_stdout(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(fake(Bar("fetch", "ratio", "<=", 1.5)))
    assert main(["bench", "fake", "--format", "json", "--check"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert list(document) == ["rows", "machine"]
    assert [(row["name"], row["value"], row["ratio"], row["runs"]) for row in document["rows"]] == [
        ("fetch", 3.0, 1.5, 11),
        ("reopen", 9.0, None, 11),
    ]
    assert "fetch: set-up" in printed.err
    assert "met: fetch ratio <= 1.5" in printed.err


def test_table_is_the_default(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(fake())
    assert main(["bench", "fake", "--runs", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "fetch",
        "3.00",
        "s",
        "2.00",
        "1.500",
        "1.500..1.500",
        "5",
    ]


def test_quick_leaves_out_long_rows_and_does_not_fail_their_bars(
    register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(fake(Bar("fetch", "value", "<=", 3), Bar("reopen", "value", "<=", 1)))
    assert main(["bench", "fake", "--quick", "--check", "--format", "json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["left_out"] == [{"name": "reopen", "reason": "too long for --quick"}]
    assert "not measured: reopen value <= 1: too long for --quick" in printed.err


def test_full_run_fails_the_bar_that_quick_left_out(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(fake(Bar("fetch", "value", "<=", 3), Bar("reopen", "value", "<=", 1)))
    assert main(["bench", "fake", "--check"]) == 1
    assert "MISSED: reopen value <= 1: 9 s, 8 (800.0 %) above the limit" in capsys.readouterr().err


def test_bar_without_a_row_fails_even_a_quick_check(register: Register) -> None:
    register(fake(Bar("fetch", "value", "<=", 3), Bar("typo", "value", "<=", 1)))
    assert main(["bench", "fake", "--check", "--quick"]) == 1


def test_missed_bar_without_check_is_exit_0(register: Register) -> None:
    register(fake(Bar("fetch", "value", "<=", 1)))
    assert main(["bench", "fake"]) == 0


def test_check_that_judged_no_bar_fails(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(fake(Bar("fetch", "value", "<=", 3)))
    assert main(["bench", "fake", "--check", "--only", "reopen"]) == 1
    assert "nothing was checked" in capsys.readouterr().err


def test_only_takes_names_with_commas_between(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(fake())
    assert main(["bench", "fake", "--only", "reopen, fetch", "--format", "json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["fetch", "reopen"]
    assert main(["bench", "fake", "--only", "nonsense"]) == 2
    assert "it has fetch, reopen" in capsys.readouterr().err


def test_runs_below_one_is_a_usage_error(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(fake())
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "fake", "--runs", "0"])
    assert "0 is below 1" in capsys.readouterr().err


def test_output_holds_what_json_prints(register: Register, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    register(fake())
    target = tmp_path / "report.json"
    assert main(["bench", "fake", "--output", str(target), "--format", "json"]) == 0
    assert target.read_text() == capsys.readouterr().out


def test_output_into_a_missing_folder_is_said_before_measuring(
    register: Register, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    register(fake())
    assert main(["bench", "fake", "--output", str(tmp_path / "none" / "report.json")]) == 2
    assert "round" not in capsys.readouterr().err


def test_files_go_to_the_folder_and_are_removed(register: Register, tmp_path: Path) -> None:
    seen: list[Path] = []

    def setup(setting: Setting) -> Iterator[Trial]:
        (setting.folder / "segment").write_bytes(b"x")
        seen.append(setting.folder.parent)
        yield Trial(lambda: Measured(1.0))

    register(Benchmark("fake", (Case("a", SECONDS, setup),)))
    assert main(["bench", "fake"]) == 0
    assert main(["bench", "fake", "--folder", str(tmp_path / "mine")]) == 0
    assert seen == [tmp_path / "cache" / "kvtide" / "bench", tmp_path / "mine"]
    assert [list(folder.iterdir()) for folder in seen] == [[], []]


def test_folder_that_cannot_be_made_is_an_error(
    register: Register, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    register(fake())
    (tmp_path / "file").touch()
    assert main(["bench", "fake", "--folder", str(tmp_path / "file" / "bench")]) == 2
    assert "choose another --folder" in capsys.readouterr().err


def test_folder_that_cannot_be_written_is_an_error(
    register: Register, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(fake())
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)  # root may write anywhere, so it is only said
    assert main(["bench", "fake", "--folder", str(tmp_path)]) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_sigterm_removes_the_files_and_exits_143(register: Register, tmp_path: Path) -> None:
    def setup(setting: Setting) -> Iterator[Trial]:
        (setting.folder / "segment").write_bytes(b"x")
        yield Trial(lambda: signal.raise_signal(signal.SIGTERM))

    register(Benchmark("fake", (Case("a", SECONDS, setup),)))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        main(["bench", "fake", "--folder", str(tmp_path / "mine")])
    assert list((tmp_path / "mine").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
