# SPDX-License-Identifier: Apache-2.0
"""The verb `kvtide engine`: what it says before it serves, what it prints, how it ends."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtide.cli.main import main
from kvtide.config.defaults import user_cache_folder
from kvtide.testing.engine import ServedEngine
from kvtide.testing.node import served


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIDE_API_KEY", raising=False)
    monkeypatch.delenv("KVTIDE_SOCKET", raising=False)


def fails_with(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one sentence of a start that cannot be."""
    assert main(["engine", "--port", "0", *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    message = printed.err.splitlines()[-1]
    assert message.startswith("kvtide: error: ")
    return message


def test_a_port_in_use_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["engine", "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvtide: error: port {port} is in use on 127.0.0.1")
    assert "--port" in line


def test_a_host_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no-such-host.invalid is no address" in fails_with(capsys, "--host", "no-such-host.invalid")
    assert "cannot be listened on" in fails_with(capsys, "--host", "192.0.2.1")


def test_a_model_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert missing in fails_with(capsys, "--cache", "none", "--model", missing)
    assert "config.json" in fails_with(capsys, "--cache", "none", "--model", str(tmp_path))


def test_a_cache_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "auto, none, embedded or unix:" in fails_with(capsys, "--cache", "redis://there")


@pytest.mark.parametrize("flag", ["--context", "--threads"])
def test_numbers_that_cannot_be_are_told(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["engine", flag, "0"])
    assert f"argument {flag}" in capsys.readouterr().err


def test_a_key_that_others_can_read_or_that_fits_no_header_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    assert "cannot be read" in fails_with(capsys, "--api-key-file", str(path))
    path.write_text("0123456789abcdef")
    path.chmod(0o644)
    assert "chmod 600" in fails_with(capsys, "--api-key-file", str(path))
    path.chmod(0o600)
    path.write_text("0123456789 abcdef")
    message = fails_with(capsys, "--api-key-file", str(path))
    assert "header" in message
    assert "0123" not in message
    monkeypatch.setenv("KVTIDE_API_KEY", "schlüssel")
    assert "KVTIDE_API_KEY" in fails_with(capsys)


@pytest.mark.parametrize(
    ("package", "extra"), [("starlette", "kvtide[engine]"), ("jinja2", "kvtide[engine]"), ("torch", "kvtide[engine]")]
)
def test_a_missing_package_is_told_with_its_pip_line(package: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None; from kvtide.cli.main import main;"
        "sys.exit(main(['engine', '--port', '0', '--cache', 'none']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    message = ended.stderr.splitlines()[-1]
    assert message.startswith("kvtide: error: ")
    assert f"pip install '{extra}'" in message
    assert package in message


def printed(engine: ServedEngine) -> str:
    """All it has printed, once the summary is there: it comes a moment after health says yes."""
    end_s = time.monotonic() + 30
    while "Ask it something" not in (output := engine.log.read_text()):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return output


def test_the_summary_tells_all_and_its_curl_line_works(smollm2_folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    key.chmod(0o600)
    flags = ("--cache", "embedded", "--name", "tiny", "--api-key-file", str(key), "--context", "512", "--threads", "1")
    with ServedEngine(tmp_path / "log", str(smollm2_folder), *flags) as engine:
        output = printed(engine)
        assert f"serves tiny at {engine.url}/v1" in output
        assert f"{smollm2_folder}, a context of 512 tokens" in output
        assert "dtype  float32" in output or "dtype  bfloat16" in output
        assert "512 MiB of DRAM in this process" in output
        (line,) = [line.strip() for line in output.splitlines() if "curl" in line]
        assert f"$(cat {key})" in line
        url, body = shlex.split(line)[1], shlex.split(line)[-1]
        headers = {"Content-Type": "application/json", "Authorization": "Bearer 0123456789abcdef"}
        answer = httpx.post(url, content=body, headers=headers, timeout=120).json()
        assert answer["model"] == "tiny"
        assert answer["choices"][0]["message"]["content"]
        assert engine.process is not None
        engine.process.send_signal(signal.SIGINT)
        assert engine.process.wait(60) == 0
        output = engine.log.read_text()
        assert output.endswith("kvtide: ended cleanly\n")
        assert "0123456789abcdef" not in output
        assert "Traceback" not in output


def test_an_engine_finds_the_service_that_starts_later_and_goes_on_without_it(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(user_cache_folder().parent))  # where the model is
    monkeypatch.setenv("HOME", str(tmp_path))  # where the service of this user is
    node = served(tmp_path / ".cache" / "kvtide")
    body = {"prompt": "The old lighthouse keeper counted ships. " * 20, "max_tokens": 2, "temperature": 0}

    with ServedEngine(tmp_path / "log", "smollm2") as engine:

        def ask() -> dict[str, Any]:
            answer: dict[str, Any] = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120).json()
            return answer

        assert "nobody answers at ~/.cache/kvtide/kvtide.sock, and it goes on looking" in printed(engine)
        alone = ask()
        assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        with node:
            for _ in range(20):  # it is found in a moment, and then the first one saves
                cached = ask()
                if cached["usage"]["prompt_tokens_details"]["cached_tokens"]:
                    break
            assert cached["kvtide"]["tokens_by_tier"]["dram"] > 0
        after = ask()
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert after["choices"] == cached["choices"] == alone["choices"]
        _end_in_the_middle(engine)


def _end_in_the_middle(engine: ServedEngine) -> None:
    """Of a stream that would go on for minutes."""
    prompt = "Count on and on, one number after the other: 1, 2, 3, 4, 5, 6, 7,"
    body = {"prompt": prompt, "max_tokens": 5000, "stream": True, "temperature": 0}
    got = ""
    has_begun = threading.Event()

    def read() -> None:
        nonlocal got
        with httpx.stream("POST", f"{engine.url}/v1/completions", json=body, timeout=120) as response:
            for text in response.iter_text():
                got += text
                has_begun.set()

    reading = threading.Thread(target=read)
    reading.start()
    assert has_begun.wait(120)
    assert engine.stop() == 0
    reading.join(60)
    assert '"code":"unavailable"' in got
    assert got.endswith("data: [DONE]\n\n")
