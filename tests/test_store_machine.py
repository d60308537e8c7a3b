# SPDX-License-Identifier: Apache-2.0
"""The store over DRAM and disk under random orders. `HYPOTHESIS_PROFILE=campaign`: many more, and longer ones."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvtide.config import SpillWhen
from kvtide.store import Lower
from kvtide.testing.faults import FailingDevice
from kvtide.testing.store_machine import make_store_machine
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk.folder import DATA, INDEX
from kvtide.tiers.disk.index import RECORD_BYTES, RECORDS_AT
from kvtide.tiers.disk.room import BYTES_MIN


def disk_below(folder: Path, device: FailingDevice, spill_when: SpillWhen) -> list[Lower]:
    return [Lower(DiskTier(folder, BYTES_MIN, open_file=device.open), spill_when)]


def flip_some_bytes(folder: Path, drawn: random.Random) -> None:
    """In frames or, as often, in the records of the index; its head is another test's business."""
    name = drawn.choice([DATA, INDEX])
    first = RECORDS_AT if name == INDEX else 0
    end = (folder / name).stat().st_size
    if name == INDEX:
        end = min(end, RECORDS_AT + 64 * RECORD_BYTES)  # most records behind these were never used
    with (folder / name).open("r+b") as file:
        for _ in range(drawn.randint(1, 20)):
            if first < end:
                file.seek(at := drawn.randrange(first, end))
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ drawn.randint(1, 255)]))


@pytest.mark.parametrize("spill_when", ["publish", "evict", "second_use"])
def test_no_order_of_calls_faults_and_restarts_makes_the_store_lie(spill_when: SpillWhen) -> None:
    device = FailingDevice()
    machine = make_store_machine(
        partial(disk_below, device=device, spill_when=spill_when),
        folder_bytes_max=BYTES_MIN,
        damage=flip_some_bytes,
        device=device,
    )
    steps = 200 if settings.default.max_examples > 1000 else 50
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=steps))
