# SPDX-License-Identifier: Apache-2.0
"""A client whose service is gone, stopped, slow, wrong or back again: misses in time, hits when it can."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvtide import __version__, wire
from kvtide.client import Client, connect
from kvtide.config import CallSettings
from kvtide.errors import Closed, ConfigError, Denied, ProtocolError, Rejected, Unavailable
from kvtide.keys import Digest
from kvtide.memory.arena import Arena
from kvtide.outcome import Outcome
from kvtide.testing.blocks import chain_keys
from kvtide.testing.node import ServedNode
from kvtide.testing.store_suite.tools import (
    HIT,
    KEYS,
    LAYOUT,
    MISS,
    PATIENCE_S,
    REJECTED,
    TIMEOUT,
    User,
    assert_bytes,
    eventually,
)
from kvtide.tickets import Ticket

FLAGS = ["--dram-bytes-max", "4MiB", "--disk-bytes-max", "64MiB", "--admin-is-on", "false"]
NAMESPACE = Digest(sha256(b"a model").digest())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ServedNode]:
    """A service that a test may kill and stop."""
    with ServedNode(tmp_path / "node", *FLAGS) as node:
        yield node


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    """A service that nobody kills, nor leaves stopped."""
    with ServedNode(tmp_path_factory.mktemp("steady"), *FLAGS) as node:
        yield node


@contextmanager
def stopped(node: ServedNode) -> Iterator[None]:
    """The service stands still: it is there, and answers nothing."""
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


def user_of(client: Client, name: str = "") -> User:
    ticket = client.open_scope(NAMESPACE, name)
    assert client.wait(ticket, PATIENCE_S)
    assert ticket.result is not None

    def settle() -> None:
        eventually(lambda: not client.stats()["spill"]["disk"]["queued_bytes"], "everything is on disk")

    return User(client, ticket.result, settle)


def impatient(node: ServedNode) -> Client:
    """As engines have it."""
    return connect(f"unix:{node.socket}", calls=CallSettings(match_s=0.05, control_s=0.05, reconnect_s_max=0.05))


def questions(user: User) -> list[Callable[[], Ticket[Any]]]:
    """One of each kind that has an answer."""
    while (plan := user.plan()).end_block < 6:  # on a slow machine, an impatient client
        continue
    return [
        lambda: user.cache.match([user.here], KEYS),
        lambda: user.cache.match_and_lease([user.here], KEYS, deadline_s=0.05),
        lambda: user.cache.fetch(plan, deadline_s=0.05),
        lambda: user.cache.pin(plan, ttl_s=60.0, deadline_s=0.05),
        lambda: user.cache.prefetch(plan),
        lambda: user.cache.reserve(user.here, chain_keys("new", 3), LAYOUT),
        lambda: user.cache.open_scope(NAMESPACE, "a customer never seen"),
    ]


def assert_misses(results: Sequence[Any]) -> None:
    """What an engine gets for `questions` when there is no cache."""
    match, leased, fetched, pinned, prefetched, reservation, scope = results
    assert (match.blocks, leased.blocks, leased.matched_blocks) == (0, 0, 0)
    for each in (fetched, pinned, *leased.fetched):
        assert (each.blocks, each.lease, each.payloads) == (0, None, [])
        assert each.outcome in (TIMEOUT, Outcome.ERROR)  # no answer, or nobody to ask
    assert (prefetched, scope) == (0, None)
    assert (reservation.outcomes, reservation.payloads) == ([REJECTED] * 3, [None] * 3)


def threads_of_clients() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtide")]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# Finding a service ------------------------------------------------------------------------------------------


def test_without_a_service_a_client_says_how_to_start_one_and_leaves_nothing_open(tmp_path: Path) -> None:
    files = open_files()
    with pytest.raises(Unavailable, match=r"kvtide\.sock.*`kvtide serve`"):
        connect(f"unix:{tmp_path}/kvtide.sock")
    assert open_files() <= files
    assert threads_of_clients() == []


def test_a_socket_that_nobody_serves_is_no_service(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "kvtide.sock"))
    with pytest.raises(Unavailable, match="Connection refused"):
        connect(f"unix:{tmp_path}/kvtide.sock")


def test_a_service_that_does_not_answer_is_unavailable_after_the_time_in_the_settings(steady: ServedNode) -> None:
    files = open_files()
    with stopped(steady), pytest.raises(Unavailable, match="timed out"):
        connect(f"unix:{steady.socket}", calls=CallSettings(connect_s=0.05))
    assert open_files() <= files
    steady.connect().close()  # though a client went away in the middle of its login


def test_a_client_that_need_not_have_an_answer_misses_first_and_hits_later(tmp_path: Path) -> None:
    node = ServedNode(tmp_path / "node", *FLAGS)
    with node.connect(must_answer=False) as client:
        assert not client.is_connected
        assert client.tenant == ""
        shelf = user_of_nobody().here
        assert client.match([shelf], KEYS).result.blocks == 0
        assert client.match_and_lease([shelf], KEYS).result.blocks == 0
        assert client.reserve(shelf, KEYS, LAYOUT).result.outcomes == [REJECTED] * 6
        assert client.open_scope(NAMESPACE).result is None
        with pytest.raises(Unavailable, match="is it running"):
            client.stats()
        with node:
            eventually(lambda: client.is_connected, "the client has found the service")
            assert client.tenant == "default"
            user = user_of(client)
            user.save()
            user.assert_right(user.fetch())


def user_of_nobody() -> User:
    """Keys and shelves without a service."""
    from kvtide.tenant import Tenant

    return User(None, Tenant().scope(NAMESPACE, Digest(bytes(32))), lambda: None)  # type: ignore[arg-type] # no cache


def test_a_client_without_a_service_ends_at_once(tmp_path: Path) -> None:
    client = connect(f"unix:{tmp_path}/kvtide.sock", must_answer=False)
    client.close()
    eventually(lambda: threads_of_clients() == [], "nobody looks for a service any more")


def test_the_place_of_the_service_and_the_tenant_may_stand_in_the_environment(
    steady: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_SOCKET", str(steady.socket))
    monkeypatch.setenv("KVTIDE_TENANT", "default")
    monkeypatch.setenv("KVTIDE_TOKEN", "of no use here")
    with connect() as client:
        assert client.tenant == "default"
    monkeypatch.setenv("KVTIDE_TENANT", "ada")
    with pytest.raises(Denied, match="KVTIDE_TENANT"):
        connect()


@pytest.mark.parametrize(
    ("where", "why"), [("http://127.0.0.1:9733", "write unix:"), ("unix:/tmp/" + "x" * 200, "name a shorter path")]
)
def test_a_place_that_cannot_be_one_is_refused(where: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        connect(where, must_answer=False)


# The service is gone ----------------------------------------------------------------------------------------


def test_when_the_service_is_killed_all_that_is_under_way_is_a_miss(node: ServedNode) -> None:
    with node.connect() as client:
        user = user_of(client)
        user.save()
        ask = questions(user)
        with stopped(node):
            tickets = [each() for each in ask]
            tickets += [client.match([user.here], KEYS) for _ in range(20)]
            node.kill()
            results = [user.done(ticket) for ticket in tickets]
            node.start()
        assert_misses(results[: len(ask)])
        assert {match.blocks for match in results[len(ask) :]} == {0}


def test_while_the_service_is_gone_everything_is_a_miss_at_once(node: ServedNode) -> None:
    with node.connect() as client:
        user = user_of(client)
        user.save()
        ask, fetched, reservation = questions(user), user.fetch(), user.reserved(chain_keys("late", 3))
        node.kill()
        eventually(lambda: client.poll() is not None and not client.is_connected, "the client has seen it")
        tickets = [each() for each in ask]
        assert all(ticket.is_done for ticket in tickets)
        assert_misses([ticket.result for ticket in tickets])
        assert client.publish(reservation).result == [REJECTED] * 3
        assert client.open_scope(NAMESPACE).result == user.scope, "what was opened before is remembered"
        user.assert_right(fetched)  # the memory stays as long as somebody looks at it
        client.release(fetched)
        client.abort(reservation)
        for call in (client.stats, client.clear):
            with pytest.raises(Unavailable):
                call()


def test_under_load_a_killed_service_costs_hits_and_nothing_else(node: ServedNode) -> None:
    files = open_files()
    client = node.connect()
    user = user_of(client)
    user.save()
    is_over = threading.Event()
    hits = [0]  # in each life of the service
    failures: list[BaseException] = []

    def load() -> None:
        try:
            while not is_over.is_set():
                life = len(hits) - 1
                leased = user.lease()
                for fetched in leased.fetched:
                    assert_bytes(fetched, KEYS, user.here)
                    client.release(fetched)
                hits[life] += leased.blocks
                client.abort(user.reserved(chain_keys("new", 3)))
        except BaseException as failure:
            failures.append(failure)

    def wait_for_hits() -> None:
        eventually(lambda: hits[-1] > 0 or bool(failures), "hits in this life of the service")

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for_hits()
    for _ in range(2):
        node.kill()
        hits.append(0)
        node.start()
        wait_for_hits()
    is_over.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []
    assert user.leases == 0
    client.close()
    eventually(lambda: threads_of_clients() == [], "no thread is left")
    assert open_files() <= files


def test_what_one_service_gave_is_not_returned_to_the_next(node: ServedNode) -> None:
    with node.connect() as client:
        user = user_of(client)
        user.save()
        old_fetch, old_reservation = user.fetch(), user.reserved(chain_keys("old", 3))
        node.kill()
        node.start()
        eventually(lambda: client.poll() is not None and client.is_connected, "the client is back")
        fetched, reservation = user.fetch(), user.reserved(chain_keys("new", 3))
        assert client.publish(old_reservation).result == [REJECTED] * 3
        client.abort(old_reservation)
        client.release(old_fetch)
        assert user.leases == 2
        user.assert_right(fetched)
        assert user.done(client.publish(reservation)) == [HIT] * 3


# The service stands still -----------------------------------------------------------------------------------


def test_a_stopped_service_is_a_miss_by_the_deadline_and_late_leases_go_back(node: ServedNode) -> None:
    with impatient(node) as client, node.connect() as witness:
        user = user_of(witness)
        user.save()
        mine = User(client, user.scope, lambda: None)
        ask = questions(mine)
        with stopped(node):
            tickets = [each() for each in ask]
            assert_misses([mine.done(ticket) for ticket in tickets])

        def is_all_back() -> bool:
            client.poll()  # late answers arrive here, and are returned from here
            return user.leases == 0

        # Requests of one client are answered in their order: with this one, all late ones have been.
        eventually(lambda: mine.matched().blocks == 6, "it is warm again")
        eventually(is_all_back, "every lease is back")
        assert client.is_connected
        assert user.reserved(chain_keys("new", 3)).outcomes == [MISS] * 3, "the late reservation is gone, too"


def test_a_client_can_be_closed_while_the_service_stands_still(node: ServedNode) -> None:
    client = impatient(node)
    with stopped(node):
        ticket = client.match([user_of_nobody().here], KEYS)
        client.close()
        assert ticket.result.blocks == 0
    with node.connect() as witness:
        assert user_of(witness).leases == 0


def test_a_service_that_reads_nothing_for_long_is_given_up_and_found_again(node: ServedNode) -> None:
    with impatient(node) as client, node.connect() as witness:
        user = user_of(witness)
        user.save()
        with stopped(node):
            for _ in range(100_000):  # more than the kernel and the client keep
                client.report_prefill(NAMESPACE, 1, 0.001)
                if not client.is_connected:
                    break
            assert not client.is_connected
        mine = User(client, user.scope, lambda: None)
        eventually(lambda: mine.lease().blocks == 6, "it is warm again")


# Many requests ----------------------------------------------------------------------------------------------


def test_many_requests_are_sent_before_the_first_answer_and_all_are_answered(steady: ServedNode) -> None:
    with steady.connect(control_s=PATIENCE_S) as client:
        user = user_of(client)
        user.save()
        with stopped(steady):
            tickets = [client.match([user.here], KEYS[: i % 7]) for i in range(64)]
            assert not any(ticket.is_done for ticket in tickets)
            client.poll()
            assert not any(ticket.is_done for ticket in tickets)
        assert [user.done(ticket).blocks for ticket in tickets] == [i % 7 for i in range(64)]


def test_beyond_the_bound_a_request_is_a_miss_at_once_but_what_is_owed_goes_out(steady: ServedNode) -> None:
    with steady.connect(control_s=PATIENCE_S) as client:
        user = user_of(client)
        user.save()
        fetched, reservation = user.fetch(), user.reserved(chain_keys("owed", 3))
        with stopped(steady):
            tickets = [client.match([user.here], KEYS) for _ in range(64)]
            beyond = [client.match_and_lease([user.here], KEYS), client.match([user.here], KEYS)]
            assert [ticket.is_done for ticket in beyond] == [True, True]
            assert [beyond[0].result.blocks, beyond[1].result.blocks] == [0, 0]
            client.release(fetched)
            published = client.publish(reservation)
        assert user.done(published) == [HIT] * 3
        assert {user.done(ticket).blocks for ticket in tickets} == {6}
        assert user.leases == 0


def test_only_the_newest_tickets_wait_for_a_poll(steady: ServedNode) -> None:
    with steady.connect() as client:
        user = user_of(client)
        for _ in range(100):
            tickets = [client.match([user.here], KEYS[:1]) for _ in range(50)]
            user.done(tickets[-1])  # answers come in order, so all are done now
        assert 1000 < len(client.poll()) < 5000


def test_more_shelves_than_one_message_holds_are_refused(steady: ServedNode) -> None:
    with steady.connect() as client:
        shelves = [user_of(client).here] * (wire.SHELVES_MAX + 1)
        for ask in (client.match, client.match_and_lease):
            with pytest.raises(Rejected, match="at most 64"):
                ask(shelves, KEYS)
        assert client.is_connected


# Another process --------------------------------------------------------------------------------------------


def test_after_a_fork_the_child_is_told_to_make_its_own_client_and_the_parent_goes_on(steady: ServedNode) -> None:
    with steady.connect() as client:
        user = user_of(client)
        user.save()
        fetched, plan = user.fetch(), user.plan()
        under_way = client.match([user.here], KEYS)
        reservation = user.reserved(chain_keys("forked", 2))
        calls: list[Callable[[], object]] = [
            partial(client.match, [user.here], KEYS),
            partial(client.match_and_lease, [user.here], KEYS),
            partial(client.fetch, plan),
            partial(client.prefetch, plan),
            partial(client.reserve, user.here, KEYS, LAYOUT),
            partial(client.publish, reservation),
            partial(client.abort, reservation),
            partial(client.release, fetched),
            partial(client.open_scope, NAMESPACE),
            partial(client.wait, under_way, 1.0),
            client.poll,
            client.stats,
            client.clear,
            partial(client.report_prefill, NAMESPACE, 1, 1.0),
        ]

        def in_the_child() -> str:
            wrong = []
            for number, call in enumerate(calls):
                try:
                    call()
                    wrong.append(f"{number} did not raise")
                except Closed as error:
                    if "before a fork" not in str(error):
                        wrong.append(f"{number} raised {error}")
            client.close()  # does nothing: it is the parent's
            return " ".join(wrong)

        is_held, may_go = threading.Event(), threading.Event()

        def hold() -> None:  # as if another thread were in the middle of a call: its lock is not free in the child
            with client._lock:
                is_held.set()
                may_go.wait(PATIENCE_S)

        holder = threading.Thread(target=hold)
        holder.start()
        is_held.wait(PATIENCE_S)
        try:
            assert forked(in_the_child) == ""
        finally:
            may_go.set()
            holder.join()
        assert user.done(under_way).blocks == 6
        user.assert_right(fetched)
        assert user.done(client.publish(reservation)) == [HIT] * 2
        client.release(fetched)
        assert user.leases == 0


def forked(work: Callable[[], str]) -> str:
    """What a forked child says; it ends without cleaning up, as workers of engines do."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            said = work()
        except BaseException as error:
            said = repr(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said_there:
        said = said_there.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"
    return said


# A service that is wrong ------------------------------------------------------------------------------------

ARENA_BYTES = 1 << 20


class FakeService:
    """Lets everybody in, and gives the next of the given answers to every request. Ids are filled in."""

    def __init__(self, path: Path, answers: Sequence[Callable[[int], wire.Answer | bytes]], version: int = 1) -> None:
        self._answers = list(answers)
        self._version = version
        self._arena = Arena(ARENA_BYTES, huge_pages=False, touch=False)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.returned: list[int] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                if not self._serve_one(connection):
                    return

    def _serve_one(self, connection: socket.socket) -> bool:
        inbox = wire.Inbox(wire.MESSAGE_BYTES_MAX)
        is_welcome = False
        while data := connection.recv(1 << 16):
            for body in inbox.feed(data):
                if bytes(body) == b"end":
                    return False
                if not is_welcome:
                    wire.decode_hello(body)
                    arenas = (wire.ArenaInfo(ARENA_BYTES, True),)
                    welcome = wire.Welcome(
                        self._version, __version__, 1, "default", "engine", arenas, 1 << 19, 64, 10.0, 7, ("dram",)
                    )
                    socket.send_fds(connection, [wire.encode(welcome)], [self._arena.fd])
                    is_welcome = True
                elif not self._answer(connection, wire.decode_request(body)):
                    return True
        return True

    def _answer(self, connection: socket.socket, request: wire.Request) -> bool:
        if isinstance(request, wire.Return):
            self.returned += request.leases
        elif not isinstance(request, wire.Bye | wire.Keep):
            answer = self._answers.pop(0)(request.id)  # type: ignore[union-attr] # the tests ask for nothing else
            connection.sendall(answer if isinstance(answer, bytes) else wire.encode(answer))
            return answer != b""
        return True

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self._listener.getsockname())
            last.sendall(len(b"end").to_bytes(4, "little") + b"end")
            self._thread.join(PATIENCE_S)
        self._listener.close()
        self._arena.close()


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Callable[..., tuple[FakeService, Path]]]:
    made: list[FakeService] = []

    def make(*answers: Callable[[int], wire.Answer | bytes], version: int = 1) -> tuple[FakeService, Path]:
        path = tmp_path / f"{len(made)}.sock"
        made.append(FakeService(path, answers, version))
        return made[-1], path

    yield make
    for fake in made:
        fake.close()


def piece(lease: int = 7, arena: int = 0, offsets: Sequence[int] = (4096,), size: int = 100) -> wire.Piece:
    pack = b"".join(offset.to_bytes(8, "little", signed=True) for offset in offsets)
    return wire.Piece(lease, arena, 0, pack, size.to_bytes(8, "little", signed=True), 0)


def leases(*pieces: wire.Piece) -> Callable[[int], wire.Answer]:
    return lambda id: wire.PiecesLeased(id, 1, 0, pieces)


WRONG: dict[str, Callable[[int], wire.Answer | bytes]] = {
    "an answer to another question": lambda id: wire.Counted(id, 3),
    "a piece too many": leases(piece(), piece()),
    "no piece": leases(),
    "an arena that is not there": leases(piece(arena=5)),
    "a slot behind the end of the arena": leases(piece(offsets=[ARENA_BYTES - 99])),
    "a slot before the arena": leases(piece(offsets=[-1])),
    "a slot of negative size": leases(piece(size=-5)),
    "offsets that are no numbers": lambda id: wire.PiecesLeased(id, 1, 0, (wire.Piece(7, 0, 0, b"odd", b"", 0),)),
    "an outcome that nobody knows": lambda id: wire.PiecesLeased(id, 1, 0, (wire.Piece(7, 0, 0, b"", b"", 99),)),
    "no message": lambda _: b"\x03\x00\x00\x00abc",
    "a message of no length": lambda _: bytes(4),
    "a message too long": lambda _: b"\xff\xff\xff\xff",
    "an end in the middle of an answer": lambda _: b"\x09\x00\x00\x00abc",
    "the end": lambda _: b"",
    "the end of the session": lambda _: wire.Refused(0, "protocol", "enough"),
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_a_miss_and_the_client_starts_over(
    fakes: Callable[..., tuple[FakeService, Path]], answer: Callable[[int], wire.Answer | bytes]
) -> None:
    right = leases(piece(offsets=[4096, 8192]))
    _, path = fakes(answer, *[right] * 3)
    calls = CallSettings(match_s=PATIENCE_S, control_s=PATIENCE_S, reconnect_s_max=0.05)
    with Client(path, calls=calls) as client:
        user = user_of_nobody()
        ticket = client.match_and_lease([user.here], KEYS, deadline_s=0.5)  # one of them does not end by itself
        assert client.wait(ticket, PATIENCE_S)
        assert (ticket.result.blocks, [each.lease for each in ticket.result.fetched]) == (0, [None])
        if not client.is_connected:
            eventually(lambda: client.is_connected, "another login")
        again = client.match_and_lease([user.here], KEYS)
        assert client.wait(again, PATIENCE_S)
        if again.result.blocks == 0:  # what was left of the wrong answer spoilt this one, too
            eventually(lambda: client.is_connected, "another login")
            again = client.match_and_lease([user.here], KEYS)
            assert client.wait(again, PATIENCE_S)
        assert [len(payload) for payload in again.result.fetched[0].payloads] == [100, 100]


def test_a_refused_request_is_a_miss_with_a_warning(
    fakes: Callable[..., tuple[FakeService, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    _, path = fakes(*[lambda id: wire.Refused(id, "busy", "too much")] * 3)
    with Client(path) as client, caplog.at_level(logging.WARNING):
        ticket = client.match_and_lease([user_of_nobody().here], KEYS)
        assert client.wait(ticket, PATIENCE_S)
        assert ticket.result.blocks == 0
        assert client.is_connected
        with pytest.raises(Rejected, match="too much"):
            client.stats()
    assert "too much" in caplog.text


def test_an_answer_that_comes_too_late_gives_its_leases_back(fakes: Callable[..., tuple[FakeService, Path]]) -> None:
    is_late = threading.Event()

    def late(id: int) -> wire.Answer:
        is_late.wait(PATIENCE_S)
        return leases(piece(lease=41))(id)

    fake, path = fakes(late, leases(piece(lease=42)))
    with Client(path) as client:
        ticket = client.match_and_lease([user_of_nobody().here], KEYS, deadline_s=0.01)
        assert client.wait(ticket, PATIENCE_S)
        assert ticket.result.blocks == 0
        is_late.set()
        again = client.match_and_lease([user_of_nobody().here], KEYS)
        assert client.wait(again, PATIENCE_S)
        assert again.result.blocks == 1
        eventually(lambda: fake.returned == [41], "the late lease is back, and only that one")
        client.release(again.result.fetched[0])
        eventually(lambda: fake.returned == [41, 42], "the other one, too")


def test_a_service_of_another_version_is_named(fakes: Callable[..., tuple[FakeService, Path]]) -> None:
    _, path = fakes(version=99)
    files = open_files()
    with pytest.raises(ProtocolError, match="install the same kvtide on both sides"):
        Client(path)
    eventually(lambda: open_files() == files, "the arena that came with the welcome is closed")


def test_a_service_that_is_lost_right_after_each_login_is_looked_for_as_long_as_it_takes(
    fakes: Callable[..., tuple[FakeService, Path]],
) -> None:
    _, path = fakes(*[lambda _: b""] * 20, leases(piece()))
    with Client(path, calls=CallSettings(reconnect_s_max=0.01)) as client:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            ticket = client.match_and_lease([user_of_nobody().here], KEYS)
            assert client.wait(ticket, PATIENCE_S)
            if ticket.result.blocks:
                break
            assert time.monotonic() < end_s
            threading.Event().wait(0.001)


# What a lost connection held ---------------------------------------------------------------------------------


def lose_connection(node: ServedNode, client: Client) -> None:
    """The service stands still until the client gives it up, and then goes on."""
    with stopped(node):
        while client.is_connected:
            client.report_prefill(NAMESPACE, 1, 0.001)
    eventually(lambda: client.is_connected, "the client is back")


def test_a_lease_of_a_lost_connection_holds_until_it_is_returned_through_the_next_one(node: ServedNode) -> None:
    with node.connect() as witness, node.connect() as client:
        watching, user = user_of(witness), user_of(client)
        user.save()
        held, returned = user.fetch(), user.fetch()
        assert watching.leases == 2
        lose_connection(node, client)
        eventually(lambda: client.poll() is not None and watching.leases == 2, "both are still held")
        user.assert_right(held)
        client.release(returned)
        eventually(lambda: watching.leases == 1, "one is back")
        user.assert_right(held)
        client.release(held)
        client.release(held)
        eventually(lambda: watching.leases == 0, "both are back")
        user.assert_right(user.fetch())


def test_a_reservation_of_a_lost_connection_cannot_be_published_but_comes_back(node: ServedNode) -> None:
    with node.connect() as witness, node.connect() as client:
        watching, user = user_of(witness), user_of(client)
        reservation = user.done(client.reserve(user.here, KEYS, LAYOUT))
        lose_connection(node, client)
        assert user.done(client.publish(reservation)) == [REJECTED] * len(KEYS)
        eventually(lambda: watching.leases == 0, "the slots are back")
        watching.save()
        user.assert_right(user.fetch())


def test_a_goodbye_also_gives_back_what_lost_connections_held(node: ServedNode) -> None:
    with node.connect() as witness:
        watching = user_of(witness)
        with node.connect() as client:
            user = user_of(client)
            user.save()
            user.fetch()
            lose_connection(node, client)
            user.fetch()
            eventually(lambda: watching.leases == 2, "both are held")
        eventually(lambda: watching.leases == 0, "both are back")


def test_after_a_goodbye_it_is_no_error_to_give_back_what_a_lost_connection_held(node: ServedNode) -> None:
    with node.connect() as client:
        user = user_of(client)
        user.save()
        fetched, reservation = user.fetch(), user.reserved(chain_keys("late", 3))
        node.kill()
        eventually(lambda: client.poll() is not None and not client.is_connected, "the client has seen it")
        client.close()
        for _ in range(2):
            client.release(fetched)
            client.abort(reservation)
    node.start()


def test_tiers_have_the_names_of_the_last_service_that_was_there(node: ServedNode) -> None:
    with node.connect() as client:
        assert client.tier_names == ("dram", "disk")
        node.kill()
        eventually(lambda: client.poll() is not None and not client.is_connected, "the client has seen it")
        assert client.tier_names == ("dram", "disk")
        with node.connect(must_answer=False) as early:
            assert early.tier_names == ()
            node.start()
            eventually(lambda: early.tier_names == ("dram", "disk"), "the service is there")


def test_a_process_cannot_return_what_another_one_holds(node: ServedNode) -> None:
    with node.connect() as witness:
        user = user_of(witness)
        user.save()
        held = user.fetch()
        code = (
            "import sys; from kvtide import wire; from kvtide.client import connect\n"
            "with connect('unix:' + sys.argv[1]) as other:\n"
            "    for session in range(1, 20):\n"
            "        other._tell(wire.Return(tuple(range(1, 50)), session)); other._tell(wire.Keep(session, ()))\n"
            "    print(other.stats()['leases'])\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code, str(node.socket)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
        user.assert_right(held)
