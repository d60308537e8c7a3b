# SPDX-License-Identifier: Apache-2.0
"""The store over DRAM and disk under random orders. `HYPOTHESIS_PROFILE=campaign`: many more, and longer ones."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvtide.config import SpillWhen
from kvtide.deadline import NEVER, Deadline
from kvtide.keys import Address, Digest, Key
from kvtide.layout import Memory
from kvtide.outcome import Outcome
from kvtide.store import Lower
from kvtide.testing.faults import FailingDevice, FaultyTier
from kvtide.testing.store_machine import CHAIN_BLOCKS, LINES, Order, StoreMachine, make_store_machine
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk.folder import DATA, INDEX
from kvtide.tiers.disk.index import RECORD_BYTES, RECORDS_AT
from kvtide.tiers.disk.room import BYTES_MIN
from kvtide.tiers.dram import DramTier
from kvtide.tiers.tier import Tier


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


# The machine itself: what it must not let pass --------------------------------------------------------------


class FlippingTier(FaultyTier):
    """Calls a damaged frame a hit."""

    def read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline = NEVER) -> list[Outcome]:
        outcomes = super().read(addresses, into, deadline)
        for memory in into:
            memory[-1] ^= 1
        return outcomes


class StubbornTier(FaultyTier):
    """Does not let go of what is cleared."""

    def clear(self, *, namespace: Digest | None = None, tenant: Digest | None = None, prefix: Key | None = None) -> int:
        return 0


class ForgetfulTier(FaultyTier):
    """Claims to be durable, and is not."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.traits = replace(tier.traits, name="forgetful", durable=True)


@contextmanager
def machine_over(make_lower: Callable[[Path], list[Lower]]) -> Iterator[StoreMachine]:
    """A machine after a calm beginning with one chain, which is below."""
    machine = make_store_machine(make_lower)()
    machine.begin(True, [LINES[0]])
    machine.drain()
    yield machine
    machine.store.close(drain_s=0)
    shutil.rmtree(machine.root)


A_FETCH = Order(pick=0, which=(0,), count=CHAIN_BLOCKS, page=0, holder=1, end="release")


def test_wrong_bytes_are_found() -> None:
    with machine_over(lambda folder: [Lower(FlippingTier(DiskTier(folder, BYTES_MIN)))]) as machine:
        machine.leave_dram(0, 0)
        with pytest.raises(AssertionError, match="not its own"):
            machine.fetch([A_FETCH])


def test_blocks_that_come_back_after_a_clear_are_found() -> None:
    with machine_over(lambda folder: [Lower(StubbornTier(DiskTier(folder, BYTES_MIN)))]) as machine:
        machine.clear(None, None)
        with pytest.raises(AssertionError, match="of what was cleared"):
            machine.fetch([A_FETCH])


def test_blocks_that_do_not_survive_are_found() -> None:
    with (
        machine_over(lambda _: [Lower(ForgetfulTier(DramTier(BYTES_MIN, huge_pages=False)))]) as machine,
        pytest.raises(AssertionError, match="16 of 16 blocks did not survive"),
    ):
        machine.restart(False)


def test_a_slot_that_changes_under_a_lease_is_found() -> None:
    with machine_over(lambda folder: [Lower(DiskTier(folder, BYTES_MIN))]) as machine:
        machine.fetch([replace(A_FETCH, end="keep")])
        machine.leased_memory_is_nobody_elses()
        machine.reads[0].fetched.payloads[3][7] ^= 1
        with pytest.raises(AssertionError, match="block 3 of 8"):
            machine.leased_memory_is_nobody_elses()


def test_a_tier_can_be_slowed_down(tmp_path: Path) -> None:
    pauses: list[float] = []
    tier = FaultyTier(DiskTier(tmp_path, BYTES_MIN), pause=pauses.append)
    tier.open()
    tier.delay_s = {"write": 0.5}
    assert tier.write([]) == tier.read([], []) == []
    tier.close()
    assert pauses == [0.5]
