# SPDX-License-Identifier: Apache-2.0
"""Who changed what, and when: one line of JSON for each call that changes something, also where it was refused.

Holds no tokens, no token ids, and of keys the first eight digits. Two files at most, this one and the one before.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kvtide.observe.fault_log import FaultLog

BYTES_MAX = 10 << 20
_KEY_DIGITS = 8

faults = FaultLog(logging.getLogger(__name__))


class AuditLog:
    """Any thread may write. A line that cannot be written is a fault in the service's log, not of the call."""

    def __init__(self, path: Path, bytes_max: int = BYTES_MAX, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._clock = clock
        self._lock = threading.Lock()

    def write(self, who: str, address: str, verb: str, arguments: Mapping[str, object], result: str) -> None:
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        entry = {"time": now, "who": who, "address": address, "verb": verb, "arguments": arguments, "result": result}
        line = msgspec.json.encode(entry) + b"\n"
        with self._lock:
            try:
                self._append(line)
            except OSError as error:
                faults.warn("admin.audit_failed", error=error.strerror)

    def _append(self, line: bytes) -> None:
        # Opened for each line: there are few, and whoever moves the file away finds the next line in a new one.
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            size = 0
        if size and size + len(line) > self._bytes_max:
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


def shown(request: msgspec.Struct | None) -> dict[str, object]:
    """The arguments of a call without what must not be written down."""
    if request is None:
        return {}
    arguments: dict[str, object] = msgspec.to_builtins(request)
    if isinstance(keys := arguments.pop("keys", None), list):
        arguments["keys"] = len(keys)
        arguments["first_key"] = keys[0][:_KEY_DIGITS]
    if isinstance(prefix := arguments.get("prefix"), str):
        arguments["prefix"] = prefix[:_KEY_DIGITS]
    arguments.pop("tokens", None)
    return arguments
