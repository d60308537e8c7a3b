# SPDX-License-Identifier: Apache-2.0
"""A real engine in a process of its own, `kvtide engine`, for tests, benchmarks and the demonstration."""

from __future__ import annotations

import http.client
import socket
import sys
import time
from pathlib import Path
from typing import Self

from kvtide.testing.process import Served

_START_S = 180.0  # torch and a model, on two busy cores


class ServedEngine(Served):
    """`kvtide engine` on a free port. Start it, kill it, start it again."""

    def __init__(self, log: Path, model: str, *flags: str) -> None:
        super().__init__(log)
        self.port = 0
        self._command = [sys.executable, "-m", "kvtide", "engine", "--model", model, *flags]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start, and return when it is ready to answer."""
        self.port = free_port()
        process = self.launch([*self._command, "--port", str(self.port)])
        end_s = time.monotonic() + _START_S
        while not self._is_ready():
            if process.poll() is not None or time.monotonic() > end_s:
                self.kill()
                raise AssertionError(f"the engine did not start:\n{self.log.read_text()[-4000:]}")
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
