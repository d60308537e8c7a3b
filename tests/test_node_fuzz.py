# SPDX-License-Identifier: Apache-2.0
"""Hostile clients: whatever bytes and numbers they send, they get an answer or are cut off, and the others are served."""

from __future__ import annotations

import random
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide import wire
from kvtide.config import DiskSettings, DramSettings, LeaseSettings, Settings, ShareGroupSettings, TenantSettings
from kvtide.config.defaults import resolve
from kvtide.errors import KvtideError, ProtocolError
from kvtide.frame import HEADER_BYTES
from kvtide.keys import NO_PARENT, Address, Key, Part, Shelf, scope_digest, tenant_digest
from kvtide.node.domains import Domain, Domains
from kvtide.node.doorkeeper import Principal
from kvtide.node.peer import NO_FD, Peer
from kvtide.node.requests import Requests
from kvtide.node.session import Seat, Session
from kvtide.outcome import Outcome
from kvtide.policy.policy import NO_ROW
from kvtide.testing import blocks

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
        wire.Welcome(1, "0.1", 3, "a", "engine", (wire.ArenaInfo(1 << 30, True),), 1, 2, 3.5),
        wire.Refused(0, "busy", "later"),
        wire.OpenScope(1, DIGEST, DIGEST, "group"),
        wire.Find(1, (SHELF, SHELF), b"".join(KEYS[:3])),
        wire.MatchAndLease(1, (SHELF,), b"".join(KEYS[:3]), 5, 2, 0.25),
        wire.Fetch(1, SHELF, b"".join(KEYS[:2]), bytes(16), b"\0\1", 3, 0.5, 1e9),
        wire.Return((1, 2, 3)),
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
            return wire.Publish(self.id(), draw.choice(self.leases), self.which())
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
