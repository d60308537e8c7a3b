# SPDX-License-Identifier: Apache-2.0
"""Secrets on disk: made once, for their owner alone; files that others could read, or that say little, are refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from kvtide.errors import ConfigError
from kvtide.keys import SECRET_BYTES_MIN
from kvtide.node.secrets import given_secret, kept_secret


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_secret_is_made_once_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "tenants" / "search"
    first = kept_secret(path)
    assert len(first) >= 32
    assert kept_secret(path) == given_secret(path) == first


def test_two_secrets_differ(tmp_path: Path) -> None:
    assert kept_secret(tmp_path / "a") != kept_secret(tmp_path / "b")


def test_a_secret_that_was_made_is_its_owners_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        kept_secret(tmp_path / "secrets" / "search")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "secrets" / "search").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700


def test_nothing_but_the_secret_is_left_in_its_folder(tmp_path: Path) -> None:
    kept_secret(tmp_path / "search")
    kept_secret(tmp_path / "search")
    assert [path.name for path in tmp_path.iterdir()] == ["search"]


def test_processes_that_make_a_secret_at_once_get_the_same(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvtide.node.secrets import kept_secret; "
        "print('ready', flush=True); sys.stdin.readline(); print(kept_secret(Path(sys.argv[1])).decode())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "secrets" / "search")]
    processes = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    got = {process.communicate()[0].strip() for process in processes}
    assert got == {given_secret(tmp_path / "secrets" / "search").decode()}
    assert [path.name for path in (tmp_path / "secrets").iterdir()] == ["search"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666, 0o777])
def test_a_secret_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "search", b"x" * 64, mode)
    for read in (given_secret, kept_secret):
        with pytest.raises(ConfigError, match="chmod 600"):
            read(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_secret_of_its_owner_alone_is_taken(tmp_path: Path, mode: int) -> None:
    assert given_secret(written(tmp_path / "search", b"x" * 64, mode)) == b"x" * 64


@pytest.mark.parametrize("size", [0, 1, SECRET_BYTES_MIN - 1, 4097, 100_000])
def test_a_secret_too_short_or_too_long_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ConfigError, match="random"):
        given_secret(written(tmp_path / "search", b"x" * size))


@pytest.mark.parametrize("size", [SECRET_BYTES_MIN, 64, 4096])
def test_a_secret_of_a_good_size_is_taken(tmp_path: Path, size: int) -> None:
    assert given_secret(written(tmp_path / "search", b"x" * size)) == b"x" * size


def test_white_space_around_a_secret_is_no_part_of_it(tmp_path: Path) -> None:
    assert given_secret(written(tmp_path / "search", b" \n" + b"x" * 32 + b"\r\n")) == b"x" * 32


def test_white_space_alone_is_no_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        given_secret(written(tmp_path / "search", b"\n" * 64))


def test_a_secret_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"search cannot be read: No such file"):
        given_secret(tmp_path / "search")


def test_a_folder_is_no_secret_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        given_secret(tmp_path)


def test_a_refusal_does_not_show_the_secret(tmp_path: Path) -> None:
    path = written(tmp_path / "search", b"hush-hush", 0o600)
    with pytest.raises(ConfigError) as caught:
        given_secret(path)
    assert "hush" not in f"{caught.value}{caught.value.context}"
