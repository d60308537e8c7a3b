# SPDX-License-Identifier: Apache-2.0
"""A real engine in a process of its own, `kvtide engine`, for tests, benchmarks and the demonstration."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_START_S = 180.0  # torch and a model, on two busy cores


class ServedEngine:
    """`kvtide engine` on a free port. Start it, kill it, start it again."""

    def __init__(self, log: Path, model: str, *flags: str) -> None:
        self.log = log
        self.port = 0
        self._command = [sys.executable, "-m", "kvtide", "engine", "--model", model, *flags]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, while_waiting: Callable[[], None] = lambda: None) -> ServedEngine:
        """Start, and return when it is ready to answer."""
        assert self.process is None
        self.port = free_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
        with self.log.open("ab") as log:
            command = [*self._command, "--port", str(self.port)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        end_s = time.monotonic() + _START_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end_s:
                self.kill()
                raise AssertionError(f"the engine did not start:\n{self.log.read_text()[-4000:]}")
            while_waiting()
            time.sleep(0.05)
        return self

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """As a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self, timeout_s: float = 60.0) -> int:
        """As an operator does. Returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        self.process = None
        return code

    def __enter__(self) -> ServedEngine:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
