# SPDX-License-Identifier: Apache-2.0
"""Faults that repeat are told once, then counted."""

from __future__ import annotations

import logging

import pytest

from kvtide.observe.fault_log import FaultLog


def test_the_first_fault_of_an_event_is_told_at_once_and_the_next_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    faults = FaultLog(logging.getLogger("kvtide.test"), clock=lambda: now[0])
    for offset in range(100):
        faults.warn("disk.damaged", offset=offset)
    faults.warn("disk.full")
    assert caplog.messages == ["disk.damaged offset=0", "disk.full"]
    now[0] = 10.0
    faults.warn("disk.damaged", offset=7)
    assert caplog.messages[2:] == ["disk.damaged offset=7 repeated=99"]
    now[0] = 20.0
    faults.warn("disk.damaged", offset=8)
    assert caplog.messages[3:] == ["disk.damaged offset=8"]
