# SPDX-License-Identifier: Apache-2.0
"""How a service starts, or says in one line why it does not, and harms nobody by trying."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing.node import ServedNode
from kvtide.testing.store_suite.tools import KEYS, PATIENCE_S, User, eventually

SMALL = ["--dram-bytes-max", "4MiB", "--disk-bytes-max", "64MiB", "--admin-is-on", "false"]


def refused(folder: Path, *flags: str) -> str:
    """What a service says that does not start. One line, and the exit code of a mistake that it explains."""
    command = [sys.executable, "-m", "kvtide", "serve", "--folder", str(folder), *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False)
    assert ended.returncode == 2, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if " INFO " not in line]
    assert len(errors) == 1, ended.stderr
    assert errors[0].startswith("kvtide: error: ")
    return errors[0]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with ServedNode(tmp_path_factory.mktemp("first"), *SMALL) as node:
        yield node


@pytest.fixture
def user(node: ServedNode) -> Iterator[User]:
    """Who uses the first service, and wants to go on."""
    with node.connect(control_s=PATIENCE_S) as client:
        ticket = client.open_scope(KEYS[0])  # type: ignore[arg-type] # any digest is a namespace
        assert client.wait(ticket, PATIENCE_S)
        assert ticket.result is not None
        user = User(client, ticket.result, lambda: None)
        user.save()
        yield user
        user.assert_right(user.fetch())
        assert client.is_connected
        node.connect().close()


def test_a_second_service_in_a_folder_is_refused_and_the_first_goes_on(node: ServedNode, user: User) -> None:
    assert f"another service serves {node.socket}" in refused(node.folder, *SMALL)
    assert node.socket.exists()


def test_a_second_service_at_a_socket_is_refused_and_the_first_goes_on(
    node: ServedNode, user: User, tmp_path: Path
) -> None:
    error = refused(tmp_path / "second", *SMALL, "--node-socket", str(node.socket))
    assert f"another service serves {node.socket}" in error
    assert "--folder" in error


def test_a_second_service_of_a_disk_folder_is_refused_and_the_first_goes_on(
    node: ServedNode, user: User, tmp_path: Path
) -> None:
    error = refused(tmp_path / "second", *SMALL, "--disk-folder", str(node.folder / "blocks"))
    assert str(node.folder / "blocks") in error
    assert str(node.pid) in error
    assert not (tmp_path / "second" / "kvtide.sock").exists(), "nobody finds a socket that nobody serves"


def test_more_memory_than_there_is_is_refused_by_the_name_of_its_setting(tmp_path: Path) -> None:
    error = refused(tmp_path / "node", *SMALL, "--dram-bytes-max", "100TiB")
    assert "dram.bytes_max" in error
    assert "lower dram.bytes_max" in error
    assert not (tmp_path / "node" / "kvtide.sock").exists()


def test_a_socket_that_a_killed_service_left_is_replaced(tmp_path: Path) -> None:
    node = ServedNode(tmp_path / "node", *SMALL)
    with node:
        node.kill()
        assert node.socket.exists()
        with socket.socket(socket.AF_UNIX) as line:
            assert line.connect_ex(str(node.socket)) == errno.ECONNREFUSED, "nobody serves it"
        node.start()
        node.connect().close()
        assert node.stop() == 0
        assert not node.socket.exists()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "kvtide.sock"
    path.write_text("precious")
    assert "is no socket: name another path" in refused(tmp_path / "node", *SMALL, "--node-socket", str(path))
    assert path.read_text() == "precious"


def test_the_socket_and_the_folder_are_the_owners_alone(tmp_path: Path) -> None:
    with ServedNode(tmp_path / "node", *SMALL) as node:
        assert stat.S_IMODE(node.socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(node.folder.stat().st_mode) == 0o700


def test_a_folder_is_made_for_the_owner_alone_and_the_socket_with_the_mode_of_the_settings(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "node"
    path = tmp_path / "new" / "elsewhere" / "node.sock"
    command = ["--folder", str(folder), *SMALL, "--node-socket", str(path), "--node-socket-mode", "0660"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvtide", "serve", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            eventually(lambda: path.exists() and stat.S_IMODE(path.stat().st_mode) == 0o660, "the socket is there")
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            with socket.socket(socket.AF_UNIX) as line:
                eventually(lambda: line.connect_ex(str(path)) == 0, "it takes connections")
        finally:
            process.kill()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    folder.chmod(0o777)
    error = refused(folder, *SMALL)
    assert str(folder) in error
    assert "chmod 700" in error
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refused(tmp_path / "file" / "node", *SMALL)
    assert "cannot be made" in error


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    assert "node.socket" in refused(tmp_path / ("x" * 120), *SMALL)
