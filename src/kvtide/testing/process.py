# SPDX-License-Identifier: Apache-2.0
"""A process of ours, and the two ways in which it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self


class Served:
    """What a service and an engine have in common. Subclasses start it, by `launch`, and know when it is ready."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def launch(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Run it with its log, and without settings that the tests' own environment may have."""
        assert self.process is None
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return self.process

    def start(self) -> Self:
        raise NotImplementedError

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

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.kill()
