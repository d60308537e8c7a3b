# SPDX-License-Identifier: Apache-2.0
"""Engines that die, sleep or cut the line while they hold slots of the service: nobody ever reads a wrong byte.

Run as a program this file is such an engine: it takes orders on stdin, one JSON list a line, and answers each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvtide import wire
from kvtide.client import Client, connect
from kvtide.config import CallSettings
from kvtide.keys import NO_PARENT, Digest
from kvtide.testing.blocks import chain_keys
from kvtide.testing.node import ServedNode
from kvtide.testing.store_suite.tools import (
    HIT,
    KEYS,
    LAYOUT,
    MISS,
    PATIENCE_S,
    PENDING,
    REJECTED,
    User,
    assert_bytes,
    eventually,
)
from kvtide.tickets import Fetched, Reservation, Ticket

FLAGS = ["--dram-bytes-max", "4MiB", "--disk-bytes-max", "64MiB", "--admin-is-on", "false"]
SLOTS = 64  # of LAYOUT, in this arena
NAMESPACE = Digest(sha256(b"a model").digest())
STRAY = 0xEE  # what an engine writes that writes too late


# The engine -------------------------------------------------------------------------------------------------


class Engine:
    """What the program does. Methods are orders; what they return is the answer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        calls = CallSettings(match_s=PATIENCE_S, control_s=PATIENCE_S)
        self._client = connect(f"unix:{path}", calls=calls)
        self._user = user_of(self._client)
        self._fetched: list[Fetched] = []
        self._keys = KEYS
        self._reservation: Reservation | None = None
        self._asked: list[Ticket[Any]] = []
        self._line: socket.socket | None = None

    def lease(self, name: str, count: int) -> int:
        self._keys = chain_keys(name, count)
        self._fetched += self._user.lease(self._keys).fetched
        return self._fetched[-1].blocks

    def check(self) -> bool:
        """Whether all that is leased still holds its own bytes."""
        for fetched in self._fetched:
            assert_bytes(fetched, self._keys, self._user.here)
        return True

    def release(self) -> None:
        for fetched in self._fetched:
            self._client.release(fetched)
        self._user.matched()  # answered after the releases were heard

    def ask(self, name: str, count: int, times: int) -> None:
        """Send requests, and do not wait."""
        for _ in range(times):
            self._asked.append(self._client.match_and_lease([self._user.here], chain_keys(name, count)))

    def reserve(self, name: str, count: int) -> int:
        ticket = self._client.reserve(self._user.here, chain_keys(name, count), LAYOUT)
        self._reservation = self._user.done(ticket)
        return self._reservation.outcomes.count(MISS)

    def publish_stray(self) -> list[str]:
        """Write wrong bytes into the reserved slots, and publish them."""
        assert self._reservation is not None
        for slot in self._reservation.payloads:
            if slot is not None:
                slot[:] = STRAY
        return [outcome.value for outcome in self._user.done(self._client.publish(self._reservation))]

    def cut(self, name: str, count: int) -> int:
        """Log in once more by hand, reserve, and close the line without a word. Returns the session's number."""
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(str(self._path))
        inbox = wire.Inbox(wire.MESSAGE_BYTES_MAX)
        self._line.sendall(wire.encode(wire.Hello(wire.VERSION, "test")))
        data, fds, _, _ = socket.recv_fds(self._line, 1 << 16, 4)
        for fd in fds:
            os.close(fd)
        welcome = wire.decode_welcome(inbox.feed(data)[0])
        assert isinstance(welcome, wire.Welcome)
        keys = b"".join(chain_keys(name, count))
        shape = (LAYOUT.layers, LAYOUT.pages, LAYOUT.page_tokens, LAYOUT.page_bytes)
        shelf = self._user.here.pack()
        self._line.sendall(wire.encode(wire.Reserve(1, shelf, keys, *shape, 0, NO_PARENT)))
        answer = wire.decode_answer(inbox.feed(self._line.recv(1 << 16))[0])
        assert isinstance(answer, wire.Reserved)
        assert len(answer.offsets) == 8 * count
        self._line.close()
        return welcome.session


def user_of(client: Client) -> User:
    ticket = client.open_scope(NAMESPACE)
    assert client.wait(ticket, PATIENCE_S)
    assert ticket.result is not None

    def settle() -> None:
        eventually(lambda: not client.stats()["spill"]["disk"]["queued_bytes"], "everything is on disk")

    return User(client, ticket.result, settle)


def main() -> None:
    engine = Engine(Path(sys.argv[1]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        print(json.dumps(getattr(engine, order)(*arguments)), flush=True)


# The tests --------------------------------------------------------------------------------------------------


class EngineProcess:
    """An engine in a process of its own, which can be stopped and killed."""

    def __init__(self, node: ServedNode) -> None:
        command = [sys.executable, __file__, str(node.socket)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.heard() == "ready"

    def say(self, order: str, *arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([order, *arguments]) + "\n")
        self.process.stdin.flush()

    def heard(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the engine has died"
        return json.loads(line)

    def do(self, order: str, *arguments: object) -> Any:
        self.say(order, *arguments)
        return self.heard()

    def stop(self) -> None:
        """It stands still from here on, wherever it is."""
        self.process.send_signal(signal.SIGSTOP)
        eventually(lambda: self._state() == "T", "the engine stands still")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with ServedNode(tmp_path_factory.mktemp("node"), *FLAGS) as node:
        yield node


@pytest.fixture(scope="module")
def hasty_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    """With leases so short that a test can wait for their end."""
    with ServedNode(tmp_path_factory.mktemp("hasty"), *FLAGS, "--leases-lease-s", "0.5") as node:
        yield node


@pytest.fixture
def mortal_node(tmp_path: Path) -> Iterator[ServedNode]:
    """One that a test may end. Nothing of it is on disk before it has to be."""
    with ServedNode(tmp_path / "node", *FLAGS, "--disk-spill-when", "evict") as node:
        yield node


@contextmanager
def using(node: ServedNode) -> Iterator[User]:
    """Another engine, here, that finds nothing of earlier tests."""
    with node.connect(control_s=PATIENCE_S) as client:
        user = user_of(client)
        eventually(lambda: user.leases == 0, "what earlier tests held is back")
        client.clear()
        yield user


@pytest.fixture
def user(node: ServedNode) -> Iterator[User]:
    with using(node) as user:
        yield user


@pytest.fixture
def hasty_user(hasty_node: ServedNode) -> Iterator[User]:
    with using(hasty_node) as user:
        yield user


@pytest.fixture
def engines() -> Iterator[Callable[[ServedNode], EngineProcess]]:
    made: list[EngineProcess] = []

    def make(node: ServedNode) -> EngineProcess:
        made.append(EngineProcess(node))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(node: ServedNode, engines: Callable[[ServedNode], EngineProcess]) -> EngineProcess:
    return engines(node)


@pytest.fixture
def hasty_engine(hasty_node: ServedNode, engines: Callable[[ServedNode], EngineProcess]) -> EngineProcess:
    return engines(hasty_node)


def churn(user: User, rounds: int = 4) -> None:
    """Fill the arena again and again, and read all of it."""
    for number in range(rounds):
        for part in range(4):
            keys = chain_keys(("churn", number, part), SLOTS // 8)
            reservation = user.reserved(keys)
            outcomes = user.done(user.cache.publish(reservation))
            assert {*outcomes} <= {HIT, REJECTED}
            user.settle()
        read_all(user, number)


def read_all(user: User, number: int) -> int:
    """Every block of a round that is still there has its own bytes."""
    found = 0
    for part in range(4):
        keys = chain_keys(("churn", number, part), SLOTS // 8)
        leased = user.lease(keys)
        for fetched in leased.fetched:
            assert_bytes(fetched, keys, user.here)
            user.cache.release(fetched)
        found += leased.blocks
    return found


def reserve_all(user: User) -> list[Reservation]:
    held: list[Reservation] = []
    while MISS in (reservation := user.reserved(chain_keys(("held", len(held)), 4))).outcomes:
        held.append(reservation)
    return held


def slots_of(reservations: list[Reservation]) -> int:
    return sum(reservation.outcomes.count(MISS) for reservation in reservations)


# An engine dies ---------------------------------------------------------------------------------------------


def test_all_that_a_killed_engine_held_comes_back(user: User, engine: EngineProcess) -> None:
    user.save(chain_keys("read", 8))
    assert engine.do("lease", "read", 8) == 8
    assert engine.do("reserve", "written", 16) == 16
    assert user.leases == 2
    assert user.reserved(chain_keys("written", 16)).outcomes == [PENDING] * 16
    engine.kill()
    eventually(lambda: user.leases == 0, "nobody holds anything")
    assert slots_of(reserve_all(user)) == SLOTS


def test_what_a_killed_engine_had_asked_for_is_held_by_nobody(
    node: ServedNode, user: User, engines: Callable[[ServedNode], EngineProcess]
) -> None:
    keys = chain_keys("cold", 16)
    user.save(keys)
    churn(user, 3)
    assert user.matched(keys).tiers[0].all()
    engine = engines(node)
    engine.do("ask", "cold", 16, 20)  # fetches on their way
    engine.kill()
    eventually(lambda: user.leases == 0, "nobody holds anything")
    engine = engines(node)
    os.kill(node.pid, signal.SIGSTOP)
    engine.do("ask", "cold", 16, 20)  # requests that are read when their sender is dead
    engine.kill()
    os.kill(node.pid, signal.SIGCONT)
    assert user.lease(keys).blocks == 16
    eventually(lambda: user.leases == 1, "nobody but this one holds anything")


def test_an_engine_that_ends_with_its_leases_gives_them_back(user: User, engine: EngineProcess) -> None:
    user.save(chain_keys("read", 8))
    assert engine.do("lease", "read", 8) == 8
    assert engine.process.stdin is not None
    engine.process.stdin.close()  # the end of its orders: it ends without a goodbye
    engine.process.wait(PATIENCE_S)
    eventually(lambda: user.leases == 0, "nobody holds anything")


# An engine cuts the line ------------------------------------------------------------------------------------


def test_slots_of_a_line_that_was_cut_are_nobodys_until_the_process_ends(
    node: ServedNode, user: User, engine: EngineProcess
) -> None:
    session = engine.do("cut", "written", 16)
    eventually(lambda: f"session_ended session={session} " in node.log.read_text(), "the service has seen it")
    held = reserve_all(user)
    assert slots_of(held) == SLOTS - 16
    for reservation in held:
        user.cache.abort(reservation)
    assert user.leases == 1
    churn(user)
    assert user.leases == 1
    engine.kill()
    eventually(lambda: user.leases == 0, "what it held is back")
    assert slots_of(reserve_all(user)) == SLOTS


# An engine sleeps -------------------------------------------------------------------------------------------


def is_quarantined(user: User) -> bool:
    return bool(user.cache.stats()["quarantined_bytes"])


def test_a_writer_that_sleeps_too_long_tears_nothing_and_publishes_nothing(
    hasty_user: User, hasty_engine: EngineProcess
) -> None:
    user, engine = hasty_user, hasty_engine
    assert engine.do("reserve", "written", 6) == 6
    engine.stop()
    eventually(lambda: is_quarantined(user), "its time is over")
    keys = chain_keys("written", 6)
    user.save(keys)  # the address is free for others
    churn(user)
    user.cache.release(user.fetch(keys))
    engine.go_on()
    assert engine.do("publish_stray") == ["rejected"] * 6
    for number in range(4):
        read_all(user, number)
    user.assert_right(user.fetch(keys), keys)
    stats = user.cache.stats()
    assert (stats["quarantined_bytes"], stats["leases"], stats["stale_publishes"]) == (0, 1, 6)


def test_a_writer_that_wakes_in_the_middle_of_others_work_tears_nothing(
    hasty_user: User, hasty_engine: EngineProcess
) -> None:
    user, engine = hasty_user, hasty_engine
    assert engine.do("reserve", "written", 6) == 6
    engine.stop()
    eventually(lambda: is_quarantined(user), "its time is over")
    engine.say("publish_stray")
    churn(user, 1)
    engine.go_on()
    churn(user, 4)
    assert engine.heard() == ["rejected"] * 6
    churn(user, 1)
    assert user.matched(chain_keys("written", 6)).blocks == 0
    assert user.leases == 0


def test_what_a_sleeping_reader_holds_is_as_it_was_when_it_wakes(hasty_user: User, hasty_engine: EngineProcess) -> None:
    user, engine = hasty_user, hasty_engine
    user.save(chain_keys("read", 6))
    assert engine.do("lease", "read", 6) == 6
    engine.stop()
    eventually(lambda: is_quarantined(user), "its time is over")
    churn(user)
    user.cache.clear(prefix=chain_keys("read", 1)[0])
    churn(user)
    engine.go_on()
    assert engine.do("check")
    engine.do("release")
    eventually(lambda: user.leases == 0, "it has given back what it held")
    assert not is_quarantined(user)


def test_a_sleeper_that_is_killed_gives_its_quarantine_back(hasty_user: User, hasty_engine: EngineProcess) -> None:
    user, engine = hasty_user, hasty_engine
    assert engine.do("reserve", "written", 6) == 6
    engine.stop()
    eventually(lambda: is_quarantined(user), "its time is over")
    held = reserve_all(user)
    assert slots_of(held) == SLOTS - 6
    for reservation in held:
        user.cache.abort(reservation)
    engine.kill()
    eventually(lambda: not is_quarantined(user), "its slots are back")
    assert slots_of(reserve_all(user)) == SLOTS


def test_who_has_too_much_in_quarantine_gets_nothing_new_and_others_do(
    hasty_user: User, hasty_engine: EngineProcess
) -> None:
    user, engine = hasty_user, hasty_engine
    assert engine.do("reserve", "leaked", 16) == 16  # twice the share
    eventually(lambda: is_quarantined(user), "its time is over")
    assert engine.do("reserve", "more", 2) == 0
    assert user.reserved(chain_keys("more", 2)).outcomes == [MISS] * 2
    engine.kill()
    eventually(lambda: not is_quarantined(user), "its slots are back")


# The service ends -------------------------------------------------------------------------------------------


def test_what_is_in_dram_when_the_service_is_asked_to_end_is_on_disk_afterwards(mortal_node: ServedNode) -> None:
    node = mortal_node
    keys = chain_keys("kept", SLOTS // 2)
    with node.connect(control_s=PATIENCE_S) as client:
        user = user_of(client)
        user.save(keys)
        assert not user.matched(keys).tiers[0].any()
        assert client.stats()["spill"]["disk"]["spilled_blocks"] == 0
    assert node.stop() == 0
    assert not node.socket.exists()
    assert "ended cleanly" in node.log.read_text()
    node.start()
    with node.connect(control_s=PATIENCE_S) as client:
        user = user_of(client)
        assert user.matched(keys).tiers[0].tolist() == [1] * len(keys)
        user.assert_right(user.fetch(keys), keys)


def test_to_be_asked_again_and_again_does_not_disturb_the_end(mortal_node: ServedNode) -> None:
    node = mortal_node
    keys = chain_keys("kept", SLOTS // 2)
    with node.connect(control_s=PATIENCE_S) as client:
        user_of(client).save(keys)
        assert node.process is not None
        process = node.process

        def has_ended() -> bool:
            process.send_signal(signal.SIGTERM)
            return process.poll() is not None

        eventually(has_ended, "the service has ended")
    assert "ended cleanly" in node.log.read_text()
    assert node.stop() in (0, -signal.SIGTERM)  # the last one may have met an interpreter that has ended already
    node.start()
    with node.connect(control_s=PATIENCE_S) as client:
        user = user_of(client)
        user.assert_right(user.fetch(keys), keys)


def test_clients_of_a_service_that_ends_miss_and_find_the_next_one(mortal_node: ServedNode) -> None:
    node = mortal_node
    with using(node) as user:
        user.save()
        fetched = user.fetch()
        assert node.stop() == 0
        user.assert_right(fetched)
        assert user.lease().blocks == 0
        node.start()
        eventually(lambda: user.lease().blocks == 6, "it is warm again")


if __name__ == "__main__":
    main()
