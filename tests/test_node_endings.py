# SPDX-License-Identifier: Apache-2.0
"""How things end: deadlines, goodbyes, pins, the service itself. What was handed in counts, what is held stays."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from kvtide.client import Client, connect
from kvtide.config import AdminSettings, CallSettings, DiskSettings, DramSettings, Settings
from kvtide.deadline import NEVER, Deadline
from kvtide.errors import Rejected
from kvtide.keys import Address, Digest
from kvtide.layout import Layout, Memory
from kvtide.memory.arena import Arena
from kvtide.node.peer import peer_of
from kvtide.node.serve import Node, open_node
from kvtide.outcome import Outcome
from kvtide.testing.blocks import chain_keys
from kvtide.testing.node import ServedNode
from kvtide.testing.store_suite.tools import HIT, KEYS, LAYOUT, PATIENCE_S, User, eventually
from kvtide.tiers.tier import Tier
from kvtide.tiers.wrappers import Wrapper

NAMESPACE = Digest(sha256(b"a model").digest())
FLAGS = ["--dram-bytes-max", "4MiB", "--disk-bytes-max", "64MiB", "--admin-is-on", "false"]
SMALL = Layout(layers=1, pages=1, page_tokens=16, page_bytes=512)
PATIENT = CallSettings(match_s=PATIENCE_S, control_s=PATIENCE_S)


def user_of(client: Client) -> User:
    ticket = client.open_scope(NAMESPACE)
    assert client.wait(ticket, PATIENCE_S)
    assert ticket.result is not None
    return User(client, ticket.result, lambda: None)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedNode]:
    with ServedNode(tmp_path / "node", *FLAGS) as node:
        yield node


@contextmanager
def running(folder: Path) -> Iterator[Node]:
    """A service in this process, whose parts a test can reach."""
    settings = Settings(
        folder=str(folder),
        dram=DramSettings(bytes_max=8 << 20),
        disk=DiskSettings(bytes_max=64 << 20),
        admin=AdminSettings(is_on=False),
    )
    with open_node(settings) as node:
        loop = threading.Thread(target=node.service.run)
        loop.start()
        try:
            yield node
        finally:
            node.service.stop()
            loop.join()


class OthersLate(Wrapper):
    """A medium that gives a block, and those that are read with it, at once, and all others when it is told to."""

    def __init__(self, tier: Tier, first: Address) -> None:
        super().__init__(tier)
        self.goes_on = threading.Event()
        self._first = first

    def read(self, addresses: Sequence[Address], into: Sequence[Memory], deadline: Deadline = NEVER) -> list[Outcome]:
        if self._first not in addresses:
            self.goes_on.wait(PATIENCE_S)
        return super().read(addresses, into, deadline)


def test_what_has_arrived_by_the_deadline_is_served_over_the_wire_as_well(tmp_path: Path) -> None:
    keys = chain_keys("long", 300)  # more than one read of the disk
    with running(tmp_path) as node, connect(f"unix:{tmp_path}/kvtide.sock", calls=PATIENT) as client:
        store = node.domains.tenants["default"].store
        user = user_of(client)
        user.settle = store.drain  # type: ignore[assignment] # what waits to be written has a bound
        user.save(keys, layout=SMALL)
        store.dram.delete([Address(user.here, key) for key in keys])
        switch = node.domains.switches["disk"]
        switch.tier = late = OthersLate(switch.tier, Address(user.here, keys[0]))
        leased = user.done(client.match_and_lease([user.here], keys, deadline_s=4.0))
        late.goes_on.set()
        assert (leased.matched_blocks, leased.fetched[0].outcome) == (300, Outcome.TIMEOUT)
        assert 0 < leased.blocks < 300


def test_a_service_that_stops_takes_nothing_back_from_those_who_may_be_copying(tmp_path: Path) -> None:
    with running(tmp_path) as node, connect(f"unix:{tmp_path}/kvtide.sock", calls=PATIENT) as client:
        user = user_of(client)
        user.save()
        held = user.fetch()
        node.service.stop()
        eventually(lambda: not node.service.sessions, "the session is over")
        assert node.domains.tenants["default"].store.stats().leases == 1
        user.assert_right(held)


def test_pins_that_have_ended_do_not_count_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.wire.LEASES_MAX", 8)
    with running(tmp_path), connect(f"unix:{tmp_path}/kvtide.sock", calls=PATIENT) as client:
        user = user_of(client)
        user.save()
        plan = user.plan()
        for _ in range(20):
            assert user.done(client.pin(plan, ttl_s=0.001)).blocks == len(KEYS)
            eventually(lambda: user.leases == 0, "the pin has ended")
        user.assert_right(user.fetch())


def test_what_was_published_right_before_a_goodbye_is_there(served: ServedNode) -> None:
    with served.connect() as witness:
        for turn in range(5):
            chains = [chain_keys((turn, i), 2) for i in range(6)]
            with served.connect() as client:
                user = user_of(client)
                reservations = [user.reserved(keys) for keys in chains]
                for reservation in reservations:
                    client.publish(reservation)
            eventually(lambda: user_of(witness).leases == 0, "the goodbye has come")
            assert [user_of(witness).matched(keys).blocks for keys in chains] == [2] * 6


def test_a_goodbye_counts_though_a_child_has_the_socket(served: ServedNode) -> None:
    with served.connect() as witness, served.connect() as client:
        watching, user = user_of(witness), user_of(client)
        user.save()
        user.fetch()
        assert watching.leases == 1
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            client.close()
            eventually(lambda: watching.leases == 0, "the lease is back")
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_numbers_that_no_service_takes_are_refused_before_they_are_sent(served: ServedNode) -> None:
    with served.connect() as client:
        user = user_of(client)
        user.save()
        for tokens, seconds in ((1, -1e-9), (1, float("nan")), (-1, 1.0), (1, float("inf"))):
            with pytest.raises(Rejected):
                client.report_prefill(NAMESPACE, tokens, seconds)
        for pages in ({"pages_per_block": 0}, {"first_page": -1}):
            with pytest.raises(Rejected):
                client.match_and_lease([user.here], KEYS, **pages)
        with pytest.raises(Rejected):
            client.open_scope(Digest(b"short"))
        client.report_prefill(NAMESPACE, np.int64(5), np.float64(0.5))  # type: ignore[arg-type] # numpy's own
        leased = user.done(client.match_and_lease([user.here], KEYS, first_page=np.int64(0)))  # type: ignore[arg-type]
        user.assert_right(leased.fetched[0])
        assert client.is_connected


def test_more_keys_than_a_message_takes_can_be_published_one_by_one(served: ServedNode) -> None:
    with served.connect() as client:
        user = user_of(client)
        keys = chain_keys("a book", 16_385)
        reservation = user.done(client.reserve(user.here, keys, LAYOUT))
        outcomes = user.done(client.publish(reservation, range(len(keys))))
        assert outcomes[0] is HIT
        assert outcomes[-1] is Outcome.REJECTED
        assert client.is_connected


def test_without_a_file_descriptor_for_its_process_nobody_is_taken_for_dead() -> None:
    class Full:
        """A connection in a process that may not open one more file."""

        def getsockopt(self, level: int, option: int, size: int = 0) -> bytes | int:
            if option == socket.SO_PEERCRED:
                return int(os.getpid()).to_bytes(4, "little") + bytes(8)
            raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(OSError, match="Too many open files"):
        peer_of(Full())  # type: ignore[arg-type] # stands in for a socket


def test_who_may_read_an_arena_cannot_open_it_again_to_write() -> None:
    arena = Arena(1 << 20, touch=False)
    assert stat.S_IMODE(os.fstat(arena.fd).st_mode) == 0o600
    arena.close()
