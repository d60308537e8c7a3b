# SPDX-License-Identifier: Apache-2.0
"""Logging faults that may repeat by the thousand: the first one at once, then a count every ten seconds."""

from __future__ import annotations

import logging
import threading
import time

from kvtide.deadline import Clock

_EVERY_S = 10.0


class FaultLog:
    """Warnings by event name, `disk.read_failed offset=4096`. Any thread may use it."""

    def __init__(self, log: logging.Logger, clock: Clock = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._told_at_s: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def warn(self, event: str, **fields: object) -> None:
        """Log an event with its fields, unless the same event was logged just now: then count it."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._told_at_s.get(event, -_EVERY_S) < _EVERY_S:
                self._untold[event] = self._untold.get(event, 0) + 1
                return
            self._told_at_s[event] = now_s
            untold = self._untold.pop(event, 0)
        if untold:
            fields["repeated"] = untold
        self._log.warning("%s%s", event, "".join(f" {name}={value}" for name, value in fields.items()))
