# SPDX-License-Identifier: Apache-2.0
"""A disk folder survives kill -9 wherever it strikes, and the campaign that says so can tell when it does not."""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvtide.errors import ConfigError
from kvtide.keys import Address
from kvtide.layout import Memory
from kvtide.outcome import Outcome
from kvtide.testing import crash
from kvtide.testing.blocks import chain_frames
from kvtide.testing.crash import CampaignResult, draw_points, folder_bytes, hear, open_nursery, run_campaign, send
from kvtide.testing.crash_worker import (
    ANY_TIME,
    CUT_DATA,
    IN_CLOSE,
    IN_OPEN,
    NEW_FOLDER,
    POINTS,
    Death,
    Event,
    Journal,
    Phase,
    Plan,
    Trap,
    TrappedFile,
    chain_headers,
    frame_of,
    is_right,
    read_journal,
    work,
)
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk.folder import DATA, INDEX
from kvtide.tiers.disk.index import RECORDS_AT
from kvtide.tiers.tier import TierStats

KILLED = -9
A_FEW = 10  # kills: enough for each kind of folder and for blocks in it


def plan_of(folder: Path, point: str, *, nth: int = 1, cut: float = 0.5, name: str = "a") -> Plan:
    return Plan(
        name=name,
        folder=str(folder / name),
        journal=str(folder / f"journal-{name}"),
        bytes_max=64 << 20,
        quota_bytes=8 << 20,
        point=point,
        nth=nth,
        cut=cut,
        kill_after_s=30.0,
    )


# The campaign ----------------------------------------------------------------------------------------------


def test_fifty_kills_leave_no_wrong_byte_and_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    result = run_campaign(tmp_path, 50, seed=7, progress=lambda done, total: heard.append((done, total)))
    assert result.is_clean, str(result)
    assert result.wrong_bytes == 0
    assert result.failures_to_reopen == 0
    assert result.bytes_max_exceeded == 0
    assert result.lost_but_acknowledged == 0
    assert result.deleted_but_back == 0
    assert result.blocks_unknown == 0
    assert result.worker_errors == 0
    assert result.blocks_corrupt == 0, "records follow their frames, so a kill leaves nothing that has to be refused"
    assert result.kills == result.reopened == 50
    assert result.blocks_checked > 500
    assert set(result.kill_points) == set(POINTS), "a kind of kill that does not happen proves nothing"
    assert sum(result.kill_points.values()) == 50
    assert heard[-1] == (50, 50)


def test_a_new_folder_survives_a_kill_at_every_operation_of_its_making(tmp_path: Path) -> None:
    plans = [plan_of(tmp_path, NEW_FOLDER, nth=i + 1, name=f"at-{i}") for i in range(20)]
    with open_nursery(tmp_path / "log") as nursery:
        for plan in plans:
            send(nursery, plan)
            assert hear(nursery) == Death(KILLED)
    opened = [Event.OPENED in (entry.event for entry in read_journal(Path(plan.journal))) for plan in plans]
    assert not opened[0]
    assert opened[-1], "there are more operations than this test tries"
    for plan in plans:
        tier = DiskTier(Path(plan.folder), plan.bytes_max)
        tier.open()
        assert tier.write(chain_frames("after", 2, 100)) == [Outcome.HIT] * 2
        tier.close()


def test_draws_follow_from_the_seed_and_hold_every_point() -> None:
    points = draw_points(50, random.Random(3))
    assert points == draw_points(50, random.Random(3))
    assert set(points) == set(POINTS)
    assert draw_points(1, random.Random(3)) != []
    for kills in range(1, 60):
        lives = Counter(draw_points(kills, random.Random(kills)))
        assert sum(lives.values()) + lives[IN_OPEN] + lives[CUT_DATA] == kills


def test_it_runs_by_hand_and_says_how_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crash.main([str(tmp_path), "--kills", "2", "--seed", "4"]) == 0
    said = capsys.readouterr().out
    assert "2 kills: 2 survived" in said
    assert "--kills 2 --seed 4" in said


# A campaign that cannot fail proves nothing ----------------------------------------------------------------


def flipped(folder: Path, bytes_max: int) -> DiskTier:
    """A sound tier over a medium that has lost a bit of every page."""
    raw = np.fromfile(folder / DATA, np.uint8) if (folder / DATA).exists() else np.empty(0, np.uint8)
    raw[77::4096] ^= 4
    raw.tofile(folder / DATA)
    return DiskTier(folder, bytes_max)


def failed(result: CampaignResult, what: str) -> bool:
    assert not result.is_clean
    return any(what in line for line in result.failures)


def test_damage_is_refused_and_counted_as_a_loss(tmp_path: Path) -> None:
    result = run_campaign(tmp_path, A_FEW, seed=1, open_tier=flipped)
    assert result.wrong_bytes == 0
    assert result.blocks_corrupt > 0
    assert result.lost_but_acknowledged > 0


def test_damage_that_a_tier_does_not_check_for_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tiers.disk.tier.verify", lambda *_: None)
    result = run_campaign(tmp_path, A_FEW, seed=1, open_tier=flipped)
    assert result.wrong_bytes > 0
    assert failed(result, "wrong bytes")


def test_a_tier_that_serves_bytes_of_another_key_is_found(tmp_path: Path) -> None:
    class Mixed(DiskTier):
        def read(self, addresses: list[Address], into: list[Memory], **rest: object) -> list[Outcome]:
            outcomes = super().read(addresses, into)
            for source, target in pairwise(into):
                shorter = min(len(source), len(target))
                target[:shorter] = source[:shorter]
            return outcomes

    assert run_campaign(tmp_path, A_FEW, seed=1, open_tier=Mixed).wrong_bytes > 0


def test_a_tier_that_forgets_is_found(tmp_path: Path) -> None:
    def forgetful(folder: Path, bytes_max: int) -> DiskTier:
        if (folder / INDEX).exists() and (folder / INDEX).stat().st_size > RECORDS_AT:
            os.truncate(folder / INDEX, RECORDS_AT)
        return DiskTier(folder, bytes_max)

    result = run_campaign(tmp_path, A_FEW, seed=1, open_tier=forgetful)
    assert result.lost_but_acknowledged > 0
    assert failed(result, "not there")


def test_a_tier_that_knows_too_much_is_found(tmp_path: Path) -> None:
    class Boaster(DiskTier):
        def stats(self) -> TierStats:
            stats = super().stats()
            stats.blocks += 1
            return stats

    assert run_campaign(tmp_path, 1, seed=1, open_tier=Boaster).blocks_unknown == 1


def test_a_folder_above_its_bound_is_found(tmp_path: Path) -> None:
    def untidy(folder: Path, bytes_max: int) -> DiskTier:
        (folder / "stray").write_bytes(bytes(bytes_max))
        return DiskTier(folder, bytes_max)

    result = run_campaign(tmp_path, 1, seed=1, open_tier=untidy)
    assert result.bytes_max_exceeded > 0
    assert failed(result, "look at")


def test_a_folder_that_does_not_open_is_found_and_kept(tmp_path: Path) -> None:
    class Shut(DiskTier):
        def open(self) -> None:
            raise ConfigError("no")

    result = run_campaign(tmp_path, 4, seed=1, open_tier=Shut)
    assert result.failures_to_reopen == result.kills == 4
    assert result.reopened == 0
    assert failed(result, "does not open")
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) > 1


def test_a_worker_that_fails_is_found_and_quoted(tmp_path: Path) -> None:
    class Spoiler(DiskTier):
        def close(self) -> None:
            super().close()
            (self._path / INDEX).write_bytes(b"x" * RECORDS_AT)

    result = run_campaign(tmp_path, A_FEW, seed=1, open_tier=Spoiler)
    assert result.worker_errors > 0
    assert failed(result, "damaged or not kvtide's")


# The worker ------------------------------------------------------------------------------------------------


def test_a_life_to_its_end_leaves_what_its_journal_says(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, IN_CLOSE, nth=1_000_000)
    work(plan, kill=lambda: None)
    entries = read_journal(Path(plan.journal))
    events = Counter(entry.event for entry in entries)
    assert entries[0].event is Event.OPENED
    assert entries[-1].event is Event.SPRUNG
    assert events[Event.ACKNOWLEDGED] > 10
    assert not events.keys() & {Event.WRONG, Event.LOST, Event.EVICTED}
    owed = {entry[1:] for entry in entries if entry.event is Event.ACKNOWLEDGED}
    cleared = {entry.thread for entry in entries if entry.event is Event.CLEARED}
    owed = {place for place in owed if place[0] not in cleared}
    owed -= {entry[1:] for entry in entries if entry.event is Event.DELETED}
    tier = DiskTier(Path(plan.folder), plan.bytes_max)
    tier.open()
    for thread, chain, position in owed:
        its = chain_headers(plan.name, thread, chain)[position]
        memory = np.empty(its.frame_bytes, np.uint8)
        assert tier.read([its.address], [memory]) == [Outcome.HIT]
        assert is_right(its, memory)
    tier.close()


def test_a_frame_with_any_byte_changed_is_not_right() -> None:
    its = chain_headers("a", 0, 0)[0]
    frame = frame_of(its)
    frame.seal()
    assert is_right(its, frame.memory)
    for at in (0, len(frame.memory) - 1):
        changed = frame.memory.copy()
        changed[at] ^= 1
        assert not is_right(its, changed)
    assert not is_right(its, frame.memory[:-1])


class Killed(Exception):
    """Stands for the end of a process."""


def strike() -> None:
    raise Killed


@pytest.mark.parametrize(("cut", "left_bytes"), [(0.0, 0), (0.3, 2048), (0.999, 8192 - 512)])
def test_a_torn_frame_ends_at_a_sector(tmp_path: Path, cut: float, left_bytes: int) -> None:
    assert torn(tmp_path, DATA, "torn data", cut, 4096, 8192, Phase.LOAD) == left_bytes


@pytest.mark.parametrize(("cut", "left_bytes"), [(0.0, 0), (0.5, 64), (0.999, 127)])
def test_a_new_record_tears_anywhere(tmp_path: Path, cut: float, left_bytes: int) -> None:
    assert torn(tmp_path, INDEX, "torn record", cut, RECORDS_AT + 128, 128, Phase.LOAD) == left_bytes


@pytest.mark.parametrize(("cut", "left_bytes"), [(0.0, 0), (0.25, 384), (0.9, 384 + 2 * 512)])
def test_a_record_of_a_block_that_must_stay_tears_between_sectors(tmp_path: Path, cut: float, left_bytes: int) -> None:
    # The write begins 128 bytes into a sector and ends 128 bytes into the last of four.
    assert torn(tmp_path, INDEX, IN_CLOSE, cut, RECORDS_AT + 128, 1536, Phase.CLOSING) == left_bytes


def torn(folder: Path, name: str, point: str, cut: float, offset: int, length: int, phase: Phase) -> int:
    """How many bytes of a write reach the file before the end."""
    nth = 2 if phase is Phase.CLOSING else 1  # the stage before it counts there
    journal = Journal(folder / "journal")
    trap = Trap(plan_of(folder, point, nth=nth, cut=cut), journal, strike)
    file = TrappedFile(trap, folder / name)
    trap.phase = phase
    with pytest.raises(Killed):
        file.write([np.full(length, 7, np.uint8)], offset)
    file.close()
    journal.close()
    assert read_journal(folder / "journal")[0].chain == POINTS.index(point)
    return (folder / name).read_bytes().count(7)


def test_a_trap_springs_once_and_at_its_point_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    trap = Trap(plan_of(tmp_path, "before data", nth=3), journal)
    journal.close()
    assert not trap.is_due("before", "data"), "the tier is not open yet"
    trap.phase = Phase.LOAD
    assert not trap.is_due("after", "data")
    assert [trap.is_due("before", "data") for _ in range(5)] == [False, False, True, False, False]
    assert not Trap(plan_of(tmp_path, ANY_TIME), journal).is_due("before", "data")


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert folder_bytes(tmp_path / "nowhere") == (0, 0)
