# SPDX-License-Identifier: Apache-2.0
"""The service from the other end of its socket: who comes in, in which order it answers, what it hands out."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import socket
import sys
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtide import wire
from kvtide.client import connect
from kvtide.config import DramSettings, LeaseSettings, NodeSettings, Settings
from kvtide.config.settings import (
    ArenaSettings,
    ClientSettings,
    DiskSettings,
    ShareGroupSettings,
    TenantSettings,
)
from kvtide.errors import Denied
from kvtide.keys import NO_PARENT, Address, Digest, Shelf, scope_digest
from kvtide.memory.arena import Arena
from kvtide.node.serve import Node, open_node
from kvtide.outcome import Outcome
from kvtide.tenant import Scope, Tenant
from kvtide.testing.blocks import chain_keys, pattern
from kvtide.testing.node import ServedNode
from kvtide.testing.store_machine import save
from kvtide.testing.store_suite.tools import HIT, KEYS, LAYOUT, MISS, PATIENCE_S, User, assert_bytes, eventually

FLAGS = ["--dram-bytes-max", "4MiB", "--disk-bytes-max", "64MiB", "--admin-is-on", "false"]
NAMESPACE = Digest(sha256(b"a model").digest())
HERE = Tenant().scope(NAMESPACE, scope_digest("")).shelf()
SHAPE = (LAYOUT.layers, LAYOUT.pages, LAYOUT.page_tokens, LAYOUT.page_bytes)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with ServedNode(tmp_path_factory.mktemp("node"), *FLAGS) as node:
        yield node


@contextmanager
def stopped(node: ServedNode) -> Iterator[None]:
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


class Line:
    """A connection by hand: nothing that a client would do for its user."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(path))
        self.fds: list[int] = []
        self._inbox = wire.Inbox(wire.MESSAGE_BYTES_MAX)
        self._read: list[memoryview] = []

    def log_in(self, token: str = "", version: int = wire.VERSION) -> wire.Welcome | wire.Refused:
        self.socket.sendall(wire.encode(wire.Hello(version, "by hand", token)))
        data, rights, _, _ = self.socket.recvmsg(4096, socket.CMSG_LEN(4 * 64), socket.MSG_CMSG_CLOEXEC)
        for _, _, content in rights:
            self.fds += array("i", content)
        return wire.decode_welcome(self._inbox.feed(data)[0])

    def send(self, *messages: wire.Request) -> None:
        self.socket.sendall(b"".join(map(wire.encode, messages)))

    def answer(self) -> wire.Answer:
        while not self._read:
            data = self.socket.recv(1 << 20)
            assert data, "the service has closed the line"
            self._read += self._inbox.feed(data)
        return wire.decode_answer(self._read.pop(0))

    def ask(self, message: wire.Request) -> wire.Answer:
        self.send(message)
        return self.answer()

    def is_cut(self) -> bool:
        """Whether the service closes the line; what it says before is read."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)


@contextmanager
def line_to(path: Path, token: str = "") -> Iterator[Line]:
    line = Line(path)
    try:
        assert isinstance(line.log_in(token), wire.Welcome)
        yield line
        line.send(wire.Bye())
    finally:
        line.close()


@pytest.fixture
def line(node: ServedNode) -> Iterator[Line]:
    with line_to(node.socket) as line:
        yield line


def find(id: int, count: int = 6, shelf: Shelf = HERE) -> wire.Find:
    return wire.Find(id, (shelf.pack(),), b"".join(chain_keys("anything", count)))


# Coming in --------------------------------------------------------------------------------------------------


def test_a_client_of_another_version_is_told_both_versions_and_what_to_do(node: ServedNode) -> None:
    line = Line(node.socket)
    refused = line.log_in(version=99)
    assert isinstance(refused, wire.Refused)
    assert refused.kind == "protocol"
    assert "speaks version 1" in refused.message
    assert "version 99: install the same kvtide on both sides" in refused.message
    assert line.is_cut()
    line.close()


def test_a_client_that_goes_away_during_its_login_harms_nobody(node: ServedNode, line: Line) -> None:
    before = open_files_of(node)
    with stopped(node):
        for _ in range(10):
            hasty = Line(node.socket)
            hasty.socket.sendall(wire.encode(wire.Hello(wire.VERSION, "hasty")))
            hasty.close()
    assert isinstance(line.ask(find(1)), wire.Found)
    eventually(lambda: open_files_of(node) <= before, "the service has forgotten them")


def open_files_of(node: ServedNode) -> int:
    return len(os.listdir(f"/proc/{node.pid}/fd"))


def test_a_client_that_says_nothing_is_sent_away(node: ServedNode) -> None:
    silent = Line(node.socket)
    assert silent.is_cut()
    silent.close()


def test_a_client_that_does_not_finish_a_message_is_sent_away(node: ServedNode) -> None:
    slow = Line(node.socket)
    slow.log_in()
    slow.socket.sendall(wire.encode(find(1))[:-1])
    assert slow.is_cut()
    slow.close()


def test_requests_may_come_in_one_piece_with_the_login(node: ServedNode) -> None:
    eager = Line(node.socket)
    eager.socket.sendall(wire.encode(wire.Hello(wire.VERSION, "eager")) + wire.encode(wire.AskStats(7)))
    data, fds, _, _ = socket.recv_fds(eager.socket, 4096, 4)
    eager.fds += fds
    inbox = wire.Inbox(wire.MESSAGE_BYTES_MAX)
    messages = inbox.feed(data)
    while len(messages) < 2:
        messages += inbox.feed(eager.socket.recv(1 << 16))
    assert isinstance(wire.decode_welcome(messages[0]), wire.Welcome)
    stats = wire.decode_answer(messages[1])
    assert isinstance(stats, wire.Stats)
    assert stats.id == 7
    eager.close()


# Asking and answering ---------------------------------------------------------------------------------------


def test_all_requests_sent_before_the_first_answer_are_answered_in_their_order(node: ServedNode, line: Line) -> None:
    with stopped(node):
        line.send(*(find(id) for id in range(1, 65)))
    answers = [line.answer() for _ in range(64)]
    assert [answer.id for answer in answers] == list(range(1, 65))
    assert {type(answer) for answer in answers} == {wire.Found}


def test_requests_beyond_the_bound_are_refused_at_once_and_the_others_answered(node: ServedNode, line: Line) -> None:
    with stopped(node):
        line.send(*(find(id) for id in range(1, 75)))
    answers = [line.answer() for _ in range(74)]
    assert [answer.id for answer in answers] == [*range(65, 75), *range(1, 65)]
    assert {answer.kind for answer in answers[:10] if isinstance(answer, wire.Refused)} == {"busy"}
    assert {type(answer) for answer in answers[10:]} == {wire.Found}
    assert isinstance(line.ask(find(99)), wire.Found)


def test_who_asks_much_does_not_keep_others_waiting(node: ServedNode) -> None:
    """By what the service had done when it answered: it counts the blocks that were asked for."""
    with line_to(node.socket) as flood, line_to(node.socket) as other:
        asked_before = asked_blocks(other.ask(wire.AskStats(1)))
        with stopped(node):
            flood.send(*(find(id, 1) for id in range(1, 61)))
            other.send(*(wire.AskStats(id) for id in range(2, 5)))
        answers = [asked_blocks(other.answer()) - asked_before for _ in range(3)]
        assert answers[0] <= 2
        assert answers[2] <= 4
        assert [flood.answer().id for _ in range(60)] == list(range(1, 61))
        assert asked_blocks(other.ask(wire.AskStats(5))) - asked_before == 60


def asked_blocks(answer: wire.Answer) -> int:
    assert isinstance(answer, wire.Stats)
    return int(msgspec.json.decode(answer.json)["asked_blocks"])


def test_a_client_makes_progress_while_another_never_stops_asking(node: ServedNode) -> None:
    is_over = threading.Event()
    answered = 0

    def flood() -> None:
        nonlocal answered
        with line_to(node.socket) as line:
            line.send(*(find(id, 1000) for id in range(1, 65)))
            while not is_over.is_set():
                line.send(find(line.answer().id, 1000))
                answered += 1
            for _ in range(64):
                line.answer()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        with line_to(node.socket) as line:
            eventually(lambda: answered > 0, "the flood has begun")
            before = answered
            for id in range(1, 51):
                assert line.ask(find(id)).id == id
            eventually(lambda: answered > before, "the flood goes on")
    finally:
        is_over.set()
        thread.join(PATIENCE_S)


def test_what_nobody_holds_can_neither_be_returned_nor_published(line: Line) -> None:
    line.send(wire.Return((1, 2, 3, 1 << 60)))
    refused = line.ask(wire.Publish(1, 12345))
    assert isinstance(refused, wire.Refused)
    assert refused.kind == "rejected"
    reserved = line.ask(wire.Reserve(2, HERE.pack(), b"".join(KEYS), *SHAPE, 0, NO_PARENT))
    assert isinstance(reserved, wire.Reserved)
    for _ in range(2):
        line.send(wire.Return((reserved.lease, reserved.lease)))
    assert isinstance(line.ask(wire.Publish(3, reserved.lease)), wire.Refused)


def test_a_lease_for_reading_cannot_be_published(node: ServedNode, line: Line) -> None:
    with node.connect() as client:
        scope = client.open_scope(NAMESPACE)
        client.wait(scope, PATIENCE_S)
        assert scope.result is not None
        User(client, scope.result, lambda: None).save()
    leased = line.ask(wire.MatchAndLease(1, (HERE.pack(),), b"".join(KEYS), 0, 1, 1.0))
    assert isinstance(leased, wire.PiecesLeased)
    assert leased.matched_blocks == 6
    assert isinstance(line.ask(wire.Publish(2, leased.pieces[0].lease)), wire.Refused)


def test_another_tenants_shelf_is_denied_and_the_session_goes_on(line: Line) -> None:
    foreign = Tenant("somebody").scope(NAMESPACE, scope_digest("")).shelf()
    refused = line.ask(find(1, shelf=foreign))
    assert isinstance(refused, wire.Refused)
    assert refused.kind == "denied"
    assert isinstance(line.ask(find(2)), wire.Found)


@pytest.mark.parametrize(
    "message",
    [
        wire.Find(1, (), b"".join(KEYS)),
        wire.Find(1, (b"x",), b"".join(KEYS)),
        wire.Find(1, (HERE.pack(),), b"odd"),
        wire.Fetch(1, HERE.pack(), b"".join(KEYS), b"", b"", 0, 0.0, 1.0),
        wire.Fetch(1, HERE.pack(), KEYS[0], bytes(8), b"\0", 0, 0.0, 1.0),
        wire.Fetch(1, HERE.pack(), KEYS[0], (5000).to_bytes(8, "little"), b"\x7f", 0, 0.0, 1.0),
        wire.Publish(1, 1, b"odd"),
        wire.MatchAndLease(1, (HERE.pack(),), b"", 0, 0, 1.0),
    ],
    ids=["no shelf", "half a shelf", "half a key", "no sizes", "size 0", "unknown tier", "half a place", "no pages"],
)
def test_what_no_client_says_ends_the_session_and_no_other(node: ServedNode, line: Line, message: wire.Request) -> None:
    wrong = Line(node.socket)
    wrong.log_in()
    if isinstance(message, wire.Publish):
        wrong.ask(wire.Reserve(2, HERE.pack(), b"".join(chain_keys("wrong", 2)), *SHAPE, 0, NO_PARENT))
    wrong.send(message)
    assert wrong.is_cut()
    wrong.close()
    assert isinstance(line.ask(find(1)), wire.Found)


# What is handed out -----------------------------------------------------------------------------------------

TOKENS = {role: f"token of a {role}" for role in ("reader", "engine", "operator")}


@dataclass(frozen=True)
class Here:
    """A service in this process, so that a test can fill a share group as operators do."""

    node: Node
    path: Path


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    folder = tmp_path_factory.mktemp("here")
    clients = tuple(
        ClientSettings(role=role, token_sha256=sha256(token.encode()).hexdigest())  # type: ignore[arg-type]
        for role, token in TOKENS.items()
    )
    settings = Settings(
        folder=str(folder),
        dram=DramSettings(bytes_max=8 << 20, huge_pages=False),
        disk=DiskSettings(bytes_max=0),
        leases=LeaseSettings(),
        node=NodeSettings(),
        tenants={"ada": TenantSettings(clients=clients, dram=ArenaSettings(bytes_max=4 << 20), reads=("common",))},
        share_groups={"common": ShareGroupSettings(), "secret": ShareGroupSettings()},
    )
    switch_s = sys.getswitchinterval()
    with open_node(settings) as node:
        thread = threading.Thread(target=node.service.run)
        thread.start()
        yield Here(node, folder / "kvtide.sock")
        node.service.stop()
        thread.join(PATIENCE_S)
    sys.setswitchinterval(switch_s)
    gc.unfreeze()


def fds_of(path: Path, token: str) -> tuple[Line, wire.Welcome]:
    line = Line(path)
    welcome = line.log_in(token)
    assert isinstance(welcome, wire.Welcome)
    assert len(line.fds) == len(welcome.arenas) == 2
    return line, welcome


def map_to_write(fd: int, size_bytes: int) -> None:
    mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE).close()


def test_the_arena_of_a_reader_cannot_be_mapped_to_write(here: Here) -> None:
    line, welcome = fds_of(here.path, TOKENS["reader"])
    own = welcome.arenas[0]
    assert not own.is_writable
    with pytest.raises(PermissionError):
        map_to_write(line.fds[0], own.size_bytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(line.fds[0], b"x")
    mmap.mmap(line.fds[0], own.size_bytes, prot=mmap.PROT_READ).close()
    line.close()


@pytest.mark.parametrize("role", ["engine", "operator"])
def test_the_arena_of_a_writer_can_be_mapped_to_write_but_not_resized(here: Here, role: str) -> None:
    line, welcome = fds_of(here.path, TOKENS[role])
    map_to_write(line.fds[0], welcome.arenas[0].size_bytes)
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(line.fds[0], size)
    line.close()


@pytest.mark.parametrize("role", ["reader", "engine", "operator"])
def test_the_arena_of_a_share_group_can_be_written_by_nobody_whatever_he_tries(here: Here, role: str) -> None:
    line, welcome = fds_of(here.path, TOKENS[role])
    fd, arena = line.fds[1], welcome.arenas[1]
    assert not arena.is_writable
    with pytest.raises(PermissionError):
        map_to_write(fd, arena.size_bytes)
    reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # root may, and so may whoever has the same user id
    try:
        with pytest.raises(PermissionError):
            map_to_write(reopened, arena.size_bytes)
        with pytest.raises(PermissionError):
            os.pwrite(reopened, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(reopened, 0)
    finally:
        os.close(reopened)
    read = mmap.mmap(fd, arena.size_bytes, prot=mmap.PROT_READ)
    assert len(read) == arena.size_bytes
    read.close()
    line.close()


def test_blocks_of_a_share_group_are_read_by_those_who_may_and_written_by_nobody(here: Here) -> None:
    group = here.node.domains.groups["common"]
    scope = group.tenant.scope(NAMESPACE, scope_digest(""))
    assert save(group.store, scope.shelf(), KEYS, LAYOUT) == [HIT] * 6
    with connect(f"unix:{here.path}", token=TOKENS["engine"]) as client:
        opened = client.open_scope(NAMESPACE, group="common")
        assert client.wait(opened, PATIENCE_S)
        assert opened.result == scope
        user = User(client, scope, lambda: None)
        leased = user.lease()
        user.assert_right(leased.fetched[0])
        with pytest.raises(ValueError, match="read-only"):
            leased.fetched[0].payloads[0][0] = 1
        client.release(leased.fetched[0])
        assert user.reserved(chain_keys("mine", 2)).outcomes == [Outcome.REJECTED] * 2
        denied = client.open_scope(NAMESPACE, group="secret")
        assert client.wait(denied, PATIENCE_S)
        assert denied.result is None
        forged: Scope = here.node.domains.groups["secret"].tenant.scope(NAMESPACE, scope_digest(""))
        assert User(client, forged, lambda: None).matched().blocks == 0


def test_a_reader_reads_and_changes_nothing(here: Here) -> None:
    with (
        connect(f"unix:{here.path}", token=TOKENS["engine"]) as writer,
        connect(f"unix:{here.path}", token=TOKENS["reader"]) as reader,
    ):
        opened = writer.open_scope(NAMESPACE)
        assert writer.wait(opened, PATIENCE_S)
        assert opened.result is not None
        user = User(writer, opened.result, lambda: None)
        assert user.done(writer.publish(user.reserved())) == [HIT] * 6
        mine = User(reader, opened.result, lambda: None)
        leased = mine.lease()
        mine.assert_right(leased.fetched[0])
        assert mine.done(reader.reserve(mine.here, chain_keys("mine", 2), LAYOUT)).outcomes == [Outcome.REJECTED] * 2
        for client in (reader, writer):
            with pytest.raises(Denied, match="operator"):
                client.clear()
        assert user.reserved(chain_keys("mine", 2)).outcomes == [MISS] * 2
        assert_bytes(leased.fetched[0], KEYS, mine.here)


def test_without_the_right_token_nobody_comes_in(here: Here) -> None:
    for token in ("", "guess", TOKENS["engine"][:-1]):
        with pytest.raises(Denied, match="KVTIDE_TOKEN"):
            connect(f"unix:{here.path}", token=token)
    with pytest.raises(Denied):
        connect(f"unix:{here.path}", token=TOKENS["engine"], tenant="bob")
    connect(f"unix:{here.path}", token=TOKENS["engine"], tenant="ada").close()


def test_an_arena_that_is_private_to_write_is_written_by_its_owner() -> None:
    arena = Arena(1 << 20, huge_pages=False, touch=False, is_private_to_write=True)
    right = pattern(Address(HERE, KEYS[0]), 1000)
    arena.memory[:1000] = right
    fd = arena.reopen_to_read()
    with mmap.mmap(fd, 1 << 20, prot=mmap.PROT_READ) as read:
        assert np.array_equal(np.frombuffer(read[:1000], np.uint8), right)
    os.close(fd)
    arena.close()
