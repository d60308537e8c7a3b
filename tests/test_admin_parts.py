# SPDX-License-Identifier: Apache-2.0
"""Pieces of the admin side one by one: the gate, the audit log, long waits, publishing to a share group."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from kvtide.config import (
    AdminClientSettings,
    AdminSettings,
    ArenaSettings,
    ClientSettings,
    DiskSettings,
    DramSettings,
    Settings,
    ShareGroupSettings,
    TenantSettings,
)
from kvtide.config.defaults import resolve
from kvtide.errors import ConfigError, Rejected
from kvtide.keys import NO_PARENT, Digest, Key, Part, chain, scope_digest
from kvtide.layout import Layout
from kvtide.node import sharing
from kvtide.node.admin import open_admin
from kvtide.node.admin.audit import AuditLog
from kvtide.node.admin.gate import Gate
from kvtide.node.admin.refusal import Refusal
from kvtide.node.domains import Domain, Domains
from kvtide.node.doorkeeper import Doorkeeper
from kvtide.node.serve import Node, listening
from kvtide.node.service import Service
from kvtide.node.sharing import Shared
from kvtide.outcome import Outcome

NAMESPACE = Digest(sha256(b"a model").digest())
LAYOUT = Layout(layers=1, pages=2, page_tokens=8, page_bytes=2048)


def hashed(token: str) -> str:
    return sha256(token.encode()).hexdigest()


# The gate --------------------------------------------------------------------------------------------------


def gate(**tenants: TenantSettings) -> Gate:
    clients = (
        AdminClientSettings(name="ops", token_sha256=hashed("of ops").upper()),
        AdminClientSettings(name="dashboard", token_sha256=hashed("of dashboard"), role="reader"),
    )
    return Gate(Settings(admin=AdminSettings(clients=clients), tenants=tenants), b"of the folder")


def test_the_gate_knows_the_folders_token_and_those_of_the_settings() -> None:
    found = [gate().admit(f"Bearer {token}") for token in ("of the folder", "of ops", "of dashboard")]
    assert [(caller.name, caller.role) for caller in found] == [
        ("node", "operator"),
        ("ops", "operator"),
        ("dashboard", "reader"),
    ]
    assert all(caller.tenants is None for caller in found)


def test_a_tenants_token_comes_in_only_where_its_role_is_operator() -> None:
    tenant = TenantSettings(
        clients=(
            ClientSettings(role="operator", token_sha256=hashed("operator")),
            ClientSettings(role="engine", token_sha256=hashed("engine")),
            ClientSettings(role="operator", uid=0),
        )
    )
    assert gate(ada=tenant).admit("bearer operator").tenants == {"ada"}
    with pytest.raises(Refusal, match="nobody who may come in"):
        gate(ada=tenant).admit("Bearer engine")


def test_one_token_of_two_tenants_is_for_both() -> None:
    tenant = TenantSettings(clients=(ClientSettings(role="operator", token_sha256=hashed("both")),))
    caller = gate(ada=tenant, bob=tenant).admit("Bearer both")
    assert caller.tenants == {"ada", "bob"}
    assert not caller.sees("eve")


# The audit log ---------------------------------------------------------------------------------------------


def test_the_audit_log_has_a_bound_and_keeps_one_old_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    audit = AuditLog(path, bytes_max=1000, clock=lambda: 0.0)
    for number in range(100):
        audit.write("ops", "127.0.0.1", "clear", {"number": number}, "ok")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["audit.log", "audit.log.1"]
    text = (tmp_path / "audit.log.1").read_text() + path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["arguments"]["number"] for line in lines] == list(range(100 - len(lines), 100))
    for each in tmp_path.iterdir():
        assert each.stat().st_size <= 1000
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    assert lines[0]["time"] == "1970-01-01T00:00:00.000+00:00"


def test_what_somebody_writes_into_a_name_stays_on_one_line(tmp_path: Path) -> None:
    AuditLog(tmp_path / "audit.log").write("ops", "", "bypass", {"name": 'x"\n{"who": "eve"}'}, "not_found")
    (line,) = (tmp_path / "audit.log").read_text().splitlines()
    assert json.loads(line)["who"] == "ops"


def test_an_audit_log_that_cannot_be_written_is_a_fault_and_no_failed_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    AuditLog(tmp_path / "nothing" / "audit.log").write("ops", "", "clear", {}, "ok")
    assert "admin.audit_failed" in caplog.text


# A node in this process ------------------------------------------------------------------------------------


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Node]:
    """A service whose parts can be reached. Its loop runs, as it does in `kvtide serve`."""
    settings = resolve(
        Settings(
            folder=str(tmp_path),
            dram=DramSettings(bytes_max=8 << 20, huge_pages=False),
            disk=DiskSettings(bytes_max=64 << 20),
            admin=AdminSettings(port=0),
            tenants={"ada": TenantSettings(), "bob": TenantSettings()},
            share_groups={"prompts": ShareGroupSettings(dram=ArenaSettings(bytes_max=1 << 20))},
        )
    )
    with ExitStack() as stack:
        listener = stack.enter_context(listening(tmp_path / "kvtide.sock", 0o600))
        domains = Domains(settings)
        stack.callback(domains.close)
        service = Service(settings, domains, Doorkeeper({}, os.getuid()), listener)
        loop = threading.Thread(target=service.run)
        loop.start()
        stack.callback(loop.join)
        stack.callback(service.stop)
        while not service.is_serving:
            pass
        yield Node(settings, domains, service)


def test_waiting_calls_keep_nobody_from_the_status_and_end_with_the_service(
    inside: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many drains of ten minutes as there are threads for calls that wait, none of which can succeed."""
    begun = threading.Semaphore(0)

    def drain(timeout_s: float) -> bool:
        begun.release()
        threading.Event().wait(timeout_s)
        return False

    for domain in inside.domains:
        monkeypatch.setattr(domain.store, "drain", drain)
    answers: list[dict[str, object]] = []
    with open_admin(inside) as url:
        secret = (Path(inside.settings.folder) / "admin.token").read_text().strip()
        headers = {"Authorization": f"Bearer {secret}"}

        def ask() -> None:
            with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
                response = http.post("/v1/tiers/disk/drain", json={"timeout_s": 600})
                answers.append(response.json())

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in threads:
            begun.acquire()
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            assert http.get("/v1/status").json()["is_serving"]
            assert http.get("/health").status_code == 200
    for thread in threads:
        thread.join()
    assert answers == [{"is_drained": False, "queued_bytes": 0}] * 4


def test_a_mistake_of_ours_is_an_answer_and_a_line_in_the_log(
    inside: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a secret of ours")

    monkeypatch.setattr(inside.domains, "quotas", fail)
    with open_admin(inside) as url:
        secret = (Path(inside.settings.folder) / "admin.token").read_text().strip()
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}, trust_env=False) as http:
            for path in ("/v1/usage", "/metrics"):
                response = http.get(path)
                assert response.status_code == 500
                assert response.json()["error"]["kind"] == "error"
                assert "secret of ours" not in response.text
    assert "admin.call_failed verb=usage" in caplog.text
    assert "admin.call_failed verb=metrics" in caplog.text


def test_more_calls_than_may_wait_are_told_to_come_again(inside: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.node.admin.app._WAITING_MAX", 0)
    with open_admin(inside) as url:
        secret = (Path(inside.settings.folder) / "admin.token").read_text().strip()
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}, trust_env=False) as http:
            response = http.get("/v1/status")
            assert (response.status_code, response.json()["error"]["kind"]) == (503, "busy")
            assert http.get("/health").status_code == 200  # needs no thread


def test_a_body_that_does_not_come_is_not_waited_for(inside: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.node.admin.app._BODY_S", 0.05)
    with open_admin(inside) as url:
        secret = (Path(inside.settings.folder) / "admin.token").read_text().strip()
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            head = f"POST /v1/clear HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {secret}\r\n"
            slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            answer = slow.recv(4096)
            while b"too_slow" not in answer and (more := slow.recv(4096)):
                answer += more
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"too_slow" in answer


def test_the_service_is_not_ready_when_its_loop_has_ended(inside: Node) -> None:
    with open_admin(inside) as url, httpx.Client(base_url=url, trust_env=False) as http:
        assert http.get("/ready").status_code == 200
        inside.service.stop()
        response = http.get("/ready")
        assert (response.status_code, response.json()["error"]["kind"]) == (503, "not_ready")
        assert http.get("/health").status_code == 200


def test_a_host_that_is_nowhere_is_a_mistake_in_the_settings(inside: Node) -> None:
    for host in ("192.0.2.1", "no such host"):
        settings = msgspec.structs.replace(inside.settings, admin=AdminSettings(host=host, port=0))
        with (
            pytest.raises(ConfigError, match=r"admin\.host"),
            open_admin(Node(settings, inside.domains, inside.service)),
        ):
            pass


# Publishing to a share group -------------------------------------------------------------------------------


def tokens(count: int) -> list[int]:
    return np.random.default_rng(count).integers(0, 1 << 31, count * LAYOUT.block_tokens).tolist()


def save(domain: Domain, prompt: list[int], part: Part | None = None, which: range | None = None) -> list[Key]:
    """Blocks of a prompt, each full of its number; those of `which` only."""
    scope = domain.tenant.scope(NAMESPACE, scope_digest("customer"))
    keys = chain(scope.root, prompt, LAYOUT.block_tokens)
    places = which or range(len(keys))
    store, first = domain.store, places[0]
    reservation = store.reserve(
        scope.shelf(part),
        [keys[place] for place in places],
        LAYOUT,
        position=first,
        parent=keys[first - 1] if first else NO_PARENT,
    ).result
    for place, slot in zip(places, reservation.payloads, strict=True):
        assert slot is not None
        slot[:] = place % 251
    assert set(store.publish(reservation).result) == {Outcome.HIT}
    return keys


Publish = Callable[..., Shared]


@pytest.fixture
def publish(inside: Node) -> Publish:
    def publish(prompt: list[int], *parts: Part, source: str = "ada", scope: str = "customer") -> Shared:
        source_domain, group = inside.domains.tenants[source], inside.domains.groups["prompts"]
        chosen = parts or (Part(),)
        return sharing.publish(source_domain, group, NAMESPACE, scope, prompt, LAYOUT.block_tokens, chosen, 10.0)

    return publish


def read(group: Domain, prompt: list[int], part: Part | None = None) -> list[int]:
    """The first byte of each block that the group has, after checking that all bytes are equal."""
    scope = group.tenant.scope(NAMESPACE, scope_digest(""))
    keys = chain(scope.root, prompt, LAYOUT.block_tokens)
    ticket = group.store.match_and_lease([scope.shelf(part)], keys)
    assert group.store.wait(ticket, 30)
    (fetched,) = ticket.result.fetched
    assert all((payload == payload[0]).all() for payload in fetched.payloads)
    first = [int(payload[0]) for payload in fetched.payloads]
    group.store.release(fetched)
    return first


def test_published_blocks_are_the_tenants_bytes_under_the_groups_keys(inside: Node, publish: Publish) -> None:
    prompt, group = tokens(6), inside.domains.groups["prompts"]
    save(inside.domains.tenants["ada"], prompt)
    assert publish(prompt) == Shared(copied=6)
    assert read(group, prompt) == [0, 1, 2, 3, 4, 5]
    assert publish(prompt) == Shared(present=6)
    for domain in inside.domains:
        assert domain.store.stats([]).leases == 0


def test_every_part_is_copied_to_its_own_shelf(inside: Node, publish: Publish) -> None:
    prompt, ranks = tokens(3), [Part(rank=0, ranks=2), Part(rank=1, ranks=2)]
    for rank in ranks:
        save(inside.domains.tenants["ada"], prompt, rank)
    assert publish(prompt, *ranks) == Shared(copied=6)
    for rank in ranks:
        assert read(inside.domains.groups["prompts"], prompt, rank) == [0, 1, 2]
    assert read(inside.domains.groups["prompts"], prompt) == []


def test_what_comes_after_a_hole_is_missing(inside: Node, publish: Publish) -> None:
    prompt, ada = tokens(6), inside.domains.tenants["ada"]
    save(ada, prompt, which=range(2))
    save(ada, prompt, which=range(3, 6))
    assert publish(prompt) == Shared(copied=2, missing=4)
    save(ada, prompt, which=range(2, 3))
    assert publish(prompt) == Shared(copied=4, present=2)
    assert read(inside.domains.groups["prompts"], prompt) == [0, 1, 2, 3, 4, 5]


def test_blocks_are_published_from_disk_as_well(inside: Node, publish: Publish) -> None:
    prompt, ada = tokens(5), inside.domains.tenants["ada"]
    save(ada, prompt)
    assert ada.store.drain(30)
    ada.store.dram.clear()
    assert publish(prompt) == Shared(copied=5)
    assert read(inside.domains.groups["prompts"], prompt) == [0, 1, 2, 3, 4]


def test_another_tenant_or_customer_has_nothing_to_publish(inside: Node, publish: Publish) -> None:
    prompt = tokens(4)
    save(inside.domains.tenants["ada"], prompt)
    assert publish(prompt, source="bob") == Shared(missing=4)
    assert publish(prompt, scope="another customer") == Shared(missing=4)


def test_more_than_one_request_may_hold_is_copied_in_steps(inside: Node, publish: Publish) -> None:
    """The group's arena holds 128 blocks of 8 KiB, and one request 64 of them."""
    prompt = tokens(100)
    save(inside.domains.tenants["ada"], prompt)
    assert publish(prompt) == Shared(copied=100)
    assert read(inside.domains.groups["prompts"], prompt[: 60 * LAYOUT.block_tokens]) == list(range(60))


def test_a_group_without_room_says_how_many_had_none(inside: Node, publish: Publish) -> None:
    prompt, group = tokens(100), inside.domains.groups["prompts"]
    save(inside.domains.tenants["ada"], prompt)
    taken = group.tenant.scope(NAMESPACE, scope_digest("somebody who writes"))
    reservations = [
        group.store.reserve(taken.shelf(), chain(taken.root, tokens(count), LAYOUT.block_tokens), LAYOUT).result
        for count in (60, 40)
    ]
    shared = publish(prompt)
    assert shared.copied == 28
    assert shared.copied + shared.rejected == 100
    for reservation in reservations:
        group.store.abort(reservation)
    assert group.store.stats([]).leases == 0


def test_publishing_stops_when_the_service_ends(inside: Node) -> None:
    prompt = tokens(4)
    save(inside.domains.tenants["ada"], prompt)
    ada, group = inside.domains.tenants["ada"], inside.domains.groups["prompts"]
    shared = sharing.publish(
        ada, group, NAMESPACE, "customer", prompt, LAYOUT.block_tokens, [Part()], 10.0, lambda: False
    )
    assert shared == Shared(missing=4)


@pytest.mark.parametrize(
    ("text", "ids"),
    [("1 2 3", [1, 2, 3]), ("[1, 2,\n3]\n", [1, 2, 3]), ("1\n2\n3", [1, 2, 3]), ("", []), ("[]", []), (" 1 ,", [1])],
)
def test_a_token_file_may_be_a_list_or_words(text: str, ids: list[int]) -> None:
    assert sharing.read_tokens(text) == ids


@pytest.mark.parametrize("text", ["one", "1.5", "{}", "1; 2"])
def test_what_is_no_token_file_is_refused(text: str) -> None:
    with pytest.raises(Rejected, match="no number"):
        sharing.read_tokens(text)


def test_ids_that_are_none_are_refused(inside: Node, publish: Publish) -> None:
    with pytest.raises(Rejected, match="ids"):
        publish([-1] * 16)
