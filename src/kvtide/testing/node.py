# SPDX-License-Identifier: Apache-2.0
"""A real node service in a process of its own, for tests and benchmarks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvtide.client import Client, connect
from kvtide.config import CallSettings
from kvtide.errors import Busy, Unavailable

_START_S = 30.0


class ServedNode:
    """`kvtide serve` in a folder. Start it, kill it, start it again: the folder stays."""

    def __init__(self, folder: Path, *flags: str, config: str | None = None) -> None:
        self.folder = folder
        self.socket = folder / "kvtide.sock"
        self.log = folder / "serve.log"
        self._flags = list(flags)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if config is not None:
            (folder / "kvtide.yaml").write_text(config)
            self._flags += ["--config", str(folder / "kvtide.yaml")]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> ServedNode:
        """Start, and return when it takes connections."""
        assert self.process is None
        command = [sys.executable, "-m", "kvtide", "serve", "--folder", str(self.folder), *self._flags]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        end_s = time.monotonic() + _START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end_s:
                self.kill()
                raise AssertionError(f"the service did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        try:
            Client(self.socket, calls=CallSettings(connect_s=1.0)).close()
        except Unavailable:
            return False
        except Exception as error:
            return not isinstance(error, Busy)  # it answers, though not with a welcome
        return True

    def connect(self, *, token: str = "", tenant: str = "", must_answer: bool = True, control_s: float = 5.0) -> Client:
        """A patient client: a slow machine must not look like a miss."""
        calls = CallSettings(match_s=control_s, control_s=control_s)
        return connect(f"unix:{self.socket}", token=token, tenant=tenant, calls=calls, must_answer=must_answer)

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

    def __enter__(self) -> ServedNode:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.kill()


def served(folder: Path, flags: Sequence[str] = ()) -> ServedNode:
    """Small, and without anything that a test does not ask for."""
    return ServedNode(folder, "--dram-bytes-max", "64MiB", "--disk-bytes-max", "256MiB", "--admin-port", "0", *flags)
