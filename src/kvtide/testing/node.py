# SPDX-License-Identifier: Apache-2.0
"""A real node service in a process of its own, for tests and benchmarks."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvtide.client import Client, connect
from kvtide.config import CallSettings
from kvtide.errors import Busy, Unavailable
from kvtide.testing.process import Served

_START_S = 30.0


class ServedNode(Served):
    """`kvtide serve` in a folder. Start it, kill it, start it again: the folder stays."""

    def __init__(self, folder: Path, *flags: str, config: str | None = None) -> None:
        super().__init__(folder / "serve.log")
        self.folder = folder
        self.socket = folder / "kvtide.sock"
        self._flags = list(flags)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if config is not None:
            (folder / "kvtide.yaml").write_text(config)
            self._flags += ["--config", str(folder / "kvtide.yaml")]

    def start(self) -> Self:
        """Start, and return when it takes connections."""
        process = self.launch([sys.executable, "-m", "kvtide", "serve", "--folder", str(self.folder), *self._flags])
        end_s = time.monotonic() + _START_S
        while not self._answers():
            if process.poll() is not None or time.monotonic() > end_s:
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


def served(folder: Path, flags: Sequence[str] = ()) -> ServedNode:
    """Small, and without anything that a test does not ask for."""
    return ServedNode(folder, "--dram-bytes-max", "64MiB", "--disk-bytes-max", "256MiB", "--admin-port", "0", *flags)
