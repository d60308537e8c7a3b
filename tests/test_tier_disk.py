# SPDX-License-Identifier: Apache-2.0
"""The disk tier: what every tier promises, and what comes with files, a bound on them, and a device that fails.

Everything is looked at from outside: the folder's files, their bytes, and a file that fails on demand.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvtide.errors import ConfigError, FolderForeign, FolderOwned, MediumFailed
from kvtide.frame import HEADER_BYTES, Frame
from kvtide.keys import Address, Key
from kvtide.outcome import Outcome
from kvtide.testing import blocks
from kvtide.testing.tier_suite import TierSuite
from kvtide.testing.tier_suite.tools import (
    CORRUPT,
    ELSEWHERE,
    HERE,
    HIT,
    MISS,
    PASSED,
    REJECTED,
    addresses_of,
    assert_has,
    assert_lacks,
    at_once,
    many,
    one,
    present,
    read,
    sizes,
    store,
)
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk.files import RawFile, supports_direct
from kvtide.tiers.disk.folder import DATA, INDEX, LOCK
from kvtide.tiers.disk.index import (
    BLOCK,
    BLOCK_RECORD,
    FREE,
    RECORD_BYTES,
    RECORDS_AT,
    SHELF,
    SHELF_RECORD,
    Records,
    checksums,
    shelf_record,
)
from kvtide.tiers.disk.room import BYTES_MIN

THROTTLED, ERROR, TIMEOUT = Outcome.THROTTLED, Outcome.ERROR, Outcome.TIMEOUT
MIB = 1 << 20


class Medium:
    """A folder as somebody sees it who only knows the format of the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def records(self) -> Records:
        raw = (self.folder / INDEX).read_bytes()[RECORDS_AT:]
        return np.frombuffer(raw[: len(raw) // RECORD_BYTES * RECORD_BYTES], BLOCK_RECORD).copy()

    def put(self, row: int, record: Records, *, has_check: bool = True) -> None:
        """Write a record as it is, by default under a checksum that fits."""
        one_record = np.array([record], BLOCK_RECORD)
        if has_check:
            one_record["check"] = checksums(one_record)
        self.write(INDEX, RECORDS_AT + row * RECORD_BYTES, one_record.tobytes())

    def row(self, address: Address) -> int | None:
        records = self.records()
        shelves = records.view(SHELF_RECORD)
        for number in shelves["number"][
            (shelves["kind"] == SHELF) & (shelves["shelf"] == np.void(address.shelf.pack()))
        ]:
            is_it = (records["kind"] == BLOCK) & (records["shelf"] == number) & (records["key"] == np.void(address.key))
            if is_it.any():
                return int(np.flatnonzero(is_it)[0])
        return None

    def free_row(self) -> int:
        return int(np.flatnonzero(self.records()["kind"] == FREE)[0])

    def write(self, name: str, offset: int, raw: bytes) -> None:
        with (self.folder / name).open("r+b") as file:
            file.seek(offset)
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())

    def get(self, address: Address) -> bytes | None:
        row = self.row(address)
        if row is None:
            return None
        record = self.records()[row]
        with (self.folder / DATA).open("rb") as file:
            file.seek(int(record["offset"]))
            return file.read(int(record["frame_bytes"]))

    def set(self, address: Address, raw: bytes) -> None:
        row = self.row(address)
        assert row is not None
        self.write(DATA, int(self.records()[row]["offset"]), raw)

    def size_bytes(self) -> int:
        """How much of a disk the folder's files take, by their length or by their blocks, whichever is more."""
        stats = [entry.stat() for entry in os.scandir(self.folder)]
        return max(sum(s.st_size for s in stats), sum(s.st_blocks * 512 for s in stats))

    def contents(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if path.name != LOCK}

    def restore(self, contents: dict[str, bytes]) -> None:
        for name, raw in contents.items():
            (self.folder / name).write_bytes(raw)


def _nothing(operation: str, name: str) -> None:
    """What happens around a call when nobody is interested in it."""


@dataclass
class Faults:
    """Which calls on which file fail, and how; `DiskTier(open_file=faults.open)`."""

    code: int = errno.EIO
    failing: set[tuple[str, str]] = field(default_factory=set)  # (operation, file name)
    fail_at: int = -1  # the number of one call that fails, whatever it is
    calls: int = 0
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    before: Callable[[str, str], None] = _nothing
    after: Callable[[str, str], None] = _nothing

    def open(self, path: Path, *, direct: bool = False) -> RawFile:
        self.meet("open", path.name)
        return FaultyFile(path, self, direct=direct)

    def meet(self, operation: str, name: str) -> None:
        self.before(operation, name)
        self.seen[operation, name] += 1
        self.calls += 1
        if (operation, name) in self.failing or self.calls == self.fail_at:
            raise OSError(self.code, os.strerror(self.code))


class FaultyFile(RawFile):
    """A real file whose calls fail when its faults say so. To use it after close is a failure of the test."""

    def __init__(self, path: Path, faults: Faults, *, direct: bool) -> None:
        super().__init__(path, direct=direct)
        self._faults = faults
        self._is_closed = False

    def _meet(self, operation: str) -> None:
        self._faults.meet(operation, self.path.name)
        assert not self._is_closed, f"{operation} on {self.path.name} after close"

    def read(self, parts: list[np.ndarray], offset: int) -> int:
        self._meet("read")
        return super().read(parts, offset)

    def write(self, parts: list[np.ndarray], offset: int) -> None:
        self._meet("write")
        super().write(parts, offset)
        self._faults.after("write", self.path.name)

    def allocate(self, offset: int, length: int) -> None:
        self._meet("allocate")
        super().allocate(offset, length)

    def truncate(self, size_bytes: int) -> None:
        self._meet("truncate")
        super().truncate(size_bytes)

    def sync(self) -> None:
        self._meet("sync")
        super().sync()

    def close(self) -> None:
        assert not self._is_closed
        self._is_closed = True
        super().close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def medium(folder: Path) -> Medium:
    return Medium(folder)


@contextmanager
def opened(folder: Path, bytes_max: int = 32 * MIB, **settings: object) -> Iterator[DiskTier]:
    tier = DiskTier(folder, bytes_max, **settings)
    tier.open()
    try:
        yield tier
    finally:
        tier.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# What every tier promises -----------------------------------------------------------------------------------


class TestDiskTier(TierSuite):
    def make_tier(self, folder: Path, bytes_max: int) -> DiskTier:
        self.medium = Medium(folder)
        return DiskTier(folder, bytes_max)

    def raw_get(self, tier: DiskTier, address: Address) -> bytes | None:
        return self.medium.get(address)

    def raw_set(self, tier: DiskTier, address: Address, raw: bytes) -> None:
        self.medium.set(address, raw)


class TestDiskTierWithoutDirectIo(TestDiskTier):
    """On tmpfs where there is one, and with the open flag refused as tmpfs did before Linux 6.6."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        real_open = os.open

        def refusing(path: Path, flags: int, *rest: int, **named: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real_open(path, flags, *rest, **named)

        parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
        with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory(dir=parent) as folder:
            patched.setattr(os, "open", refusing)
            yield Path(folder) / "tier"

    def test_the_page_cache_is_used(self, tier: DiskTier) -> None:
        assert tier.is_direct is False


def test_direct_io_is_used_where_the_filesystem_has_it(folder: Path) -> None:
    with opened(folder) as tier:
        assert tier.is_direct is supports_direct(folder)


def test_a_filesystem_that_takes_the_flag_and_refuses_the_write_is_used_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: RawFile, parts: list[np.ndarray], offset: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with monkeypatch.context() as patched:
        patched.setattr(RawFile, "write", refuse)
        assert supports_direct(tmp_path) is False
    assert list(tmp_path.iterdir()) == []


# The bound, measured from outside ---------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_max", [BYTES_MIN, 3 * MIB + 1234, 20 * MIB])
def test_files_stay_within_the_bound_during_and_after_heavy_writing(
    folder: Path, medium: Medium, bytes_max: int
) -> None:
    drawn = np.random.default_rng(bytes_max)
    payloads = drawn.choice([0, 1, 3000, 4096, 60_000, 300_000, 700_000], 300).tolist()
    frames = [one(i, payload, on=blocks.shelf(f"tenant {i % 7}")) for i, payload in enumerate(payloads)]
    is_done = threading.Event()

    def write(tier: DiskTier, part: list[Frame]) -> None:
        for i in range(0, len(part), 3):
            assert set(tier.write(part[i : i + 3])) <= {HIT, REJECTED}
        is_done.set()

    def watch() -> None:
        while not is_done.is_set():
            assert medium.size_bytes() <= bytes_max

    with opened(folder, bytes_max) as tier:
        at_once(partial(write, tier, frames[::2]), partial(write, tier, frames[1::2]), watch)
        assert medium.size_bytes() <= bytes_max
        here = present(tier, frames)
        assert here
    assert medium.size_bytes() <= bytes_max
    with opened(folder, bytes_max) as tier:
        assert medium.size_bytes() <= bytes_max
        assert present(tier, frames) == here
        write(tier, frames)
        assert medium.size_bytes() <= bytes_max


@pytest.mark.parametrize("bytes_max", [20 * MIB, 5 * MIB, BYTES_MIN])
def test_a_lowered_bound_holds_from_open_on(folder: Path, medium: Medium, bytes_max: int) -> None:
    frames = many("a", 120, 200_000)
    with opened(folder, 32 * MIB) as tier:
        store(tier, frames)
    with opened(folder, bytes_max) as tier:
        assert medium.size_bytes() <= bytes_max
        here = present(tier, frames)
        assert 0 < len(here) < 120
        for frame in many("b", 50, 200_000):
            assert tier.write([frame]) == [HIT]
        assert medium.size_bytes() <= bytes_max
        assert tier.stats().bytes_used <= tier.stats().bytes_max
    assert medium.size_bytes() <= bytes_max


def test_a_bound_lowered_below_a_large_index_holds(folder: Path, medium: Medium) -> None:
    with opened(folder, 64 * MIB) as tier:
        store(tier, many("a", 50))
    os.truncate(folder / INDEX, 2 * MIB)  # as large as 16,000 blocks would have made it
    with opened(folder, BYTES_MIN) as tier:
        assert medium.size_bytes() <= BYTES_MIN
        assert_has(tier, many("a", 50))
        store(tier, [one("b")])
        assert_has(tier, [one("b")])
        assert medium.size_bytes() <= BYTES_MIN


def test_a_raised_bound_is_used(folder: Path, medium: Medium) -> None:
    frames = many("a", 60, 200_000)
    with opened(folder, 2 * MIB) as tier:
        tier.write(frames[:5])
    with opened(folder, 32 * MIB) as tier:
        store(tier, frames)
        assert_has(tier, frames)


def test_small_frames_do_not_let_the_index_break_the_bound(folder: Path, medium: Medium) -> None:
    with opened(folder, BYTES_MIN) as tier:
        for i in range(20):
            assert set(tier.write(many(i, 50, 0, on=blocks.shelf(f"tenant {i}")))) <= {HIT, REJECTED}
            assert medium.size_bytes() <= BYTES_MIN
        assert tier.stats().blocks > 100


def test_large_frames_fit_where_many_small_ones_were(folder: Path, medium: Medium) -> None:
    bytes_max = 32 * MIB
    with opened(folder, bytes_max) as tier:
        for i in range(600):
            assert tier.write([one(i, 64 << 10)]) == [HIT]
        large = [one(f"large {i}", 6 << 20) for i in range(8)]
        for frame in large:
            assert tier.write([frame]) == [HIT]
            assert_has(tier, [frame])
        assert len(present(tier, large)) >= 4
        for i in range(600):
            assert tier.write([one(f"again {i}", 64 << 10)]) == [HIT]
        assert medium.size_bytes() <= bytes_max


def test_the_smallest_bound_takes_the_largest_frame_that_it_claims(folder: Path) -> None:
    with opened(folder, BYTES_MIN) as tier:
        frame = one("a", tier.traits.frame_bytes_max - HEADER_BYTES)
        store(tier, [frame])
        assert_has(tier, [frame])


def test_a_bound_that_holds_no_block_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk\.bytes_max"):
        DiskTier(folder, BYTES_MIN - 1)
    assert not folder.exists()


# The folder -------------------------------------------------------------------------------------------------


def test_a_folder_with_files_of_others_is_refused_and_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("chapter one")
    with pytest.raises(FolderForeign, match=r"thesis\.tex"):
        DiskTier(folder, MIB).open()
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    assert (folder / "thesis.tex").read_text() == "chapter one"


def test_a_stray_file_beside_ours_is_left_alone(folder: Path) -> None:
    with opened(folder) as tier:
        store(tier, [one("a")])
    (folder / "note").write_text("do not delete")
    with opened(folder) as tier:
        assert_has(tier, [one("a")])
        tier.clear()
    assert (folder / "note").read_text() == "do not delete"


def test_the_root_of_a_fresh_filesystem_is_no_foreign_folder(folder: Path) -> None:
    (folder / "lost+found").mkdir(parents=True)
    with opened(folder) as tier:
        store(tier, [one("a")])


OWNER = """
import sys
from pathlib import Path
from kvtide.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 1 << 20)
tier.open()
print("open", flush=True)
sys.stdin.read()
"""


def test_a_folder_belongs_to_one_process_and_is_free_when_that_is_killed(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        files_before = open_files()
        with pytest.raises(FolderOwned, match=rf"process {owner.pid}\b") as refused:
            DiskTier(folder, MIB).open()
        assert refused.value.context["owner"] == str(owner.pid)
        assert open_files() == files_before
        owner.send_signal(signal.SIGKILL)
    with opened(folder) as tier:
        store(tier, [one("a")])


def test_two_tiers_of_one_process_do_not_share_a_folder(folder: Path) -> None:
    with opened(folder) as tier:
        store(tier, [one("a")])
        with pytest.raises(FolderOwned, match=str(os.getpid())):
            DiskTier(folder, MIB).open()
        assert_has(tier, [one("a")])


@pytest.mark.parametrize("below", ["file", "file/folder"])
def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("content")
    with pytest.raises(ConfigError, match=r"disk\.folder"):
        DiskTier(tmp_path / below, MIB).open()
    assert (tmp_path / "file").read_text() == "content"


def test_a_filesystem_without_locks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("kvtide.tiers.disk.folder.fcntl.flock", no_lock)
    files_before = open_files()
    with pytest.raises(ConfigError, match="cannot be locked"):
        DiskTier(folder, MIB).open()
    assert open_files() == files_before


def test_only_the_owner_may_read_the_files(folder: Path) -> None:
    umask = os.umask(0)
    try:
        with opened(folder) as tier:
            store(tier, [one("a")])
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert {path.name for path in folder.iterdir()} == {DATA, INDEX, LOCK}
            assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
    finally:
        os.umask(umask)


def test_a_closed_tier_holds_no_file(folder: Path) -> None:
    files_before = open_files()
    with opened(folder) as tier:
        store(tier, many("a", 5))
    assert open_files() == files_before


# The index --------------------------------------------------------------------------------------------------


@pytest.fixture
def three(folder: Path) -> list[Frame]:
    """A closed folder with three blocks in it."""
    frames = [*many("a", 2, 5000), one("c", 5000, on=ELSEWHERE["tenant"])]
    with opened(folder, 4 * MIB) as tier:
        store(tier, frames)
    return frames


def test_a_damaged_head_is_refused_and_no_file_changed(folder: Path, medium: Medium, three: list[Frame]) -> None:
    files_before = open_files()
    sound = medium.contents()
    for at in range(32):
        damaged = bytearray(sound[INDEX])
        damaged[at] ^= 1 << at % 8
        (folder / INDEX).write_bytes(damaged)
        with pytest.raises(ConfigError, match="damaged"):
            DiskTier(folder, 4 * MIB).open()
        assert medium.contents() == {**sound, INDEX: bytes(damaged)}
    assert open_files() == files_before
    medium.restore(sound)
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, three)


@pytest.mark.parametrize(("version", "record_bytes"), [(0, RECORD_BYTES), (2, RECORD_BYTES), (1, 256)])
def test_an_index_of_another_version_is_refused_and_left_alone(
    folder: Path, medium: Medium, three: list[Frame], version: int, record_bytes: int
) -> None:
    head = struct.Struct("<16sIIQ")
    magic = (folder / INDEX).read_bytes()[:16]
    check = xxh3_64_intdigest(head.pack(magic, version, record_bytes, 0))
    medium.write(INDEX, 0, head.pack(magic, version, record_bytes, check))
    before = medium.contents()
    with pytest.raises(ConfigError, match="another version"):
        DiskTier(folder, 4 * MIB).open()
    assert medium.contents() == before


@pytest.mark.parametrize("size_bytes", [0, 100, 4096])
def test_an_index_whose_making_was_cut_short_is_made_again(folder: Path, size_bytes: int) -> None:
    # What a process leaves behind that dies while it makes a new folder.
    folder.mkdir()
    (folder / LOCK).touch()
    (folder / INDEX).write_bytes(bytes(size_bytes))
    with opened(folder) as tier:
        store(tier, [one("a")])
        assert_has(tier, [one("a")])


def test_a_damaged_record_costs_its_block_and_no_other(folder: Path, medium: Medium, three: list[Frame]) -> None:
    sound = medium.contents()
    for victim in (three[0], three[2]):
        medium.restore(sound)
        row = medium.row(victim.address)
        assert row is not None
        others = [frame for frame in three if frame is not victim]
        for at in range(RECORD_BYTES):
            medium.restore(sound)
            place = RECORDS_AT + row * RECORD_BYTES + at
            medium.write(INDEX, place, bytes([sound[INDEX][place] ^ 1 << at % 8]))
            is_written = medium.records()[row]["kind"] != FREE
            with opened(folder, 4 * MIB) as tier:
                assert_lacks(tier, [victim])
                assert_has(tier, others)
                assert (tier.recovered.blocks, tier.stats().blocks) == (2, 2)
                assert tier.recovered.dropped == is_written


def test_a_dropped_record_is_erased(folder: Path, medium: Medium, three: list[Frame]) -> None:
    row = medium.row(three[0].address)
    assert row is not None
    medium.write(INDEX, RECORDS_AT + row * RECORD_BYTES, b"damaged")
    with opened(folder, 4 * MIB) as tier:
        assert tier.recovered.dropped == 1
    with opened(folder, 4 * MIB) as tier:
        assert tier.recovered.dropped == 0
        assert_has(tier, three[1:])


def test_a_record_damaged_while_open_harms_no_other_block_after_close(
    folder: Path, medium: Medium, three: list[Frame]
) -> None:
    # Closing writes the clocks of all records: it must not put a checksum on what it did not write itself.
    with opened(folder, 4 * MIB) as tier:
        damaged_row, other_row = medium.row(three[0].address), medium.row(three[1].address)
        assert damaged_row is not None
        record = medium.records()[damaged_row]
        record["offset"] = medium.records()[other_row]["offset"]
        medium.put(damaged_row, record, has_check=False)
        read(tier, three[:1])  # the damaged one is the newest: of two claims to a place the newer is believed
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, three[1:])
        assert set(read(tier, three[:1])[0]) <= {MISS, CORRUPT}


def _set(name: str, value: object) -> Callable[[Records], None]:
    def change(record: Records) -> None:
        record[name] = value

    return change


IMPOSSIBLE = {
    "offset below the file": _set("offset", -4096),
    "offset between pages": _set("offset", 100),
    "offset behind the file": _set("offset", 1 << 40),
    "offset that overflows": _set("offset", 2**63 - 4096),
    "frame longer than the file": _set("frame_bytes", 1 << 40),
    "frame of the largest number": _set("frame_bytes", 2**63 - 1),
    "frame shorter than a header": _set("frame_bytes", HEADER_BYTES - 1),
    "frame of no bytes": _set("frame_bytes", 0),
    "frame of negative length": _set("frame_bytes", -8192),
    "unknown shelf": _set("shelf", 7),
    "shelf beyond all numbers": _set("shelf", 2**32 - 1),
    "unknown kind": _set("kind", 3),
}


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_an_impossible_record_is_dropped(
    folder: Path, medium: Medium, three: list[Frame], change: Callable[[Records], None]
) -> None:
    row = medium.row(three[1].address)
    assert row is not None
    record = medium.records()[row]
    change(record)
    medium.put(row, record)
    with opened(folder, 4 * MIB) as tier:
        assert (tier.recovered.blocks, tier.recovered.dropped) == (2, 1)
        assert_lacks(tier, [three[1]])
        assert_has(tier, [three[0], three[2]])
        store(tier, [three[1]])
        assert medium.size_bytes() <= 4 * MIB
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, three)


@pytest.mark.parametrize("clock", [2**63 - 1, 2**63 - 2, -1, -(2**63)])
def test_a_clock_beyond_all_time_does_no_harm(folder: Path, medium: Medium, three: list[Frame], clock: int) -> None:
    row = medium.row(three[1].address)
    assert row is not None
    record = medium.records()[row]
    record["clock"] = clock
    medium.put(row, record)
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, [three[0], three[2]])
        assert set(read(tier, [three[1]])[0]) <= {HIT, MISS}
        for frame in many("b", 400):
            assert tier.write([frame]) == [HIT]
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, many("b", 400)[-10:])
        store(tier, many("c", 10))


def test_a_frame_longer_than_its_record_says_is_corrupt(folder: Path, medium: Medium, three: list[Frame]) -> None:
    row = medium.row(three[1].address)
    assert row is not None
    record = medium.records()[row]
    record["frame_bytes"] = HEADER_BYTES
    medium.put(row, record)
    with opened(folder, 4 * MIB) as tier:
        assert sizes(tier, [three[1]]) == [HEADER_BYTES]
        into = np.full(HEADER_BYTES, 0xA5, np.uint8)
        assert tier.read([three[1].address], [into]) == [CORRUPT]
        assert not into.any()
        assert_has(tier, [three[0], three[2]])


def test_of_two_records_with_one_address_the_later_is_believed(
    folder: Path, medium: Medium, three: list[Frame]
) -> None:
    row = medium.row(three[0].address)
    assert row is not None
    record = medium.records()[row]
    record["offset"], record["clock"] = 0 if record["offset"] else 8192, record["clock"] + 100
    medium.put(medium.free_row(), record)
    with opened(folder, 4 * MIB) as tier:
        # The later one points to somebody else's place, and takes it: a power loss costs blocks, not bytes.
        assert (tier.recovered.blocks, tier.recovered.dropped) == (2, 2)
        assert set(read(tier, three)[0]) <= {HIT, MISS, CORRUPT}
        store(tier, three)
        assert_has(tier, three)


def test_of_two_records_with_one_address_the_earlier_is_dropped_wherever_it_stands(
    folder: Path, medium: Medium, three: list[Frame]
) -> None:
    record = medium.records()[medium.row(three[0].address)]
    record["offset"], record["clock"] = 40_960, 0
    medium.put(medium.free_row(), record)
    with opened(folder, 4 * MIB) as tier:
        assert (tier.recovered.blocks, tier.recovered.dropped) == (3, 1)
        assert_has(tier, three)


def test_of_records_that_overlap_the_latest_is_believed(folder: Path, medium: Medium, three: list[Frame]) -> None:
    offsets = sorted(medium.records()[medium.row(frame.address)]["offset"] for frame in three)
    assert offsets == [0, 12288, 24576]
    record = medium.records()[medium.row(three[0].address)]
    record["key"], record["offset"], record["clock"] = np.void(blocks.chain_keys("forged", 1)[0]), 8192, 1000
    record["frame_bytes"] = 24_000  # reaches from the first frame into the third
    medium.put(medium.free_row(), record)
    forged = one("forged", 24_000 - HEADER_BYTES)
    with opened(folder, 4 * MIB) as tier:
        assert (tier.recovered.blocks, tier.recovered.dropped) == (1, 3)
        assert read(tier, [forged, *three])[0] == [CORRUPT, MISS, MISS, MISS]
        store(tier, three)
        assert_has(tier, three)


def test_equal_clocks_decide_an_overlap_all_the_same(folder: Path, medium: Medium, three: list[Frame]) -> None:
    record = medium.records()[medium.row(three[0].address)]
    for key in blocks.chain_keys("forged", 5):
        record["key"] = np.void(key)
        medium.put(medium.free_row(), record)
    with opened(folder, 4 * MIB) as tier:
        assert (tier.recovered.blocks, tier.recovered.dropped) == (3, 5)
        assert_has(tier, three[1:])


@pytest.mark.parametrize("parent", ["itself", "each other"])
def test_records_that_claim_a_circle_of_parents_do_no_harm(
    folder: Path, medium: Medium, three: list[Frame], parent: str
) -> None:
    rows = [medium.row(frame.address) for frame in three[:2]]
    keys = [frame.header.key for frame in three[:2]]
    for row, key in zip(rows, keys if parent == "itself" else keys[::-1], strict=True):
        record = medium.records()[row]
        record["parent"] = np.void(key)
        record["parent_row"] = row if parent == "itself" else sum(rows) - row
        medium.put(row, record)
    with opened(folder, BYTES_MIN) as tier:
        assert_has(tier, three)
        for frame in many("b", 300, 0):
            assert tier.write([frame]) == [HIT]
        tier.delete(addresses_of(three))
        store(tier, three)


def test_a_lost_shelf_record_costs_its_blocks_and_no_others(folder: Path, medium: Medium, three: list[Frame]) -> None:
    shelves = medium.records().view(SHELF_RECORD)
    row = int(np.flatnonzero((shelves["kind"] == SHELF) & (shelves["shelf"] == np.void(HERE.pack())))[0])
    medium.write(INDEX, RECORDS_AT + row * RECORD_BYTES, bytes(RECORD_BYTES))
    with opened(folder, 4 * MIB) as tier:
        assert (tier.recovered.blocks, tier.recovered.dropped) == (1, 2)
        assert_lacks(tier, three[:2])
        assert_has(tier, three[2:])
        store(tier, three)
    with opened(folder, 4 * MIB) as tier:
        assert tier.recovered.dropped == 0
        assert_has(tier, three)


SHELF_FORGERIES = {
    "number of another shelf": lambda: shelf_record(blocks.shelf("forged"), 0),
    "shelf of another number": lambda: shelf_record(HERE, 50),
    "number beyond all shelves": lambda: shelf_record(blocks.shelf("forged"), 2**32 - 1),
    "part that cannot be": lambda: _impossible_part(),
}


def _impossible_part() -> Records:
    record = shelf_record(blocks.shelf("forged"), 9).view(SHELF_RECORD)
    raw = bytearray(record["shelf"][0].tobytes())
    raw[96 + 2 : 96 + 6] = struct.pack("<HH", 9, 4)  # rank 9 of 4
    record["shelf"] = np.void(bytes(raw))
    return record.view(BLOCK_RECORD)


@pytest.mark.parametrize("forge", SHELF_FORGERIES.values(), ids=SHELF_FORGERIES.keys())
def test_a_second_or_impossible_shelf_record_is_dropped(
    folder: Path, medium: Medium, three: list[Frame], forge: Callable[[], Records]
) -> None:
    medium.put(medium.free_row(), forge()[0])
    with opened(folder, 4 * MIB) as tier:
        assert (tier.recovered.blocks, tier.recovered.dropped) == (3, 1)
        assert_has(tier, three)


def test_a_shelf_number_far_above_the_others_is_believed(folder: Path, medium: Medium, three: list[Frame]) -> None:
    medium.put(medium.free_row(), shelf_record(blocks.shelf("far"), 5000)[0])
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, three)
        store(tier, [one("a", on=blocks.shelf("far")), one("a", on=blocks.shelf("new"))])
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, [*three, one("a", on=blocks.shelf("far")), one("a", on=blocks.shelf("new"))])


def test_an_index_full_of_noise_opens_empty(folder: Path, medium: Medium, three: list[Frame]) -> None:
    rows = len(medium.records())
    noise = np.random.default_rng(5).integers(0, 256, rows * RECORD_BYTES, np.uint8)
    medium.write(INDEX, RECORDS_AT, noise.tobytes())
    with opened(folder, 4 * MIB) as tier:
        assert (tier.recovered.blocks, tier.recovered.dropped) == (0, rows)
        assert_lacks(tier, three)
        store(tier, three)
        assert_has(tier, three)


def test_records_of_random_numbers_under_sound_checksums_do_no_harm(
    folder: Path, medium: Medium, three: list[Frame]
) -> None:
    drawn = np.random.default_rng(6)
    sound = medium.contents()
    for _ in range(30):
        medium.restore(sound)
        rows = len(medium.records())
        records = np.frombuffer(drawn.bytes(rows * RECORD_BYTES), BLOCK_RECORD).copy()
        records["kind"] = drawn.integers(0, 4, rows)
        records["shelf"] = drawn.integers(0, 4, rows)
        records["offset"] = drawn.integers(-2, 40, rows) * drawn.choice([4096, 2048], rows)
        records["frame_bytes"] = drawn.integers(-1, 40_000, rows)
        records["check"] = checksums(records)
        medium.write(INDEX, RECORDS_AT, records.tobytes())
        medium.put(0, shelf_record(HERE, 0)[0])
        with opened(folder, 4 * MIB) as tier:
            assert tier.stats().bytes_used <= tier.stats().bytes_max
            assert set(read(tier, three)[0]) <= {HIT, MISS, CORRUPT}
            known = [Address(HERE, Key(record["key"].tobytes())) for record in medium.records()]
            keys = [address.key for address in known]
            into = [np.full(size, 0xA5, np.uint8) for size in tier.lookup(HERE, keys).tolist()]
            assert set(tier.read(known, into)) <= {MISS, CORRUPT}
            assert not any(memory.any() for memory in into)
            store(tier, three)
            assert_has(tier, three)
            assert medium.size_bytes() <= 4 * MIB


@pytest.mark.parametrize("rows_left", [0, 1, 2.5, 4])
def test_an_index_cut_short_costs_the_records_behind_the_cut(
    folder: Path, medium: Medium, three: list[Frame], rows_left: float
) -> None:
    os.truncate(folder / INDEX, RECORDS_AT + int(rows_left * RECORD_BYTES))
    with opened(folder, 4 * MIB) as tier:
        present(tier, three)
        store(tier, three)
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, three)


@pytest.mark.parametrize("name", [DATA, INDEX, LOCK])
def test_a_lost_file_costs_blocks_and_nothing_else(folder: Path, medium: Medium, three: list[Frame], name: str) -> None:
    (folder / name).unlink()
    if name == LOCK:  # without it the folder may be anybody's
        with pytest.raises(FolderForeign):
            DiskTier(folder, 4 * MIB).open()
        return
    with opened(folder, 4 * MIB) as tier:
        assert_lacks(tier, three)
        assert tier.recovered.dropped == (3 if name == DATA else 0)
        store(tier, three)
        assert medium.size_bytes() <= 4 * MIB
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, three)


def test_opening_leaves_the_garbage_collector_as_it_was(folder: Path, three: list[Frame]) -> None:
    for is_enabled in (False, True):
        (gc.enable if is_enabled else gc.disable)()
        with opened(folder, 4 * MIB):
            assert gc.isenabled() is is_enabled


def test_a_libc_that_cannot_give_memory_back_will_do(
    folder: Path, three: list[Frame], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.tiers.disk.recovery.ctypes.CDLL", lambda _: object())
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, three)


# The data file ----------------------------------------------------------------------------------------------


def test_a_data_file_cut_short_while_closed_costs_the_blocks_behind_the_cut(folder: Path) -> None:
    frames = many("a", 20)
    with opened(folder) as tier:
        store(tier, frames)
    os.truncate(folder / DATA, 10 * 16_384 + 5000)
    with opened(folder) as tier:
        assert (tier.recovered.blocks, tier.recovered.dropped) == (10, 10)
        assert_has(tier, frames[:10])
        assert_lacks(tier, frames[10:])
        store(tier, frames)
        assert_has(tier, frames)


def test_a_data_file_cut_short_while_open_is_corrupt_behind_the_cut(folder: Path) -> None:
    frames = many("a", 20)
    with opened(folder) as tier:
        store(tier, frames)
        os.truncate(folder / DATA, 10 * 16_384 + 5000)
        assert read(tier, frames)[0] == [HIT] * 10 + [CORRUPT] * 10
        assert_lacks(tier, frames[10:])
        store(tier, frames)
        assert_has(tier, frames)


def test_bytes_of_one_tenant_never_pad_a_frame_of_another(folder: Path, medium: Medium) -> None:
    secret = np.frombuffer(b"secret of a tenant" * 2000, np.uint8)
    theirs = one("a", len(secret), on=ELSEWHERE["tenant"])
    theirs.memory[HEADER_BYTES:] = secret
    with opened(folder) as tier:
        store(tier, [theirs])
        tier.delete([theirs.address])
        for i in range(60):  # until the staging memory of every thread has been used again
            store(tier, [one(i, 1)])
            tier.delete([one(i, 1).address])
        store(tier, [one("mine", 1)])
        record = medium.records()[medium.row(one("mine", 1).address)]
        with (folder / DATA).open("rb") as file:
            file.seek(int(record["offset"]))
            assert b"secret" not in file.read(2 * HEADER_BYTES)


# What survives ----------------------------------------------------------------------------------------------


def crashed(folder: Path, name: str = "crashed") -> Path:
    """The folder as a process leaves it behind that is killed now."""
    copy = folder.with_name(name)
    shutil.copytree(folder, copy)
    return copy


def test_every_block_that_was_stored_survives_a_crash(folder: Path) -> None:
    frames = [*blocks.chain_frames("chain", 30, 5000), *many("b", 10, on=ELSEWHERE["scope"])]
    with opened(folder) as tier:
        store(tier, frames)
        copy = crashed(folder)
    with opened(copy) as tier:
        assert tier.recovered.dropped == 0
        assert_has(tier, frames)


def test_no_crash_brings_back_what_was_cleared(folder: Path) -> None:
    mine, theirs = many("a", 10), many("a", 10, on=ELSEWHERE["tenant"])
    with opened(folder) as tier:
        store(tier, [*mine, *theirs])
        tier.clear(tenant=HERE.tenant)
        copy = crashed(folder)
    with opened(copy) as tier:
        assert_lacks(tier, mine)
        assert_has(tier, theirs)


def test_no_crash_brings_back_a_write_that_was_under_way_when_it_was_cleared(folder: Path) -> None:
    faults = Faults()
    is_at_record, may_go_on = threading.Event(), threading.Event()
    copies: list[Path] = []
    outcomes: list[Outcome] = []

    def wait_at_the_record(operation: str, name: str) -> None:
        if threading.current_thread() is writer and (operation, name) == ("write", INDEX):
            is_at_record.set()
            assert may_go_on.wait(30)

    def crash_if_cleared(operation: str, name: str) -> None:
        if threading.current_thread() is writer and may_go_on.is_set() and not cleaner.is_alive():
            copies.append(crashed(folder, f"crashed-{len(copies)}"))

    with opened(folder, open_file=faults.open) as tier:
        store(tier, [one("b")])
        writer = threading.Thread(target=lambda: outcomes.extend(tier.write([one("a")])))
        cleaner = threading.Thread(target=tier.clear)
        faults.before, faults.after = wait_at_the_record, crash_if_cleared
        writer.start()
        assert is_at_record.wait(30)  # the frame is on the medium, its record is about to be
        cleaner.start()
        cleaner.join(0.2)  # either it waits for the writer, or it returns and the writer must not go on
        may_go_on.set()
        writer.join(30)
        cleaner.join(30)
        copies.append(crashed(folder, "crashed-last"))
        assert outcomes == [REJECTED]
        assert_lacks(tier, [one("a"), one("b")])
        assert tier.stats().bytes_used == 0
    for copy in copies:
        with opened(copy) as tier:
            assert_lacks(tier, [one("a"), one("b")])


def test_clear_of_a_prefix_stops_those_that_are_being_written_and_follow_it(folder: Path) -> None:
    faults = Faults()
    is_writing, may_go_on = threading.Event(), threading.Event()
    chain, other = blocks.chain_frames("chain", 8, 5000), one("other")

    def wait_at_the_frame(operation: str, name: str) -> None:
        if (operation, name) == ("write", DATA):
            is_writing.set()
            assert may_go_on.wait(30)

    with opened(folder, open_file=faults.open) as tier:
        store(tier, [*chain[:3], *chain[5:]])
        outcomes: list[Outcome] = []
        writer = threading.Thread(target=lambda: outcomes.extend(tier.write([chain[4], other, chain[3]])))
        counts: list[int] = []
        cleaner = threading.Thread(target=lambda: counts.append(tier.clear(prefix=chain[1].header.key)))
        faults.before = wait_at_the_frame
        writer.start()
        assert is_writing.wait(30)
        cleaner.start()
        while sizes(tier, chain[1:2]) != [0]:  # only when it has stopped them does it wait for their end
            cleaner.join(0.01)
        assert cleaner.is_alive()
        may_go_on.set()
        writer.join(30)
        cleaner.join(30)
        assert outcomes == [REJECTED, HIT, REJECTED]
        assert counts == [2 + 3]  # those after the ones that were being written follow, too
        assert_has(tier, [chain[0], other])
        assert_lacks(tier, chain[1:])
        copy = crashed(folder)
    with opened(copy) as tier:
        assert_has(tier, [chain[0], other])
        assert_lacks(tier, chain[1:])


def test_clear_of_a_prefix_forgets_blocks_that_could_not_be_read(folder: Path) -> None:
    faults = Faults()
    chain, elsewhere = blocks.chain_frames("chain", 4, 5000), one("a", on=ELSEWHERE["tenant"])
    with opened(folder, open_file=faults.open) as tier:
        store(tier, [*chain, elsewhere])
        faults.failing = {("read", DATA)}
        assert read(tier, [chain[2], elsewhere])[0] == [ERROR] * 2
        faults.failing.clear()
        tier.clear(tenant=HERE.tenant, prefix=chain[1].header.key)
    with opened(folder) as tier:
        assert_lacks(tier, chain[1:3])
        assert_has(tier, [chain[0], elsewhere])


def test_blocks_leave_in_the_order_of_their_last_use_after_opening_again(folder: Path) -> None:
    frames = many("a", 100)
    with opened(folder, 2 * MIB) as tier:
        store(tier, frames)
        for frame in frames[:50]:
            assert read(tier, [frame])[0] == [HIT]
    order = frames[50:] + frames[:50]
    with opened(folder, 2 * MIB) as tier:
        for filler in many("filler", 70):
            store(tier, [filler])
            here = [size > 0 for size in sizes(tier, order)]
            assert here == sorted(here)  # those gone are the first of the order
        assert here.count(False) > 20


def test_a_new_shelf_in_a_full_tier_survives(folder: Path) -> None:
    # The shelf's record may take the row of a block that the same batch has evicted: it must not be erased after.
    large, new = one("large", 400_000), one("new", on=ELSEWHERE["tenant"])
    with opened(folder, BYTES_MIN) as tier:
        for frame in many("small", 200, 0):
            store(tier, [frame])
        store(tier, [large, new])
    with opened(folder, BYTES_MIN) as tier:
        assert tier.recovered.dropped == 0
        assert_has(tier, [large, new])


def test_many_shelves_survive(folder: Path) -> None:
    frames = [one("a", 0, on=blocks.shelf(f"tenant {i}", scope=str(i % 5))) for i in range(600)]
    with opened(folder) as tier:
        store(tier, frames)
    with opened(folder) as tier:
        assert tier.recovered.dropped == 0
        assert_has(tier, frames)


def test_numbers_of_empty_shelves_are_given_out_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tiers.table.SHELVES_MAX", 4)
    monkeypatch.setattr("kvtide.tiers.disk.recovery.SHELVES_MAX", 4)
    frames = [one("a", on=blocks.shelf(f"tenant {i}")) for i in range(6)]
    with opened(folder) as tier:
        store(tier, frames[:4])
        assert tier.write(frames[4:]) == [REJECTED, REJECTED]
        tier.clear(tenant=frames[1].header.shelf.tenant)
        assert tier.write(frames[4:]) == [HIT, REJECTED]
    with opened(folder) as tier:
        assert_has(tier, [frames[0], *frames[2:5]])
        assert_lacks(tier, [frames[1], frames[5]])
        assert tier.recovered.dropped == 0


def test_shelves_that_compete_for_the_last_number_say_what_became_of_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.tiers.table.SHELVES_MAX", 2)
    monkeypatch.setattr("kvtide.tiers.disk.recovery.SHELVES_MAX", 2)
    frames = [one("a", on=blocks.shelf(f"tenant {i}")) for i in range(6)]
    with opened(folder) as tier:
        outcomes = tier.write(frames)
        here = [frame.address for frame, outcome in zip(frames, outcomes, strict=True) if outcome is HIT]
        assert 0 < len(here) <= 2
        assert present(tier, frames) == here
    with opened(folder) as tier:
        assert present(tier, frames) == here


# A device that fails ----------------------------------------------------------------------------------------


class FakeTime:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s


def test_a_device_without_room_rejects_and_keeps_what_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr("kvtide.tiers.disk.room.time", clock)
    faults = Faults(errno.ENOSPC)
    with opened(folder, open_file=faults.open) as tier:
        store(tier, many("a", 5))
        faults.failing = {("allocate", DATA), ("allocate", INDEX)}
        assert tier.write([one("large", 5 << 20)]) == [REJECTED]
        assert_has(tier, many("a", 5))
        asked = faults.seen["allocate", DATA]
        assert tier.write([one("large", 5 << 20)]) == [REJECTED]
        assert faults.seen["allocate", DATA] == asked  # a full device is not asked each time
        faults.failing.clear()
        clock.now_s += 3600
        store(tier, [one("large", 5 << 20)])
        assert_has(tier, [*many("a", 5), one("large", 5 << 20)])


def test_a_device_without_room_at_the_start_rejects_everything(folder: Path) -> None:
    faults = Faults(errno.ENOSPC, failing={("allocate", DATA)})
    with opened(folder, open_file=faults.open) as tier:
        assert tier.write(many("a", 3)) == [REJECTED] * 3
        assert_lacks(tier, many("a", 3))


def test_a_device_without_room_goes_on_within_what_it_has(folder: Path) -> None:
    faults = Faults(errno.ENOSPC)
    with opened(folder, open_file=faults.open) as tier:
        store(tier, many("a", 5))
        faults.failing = {("allocate", DATA), ("allocate", INDEX)}
        for frame in many("b", 200):
            assert tier.write([frame]) == [HIT]
            assert_has(tier, [frame])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("name", [DATA, INDEX])
def test_a_failed_write_is_an_error_and_stores_nothing(folder: Path, code: int, name: str) -> None:
    faults = Faults(code)
    with opened(folder, open_file=faults.open) as tier:
        store(tier, many("a", 5))
        used = tier.stats().bytes_used
        faults.failing = {("write", name)}
        assert tier.write(many("b", 5)) == [ERROR] * 5
        assert_lacks(tier, many("b", 5))
        assert_has(tier, many("a", 5))
        assert tier.stats().bytes_used == used
        faults.failing.clear()
        store(tier, many("b", 5))
        assert_has(tier, [*many("a", 5), *many("b", 5)])


def test_a_failed_read_is_an_error_then_a_miss_and_back_after_opening_again(folder: Path) -> None:
    faults = Faults()
    with opened(folder, open_file=faults.open) as tier:
        store(tier, many("a", 5))
        faults.failing = {("read", DATA)}
        outcomes, into = read(tier, many("a", 3))
        assert outcomes == [ERROR] * 3
        assert not any(memory.any() for memory in into)
        faults.failing.clear()
        assert_lacks(tier, many("a", 3))
        assert_has(tier, many("a", 5)[3:])
        store(tier, many("b", 50))  # the places that could not be read are not given to others
    with opened(folder) as tier:
        assert_has(tier, [*many("a", 5), *many("b", 50)])


def test_a_bad_sector_costs_its_block_and_not_the_neighbours_that_are_read_with_it(folder: Path) -> None:
    frames = many("a", 5, 4096)
    bad = 2 * (HEADER_BYTES + 4096)

    class BadSector(RawFile):
        def read(self, parts: list[np.ndarray], offset: int) -> int:
            if self.path.name == DATA and offset <= bad < offset + sum(map(len, parts)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(parts, offset)

    with opened(folder, open_file=BadSector) as tier:
        store(tier, frames)
        outcomes, into = read(tier, frames)
        assert outcomes == [HIT, HIT, ERROR, HIT, HIT]
        assert not into[2].any()
        assert_has(tier, [*frames[:2], *frames[3:]])


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_clear_that_the_medium_does_not_confirm_says_so(folder: Path, operation: str) -> None:
    faults = Faults()
    with opened(folder, open_file=faults.open) as tier:
        store(tier, many("a", 3))
        faults.failing = {(operation, INDEX)}
        with pytest.raises(MediumFailed, match="clear again"):
            tier.clear()
        assert_lacks(tier, many("a", 3))
        faults.failing.clear()


def test_a_shelf_record_that_could_not_be_written_is_written_with_the_next_block(folder: Path) -> None:
    faults = Faults()
    with opened(folder, open_file=faults.open) as tier:
        faults.failing = {("write", INDEX)}
        assert tier.write(many("a", 2)) == [REJECTED] * 2
        faults.failing.clear()
        store(tier, many("a", 2))
    with opened(folder) as tier:
        assert_has(tier, many("a", 2))


def test_a_block_that_could_not_be_read_can_be_written_anew(folder: Path) -> None:
    faults = Faults()
    with opened(folder, open_file=faults.open) as tier:
        store(tier, many("a", 3))
        faults.failing = {("read", DATA)}
        assert read(tier, many("a", 1))[0] == [ERROR]
        faults.failing.clear()
        store(tier, many("a", 1))
        assert_has(tier, many("a", 3))
    with opened(folder) as tier:
        assert_has(tier, many("a", 3))


def test_a_failed_erase_does_not_bring_a_deleted_block_back_while_open(folder: Path) -> None:
    faults = Faults()
    with opened(folder, open_file=faults.open) as tier:
        store(tier, many("a", 3))
        faults.failing = {("write", INDEX)}
        assert tier.delete(addresses_of(many("a", 1))) == [HIT]
        assert_lacks(tier, many("a", 1))
        faults.failing.clear()
        store(tier, many("b", 30))
    with opened(folder) as tier:
        assert_has(tier, [*many("a", 3)[1:], *many("b", 30)])
        assert set(read(tier, many("a", 1))[0]) <= {HIT, MISS, CORRUPT}


@pytest.mark.parametrize("operation", ["write", "sync", "read"])
@pytest.mark.parametrize("name", [DATA, INDEX])
def test_closing_a_device_that_fails_lets_go_of_everything(folder: Path, operation: str, name: str) -> None:
    faults = Faults()
    files_before = open_files()
    tier = DiskTier(folder, 4 * MIB, open_file=faults.open)
    tier.open()
    store(tier, many("a", 3))
    faults.failing = {(operation, name)}
    tier.close()
    assert open_files() == files_before
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, many("a", 3))


@pytest.mark.parametrize(
    ("operation", "name"),
    [("open", INDEX), ("open", DATA), ("read", INDEX), ("write", INDEX), ("allocate", INDEX), ("truncate", DATA)],
)
def test_opening_a_device_that_fails_is_refused_and_lets_go_of_everything(
    folder: Path, operation: str, name: str
) -> None:
    if operation == "truncate":
        with opened(folder, 32 * MIB) as tier:
            store(tier, many("a", 100))
    files_before = open_files()
    faults = Faults(failing={(operation, name)})
    tier = DiskTier(folder, BYTES_MIN, open_file=faults.open)
    with pytest.raises(ConfigError, match=r"disk\.folder"):
        tier.open()
    tier.close()
    assert open_files() == files_before
    with opened(folder, BYTES_MIN) as tier:
        store(tier, [one("b")])


def test_a_close_waits_for_writes_that_are_under_way(folder: Path) -> None:
    # Without waiting, the writer would put its record into whatever file has got the closed one's number.
    faults = Faults()
    may_go_on, is_in_index = threading.Event(), threading.Event()
    tier = DiskTier(folder, 4 * MIB, open_file=faults.open)
    tier.open()
    store(tier, [one("a")])

    def wait_at_the_record(operation: str, name: str) -> None:
        if (operation, name) == ("write", INDEX) and threading.current_thread() is writer:
            is_in_index.set()
            assert may_go_on.wait(30)

    outcomes: list[Outcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(tier.write([one("b")])))
    closer = threading.Thread(target=tier.close)
    faults.before = wait_at_the_record
    writer.start()
    assert is_in_index.wait(30)
    closer.start()
    closer.join(0.2)
    may_go_on.set()
    writer.join(30)
    closer.join(30)
    assert outcomes == [HIT]
    with opened(folder, 4 * MIB) as tier:
        assert_has(tier, [one("a"), one("b")])


def test_files_are_synced_from_time_to_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr("kvtide.tiers.disk.tier.time", clock)
    faults = Faults()
    days = {"bytes_written_daily_max": 30_000, "today": lambda: 20_000}
    with opened(folder, open_file=faults.open, **days) as tier:
        synced = faults.seen["sync", DATA]
        store(tier, [one("a")])
        assert faults.seen["sync", DATA] == synced
        clock.now_s += 60
        is_synced = threading.Event()
        faults.before = lambda operation, _: is_synced.set() if operation == "sync" else None
        store(tier, [one("b", 5000)])
        assert is_synced.wait(30)


def test_a_sync_that_fails_costs_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr("kvtide.tiers.disk.tier.time", clock)
    faults = Faults(failing={("sync", DATA)})
    with opened(folder, open_file=faults.open) as tier:
        for frame in many("a", 5):
            clock.now_s += 60
            store(tier, [frame])
        assert_has(tier, many("a", 5))
    assert faults.seen["sync", DATA] > 1


def test_a_mistake_in_the_code_is_not_taken_for_a_fault_of_the_device(folder: Path) -> None:
    faults = Faults()

    def mistake(operation: str, name: str) -> None:
        if (operation, name) == ("read", DATA):
            raise ZeroDivisionError

    with opened(folder, open_file=faults.open) as tier:
        store(tier, [one("a")])
        faults.before = mistake
        with pytest.raises(ZeroDivisionError):
            tier.read([one("a").address], [one("a").memory])


def _scenario(folder: Path, faults: Faults) -> bool:
    """A short life with a bit of everything. Only open and clear may raise, a ConfigError and a MediumFailed.

    Returns whether the other tenant's block was cleared as far as clear says: then it may not come back.
    """
    tier = DiskTier(folder, BYTES_MIN, open_file=faults.open)
    try:
        tier.open()
    except ConfigError:
        return True
    try:
        chain = blocks.chain_frames("chain", 4, 50_000)
        tier.write(chain)
        read(tier, chain)
        tier.delete([chain[2].address])
        tier.write(many("a", 10, 100_000))
        read(tier, many("a", 10, 100_000))
        tier.write([one("b", on=ELSEWHERE["tenant"])])
        is_cleared = True
        try:
            tier.clear(tenant=ELSEWHERE["tenant"].tenant)
        except MediumFailed:
            is_cleared = False
        tier.write([one("c", 600_000)])
        read(tier, [one("c", 600_000)])
    finally:
        tier.close()
    return is_cleared


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_whichever_call_fails_no_byte_is_wrong_and_nothing_is_left_open(folder: Path, code: int) -> None:
    rehearsal = Faults()
    _scenario(folder, rehearsal)
    assert rehearsal.calls > 25
    files_before = open_files()
    every = [*blocks.chain_frames("chain", 4, 50_000), *many("a", 10, 100_000), one("c", 600_000)]
    for fail_at in range(1, rehearsal.calls + 1):
        shutil.rmtree(folder)
        is_cleared = _scenario(folder, Faults(code, fail_at=fail_at))
        assert open_files() == files_before, f"call {fail_at} left a file open"
        with opened(folder, BYTES_MIN) as tier:
            assert set(read(tier, every)[0]) <= {HIT, MISS, CORRUPT}
            assert not is_cleared or not any(sizes(tier, [one("b", on=ELSEWHERE["tenant"])]))
            store(tier, [one("d")])
            assert_has(tier, [one("d")])
            assert Medium(folder).size_bytes() <= BYTES_MIN


@pytest.mark.parametrize("is_direct", [True, False])
def test_calls_that_the_kernel_cuts_short_are_completed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    limit = 4096 if is_direct else 1000
    real = {"preadv": os.preadv, "pwritev": os.pwritev}

    def cut(buffers: list[np.ndarray]) -> list[memoryview]:
        left, parts = limit, []
        for buffer in buffers:
            part = memoryview(buffer)[:left]
            left -= len(part)
            parts.append(part)
            if not left:
                break
        return parts

    with opened(folder) as tier:
        monkeypatch.setattr(tier, "is_direct", is_direct)
    monkeypatch.setattr("kvtide.tiers.disk.tier.supports_direct", lambda folder: is_direct and supports_direct(folder))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real["preadv"](fd, cut(buffers), offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: real["pwritev"](fd, cut(buffers), offset))
    frames = [one(size, size) for size in (0, 1, 4097, 30_000)]
    with opened(folder) as tier:
        store(tier, frames)
        assert_has(tier, frames)
    with opened(folder) as tier:
        assert_has(tier, frames)


# The daily budget -------------------------------------------------------------------------------------------


def test_a_spent_budget_throttles_until_the_next_day(folder: Path) -> None:
    days = [20_000]
    frames = many("a", 12)
    settings = {"bytes_written_daily_max": 5 * frames[0].header.frame_bytes + 100, "today": lambda: days[0]}
    with opened(folder, **settings) as tier:
        assert tier.write(frames[:7]) == [HIT] * 5 + [THROTTLED] * 2
        assert tier.write([one("small", 0)]) == [THROTTLED]
        assert tier.write(frames[:5]) == [HIT] * 5  # what is there already costs nothing
        assert_has(tier, frames[:5])
        assert_lacks(tier, frames[5:])
    with opened(folder, **settings) as tier:  # a restart does not open a new purse
        assert tier.write(frames[5:7]) == [THROTTLED] * 2
        days[0] += 1
        assert tier.write(frames[5:]) == [HIT] * 5 + [THROTTLED] * 2
    with opened(folder, today=lambda: days[0]) as tier:
        store(tier, frames)
        assert tier.stats().outcomes["write"] == {"hit": 12}


def test_a_frame_smaller_than_the_rest_of_the_budget_still_enters(folder: Path) -> None:
    with opened(folder, bytes_written_daily_max=30_000) as tier:
        assert tier.write([one("a", 20_000), one("b", 20_000), one("c", 0)]) == [HIT, THROTTLED, HIT]


def test_what_was_not_written_spends_no_budget(folder: Path) -> None:
    faults = Faults()
    frame = one("a", 20_000)
    with opened(folder, bytes_written_daily_max=30_000, open_file=faults.open) as tier:
        assert tier.write([frame], PASSED) == [TIMEOUT]
        store(tier, [frame])


def test_a_damaged_day_counts_from_zero(folder: Path, medium: Medium) -> None:
    settings = {"bytes_written_daily_max": 30_000, "today": lambda: 20_000}
    with opened(folder, **settings) as tier:
        store(tier, [one("a", 20_000)])
    medium.write(INDEX, 4096, b"\xff" * 16)
    with opened(folder, **settings) as tier:
        store(tier, [one("b", 20_000)])
