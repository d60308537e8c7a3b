# SPDX-License-Identifier: Apache-2.0
"""Tenants of a real service: nobody sees, changes or takes what is another's, and nobody learns who else there is."""

from __future__ import annotations

import gc
import mmap
import os
import socket
import stat
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from kvtide import wire
from kvtide.client import Client, connect
from kvtide.config import (
    CallSettings,
    ClientSettings,
    DiskSettings,
    DramSettings,
    Settings,
    ShareGroupSettings,
    TenantSettings,
)
from kvtide.config.defaults import resolve
from kvtide.errors import ConfigError, Denied, ProtocolError
from kvtide.frame import HEADER_BYTES
from kvtide.keys import NO_PARENT, Address, Digest, Key, Part, Shelf, chain, scope_digest, tenant_digest
from kvtide.layout import Layout
from kvtide.node.domains import Domains
from kvtide.node.serve import Node, open_node
from kvtide.outcome import Outcome
from kvtide.tenant import Scope
from kvtide.testing import blocks
from kvtide.testing.node import ServedNode
from kvtide.tickets import Ticket

T = TypeVar("T")
MIB = 1 << 20
PATIENCE_S = 60.0
LAYOUT = Layout(layers=1, pages=4, page_tokens=16, page_bytes=15_360)
BLOCK_BYTES = HEADER_BYTES + LAYOUT.payload_bytes
assert BLOCK_BYTES == 64 << 10
MODEL = blocks.shelf().namespace
TOKENS = list(range(64 * 6))

TOKEN = {name: f"token-of-{name}-a1b2c3" for name in ("ada", "ada-reader", "ada-operator", "bob", "bob-operator", "cy")}
SECRET = "cy-keeps-this-to-herself-0123456789"


def hashed(name: str) -> str:
    return sha256(TOKEN[name].encode()).hexdigest()


def config(folder: Path) -> str:
    return f"""
dram: {{bytes_max: 32MiB, huge_pages: false}}
disk: {{bytes_max: 48MiB}}
node: {{drain_s: 30}}
admin: {{is_on: false}}
tenants:
  ada:
    clients:
      - token_sha256: {hashed("ada")}
      - {{role: reader, token_sha256: {hashed("ada-reader")}}}
      - {{role: operator, token_sha256: {hashed("ada-operator")}}}
    dram: {{bytes_max: 8MiB}}
    disk: {{bytes_reserved: 12MiB, bytes_max: 24MiB}}
    scopes:
      kept:
        dram: {{bytes_reserved: 2MiB}}
        disk: {{bytes_reserved: 4MiB, bytes_max: 8MiB}}
      small:
        dram: {{bytes_max: 1MiB}}
        disk: {{bytes_max: 2MiB}}
    reads: [common]
  bob:
    clients:
      - token_sha256: {hashed("bob")}
      - {{role: operator, token_sha256: {hashed("bob-operator")}}}
      - uid: 54321
    dram: {{bytes_max: 8MiB}}
    disk: {{bytes_max: 16MiB}}
  cy:
    secret_file: {folder}/cy.secret
    clients:
      - {{role: operator, token_sha256: {hashed("cy")}}}
share_groups:
  common: {{disk: {{bytes_reserved: 4MiB}}}}
  hidden: {{}}
"""


def until(is_so: Callable[[], bool], what: str) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if is_so():
            return
        pause.wait(0.005)
    raise AssertionError(f"waited {PATIENCE_S} s for: {what}")


@dataclass
class Person:
    """A client and the scope it works in."""

    client: Client
    scope: Scope

    @property
    def shelf(self) -> Shelf:
        return self.scope.shelf()

    def done(self, ticket: Ticket[T]) -> T:
        assert self.client.wait(ticket, PATIENCE_S)
        return ticket.result

    def keys(self, name: object, count: int) -> list[Key]:
        """Of a prompt that is known by its name."""
        seed = int.from_bytes(sha256(repr(name).encode()).digest()[:4], "little")
        tokens = np.random.default_rng(seed).integers(0, 50_000, count * LAYOUT.block_tokens)
        return chain(self.scope.root, tokens, LAYOUT.block_tokens)

    def save(self, name: object, count: int) -> list[Key]:
        """A prompt, a few blocks at a time; waits until what was written is below."""
        keys = self.keys(name, count)
        for first in range(0, count, 8):
            parent = keys[first - 1] if first else NO_PARENT
            part = keys[first : first + 8]
            reserving = self.done(self.client.reserve(self.shelf, part, LAYOUT, position=first, parent=parent))
            for key, slot in zip(part, reserving.payloads, strict=True):
                if slot is not None:
                    slot[:] = blocks.pattern(Address(self.shelf, key), LAYOUT.payload_bytes)
            assert set(self.done(self.client.publish(reserving))) == {Outcome.HIT}
            until(lambda: self.client.stats()["spill"]["disk"]["queued_bytes"] == 0, "the spill")
        return keys

    def found(self, keys: list[Key]) -> tuple[int, list[int]]:
        """How many of these are there from the first on, and on which tiers."""
        match = self.done(self.client.match([self.shelf], keys))
        return match.blocks, match.tiers[0][: match.blocks].tolist()

    def has(self, keys: list[Key]) -> int:
        """How many of these there are, each asked for alone."""
        return sum(self.found([key])[0] for key in keys)

    def read(self, keys: list[Key]) -> int:
        """How many can be read; every byte is right."""
        leased = self.done(self.client.match_and_lease([self.shelf], keys, deadline_s=10.0))
        (fetched,) = leased.fetched
        for key, payload in zip(keys, fetched.payloads, strict=False):
            assert (payload == blocks.pattern(Address(self.shelf, key), LAYOUT.payload_bytes)).all()
        self.client.release(fetched)
        return fetched.blocks


class House:
    """The service, and who comes in."""

    def __init__(self, node: ServedNode) -> None:
        self.node = node
        self._clients: list[Client] = []

    def client(self, name: str) -> Client:
        self._clients.append(self.node.connect(token=TOKEN[name], control_s=20.0))
        return self._clients[-1]

    def person(self, name: str, scope: str = "", group: str = "") -> Person:
        client = self.client(name)
        ticket = client.open_scope(MODEL, scope, group=group)
        assert client.wait(ticket, PATIENCE_S)
        assert ticket.result is not None
        return Person(client, ticket.result)

    def leave(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()


def fill_group(settings: Settings) -> list[Key]:
    """As operators do, while no service runs: what is in the group's store is on disk afterwards."""
    domains = Domains(resolve(settings))
    try:
        group = domains.groups["common"]
        scope = group.tenant.scope(MODEL, scope_digest(""))
        keys = chain(scope.root, TOKENS, LAYOUT.block_tokens)
        reservation = group.store.reserve(scope.shelf(), keys, LAYOUT).result
        for key, slot in zip(keys, reservation.payloads, strict=True):
            assert slot is not None
            slot[:] = blocks.pattern(Address(scope.shelf(), key), LAYOUT.payload_bytes)
        assert group.store.publish(reservation).result == [Outcome.HIT] * len(keys)
        assert group.store.drain()
        return keys
    finally:
        domains.close(30.0)


def in_process(folder: Path) -> Settings:
    """The same folder and names, for a look without the service."""
    tenants = {
        "ada": TenantSettings(reads=("common",)),
        "bob": TenantSettings(),
        "cy": TenantSettings(secret_file=str(folder / "cy.secret")),
    }
    return Settings(
        folder=str(folder),
        dram=DramSettings(bytes_max=32 * MIB, huge_pages=False),
        disk=DiskSettings(bytes_max=48 * MIB),
        tenants=tenants,
        share_groups={"common": ShareGroupSettings(), "hidden": ShareGroupSettings()},
    )


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("tenants")
    folder.chmod(0o700)
    (folder / "cy.secret").write_text(SECRET + "\n")
    (folder / "cy.secret").chmod(0o600)
    assert len(fill_group(in_process(folder))) == 6
    with ServedNode(folder, config=config(folder)) as node:
        yield node
        assert node.stop() == 0
        check_log(node)


def check_log(node: ServedNode) -> None:
    """It says who came, and never with what."""
    told = node.log.read_text()
    assert "Traceback" not in told
    secrets = [path.read_text().strip() for path in (node.folder / "secrets").rglob("*") if path.is_file()]
    assert len(secrets) == 4  # of ada, bob and both groups; cy's is where its operator put it
    for hidden in [SECRET, *secrets, *TOKEN.values(), *map(hashed, TOKEN), "wrong-token"]:
        assert hidden not in told


@pytest.fixture
def house(node: ServedNode) -> Iterator[House]:
    house = House(node)
    yield house
    for name in ("ada-operator", "bob-operator", "cy"):
        house.client(name).clear()
    house.leave()


class Line:
    """A client that says what it likes."""

    def __init__(self, node: ServedNode, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(os.fspath(node.socket))
        self._socket.sendall(wire.encode(wire.Hello(wire.VERSION, "test", TOKEN[name])))
        data, rights, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(4 * wire.ARENAS_MAX))
        welcome = wire.decode_welcome(memoryview(data)[wire.LENGTH_BYTES :])
        assert isinstance(welcome, wire.Welcome)
        self.welcome = welcome
        self.fds = [fd for _, _, content in rights for fd in array("i", content[: len(content) // 4 * 4])]

    def ask(self, request: wire.Request) -> wire.Answer:
        self._socket.sendall(wire.encode(request))
        size = int.from_bytes(self._exactly(4), "little")
        return wire.decode_answer(memoryview(self._exactly(size)))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            assert piece, "the service ended the connection"
            data += piece
        return data

    def close(self) -> None:
        self._socket.close()
        for fd in self.fds:
            os.close(fd)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# Coming in ---------------------------------------------------------------------------------------------------


def refusal(node: ServedNode, token: str = "", tenant: str = "") -> str:
    with pytest.raises(Denied) as caught:
        node.connect(token=token, tenant=tenant)
    return str(caught.value)


def test_a_token_lets_in_as_its_tenant_and_no_other(node: ServedNode) -> None:
    for name, tenant in (("ada", "ada"), ("ada-reader", "ada"), ("bob", "bob"), ("cy", "cy")):
        with node.connect(token=TOKEN[name]) as client:
            assert client.tenant == tenant
        with node.connect(token=TOKEN[name], tenant=tenant) as client:
            assert client.tenant == tenant


def test_who_is_not_let_in_hears_the_same_whatever_he_tried(node: ServedNode) -> None:
    tried = [
        ("", ""),
        ("wrong-token", ""),
        ("wrong-token", "ada"),
        ("wrong-token", "nobody"),
        ("", "ada"),
        ("", "common"),
        ("", "group:common"),
        (TOKEN["ada"], "bob"),
        (TOKEN["ada"], "nobody"),
        (TOKEN["ada"][:-1], "ada"),
        (TOKEN["ada"] + "\0", "ada"),
        (hashed("ada"), "ada"),
    ]
    texts = {refusal(node, token, tenant) for token, tenant in tried}
    assert len(texts) == 1
    (text,) = texts
    assert not any(name in text for name in ("ada", "bob", "cy", "common", "hidden", "54321"))


def test_a_token_too_long_is_turned_away_without_being_repeated(node: ServedNode) -> None:
    with pytest.raises((Denied, ProtocolError)) as caught:
        node.connect(token="wrong-token" * 100)
    assert "wrong-token" not in str(caught.value)


def test_who_may_come_in_for_several_tenants_by_user_and_token_says_for_which(tmp_path: Path) -> None:
    text = f"""
dram: {{bytes_max: 4MiB, huge_pages: false}}
disk: {{bytes_max: 0}}
admin: {{is_on: false}}
tenants:
  ada: {{clients: [{{uid: {os.getuid()}, role: operator}}]}}
  bob: {{clients: [{{token_sha256: {hashed("bob")}}}]}}
  dan: {{clients: [{{token_sha256: {hashed("bob")}}}]}}
"""
    with ServedNode(tmp_path / "node", config=text) as node:
        with node.connect() as by_user:
            assert by_user.tenant == "ada"
        told = refusal(node, TOKEN["bob"])
        assert "KVTIDE_TENANT" in told
        assert not any(name in told for name in ("ada", "bob", "dan"))
        for tenant in ("ada", "bob", "dan"):
            with node.connect(token=TOKEN["bob"], tenant=tenant) as client:
                assert client.tenant == tenant
        refusal(node, TOKEN["bob"], "nobody")


# Roles -------------------------------------------------------------------------------------------------------


def test_a_reader_reads_and_neither_saves_nor_clears(house: House) -> None:
    ada, reader = house.person("ada"), house.person("ada-reader")
    keys = ada.save("prompt", 3)
    assert reader.read(keys) == 3
    new = reader.keys("another", 2)
    reservation = reader.done(reader.client.reserve(reader.shelf, new, LAYOUT))
    assert reservation.outcomes == [Outcome.REJECTED] * 2
    with pytest.raises(Denied, match="reader may not clear"):
        reader.client.clear()
    assert ada.read(keys) == 3


def test_an_engine_saves_and_does_not_clear(house: House) -> None:
    ada = house.person("ada")
    keys = ada.save("prompt", 3)
    with pytest.raises(Denied, match="engine may not clear"):
        ada.client.clear()
    assert ada.read(keys) == 3


def test_an_operator_clears_what_is_his_tenants_and_nothing_else(house: House) -> None:
    ada, bob, operator = house.person("ada"), house.person("bob"), house.client("ada-operator")
    common = house.person("ada", group="common")
    shared = chain(common.scope.root, TOKENS, LAYOUT.block_tokens)
    mine, others = ada.save("prompt", 3), bob.save("prompt", 3)
    assert operator.clear() >= 3
    assert ada.has(mine) == 0
    assert bob.read(others) == 3
    assert common.read(shared) == 6


def test_a_namespace_and_a_prefix_cleared_by_one_tenant_stay_with_another(house: House) -> None:
    bob, operator = house.person("bob"), house.client("ada-operator")
    keys = bob.save("prompt", 3)
    assert operator.clear(namespace=MODEL) == 0
    assert operator.clear(prefix=keys[0]) == 0
    assert bob.read(keys) == 3


# What is another's -------------------------------------------------------------------------------------------


def questions(shelf: Shelf, keys: list[Key]) -> list[wire.Request]:
    packed, joined = shelf.pack(), b"".join(keys)
    sizes, tiers = wire.pack_numbers(np.full(len(keys), BLOCK_BYTES)), bytes(len(keys))
    return [
        wire.Find(1, (packed,), joined),
        wire.MatchAndLease(1, (packed,), joined, 0, 1, 1.0),
        wire.Fetch(1, packed, joined, sizes, tiers, 0, 0.0, 1.0),
        wire.Prefetch(1, packed, joined, sizes, tiers),
        wire.Reserve(1, packed, joined, 1, 4, 16, 15_360, 0, NO_PARENT),
    ]


def test_the_same_prompt_has_other_keys_for_another_tenant(house: House) -> None:
    roots = {house.person(name).scope.root for name in ("ada", "bob", "cy")}
    roots |= {house.person("ada", "kept").scope.root, house.person("ada", group="common").scope.root}
    assert len(roots) == 5
    ada, bob = house.person("ada"), house.person("bob")
    assert not set(ada.keys("prompt", 5)) & set(bob.keys("prompt", 5))


def test_the_same_prompt_saved_by_one_tenant_is_a_miss_for_another(house: House) -> None:
    ada, bob = house.person("ada"), house.person("bob")
    ada.save("prompt", 3)
    assert bob.found(bob.keys("prompt", 3)) == (0, [])


def test_who_knows_another_tenants_root_and_shelf_gets_nothing_with_them(house: House) -> None:
    ada, bob = house.person("ada"), house.person("bob")
    keys = ada.save("prompt", 3)
    thief = Person(bob.client, ada.scope)
    assert thief.keys("prompt", 3) == keys
    assert thief.found(keys) == (0, [])
    assert thief.read(keys) == 0
    new = thief.keys("planted", 2)
    assert thief.done(thief.client.reserve(thief.shelf, new, LAYOUT)).outcomes == [Outcome.REJECTED] * 2
    assert ada.has(new) == 0
    assert ada.read(keys) == 3


def test_known_keys_of_another_tenant_on_the_own_shelf_are_a_miss(house: House) -> None:
    ada, bob = house.person("ada"), house.person("bob")
    keys = ada.save("prompt", 3)
    assert bob.found(keys) == (0, [])
    assert bob.read(keys) == 0


def test_a_shelf_of_another_tenant_is_refused_in_the_same_words_as_one_of_nobody(house: House) -> None:
    ada = house.person("ada")
    there = ada.save("prompt", 3)
    nowhere = ada.keys("never saved", 3)
    nobody = Shelf(MODEL, tenant_digest("nobody"), scope_digest(""), Part())
    hidden = Shelf(MODEL, tenant_digest("group:hidden"), scope_digest(""), Part())
    with Line(house.node, "bob") as line:
        answers = [
            [line.ask(question) for question in questions(shelf, keys)]
            for shelf, keys in ((ada.shelf, there), (ada.shelf, nowhere), (nobody, there), (hidden, there))
        ]
    assert all(isinstance(answer, wire.Refused) for answer in answers[0])
    assert {answer.kind for answer in answers[0] if isinstance(answer, wire.Refused)} == {"denied"}
    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_what_exists_elsewhere_is_answered_as_what_exists_nowhere(house: House) -> None:
    ada = house.person("ada")
    there, nowhere = ada.save("prompt", 3), ada.keys("never saved", 3)
    bob = house.person("bob")
    with Line(house.node, "bob") as line:
        for asked, other in zip(questions(bob.shelf, there), questions(bob.shelf, nowhere), strict=True):
            first, second = line.ask(asked), line.ask(other)
            assert type(first) is type(second)
            if isinstance(first, wire.Reserved):
                assert isinstance(second, wire.Reserved)
                assert first.outcomes == second.outcomes
            else:
                assert first == second
        line.ask(wire.AskStats(1))


def test_one_request_is_about_one_tenant(house: House) -> None:
    common = house.person("ada", group="common")
    ada = house.person("ada")
    with Line(house.node, "ada") as line:
        answer = line.ask(wire.Find(1, (ada.shelf.pack(), common.shelf.pack()), bytes(32)))
        assert isinstance(answer, wire.Refused)
        assert answer.kind == "rejected"
        mixed = line.ask(wire.Find(2, (ada.shelf.pack(), blocks.shelf("bob").pack()), bytes(32)))
        assert isinstance(mixed, wire.Refused)
        assert mixed.kind == "denied"


def test_arenas_of_two_tenants_are_two_memories(node: ServedNode) -> None:
    with Line(node, "ada") as ada, Line(node, "bob") as bob:
        assert len(ada.fds) == 2  # its own, and that of the group it reads
        assert len(bob.fds) == 1
        inodes = {os.fstat(fd).st_ino for fd in (*ada.fds, *bob.fds)}
        assert len(inodes) == 3
        size = ada.welcome.arenas[0].size_bytes
        with mmap.mmap(ada.fds[0], size) as mine, mmap.mmap(bob.fds[0], size) as theirs:
            before = theirs[-4096:]
            mark = os.urandom(4096)
            mine[-4096:] = mark
            assert theirs[-4096:] == before
            assert theirs.find(mark[:64]) == -1


def test_a_reader_cannot_map_its_arena_to_write(node: ServedNode) -> None:
    with Line(node, "ada-reader") as reader:
        assert [arena.is_writable for arena in reader.welcome.arenas] == [False, False]
        for fd, arena in zip(reader.fds, reader.welcome.arenas, strict=True):
            with pytest.raises(PermissionError):
                mmap.mmap(fd, arena.size_bytes)


def without_time(stats: dict[str, Any]) -> dict[str, Any]:
    """Bytes times seconds grow whatever anybody does."""
    for pool in stats["tiers"]["dram"]["pools"]:
        del pool["byte_seconds"]
    return stats


def test_what_one_tenant_does_changes_nothing_that_another_is_told(house: House) -> None:
    ada, bob, operator = house.person("ada"), house.person("bob"), house.client("bob-operator")
    ada.save("prompt", 3)
    before = without_time(ada.client.stats())
    assert set(before["tiers"]) == {"dram"}  # nothing of the disk, which all share
    thief = Person(bob.client, ada.scope)
    for name in range(20):
        keys = bob.save(name, 8)
        assert bob.read(keys) == 8
        thief.read(thief.keys("prompt", 3))
    operator.clear()
    house.person("bob", "customer")
    assert without_time(ada.client.stats()) == before


# Scopes ------------------------------------------------------------------------------------------------------


def test_customers_of_a_tenant_do_not_find_each_others_blocks(house: House) -> None:
    one, other = house.person("ada", "one"), house.person("ada", "other")
    keys = one.save("prompt", 3)
    assert other.found(other.keys("prompt", 3)) == (0, [])
    assert other.found(keys) == (0, [])
    assert one.read(keys) == 3


def test_a_scope_takes_no_more_of_dram_than_its_bound(house: House) -> None:
    small, other = house.person("ada", "small"), house.person("ada")
    keys = small.save("prompt", 40)  # 2.5 MiB, of which it may have one
    tiers = [small.found([key])[1] for key in keys]
    assert 0 < tiers.count([0]) * BLOCK_BYTES <= MIB
    assert len([tier for tier in tiers if tier]) * BLOCK_BYTES <= 3 * MIB
    kept = other.save("another", 8)
    assert other.found(kept) == (8, [0] * 8)


def test_a_flood_in_one_scope_leaves_another_its_reserve(house: House) -> None:
    kept, flood = house.person("ada", "kept"), house.person("ada", "flood")
    keys = kept.save("prompt", 24)  # 1.5 MiB of the 2 MiB of DRAM and the 4 MiB of disk that nobody else can take
    for name in range(80):  # 40 MiB: five times the arena, and more than the tenant may have of the disk
        flood.save(name, 8)
    assert kept.found(keys) == (24, [0] * 24)
    assert kept.read(keys) == 24


# Share groups ------------------------------------------------------------------------------------------------


def test_readers_of_a_group_read_what_operators_put_there(house: House) -> None:
    for name in ("ada", "ada-reader"):
        person = house.person(name, group="common")
        keys = chain(person.scope.root, TOKENS, LAYOUT.block_tokens)
        assert person.read(keys) == 6


def test_nobody_saves_into_a_group_he_reads(house: House) -> None:
    for name in ("ada", "ada-reader", "ada-operator"):
        person = house.person(name, group="common")
        new = person.keys("planted", 2)
        assert person.done(person.client.reserve(person.shelf, new, LAYOUT)).outcomes == [Outcome.REJECTED] * 2
        assert person.found(new) == (0, [])


def test_a_group_that_a_tenant_does_not_read_is_denied_as_one_that_does_not_exist(house: House) -> None:
    said = []
    with Line(house.node, "bob") as bob, Line(house.node, "ada") as ada:
        for line, group in ((bob, "common"), (bob, "hidden"), (bob, "nowhere"), (ada, "hidden"), (ada, "nowhere")):
            answer = line.ask(wire.OpenScope(1, MODEL, scope_digest(""), group))
            assert isinstance(answer, wire.Refused)
            said.append((answer.kind, answer.message.replace(group, "GROUP")))
    assert len(set(said)) == 1
    assert said[0][0] == "denied"
    client = house.client("bob")
    ticket = client.open_scope(MODEL, group="common")
    assert client.wait(ticket, PATIENCE_S)
    assert ticket.result is None


def test_who_knows_the_root_and_shelf_of_a_group_needs_to_be_its_reader(house: House) -> None:
    common = house.person("ada", group="common")
    keys = chain(common.scope.root, TOKENS, LAYOUT.block_tokens)
    thief = Person(house.client("bob"), common.scope)
    assert thief.found(keys) == (0, [])
    assert thief.read(keys) == 0


# Quotas on disk, and a restart -------------------------------------------------------------------------------


def test_a_flood_of_five_disks_takes_nothing_of_what_another_has_reserved_and_a_restart_is_warm(
    node: ServedNode, house: House
) -> None:
    ada, kept, bob = house.person("ada"), house.person("ada", "kept"), house.person("bob")
    mine, customers = ada.save("prompt", 32), kept.save("prompt", 32)  # 2 MiB each, within what is reserved
    roots = ada.scope.root, kept.scope.root, bob.scope.root
    for name in range(240):  # 240 MiB through a disk of 48
        keys = bob.save(("flood", name), 16)
    assert bob.has(keys) > 0
    assert bob.client.stats()["spill"]["disk"]["spilled_bytes"] > 200 * MIB
    house.leave()
    assert node.stop() == 0
    domains = Domains(resolve(in_process(node.folder)))
    try:
        used = {tenant: domains.quotas(tenant)[-1].bytes_used for tenant in ("ada", "bob")}
        assert used["bob"] <= 16 * MIB
        assert used["ada"] >= 4 * MIB
    finally:
        domains.close()
    node.start()
    ada, kept, bob = house.person("ada"), house.person("ada", "kept"), house.person("bob")
    assert (ada.scope.root, kept.scope.root, bob.scope.root) == roots
    assert ada.found(mine) == (32, [1] * 32)
    assert kept.found(customers) == (32, [1] * 32)
    assert ada.read(mine) == kept.read(customers) == 32
    assert bob.has(keys) > 0
    common = house.person("ada", group="common")
    assert common.read(chain(common.scope.root, TOKENS, LAYOUT.block_tokens)) == 6


def test_a_scope_takes_no_more_of_the_disk_than_its_bound(node: ServedNode, house: House) -> None:
    small = house.person("ada", "small")
    keys = small.save("prompt", 80)  # 5 MiB, of which it may have two
    on_disk = [small.found([key])[1] for key in keys].count([1])
    assert on_disk * BLOCK_BYTES <= 2 * MIB
    assert small.has(keys) * BLOCK_BYTES <= 3 * MIB  # with the one of DRAM


# Secrets -----------------------------------------------------------------------------------------------------


def test_secrets_are_files_of_their_owner_alone(node: ServedNode) -> None:
    folder = node.folder / "secrets"
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert set(files) == {"tenants/ada", "tenants/bob", "groups/common", "groups/hidden"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    assert len({path.read_text() for path in files.values()}) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o700}


@pytest.mark.parametrize(
    ("content", "mode", "told"),
    [(b"x" * 64, 0o644, "chmod 600"), (b"short", 0o600, "random"), (b"", 0o600, "random"), (None, 0, "cannot be read")],
    ids=["readable by others", "short", "empty", "missing"],
)
def test_a_service_does_not_start_with_a_secret_that_is_none(
    tmp_path: Path, content: bytes | None, mode: int, told: str
) -> None:
    path = tmp_path / "given.secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    for given in (
        {"tenants": {"ada": TenantSettings(secret_file=str(path))}},
        {"tenants": {"ada": TenantSettings()}, "share_groups": {"g": ShareGroupSettings(secret_file=str(path))}},
    ):
        settings = Settings(folder=str(tmp_path / "node"), dram=DramSettings(bytes_max=4 * MIB, huge_pages=False))
        with pytest.raises(ConfigError, match=told) as caught:
            Domains(resolve(Settings(**{**_fields(settings), **given})))
        assert str(path) in str(caught.value)


def _fields(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("folder", "dram")}


def test_nodes_with_the_same_secret_file_make_the_same_keys(tmp_path: Path) -> None:
    path = tmp_path / "given.secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    roots = []
    for name in ("one", "other"):
        settings = Settings(
            folder=str(tmp_path / name),
            dram=DramSettings(bytes_max=4 * MIB, huge_pages=False),
            tenants={"ada": TenantSettings(secret_file=str(path)), "bob": TenantSettings()},
        )
        domains = Domains(resolve(settings))
        roots.append([domains.tenants[each].tenant.scope(MODEL, scope_digest("")).root for each in ("ada", "bob")])
        domains.close()
    assert roots[0][0] == roots[1][0]
    assert roots[0][1] != roots[1][1]


# Usage -------------------------------------------------------------------------------------------------------


@contextmanager
def running(settings: Settings) -> Iterator[Node]:
    """A service in this process: what it counts for operators can be seen."""
    switch_s = sys.getswitchinterval()
    with open_node(settings) as node:
        thread = threading.Thread(target=node.service.run)
        thread.start()
        try:
            yield node
        finally:
            node.service.stop()
            thread.join(PATIENCE_S)
    sys.setswitchinterval(switch_s)
    gc.unfreeze()


def test_usage_counts_the_tokens_of_each_tenant_once_and_seconds_after_a_report(tmp_path: Path) -> None:
    settings = Settings(
        folder=str(tmp_path / "node"),
        dram=DramSettings(bytes_max=4 * MIB, huge_pages=False),
        tenants={name: TenantSettings(clients=(ClientSettings(token_sha256=hashed(name)),)) for name in ("ada", "bob")},
    )
    calls = CallSettings(match_s=20.0, control_s=20.0)
    with running(settings) as node:
        path = str(node.settings.node.socket)
        usage = node.domains.tenants["ada"].usage
        with connect(path, token=TOKEN["ada"], calls=calls) as client:
            opening = client.open_scope(MODEL)
            assert client.wait(opening)
            assert opening.result is not None
            ranks = [opening.result.shelf(Part(rank=rank, ranks=2)) for rank in range(2)]
            keys = chain(opening.result.root, TOKENS[:128], LAYOUT.block_tokens)
            for shelf in ranks:
                reserving = client.reserve(shelf, keys, LAYOUT)
                assert client.wait(reserving)
                assert client.wait(client.publish(reserving.result))

            def read() -> None:
                leasing = client.match_and_lease(ranks, keys, deadline_s=10.0)
                assert client.wait(leasing)
                assert leasing.result.blocks == 2
                for fetched in leasing.result.fetched:
                    client.release(fetched)

            read()
            assert (usage.stats().blocks_served, usage.stats().tokens_served) == (2, 128)
            assert usage.stats().compute_seconds_saved is None
            client.report_prefill(MODEL, 1000, 2.0)
            client.report_prefill(Digest(bytes(32)), 1000, 500.0)
            read()
            assert usage.stats().tokens_served == 256
            assert usage.stats().compute_seconds_saved == pytest.approx(128 * 2.0 / 1000)
            read()
            assert usage.stats().compute_seconds_saved == pytest.approx(256 * 2.0 / 1000)
            client.stats()  # everything that was said before has been heard
        stats = node.domains.tenants["bob"].usage.stats()
        assert (stats.blocks_served, stats.tokens_served, stats.compute_seconds_saved) == (0, 0, None)
