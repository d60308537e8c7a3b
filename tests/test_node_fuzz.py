# SPDX-License-Identifier: Apache-2.0
"""Hostile clients: whatever bytes and numbers they send, they are answered or cut off, and the others are served."""

from __future__ import annotations

import gc
import itertools
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide import wire
from kvtide.config import DiskSettings, DramSettings, LeaseSettings, Settings, ShareGroupSettings, TenantSettings
from kvtide.config.defaults import resolve
from kvtide.errors import Denied, KvtideError, MediumFailed, ProtocolError, Rejected
from kvtide.frame import HEADER_BYTES
from kvtide.keys import NO_PARENT, Address, Key, Part, Shelf, scope_digest, tenant_digest
from kvtide.layout import Layout
from kvtide.node.domains import Domain, Domains
from kvtide.node.doorkeeper import Principal
from kvtide.node.peer import NO_FD, Peer
from kvtide.node.requests import Requests
from kvtide.node.serve import Node, open_node
from kvtide.node.session import Seat, Session
from kvtide.outcome import Outcome
from kvtide.testing import blocks
from kvtide.testing.node import ServedNode

DECODERS: list[Callable[[memoryview], msgspec.Struct]] = [
    wire.decode_hello,
    wire.decode_request,
    wire.decode_answer,
    wire.decode_welcome,
]
DIGEST = bytes(range(32))
SHELF = blocks.shelf().pack()
KEYS = blocks.chain_keys("fuzz", 24)
# One of each kind, to be mutated.
SEEDS = [
    wire.encode(message)[wire.LENGTH_BYTES :]
    for message in (
        wire.Hello(1, "0.1", "token", "tenant"),
        wire.Welcome(1, "0.1", 3, "a", "engine", (wire.ArenaInfo(1 << 30, True),), 1, 2, 3.5, 7, ("dram",)),
        wire.Refused(0, "busy", "later"),
        wire.OpenScope(1, DIGEST, DIGEST, "group"),
        wire.Find(1, (SHELF, SHELF), b"".join(KEYS[:3])),
        wire.MatchAndLease(1, (SHELF,), b"".join(KEYS[:3]), 5, 2, 0.25),
        wire.Fetch(1, SHELF, b"".join(KEYS[:2]), bytes(16), b"\0\1", 3, 0.5, 1e9),
        wire.Return((1, 2, 3), 4),
        wire.Keep(4, (1, 2)),
        wire.Reserve(1, SHELF, b"".join(KEYS[:2]), 2, 4, 16, 1024, 3, DIGEST),
        wire.Publish(1, 9, bytes(8)),
        wire.Clear(1, DIGEST, DIGEST),
        wire.ReportPrefill(DIGEST, 4096, 1.5),
        wire.PiecesLeased(1, 3, 0, (wire.Piece(7, 1, 2, bytes(24), bytes(8), 0),)),
        wire.Reserved(1, 3, 0, b"\1\0\1", bytes(16)),
        wire.Stats(1, b"{}"),
    )
]


def is_safe(decode: Callable[[memoryview], msgspec.Struct], body: bytes) -> None:
    """Read it, or refuse it. What was read is within its bounds, so it can be sent."""
    try:
        message = decode(memoryview(body))
    except ProtocolError:
        return
    assert decode(memoryview(wire.encode(message)[wire.LENGTH_BYTES :])) == message


# Bytes -------------------------------------------------------------------------------------------------------


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_are_read_or_refused(body: bytes) -> None:
    for decode in DECODERS:
        is_safe(decode, body)


@settings(max_examples=500)
@given(st.integers(0, 31), st.lists(st.binary(max_size=20), max_size=10))
def test_random_fields_behind_a_right_number_are_read_or_refused(number: int, fields: list[bytes]) -> None:
    body = bytes([0x90 | (1 + len(fields)), number]) + b"".join(fields)
    for decode in DECODERS:
        is_safe(decode, body)


@settings(max_examples=500)
@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_message_with_bytes_changed_is_read_or_refused(body: bytes, changes: list[tuple[int, int]]) -> None:
    mutated = bytearray(body)
    for at, value in changes:
        mutated[at % len(mutated)] = value
    for decode in DECODERS:
        is_safe(decode, bytes(mutated))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=10)
    | st.sampled_from([DIGEST, SHELF, 2**62 - 1, 2**62, 2**32 - 1, 2**32, 0, -1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=400)
@given(st.integers(0, 30), st.lists(values, max_size=10))
def test_well_formed_arrays_of_anything_are_read_or_refused(number: int, fields: list[object]) -> None:
    for decode in DECODERS:
        is_safe(decode, msgspec.msgpack.encode([number, *fields]))


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=8), st.integers(1, 100))
def test_an_inbox_gives_messages_within_its_bound_or_refuses_the_stream(reads: list[bytes], bytes_max: int) -> None:
    inbox = wire.Inbox(bytes_max)
    try:
        for read in reads:
            assert all(1 <= len(message) <= bytes_max for message in inbox.feed(read))
    except ProtocolError:
        return


# Numbers -----------------------------------------------------------------------------------------------------

PAYLOAD = 4096
HOSTILE = [0, 1, 2, 3, 5, 63, 64, 255, 4095, 4096, 8191, 8192, 2**31 - 1, 2**31, 2**32 - 1, 2**41, 2**62 - 1]
SIZES = [0, -1, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + PAYLOAD, HEADER_BYTES + 2 * PAYLOAD, 1 << 20, 1 << 40]
SIZES += [(1 << 41) + 1, 2**63 - 1, -(2**63)]
OWNER, GUEST, GOOD = 11, 12, 13  # sessions


def own(scope: str = "", part: Part | None = None) -> Shelf:
    return Shelf(blocks.shelf().namespace, tenant_digest("mine"), scope_digest(scope), part or Part())


PART = Part(rank=1, ranks=2)
OWN = [own(), own(part=PART), own("customer")]
GROUP = Shelf(blocks.shelf().namespace, tenant_digest("group:prompts"), scope_digest(""), Part())
FOREIGN = Shelf(blocks.shelf().namespace, tenant_digest("yours"), scope_digest(""), Part())
UNKNOWN = Shelf(blocks.shelf().namespace, tenant_digest("nobody"), scope_digest(""), Part())


def until(is_so: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait for something that another thread or process does."""
    end_s, pause = time.monotonic() + timeout_s, threading.Event()
    while not is_so():
        assert time.monotonic() < end_s, f"waited {timeout_s} s for: {what}"
        pause.wait(0.002)


@contextmanager
def opened(disk_bytes: int) -> Iterator[Domains]:
    """Two tenants and a share group, each with an arena of a megabyte."""
    with tempfile.TemporaryDirectory() as folder:
        domains = Domains(
            resolve(
                Settings(
                    folder=folder,
                    dram=DramSettings(bytes_max=3 << 20, huge_pages=False),
                    disk=DiskSettings(bytes_max=disk_bytes) if disk_bytes else None,
                    leases=LeaseSettings(fetch_s=0.3),
                    tenants={"mine": TenantSettings(reads=("prompts",)), "yours": TenantSettings()},
                    share_groups={"prompts": ShareGroupSettings()},
                )
            )
        )
        try:
            yield domains
        finally:
            domains.close()


class Talk:
    """A session that says requests to the service's own handler, as if they had come over a socket."""

    def __init__(self, domains: Domains, number: int, role: str = "operator") -> None:
        self.domains = domains
        self.number = number
        self._requests = Requests(domains, 64)
        self._connection, self._other_end = socket.socketpair()
        self.session = Session(number, self._connection, Peer(0, 0, NO_FD), 0.0)
        self.session.principal = Principal("mine", role)  # type: ignore[arg-type] # a role of the closed set
        mine, prompts = domains.tenants["mine"], domains.groups["prompts"]
        self.session.seats = {
            mine.tenant.digest: Seat(mine, 0, role != "reader"),
            prompts.tenant.digest: Seat(prompts, 1, False),
        }

    def say(self, request: wire.Request) -> wire.Answer | None:
        """The answer, now or later; None where there is none. Raises KvtideError, and nothing else."""
        read = wire.decode_request(memoryview(wire.encode(request))[wire.LENGTH_BYTES :])
        before = len(self.session.waiting)
        answer = self._requests.handle(self.session, read)
        if answer is not None or len(self.session.waiting) == before:
            return self._sendable(answer)
        waiting = self.session.waiting.pop()

        def is_done() -> bool:
            for domain in self.domains:
                domain.store.poll()
            return waiting.ticket.is_done

        until(is_done, "a ticket")
        return self._sendable(waiting.answer(waiting.ticket.result))

    def _sendable(self, answer: wire.Answer | None) -> wire.Answer | None:
        if answer is not None:
            wire.decode_answer(memoryview(wire.encode(answer))[wire.LENGTH_BYTES :])
        return answer

    def fill(self, request: wire.Reserve, answer: wire.Reserved) -> None:
        """What an honest engine would write: bytes that follow from the address."""
        shelf, keys = Shelf.unpack(request.shelf), wire.unpack_keys(request.keys)
        size = request.layers * request.pages * request.page_bytes
        outcomes = wire.unpack_outcomes(answer.outcomes)
        given_keys = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.MISS]
        memory = self.domains.tenants["mine"].store.dram.arena.memory
        for key, offset in zip(given_keys, wire.unpack_numbers(answer.offsets).tolist(), strict=True):
            memory[offset : offset + size] = blocks.pattern(Address(shelf, key), size)

    def end(self) -> None:
        """As the end of its process: everything that was held comes back."""
        for domain in self.domains:
            domain.store.forget(self.number)
        self._connection.close()
        self._other_end.close()


def check_invariants(domain: Domain) -> None:
    """Nobody holds anything, and every byte of the arena is free or a block's that can be found."""
    store = domain.store

    def is_quiet() -> bool:
        store.poll()
        with store.dram.lock:
            return not store.dram.table.held[: store.dram.table.rows].any()

    assert store.drain()
    until(is_quiet, "flights to land")
    stats = store.stats()
    assert (stats.leases, stats.pinned_bytes, stats.quarantined_bytes) == (0, 0, 0)
    with store.dram.lock:
        table = store.dram.table
        visible = table.visible
        assert store.dram.free_bytes + int(table.extent[visible].sum()) == store.dram.bytes_max
        assert table.blocks == len(visible)
        for row in visible.tolist():
            address = table.address(row)
            header = store.dram.header[row]
            assert header is not None
            assert table.row(address) == row
            assert Address(header.shelf, header.key) == address
            assert header.frame_bytes == table.frame_bytes[row]
            payload = store.dram.payload(row)
            assert (payload == blocks.pattern(address, len(payload))).all(), "wrong bytes"


def check_good_client(domains: Domains, name: object) -> None:
    """Somebody who does it right is served right."""
    talk = Talk(domains, GOOD, "engine")
    keys = blocks.chain_keys(("good", name), 4)
    request = wire.Reserve(1, OWN[0].pack(), b"".join(keys), 1, 1, 16, PAYLOAD, 0, NO_PARENT)
    reserved = talk.say(request)
    assert isinstance(reserved, wire.Reserved)
    assert wire.unpack_outcomes(reserved.outcomes) == [Outcome.MISS] * 4
    talk.fill(request, reserved)
    published = talk.say(wire.Publish(2, reserved.lease))
    assert isinstance(published, wire.Published)
    assert wire.unpack_outcomes(published.outcomes) == [Outcome.HIT] * 4
    leased = talk.say(wire.MatchAndLease(3, (OWN[0].pack(),), b"".join(keys), 0, 1, 0.3))
    assert isinstance(leased, wire.PiecesLeased)
    assert leased.matched_blocks == 4
    offsets = wire.unpack_numbers(leased.pieces[0].offsets).tolist()
    memory = domains.tenants["mine"].store.dram.arena.memory
    for key, offset in zip(keys, offsets, strict=True):
        assert (memory[offset : offset + PAYLOAD] == blocks.pattern(Address(OWN[0], key), PAYLOAD)).all()
    talk.end()


class Hostile:
    """Draws requests whose types are right and whose numbers are not, from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.leases: list[int] = [0, 1, 2**62 - 1]

    def number(self, most: int) -> int:
        return min(self.random.choice(HOSTILE), most)

    def id(self) -> int:
        return self.number(2**32 - 1)

    def shelf(self) -> bytes:
        if self.random.random() < 0.75:
            return self.random.choice(OWN).pack()
        broken = bytes(96) + struct.pack("<5H6s", 1, 5, 2, 0, 0, bytes(6))  # rank 5 of 2
        reserved = OWN[0].pack()[:-1] + b"\1"
        return self.random.choice([GROUP.pack(), FOREIGN.pack(), UNKNOWN.pack(), bytes(112), broken, reserved])

    def shelves(self) -> tuple[bytes, ...]:
        return tuple(self.shelf() for _ in range(self.random.choice([0, 1, 1, 1, 1, 2, 3, 64])))

    def keys(self) -> bytes:
        first = self.random.randrange(len(KEYS))
        kind = self.random.random()
        keys: list[bytes] = list(KEYS[first : first + self.random.randint(0, 12)])
        if kind < 0.2:
            keys = [self.random.choice(KEYS) for _ in range(self.random.randint(0, 20))]  # the same one several times
        elif kind < 0.3:
            keys = [KEYS[first]] * self.random.choice([2, 7, 300])
        elif kind < 0.35:
            keys.append(NO_PARENT)
        elif kind < 0.4:
            keys += [self.random.randbytes(32) for _ in range(self.random.choice([1, 500]))]
        return b"".join(keys) + (b"tail" if self.random.random() < 0.03 else b"")

    def seconds(self) -> float:
        return self.random.choice([0.0, 1e-9, 1e-3, 0.05, 1e9])

    def plan(self) -> tuple[bytes, bytes, bytes, bytes]:
        keys = self.keys()
        count = max(0, len(keys) // 32 + self.random.choice([0] * 12 + [1, -1]))
        is_fair = self.random.random() < 0.7
        size = HEADER_BYTES + PAYLOAD * self.random.choice([1, 1, 2, 3])
        sizes = [size if is_fair else self.random.choice(SIZES) for _ in range(count)]
        tiers = [self.random.choice([0, 1]) if is_fair else self.random.randrange(256) for _ in range(count)]
        return self.shelf(), keys, wire.pack_numbers(np.array(sizes, np.int64)), bytes(tiers)

    def reserve(self) -> wire.Reserve:
        keys = self.keys()
        shape = (1, 1, 16, self.random.choice([1, PAYLOAD, PAYLOAD, PAYLOAD, 2 * PAYLOAD, 5000]))
        if self.random.random() < 0.2:
            shape = (self.id(), self.id(), self.id(), self.id())
        position, parent = 0, bytes(NO_PARENT)
        if self.random.random() < 0.5:
            position, parent = self.number(2**32 - 1), self.random.choice([bytes(32), *KEYS, DIGEST])
        return wire.Reserve(self.id(), self.shelf(), keys, *shape, position, parent)

    def which(self) -> bytes | None:
        kind = self.random.random()
        if kind < 0.5:
            return None
        places = [self.random.choice([0, 0, 1, 2, 3, 5, 11]) for _ in range(self.random.randint(0, 6))]
        if kind < 0.6:
            places.append(self.number(2**32 - 1))
        return np.array(places, "<u4").tobytes() + (b"x" if kind > 0.97 else b"")

    def request(self) -> wire.Request:
        draw = self.random
        kind = draw.random()
        if kind < 0.25:
            return self.reserve()
        if kind < 0.45:
            lease = draw.choice(self.leases if draw.random() < 0.3 else self.leases[-3:])
            return wire.Publish(self.id(), lease, self.which())
        if kind < 0.60:
            page, per_block = self.number(2**32 - 1), max(1, self.number(2**32 - 1))
            return wire.MatchAndLease(self.id(), self.shelves(), self.keys(), page, per_block, self.seconds())
        if kind < 0.66:
            return wire.Find(self.id(), self.shelves(), self.keys())
        if kind < 0.80:
            pin_s = draw.choice([0.0, 0.0, 1e-9, 5.0, 1e9])
            return wire.Fetch(self.id(), *self.plan(), self.number(2**32 - 1), pin_s, self.seconds())
        if kind < 0.84:
            return wire.Prefetch(self.id(), *self.plan())
        if kind < 0.94:
            return wire.Return(tuple(draw.choice(self.leases) for _ in range(draw.randint(0, 5))))
        if kind < 0.945:
            return wire.Keep(draw.choice([OWNER, GOOD, self.number(2**62 - 1)]), tuple(self.leases[:50]))
        if kind < 0.96:
            group = draw.choice(["", "prompts", "other", "group:prompts", "\n", "x" * 256])
            return wire.OpenScope(self.id(), draw.randbytes(32), draw.randbytes(32), group)
        if kind < 0.97:
            return wire.Clear(self.id(), draw.choice([None, OWN[0].namespace]), draw.choice([None, KEYS[3]]))
        if kind < 0.98:
            return wire.ReportPrefill(draw.randbytes(32), self.number(2**62 - 1), self.seconds())
        return wire.AskStats(self.id())


def hostile_session(domains: Domains, seed: int, steps: int) -> None:
    hostile, talk = Hostile(seed), Talk(domains, OWNER)
    for _ in range(steps):
        request = hostile.request()
        try:
            answer = talk.say(request)
        except KvtideError:
            continue
        if isinstance(answer, wire.Reserved):
            assert isinstance(request, wire.Reserve)
            talk.fill(request, answer)
            hostile.leases.append(answer.lease)
        elif isinstance(answer, wire.PiecesLeased):
            hostile.leases += [piece.lease for piece in answer.pieces]
        elif isinstance(answer, wire.PieceFetched):
            hostile.leases.append(answer.piece.lease)
        hostile.leases = hostile.leases[:3] + hostile.leases[3:][-20:]
    talk.end()
    for domain in domains:
        check_invariants(domain)
    check_good_client(domains, seed)
    for domain in domains:
        check_invariants(domain)


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_a_client_with_hostile_numbers_leaves_a_sound_store_without_disk(seed: int, steps: int) -> None:
    with opened(0) as domains:
        hostile_session(domains, seed, steps)
        assert domains.tenants["yours"].store.stats().asked_blocks == 0


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(10, 80))
def test_a_client_with_hostile_numbers_leaves_a_sound_store_with_disk(seed: int, steps: int) -> None:
    with opened(8 << 20) as domains:
        hostile_session(domains, seed, steps)
        assert domains.tenants["yours"].store.stats().asked_blocks == 0


def save(talk: Talk, keys: list[Key], *, page_bytes: int = PAYLOAD) -> list[Outcome]:
    request = wire.Reserve(1, OWN[0].pack(), b"".join(keys), 1, 1, 16, page_bytes, 0, NO_PARENT)
    reserved = talk.say(request)
    assert isinstance(reserved, wire.Reserved)
    talk.fill(request, reserved)
    published = talk.say(wire.Publish(2, reserved.lease))
    assert isinstance(published, wire.Published)
    return wire.unpack_outcomes(published.outcomes)


def fetch(keys: list[Key], *, size: int = HEADER_BYTES + PAYLOAD, tier: int = 0, pin_s: float = 0.0) -> wire.Fetch:
    sizes = wire.pack_numbers(np.full(len(keys), size))
    return wire.Fetch(1, OWN[0].pack(), b"".join(keys), sizes, bytes([tier]) * len(keys), 0, pin_s, 0.3)


@pytest.fixture(params=[0, 8 << 20], ids=["dram", "disk"])
def talk(request: pytest.FixtureRequest) -> Iterator[Talk]:
    with opened(request.param) as domains:
        talk = Talk(domains, OWNER)
        yield talk
        talk.end()
        for domain in domains:
            check_invariants(domain)


A, B, C = KEYS[:3]


def test_a_key_reserved_twice_in_one_request_becomes_one_block(talk: Talk) -> None:
    assert sorted(outcome.value for outcome in save(talk, [A, A, A])) == ["hit", "rejected", "rejected"]
    assert talk.domains.tenants["mine"].store.dram.table.blocks == 1


def test_keys_reserved_in_a_circle_become_blocks_that_can_leave(talk: Talk) -> None:
    assert Outcome.HIT in save(talk, [A, B, A, C, B])
    dram = talk.domains.tenants["mine"].store.dram
    blocks_before = dram.table.blocks
    assert blocks_before == 3
    for name in range(20):  # more than the arena holds: everything must be able to leave
        assert save(talk, blocks.chain_keys(name, 20)) == [Outcome.HIT] * 20
    assert talk.say(wire.Find(1, (OWN[0].pack(),), A)) == wire.Found(1, 0, (b"",), (b"",)) or dram.table.blocks > 3


@pytest.mark.parametrize("asked", [[A, A], [A, B, A, B], [A] * 20], ids=["twice", "in turn", "often"])
def test_a_block_leased_several_times_at_once_is_held_until_all_of_them_are_back(talk: Talk, asked: list[Key]) -> None:
    save(talk, [A, B])
    table = talk.domains.tenants["mine"].store.dram.table
    leased = talk.say(wire.MatchAndLease(1, (OWN[0].pack(),), b"".join(asked), 0, 1, 0.3))
    fetched = talk.say(fetch(asked))
    assert isinstance(leased, wire.PiecesLeased)
    assert isinstance(fetched, wire.PieceFetched)
    assert leased.matched_blocks == len(asked)
    row = table.row(Address(OWN[0], A))
    assert table.held[row] >= 2 * asked.count(A)
    talk.say(wire.Return((leased.pieces[0].lease,)))
    assert table.held[row] >= asked.count(A)
    talk.say(wire.Return((fetched.piece.lease, fetched.piece.lease)))
    until(lambda: table.held[row] == 0, "the spill to let go")


def test_a_shelf_asked_for_twice_in_one_request_is_leased_twice(talk: Talk) -> None:
    save(talk, [A, B])
    leased = talk.say(wire.MatchAndLease(1, (OWN[0].pack(),) * 3, A + B, 0, 1, 0.3))
    assert isinstance(leased, wire.PiecesLeased)
    assert len({piece.lease for piece in leased.pieces}) == 3


def test_a_block_that_comes_up_twice_in_one_fetch_comes_up_once() -> None:
    with opened(8 << 20) as domains:
        talk = Talk(domains, OWNER)
        store = domains.tenants["mine"].store
        save(talk, [A, B])
        assert store.drain()
        for name in range(20):
            save(talk, blocks.chain_keys(name, 20))
        assert store.drain()
        assert store.dram.lookup(OWN[0], [A, B]).tolist() == [0, 0]
        fetched = talk.say(fetch([A, A, B, A], tier=1))
        assert isinstance(fetched, wire.PieceFetched)
        offsets = wire.unpack_numbers(fetched.piece.offsets).tolist()
        assert len(offsets) == 4
        assert offsets[0] == offsets[1] == offsets[3] != offsets[2]
        talk.end()
        check_invariants(domains.tenants["mine"])


@pytest.mark.parametrize("op", ["fetch", "prefetch"])
@pytest.mark.parametrize("who", ["mine", "group"])
def test_blocks_that_do_not_exist_take_no_room_from_those_that_do(op: str, who: str) -> None:
    with opened(8 << 20) as domains:
        domain = domains.groups["prompts"] if who == "group" else domains.tenants["mine"]
        shelf = GROUP if who == "group" else OWN[0]
        keys = blocks.chain_keys("real", 40)
        store = domain.store
        reservation = store.reserve(shelf, keys, Layout(1, 1, 16, PAYLOAD)).result
        for key, payload in zip(keys, reservation.payloads, strict=True):
            assert payload is not None
            payload[:] = blocks.pattern(Address(shelf, key), PAYLOAD)
        store.publish(reservation)
        guest = Talk(domains, GUEST, "reader")
        for name in range(10):
            invented = blocks.chain_keys(("invented", name), 60)
            sizes = wire.pack_numbers(np.full(60, 8192))
            plan = (shelf.pack(), b"".join(invented), sizes, b"\1" * 60)
            if op == "fetch":
                fetched = guest.say(wire.Fetch(1, *plan, 0, 0.0, 0.3))
                assert isinstance(fetched, wire.PieceFetched)
                assert fetched.piece.lease == 0
            else:
                assert guest.say(wire.Prefetch(1, *plan)) == wire.Counted(1, 0)
        assert store.dram.lookup(shelf, keys).all()
        guest.end()
        check_invariants(domain)


def test_a_share_of_the_arena_is_not_stretched_by_saying_that_blocks_are_small(talk: Talk) -> None:
    store = talk.domains.tenants["mine"].store
    keys = blocks.chain_keys("large", 9)
    for key in keys:
        assert save(talk, [key], page_bytes=20 * PAYLOAD) == [Outcome.HIT]
    with pytest.raises(Rejected, match="share"):
        talk.say(fetch(keys, size=HEADER_BYTES))
    pinned = talk.say(fetch(keys[:6], size=HEADER_BYTES, pin_s=1e9))
    assert isinstance(pinned, wire.PieceFetched)
    assert store.stats().pinned_bytes <= store.dram.bytes_max // 2
    pinned = talk.say(fetch(keys[6:8], size=HEADER_BYTES, pin_s=1e9))
    assert isinstance(pinned, wire.PieceFetched)
    assert (pinned.piece.lease, wire.unpack_outcome(pinned.piece.outcome)) == (0, Outcome.REJECTED)
    assert store.stats().pinned_bytes <= store.dram.bytes_max // 2


@pytest.mark.parametrize("role", ["reader", "engine"])
def test_only_operators_pin(talk: Talk, role: str) -> None:
    save(talk, [A])
    other = Talk(talk.domains, GUEST, role)
    with pytest.raises(Denied, match="pin"):
        other.say(fetch([A], pin_s=1.0))
    other.end()


def test_nobody_pins_in_a_share_group(talk: Talk) -> None:
    request = wire.Fetch(1, GROUP.pack(), A, wire.pack_numbers(np.array([8192])), b"\0", 0, 1e9, 0.3)
    with pytest.raises(Denied, match="share groups"):
        talk.say(request)


@pytest.mark.parametrize(("keys", "shelves", "is_allowed"), [(1024, 64, True), (1025, 64, False), (16_384, 4, True)])
def test_a_question_is_no_larger_than_an_answer_can_be(talk: Talk, keys: int, shelves: int, is_allowed: bool) -> None:
    asked = ((OWN[0].pack(),) * shelves, bytes(32 * keys))
    for request in (wire.Find(1, *asked), wire.MatchAndLease(1, *asked, 0, 1, 0.0)):
        if is_allowed:
            assert talk.say(request) is not None
        else:
            with pytest.raises(Rejected, match="at a time"):
                talk.say(request)


def test_leases_are_held_up_to_a_bound_and_no_more(talk: Talk) -> None:
    save(talk, [A])
    request = wire.MatchAndLease(1, (OWN[0].pack(),) * 64, A, 0, 1, 0.0)
    for _ in range(wire.LEASES_MAX // 64):
        leased = talk.say(request)
        assert isinstance(leased, wire.PiecesLeased)
        assert all(piece.lease for piece in leased.pieces)
    for more in (request, fetch([A]), wire.Reserve(1, OWN[0].pack(), B, 1, 1, 1, 1, 0, NO_PARENT)):
        with pytest.raises(Rejected, match="return some first"):
            talk.say(more)
    talk.say(wire.Return((leased.pieces[0].lease,)))
    assert isinstance(talk.say(fetch([A])), wire.PieceFetched)


@contextmanager
def running(folder: Path) -> Iterator[Node]:
    """A service in this process, with one tenant and no disk."""
    small = Settings(folder=str(folder), dram=DramSettings(bytes_max=1 << 20, huge_pages=False))
    switch_s = sys.getswitchinterval()
    with open_node(small) as node:
        thread = threading.Thread(target=node.service.run)
        thread.start()
        try:
            yield node
        finally:
            node.service.stop()
            thread.join()
    sys.setswitchinterval(switch_s)
    gc.unfreeze()


@pytest.mark.parametrize("error", [RuntimeError("a mistake of ours"), OSError(5, "Input/output error")])
def test_a_mistake_of_the_service_ends_one_session_and_not_the_service(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an answer that comes later, from another thread: `clear` is one."""
    is_asked = threading.Event()

    def clear(**which: object) -> int:
        is_asked.wait(10)
        raise error

    with running(tmp_path / "node") as node:
        node.domains.tenants["default"].store.clear = clear  # type: ignore[method-assign] # the mistake
        path = Path(str(node.settings.node.socket))
        with logged_in(path) as victim:
            victim.sendall(wire.encode(wire.Clear(1)) + wire.encode(wire.AskStats(2)))
            assert isinstance(wire.decode_answer(read_message(victim)), wire.Stats)  # the other one waits
            is_asked.set()
            refusal = wire.decode_answer(read_message(victim))
            assert isinstance(refusal, wire.Refused)
            assert "mistake" in refusal.message
            assert is_cut_off(victim)
        with logged_in(path) as other:
            other.sendall(wire.encode(wire.AskStats(1)))
            assert isinstance(wire.decode_answer(read_message(other)), wire.Stats)
    assert "node.request_failed op=clear" in caplog.text


def test_a_clear_that_a_medium_does_not_confirm_is_refused_and_the_session_goes_on(tmp_path: Path) -> None:
    def clear(**which: object) -> int:
        raise MediumFailed("not confirmed")

    with running(tmp_path / "node") as node:
        node.domains.tenants["default"].store.clear = clear  # type: ignore[method-assign] # as a failing disk does
        with logged_in(Path(str(node.settings.node.socket))) as client:
            client.sendall(wire.encode(wire.Clear(7)))
            assert wire.decode_answer(read_message(client)) == wire.Refused(7, "medium_failed", "not confirmed")
            client.sendall(wire.encode(wire.AskStats(8)))
            assert isinstance(wire.decode_answer(read_message(client)), wire.Stats)


# Peers -------------------------------------------------------------------------------------------------------

CUT_OFF_S = 8.0  # a second, as the service says, and what a busy machine may add
SESSIONS_MAX = 24
RSS_GROWTH_MAX = 100 << 20


@contextmanager
def line_to(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(CUT_OFF_S)
        until(lambda: line.connect_ex(os.fspath(path)) == 0, "a place in the kernel's queue")
        yield line


@contextmanager
def logged_in(path: Path, hello: wire.Hello | None = None) -> Iterator[socket.socket]:
    with line_to(path) as line:
        line.sendall(wire.encode(hello or wire.Hello(wire.VERSION, "test")))
        data, rights, _, _ = line.recvmsg(wire.HELLO_BYTES_MAX, socket.CMSG_SPACE(4 * wire.ARENAS_MAX))
        for _, _, content in rights:
            for fd in array("i", content[: len(content) // 4 * 4]):
                os.close(fd)
        assert isinstance(wire.decode_welcome(memoryview(data)[wire.LENGTH_BYTES :]), wire.Welcome)
        yield line


def read_message(line: socket.socket) -> memoryview:
    size = int.from_bytes(read_exactly(line, wire.LENGTH_BYTES), "little")
    return memoryview(read_exactly(line, size))


def read_exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        assert piece, "the service ended the connection"
        data += piece
    return data


def is_cut_off(line: socket.socket) -> bool:
    """The service closes this connection, whatever it says before."""
    try:
        while line.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def try_send(line: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):  # it may have been cut off before the last byte
        line.sendall(data)


_names = (f"good/{number}" for number in itertools.count())


class Good:
    """A client that does everything right, again and again, in a thread of its own. `faults`: what was wrong."""

    def __init__(self, node: ServedNode) -> None:
        self.rounds = 0
        self.faults: list[str] = []
        self.rss_max = 0
        self._node = node
        self._is_over = threading.Event()
        self._client = node.connect(control_s=20.0)
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        try:
            while not self._is_over.is_set():
                self._round()
                self.rss_max = max(self.rss_max, anonymous_bytes(self._node.pid))
                self.rounds += 1
        except Exception as error:
            self.faults.append(repr(error))

    def _round(self) -> None:
        client, name = self._client, next(_names)
        ticket = client.open_scope(blocks.shelf().namespace)
        client.wait(ticket)
        assert ticket.result is not None, "no scope"
        shelf = ticket.result.shelf()
        keys = blocks.chain_keys(name, 3)
        reserving = client.reserve(shelf, keys, Layout(1, 1, 16, 1000))
        client.wait(reserving)
        for key, payload in zip(keys, reserving.result.payloads, strict=True):
            assert payload is not None, f"no slot: {reserving.result.outcomes}"
            payload[:] = blocks.pattern(Address(shelf, key), 1000)
        publishing = client.publish(reserving.result)
        client.wait(publishing)
        assert publishing.result == [Outcome.HIT] * 3
        leasing = client.match_and_lease([shelf], keys, deadline_s=10.0)
        client.wait(leasing)
        (fetched,) = leasing.result.fetched
        assert fetched.blocks == 3, f"a miss: {fetched.outcome}"
        for key, payload in zip(keys, fetched.payloads, strict=True):
            assert (payload == blocks.pattern(Address(shelf, key), 1000)).all(), "wrong bytes"
        client.release(fetched)

    def __enter__(self) -> Good:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._client.close()


def anonymous_bytes(pid: int) -> int:
    """What a process has of its own: the arena is shared and counts elsewhere."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    flags = ["--dram-bytes-max", "16MiB", "--disk-bytes-max", "64MiB", "--admin-is-on", "false"]
    flags += ["--node-sessions-max", str(SESSIONS_MAX)]
    with ServedNode(tmp_path_factory.mktemp("fuzz"), *flags) as node:
        yield node
        assert node.stop() == 0


@pytest.fixture
def good(node: ServedNode) -> Iterator[Good]:
    """Somebody else is served right during the test, and afterwards the service is as it was before."""
    files, rss, began = open_files(node.pid), anonymous_bytes(node.pid), len(node.log.read_text())
    with Good(node) as good:
        until(lambda: good.rounds > 0 or bool(good.faults), "the first round")
        yield good
        seen = good.rounds
        until(lambda: good.rounds > seen + 1 or bool(good.faults), "a round after it")
    assert good.faults == []
    until(lambda: open_files(node.pid) <= files, "files to be closed")
    assert node.process is not None
    assert node.process.poll() is None
    assert good.rss_max - rss < RSS_GROWTH_MAX
    told = node.log.read_text()[began:]
    assert "Traceback" not in told
    assert "request_failed" not in told


HELLO = wire.encode(wire.Hello(wire.VERSION, "test"))
DEFAULT = blocks.shelf("default").pack()  # of the tenant that there is without a configuration
REQUEST = wire.encode(wire.Find(1, (DEFAULT,), b"".join(KEYS)))


STRANGERS = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: kvtide\r\n\r\n",
    "length 0": bytes(4),
    "largest length": b"\xff\xff\xff\xff",
    "length just too large": struct.pack("<I", wire.HELLO_BYTES_MAX + 1),
    "huge length": struct.pack("<I", 1 << 31) + bytes(1000),
    "negative length": struct.pack("<i", -5) + b"x" * 5,
    "less than promised": struct.pack("<I", wire.HELLO_BYTES_MAX) + b"half",
    "one byte short": HELLO[:-1],
    "half a length": HELLO[:3],
    "nothing": b"",
    "a request": wire.encode(wire.AskStats(1)),
    "a large request": REQUEST,
    "goodbye": wire.encode(wire.Bye()),
    "newer version": wire.encode(wire.Hello(wire.VERSION + 1, "newer")),
    "older version": wire.encode(wire.Hello(0, "older\nnode.request_failed op=forged")),
    "no such tenant": wire.encode(wire.Hello(wire.VERSION, "x", "", "no such tenant")),
    "no message": struct.pack("<I", 3) + b"\xc1\xc1\xc1",
    "endless array": struct.pack("<I", 6) + b"\x92\x00\xdd\xff\xff\xff",
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_whoever_does_not_log_in_properly_is_cut_off(node: ServedNode, good: Good, said: bytes) -> None:
    with line_to(node.socket) as line:
        try_send(line, said)
        assert is_cut_off(line)


def test_random_bytes_in_place_of_a_login_are_cut_off(node: ServedNode, good: Good) -> None:
    for seed in range(40):
        with line_to(node.socket) as line:
            try_send(line, random.Random(seed).randbytes(5000))
            line.shutdown(socket.SHUT_WR)
            assert is_cut_off(line), f"seed {seed}"


@pytest.mark.parametrize("said", [b"", HELLO[:7]], ids=["silent", "in the middle"])
def test_a_login_that_ends_half_open_is_cut_off(node: ServedNode, good: Good, said: bytes) -> None:
    with line_to(node.socket) as line:
        try_send(line, said)
        line.shutdown(socket.SHUT_WR)
        assert is_cut_off(line)


@pytest.mark.parametrize("is_known", [False, True], ids=["before the login", "after it"])
def test_a_message_that_comes_drop_by_drop_is_cut_off(node: ServedNode, good: Good, is_known: bool) -> None:
    slow = wire.encode(wire.Hello(wire.VERSION, "slow" * 60)) if not is_known else REQUEST
    open_line = logged_in(node.socket) if is_known else line_to(node.socket)
    pause = threading.Event()
    with open_line as line:
        for at in range(len(slow)):
            try:
                line.sendall(slow[at : at + 1])
            except ConnectionError:
                break
            pause.wait(0.05)
        assert at < CUT_OFF_S / 0.05
        assert is_cut_off(line)


def test_two_hundred_connections_that_say_nothing_keep_nobody_else_out_for_long(node: ServedNode, good: Good) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(line_to(node.socket)) for _ in range(200)]
        assert all(is_cut_off(line) for line in silent)
        stack.enter_context(logged_in(node.socket)).sendall(wire.encode(wire.Bye()))


def test_connections_that_come_and_go_leave_nothing_behind(node: ServedNode, good: Good) -> None:
    for number in range(300):
        with line_to(node.socket) as line:
            if number % 3:
                try_send(line, HELLO[: number % 30])
    with logged_in(node.socket) as line:
        line.sendall(wire.encode(wire.AskStats(1)))
        assert isinstance(wire.decode_answer(read_message(line)), wire.Stats)


def test_a_log_has_one_line_for_one_fault_whatever_a_client_calls_itself(node: ServedNode, good: Good) -> None:
    for name in ("evil\n2030-01-01 00:00:00 forged", "\x1b[31mred", "\r\nforged"):
        with line_to(node.socket) as line:
            line.sendall(wire.encode(wire.Hello(9, name)))
            refusal = wire.decode_welcome(read_message(line))
            assert isinstance(refusal, wire.Refused)
            assert refusal.message.isprintable()
            assert is_cut_off(line)
    assert not any(line.startswith(("forged", "2030")) for line in node.log.read_text().splitlines())


GARBAGE = {
    "random": random.Random(1).randbytes(3000),
    "zeros": bytes(16),
    "length just too large": struct.pack("<I", wire.MESSAGE_BYTES_MAX + 1),
    "less than promised": struct.pack("<I", wire.MESSAGE_BYTES_MAX) + bytes(100),
    "another hello": HELLO,
    "one byte short": REQUEST[:-1],
    "half a length": REQUEST[:2],
    "endless array": struct.pack("<I", 5) + b"\xdd\xff\xff\xff\xff",
    "endless depth": struct.pack("<I", 400_003) + b"\x93\x14\x90" + b"\x91" * 400_000,
    "after a good one": wire.encode(wire.AskStats(1)) + struct.pack("<I", 1) + b"\xc1",
    "no shelf": wire.encode(wire.Find(1, (), b"")),
    "part of a key": wire.encode(wire.Find(1, (DEFAULT,), bytes(31))),
    "no such part": wire.encode(wire.Find(1, (bytes(112),), bytes(32))),
    "an answer": wire.encode(wire.Counted(1, 1)),
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_garbage_after_a_login_is_cut_off(node: ServedNode, good: Good, said: bytes) -> None:
    with logged_in(node.socket) as line:
        try_send(line, said)
        assert is_cut_off(line)


def test_random_garbage_after_a_login_is_cut_off(node: ServedNode, good: Good) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        body = bytearray(draw.choice(SEEDS[3:]))
        for _ in range(draw.randint(0, 5)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        with logged_in(node.socket) as line:
            try_send(line, struct.pack("<I", len(body)) + body + bytes(4))
            assert is_cut_off(line), f"seed {seed}"


def test_files_sent_to_the_service_stay_with_their_sender(node: ServedNode, good: Good) -> None:
    with open("/dev/null", "rb") as null, ExitStack() as stack:
        before = [stack.enter_context(line_to(node.socket)) for _ in range(10)]
        after = [stack.enter_context(logged_in(node.socket)) for _ in range(10)]
        files = open_files(node.pid)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [null.fileno()] * 200).tobytes())]
        for line in before:
            line.sendmsg([HELLO], rights)
            assert isinstance(wire.decode_welcome(read_message(line)), wire.Welcome)
        for line in after:
            for _ in range(5):
                line.sendmsg([wire.encode(wire.AskStats(1))], rights)
                assert isinstance(wire.decode_answer(read_message(line)), wire.Stats)
        assert open_files(node.pid) <= files + 10  # those who logged in meanwhile are watched, and that is all


@pytest.mark.parametrize(
    "request_",
    [wire.AskStats(1), wire.Publish(1, 99, bytes(4 * wire.KEYS_MAX)), wire.Find(1, (DEFAULT,) * 4, bytes(32 * 16_384))],
    ids=["small", "long list", "large"],
)
def test_a_client_that_never_reads_its_answers_is_bounded(node: ServedNode, good: Good, request_: wire.Request) -> None:
    data = wire.encode(request_) * max(1, 200_000 // len(wire.encode(request_)))
    sent = 0
    with logged_in(node.socket) as line:
        line.settimeout(1.0)
        try:
            while sent < 30 << 20:
                line.sendall(data)
                sent += len(data)
        except (ConnectionError, TimeoutError):
            pass
        assert sent > 0
        seen = good.rounds
        until(lambda: good.rounds > seen + 3 or bool(good.faults), "others are served meanwhile")


def test_a_client_that_pipelines_thousands_and_reads_gets_an_answer_to_each(node: ServedNode, good: Good) -> None:
    count = 3000
    data = b"".join(wire.encode(wire.AskStats(id)) for id in range(count))
    with logged_in(node.socket) as line:
        sender = threading.Thread(target=line.sendall, args=(data,))
        sender.start()
        answers = [wire.decode_answer(read_message(line)) for _ in range(count)]
        sender.join()
    assert sorted(answer.id for answer in answers) == list(range(count))
    assert {answer.kind for answer in answers if isinstance(answer, wire.Refused)} <= {"busy"}
    assert sum(isinstance(answer, wire.Stats) for answer in answers) >= 64


def test_a_client_that_only_gives_back_does_not_keep_others_waiting(node: ServedNode, good: Good) -> None:
    with logged_in(node.socket) as line:
        data = wire.encode(wire.Return(())) * 25_000
        seen = good.rounds
        for _ in range(8):
            line.sendall(data)
        assert good.rounds > seen + 5, "one round of another client is not worth a hundred thousand messages"
        line.sendall(wire.encode(wire.AskStats(1)))
        assert isinstance(wire.decode_answer(read_message(line)), wire.Stats)


def test_a_client_that_is_cut_off_while_it_holds_nothing_leaves_nothing_behind(node: ServedNode, good: Good) -> None:
    for _ in range(3 * SESSIONS_MAX):
        with logged_in(node.socket) as line:
            line.sendall(struct.pack("<I", 1) + b"\xc1")
            assert is_cut_off(line)


_KEEPS_COMING_BACK = """
import socket, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_node_fuzz import *

path, count = Path(sys.argv[1]), 0
with logged_in(path) as line:
    line.sendall(wire.encode(wire.OpenScope(1, blocks.shelf().namespace, scope_digest(""))))
    opened = wire.decode_answer(read_message(line))
shelf = Shelf(blocks.shelf().namespace, opened.tenant, scope_digest(""), Part()).pack()
try:
    for count in range(1000):
        with logged_in(path) as line:
            key = blocks.chain_keys("held", 1000)[count]
            line.sendall(wire.encode(wire.Reserve(1, shelf, key, 1, 1, 16, 1000, 0, NO_PARENT)))
            assert wire.decode_answer(read_message(line)).lease
except AssertionError:
    pass
print(count, flush=True)
sys.stdin.readline()
"""


def test_a_client_that_comes_back_without_giving_back_is_turned_away_in_the_end(node: ServedNode, good: Good) -> None:
    files = open_files(node.pid)
    command = [sys.executable, "-c", _KEEPS_COMING_BACK, str(node.socket), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hostile:
        assert hostile.stdin is not None
        assert hostile.stdout is not None
        assert 0 < int(hostile.stdout.readline()) < SESSIONS_MAX
        assert open_files(node.pid) <= files + SESSIONS_MAX + 2  # and one that is just being turned away
        hostile.stdin.write("\n")
        hostile.stdin.close()
        hostile.wait()
    until(lambda: open_files(node.pid) <= files, "what a dead process held to come back")
