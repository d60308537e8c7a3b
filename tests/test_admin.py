# SPDX-License-Identifier: Apache-2.0
"""The admin side of a service for one user: what each call does, who may call, what is refused and in which words."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kvtide import __version__
from kvtide.client import Client
from kvtide.keys import Digest, Key, Part, chain
from kvtide.layout import Layout
from kvtide.node.admin.routes import CALLS
from kvtide.outcome import Outcome
from kvtide.testing.node import ServedNode

NAMESPACE = Digest(sha256(b"a model").digest())
LAYOUT = Layout(layers=2, pages=4, page_tokens=16, page_bytes=512)
READER = "a token for those who only look"
CONFIG = f"""
dram: {{bytes_max: 8MiB}}
disk: {{bytes_max: 64MiB}}
admin:
  port: 0
  clients: [{{name: grafana, role: reader, token_sha256: {sha256(READER.encode()).hexdigest()}}}]
share_groups:
  prompts: {{dram: {{bytes_max: 2MiB}}}}
"""


class Engine:
    """Saves blocks whose bytes tell their place."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def keys(self, name: str, count: int, scope: str = "") -> list[Key]:
        ticket = self.client.open_scope(NAMESPACE, scope)
        assert self.client.wait(ticket, 30)
        assert ticket.result is not None
        return chain(ticket.result.root, tokens(name, count), LAYOUT.block_tokens)

    def save(self, name: str, count: int, part: Part | None = None, scope: str = "") -> list[Key]:
        keys, opened = self.keys(name, count, scope), self.client.open_scope(NAMESPACE, scope).result
        assert opened is not None
        ticket = self.client.reserve(opened.shelf(part), keys, LAYOUT)
        assert self.client.wait(ticket, 30)
        for place, slot in enumerate(ticket.result.payloads):
            assert slot is not None
            slot[:] = place + 1
        published = self.client.publish(ticket.result)
        assert self.client.wait(published, 30)
        assert published.result == [Outcome.HIT] * count
        return keys


def tokens(name: str, count: int) -> list[int]:
    seed = int.from_bytes(sha256(name.encode()).digest()[:4], "little")
    return np.random.default_rng(seed).integers(0, 1 << 31, count * LAYOUT.block_tokens).tolist()


def blocks(keys: list[Key], **more: object) -> dict[str, object]:
    body = {"tenant": "default", "namespace": NAMESPACE.hex(), "keys": [key.hex() for key in keys]}
    return body | more


class Api:
    """The admin side of a service, with a token or without."""

    def __init__(self, node: ServedNode, token: str | None = None) -> None:
        self.node = node
        self.url = (node.folder / "admin.url").read_text().strip()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def call(self, method: str, path: str, body: object = None, status: int = 200) -> dict[str, Any]:
        response = self.http.request(method, path, json=body) if body is not None else self.http.request(method, path)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def get(self, path: str) -> dict[str, Any]:
        return self.call("GET", path)

    def post(self, path: str, body: object, status: int = 200) -> dict[str, Any]:
        return self.call("POST", path, body, status)

    def error(self, method: str, path: str, body: object = None, *, status: int) -> tuple[str, str]:
        """The kind and the message of a refusal."""
        error = self.call(method, path, body, status)["error"]
        return error["kind"], error["message"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with ServedNode(tmp_path_factory.mktemp("node"), config=CONFIG) as node:
        yield node
        assert node.stop() == 0


@pytest.fixture(scope="module")
def api(node: ServedNode) -> Iterator[Api]:
    api = Api(node, (node.folder / "admin.token").read_text().strip())
    with api.http:
        yield api


@pytest.fixture(scope="module")
def nobody(node: ServedNode) -> Iterator[Api]:
    api = Api(node)
    with api.http:
        yield api


@pytest.fixture(scope="module")
def reader(node: ServedNode) -> Iterator[Api]:
    api = Api(node, READER)
    with api.http:
        yield api


@pytest.fixture(scope="module")
def engine(node: ServedNode) -> Iterator[Engine]:
    with node.connect() as client:
        yield Engine(client)


# Files, and the way in -------------------------------------------------------------------------------------


def test_token_and_url_are_for_the_services_user_alone(node: ServedNode) -> None:
    for name in ("admin.token", "admin.url"):
        assert stat.S_IMODE((node.folder / name).stat().st_mode) == 0o600


def test_health_and_readiness_and_the_document_need_no_token(nobody: Api) -> None:
    assert nobody.get("/health") == {"status": "ok"}
    assert nobody.get("/ready") == {"status": "ok"}
    assert nobody.get("/openapi.json")["openapi"] == "3.1.0"


def test_metrics_need_no_token_where_there_are_no_tenants(nobody: Api) -> None:
    assert "kvtide_build_info" in nobody.http.get("/metrics").text


def test_every_other_call_without_a_token_is_told_what_to_send(nobody: Api) -> None:
    for call in CALLS:
        if call.role is not None:
            response = nobody.http.request(call.method, call.path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert "Authorization: Bearer" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "header", ["Bearer wrong", "Bearer", "Basic YTpi", "wrong", "Bearer " + "x" * 1000, "Bearer \xff"]
)
def test_what_is_no_token_of_anybody_is_turned_away(nobody: Api, header: str) -> None:
    response = nobody.http.get("/v1/status", headers={"Authorization": header.encode("latin-1")})
    assert response.status_code == 401
    assert "wrong" not in response.text


def test_a_reader_looks_and_changes_nothing(reader: Api) -> None:
    assert reader.get("/v1/status")["version"] == __version__
    kind, message = reader.error("POST", "/v1/clear", {"tenant": "*"}, status=403)
    assert kind == "denied"
    assert "operator" in message


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9733", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_a_host_that_is_not_this_machine_is_refused(api: Api, host: str) -> None:
    response = api.http.get("/health", headers={"Host": host})
    assert response.status_code == 421
    assert response.json()["error"]["kind"] == "wrong_host"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:9733"])
def test_names_of_this_machine_are_its_host(api: Api, host: str) -> None:
    assert api.http.get("/health", headers={"Host": host}).status_code == 200


def test_other_origins_are_allowed_nothing(api: Api) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    response = api.http.options("/v1/clear", headers=headers)
    assert response.status_code == 405
    assert not any(name.startswith("access-control") for name in response.headers)


# The document ----------------------------------------------------------------------------------------------


def test_every_route_is_in_the_document_with_its_bodies(nobody: Api) -> None:
    document = nobody.get("/openapi.json")
    schemas = document["components"]["schemas"]
    for call in CALLS:
        operation = document["paths"][call.path][call.method.lower()]
        assert operation["summary"] == call.summary
        assert operation["responses"][str(call.success)]["content"]["application/json"]["schema"] == {
            "$ref": f"#/components/schemas/{call.answer.__name__}"
        }
        assert ("requestBody" in operation) == (call.request is not None)
    refs = {text.split('"')[0] for text in json.dumps(document).split("#/components/schemas/")[1:]}
    assert refs <= schemas.keys()
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))


def test_every_route_of_the_document_answers(api: Api) -> None:
    paths = api.get("/openapi.json")["paths"]
    assert len(paths) >= len({call.path for call in CALLS})
    for path, operations in paths.items():
        for method in operations:
            filled = path.replace("{name}", "nobody").replace("{id}", "none").replace("{group}", "none")
            response = api.http.request(method.upper(), filled, content=b"{}" if method in ("post", "put") else None)
            assert response.status_code in (200, 404, 422), (method, path, response.text)
            if response.status_code != 200:
                assert response.json()["error"]["kind"] in ("not_found", "invalid"), (method, path)


def test_a_route_that_is_not_there_says_where_all_are(api: Api) -> None:
    kind, message = api.error("GET", "/v1/nothing", status=404)
    assert kind == "no_route"
    assert "/openapi.json" in message
    assert api.error("GET", "/v1/status/", status=404)[0] == "no_route"


# Bodies ----------------------------------------------------------------------------------------------------


def test_an_unknown_field_is_named_with_the_nearest_known_one(api: Api) -> None:
    kind, message = api.error("POST", "/v1/clear", {"tennant": "default"}, status=422)
    assert kind == "invalid"
    assert "`tennant`" in message
    assert "`tenant`" in message


def test_an_unknown_field_within_a_field_is_named_too(api: Api) -> None:
    body = blocks([Key(bytes(32))], part={"rnak": 1})
    assert "did you mean `rank`?" in api.error("POST", "/v1/lookup", body, status=422)[1]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"", 422, "invalid"),
        (b"{", 400, "not_json"),
        (b"\xff", 400, "not_json"),
        (b"[]", 422, "invalid"),
        (b'{"tenant": 5}', 422, "invalid"),
        (b'{"tenant": ""}', 422, "invalid"),
        (b'{"tenant": "default", "prefix": "ab"}', 422, "invalid"),
        (b'{"tenant": "default", "prefix": "' + b"Z" * 64 + b'"}', 422, "invalid"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_with_its_reason(api: Api, body: bytes, status: int, kind: str) -> None:
    response = api.http.post("/v1/clear", content=body)
    assert response.status_code == status
    assert response.json()["error"]["kind"] == kind


def test_a_part_that_cannot_be_is_refused(api: Api) -> None:
    body = blocks([Key(bytes(32))], part={"rank": 3, "ranks": 2})
    assert "rank 3" in api.error("POST", "/v1/lookup", body, status=422)[1]


def test_a_body_over_four_mebibytes_is_refused(api: Api) -> None:
    response = api.http.post("/v1/lookup", content=b" " * ((4 << 20) + 1))
    assert response.status_code == 413
    assert response.json()["error"]["kind"] == "too_large"


def test_more_keys_than_a_call_takes_are_refused(api: Api) -> None:
    keys = [Key(number.to_bytes(32, "big")) for number in range(16_385)]
    assert api.post("/v1/lookup", blocks(keys[:-1]))["prefix_blocks"] == 0
    assert api.error("POST", "/v1/lookup", blocks(keys), status=422)[0] == "invalid"


def test_no_keys_are_refused(api: Api) -> None:
    assert api.error("POST", "/v1/lookup", blocks([]), status=422)[0] == "invalid"


# Blocks ----------------------------------------------------------------------------------------------------


def test_a_lookup_says_on_which_tiers_each_block_is(api: Api, engine: Engine) -> None:
    keys = engine.save("lookup", 3)
    api.post("/v1/tiers/disk/drain", {"timeout_s": 30})
    answer = api.post("/v1/lookup", blocks([*keys, Key(bytes(32))]))
    sizes = 4096 + LAYOUT.payload_bytes
    assert answer["blocks"] == [{"tiers": ["dram", "disk"], "frame_bytes": sizes}] * 3 + [
        {"tiers": [], "frame_bytes": 0}
    ]
    assert answer["prefix_blocks"] == 3
    elsewhere = api.post("/v1/lookup", blocks(keys, scope="other"))
    assert elsewhere["prefix_blocks"] == 0
    of_rank = api.post("/v1/lookup", blocks(keys, part={"rank": 1, "ranks": 2}))
    assert of_rank["prefix_blocks"] == 0


def test_a_lookup_does_not_count_as_what_engines_ask_for(api: Api, engine: Engine) -> None:
    keys = engine.save("not counted", 2)
    before = engine.client.stats()
    api.post("/v1/lookup", blocks(keys))
    api.post("/v1/warm", blocks(keys))
    after = engine.client.stats()
    assert (after["asked_blocks"], after["matched_blocks"]) == (before["asked_blocks"], before["matched_blocks"])


def test_pinned_blocks_stay_until_the_pin_is_removed(api: Api, engine: Engine) -> None:
    keys = engine.save("pin", 4)
    pin = api.post("/v1/pins", blocks(keys, ttl_s=600), 201)
    assert pin["blocks"] == 4
    assert 590 < pin["expires_s"] <= 600
    (listed,) = api.get("/v1/pins")["pins"]
    assert (listed["id"], listed["tenant"], listed["blocks"]) == (pin["id"], "default", 4)
    assert listed["bytes"] == api.get("/v1/status")["pinned_bytes"] > 0
    for number in range(20):  # more than the arena holds
        engine.save(f"crowd {number}", 60)
    assert "dram" in api.post("/v1/lookup", blocks(keys))["blocks"][0]["tiers"]
    assert api.call("DELETE", f"/v1/pins/{pin['id']}") == {"blocks": 4}
    assert api.get("/v1/pins") == {"pins": []}
    assert api.get("/v1/status")["pinned_bytes"] == 0
    assert api.error("DELETE", f"/v1/pins/{pin['id']}", status=404)[0] == "not_found"


def test_an_expired_pin_is_gone(api: Api, engine: Engine) -> None:
    keys = engine.save("short pin", 1)
    api.post("/v1/pins", blocks(keys, ttl_s=0.001), 201)
    while api.get("/v1/pins")["pins"] or api.get("/v1/status")["pinned_bytes"]:
        pass


def test_pins_have_a_bound(api: Api, engine: Engine) -> None:
    keys = engine.save("many pins", 1)
    ids = [api.post("/v1/pins", blocks(keys, ttl_s=600), 201)["id"] for _ in range(256)]
    assert api.error("POST", "/v1/pins", blocks(keys, ttl_s=600), status=503)[0] == "busy"
    for id in ids:
        api.call("DELETE", f"/v1/pins/{id}")


def test_more_than_the_share_of_pins_is_refused(api: Api, engine: Engine) -> None:
    ids = []
    for number in range(100):
        keys = engine.save(f"large {number}", 60)
        response = api.http.post("/v1/pins", json=blocks(keys, ttl_s=600))
        if response.status_code != 201:
            break
        ids.append(response.json()["id"])
    assert response.status_code == 409
    assert "leases.pinned_share" in response.json()["error"]["message"]
    for id in ids:
        api.call("DELETE", f"/v1/pins/{id}")


def test_what_is_nowhere_cannot_be_pinned_or_warmed(api: Api) -> None:
    for path, more in (("/v1/pins", {"ttl_s": 60}), ("/v1/warm", {})):
        assert api.error("POST", path, blocks([Key(bytes(31) + b"\1")], **more), status=404)[0] == "not_found"


def test_warming_brings_blocks_up_from_disk(api: Api, engine: Engine) -> None:
    keys = engine.save("warm", 3)
    assert api.post("/v1/tiers/disk/drain", {})["is_drained"]
    number = 0
    while "dram" in api.post("/v1/lookup", blocks(keys))["blocks"][2]["tiers"]:
        engine.save(f"pushing {number}", 60)
        number += 1
    assert api.post("/v1/warm", blocks(keys)) == {"blocks": 3}
    while "dram" not in api.post("/v1/lookup", blocks(keys))["blocks"][2]["tiers"]:
        pass


def test_clearing_by_prefix_leaves_what_comes_before(api: Api, engine: Engine) -> None:
    keys = engine.save("prefix", 4)
    api.post("/v1/tiers/disk/drain", {})
    cleared = api.post("/v1/clear", {"tenant": "default", "namespace": NAMESPACE.hex(), "prefix": keys[2].hex()})
    assert cleared == {"blocks": 4}  # two blocks on two tiers
    assert api.post("/v1/lookup", blocks(keys))["prefix_blocks"] == 2


def test_clearing_a_tenant_ends_its_pins(api: Api, engine: Engine) -> None:
    keys = engine.save("cleared", 2)
    api.post("/v1/pins", blocks(keys, ttl_s=600), 201)
    other = Digest(sha256(b"another model").digest())
    assert api.post("/v1/clear", {"tenant": "default", "namespace": other.hex()}) == {"blocks": 0}
    assert len(api.get("/v1/pins")["pins"]) == 1
    assert api.post("/v1/clear", {"tenant": "*"})["blocks"] >= 2
    assert api.get("/v1/pins") == {"pins": []}
    assert api.post("/v1/lookup", blocks(keys))["prefix_blocks"] == 0
    assert [tier["blocks"] for tier in api.get("/v1/tiers")["tiers"]] == [0, 0]


def test_a_tenant_that_is_not_there_is_named_with_the_nearest(api: Api) -> None:
    assert "did you mean default?" in api.error("POST", "/v1/clear", {"tenant": "defualt"}, status=404)[1]


# The node --------------------------------------------------------------------------------------------------


def test_the_status_counts_sessions_and_blocks(api: Api, engine: Engine) -> None:
    engine.save("status", 2)
    status = api.get("/v1/status")
    assert status["is_serving"] is True
    assert status["sessions"] == [{"tenant": "default", "role": "operator", "sessions": 1}]
    assert [tier["name"] for tier in status["tiers"]] == ["dram", "disk"]
    assert [store["tenant"] for store in status["stores"]] == ["default", "group:prompts"]
    assert status["stores"][0]["blocks"] >= 2
    assert status["tiers"][0]["bytes_max"] == 8 << 20


def test_a_bypassed_tier_finds_nothing_until_it_is_resumed(api: Api, engine: Engine) -> None:
    keys = engine.save("bypass", 2)
    api.post("/v1/tiers/disk/drain", {})
    answer = api.post("/v1/tiers/disk/bypass", {"on": True})
    assert [tier["is_bypassed"] for tier in answer["tiers"]] == [None, True]
    assert api.post("/v1/lookup", blocks(keys))["blocks"][0]["tiers"] == ["dram"]
    api.post("/v1/tiers/disk/bypass", {"on": False})
    assert api.post("/v1/lookup", blocks(keys))["blocks"][0]["tiers"] == ["dram", "disk"]


def test_dram_can_not_be_bypassed(api: Api) -> None:
    kind, message = api.error("POST", "/v1/tiers/dram/bypass", {"on": True}, status=404)
    assert kind == "not_found"
    assert "disk" in message


def test_a_quota_is_changed_until_the_restart(api: Api) -> None:
    answer = api.call("PUT", "/v1/tenants/default/quota", {"tier": "disk", "bytes_max": 1 << 30})
    assert answer["until"] == "restart"
    (quota,) = [each for each in api.get("/v1/tenants")["tenants"][0]["quotas"] if each["tier"] == "disk"]
    assert quota["bytes_max"] == 1 << 30
    api.call("PUT", "/v1/tenants/default/quota", {"tier": "disk"})
    assert api.get("/v1/tenants")["tenants"][0]["quotas"][1]["bytes_max"] is None


def test_a_quota_that_does_not_fit_is_refused(api: Api) -> None:
    for body in ({"tier": "disk", "bytes_reserved": 1 << 40}, {"tier": "disk", "bytes_reserved": 2, "bytes_max": 1}):
        assert api.error("PUT", "/v1/tenants/default/quota", body, status=422)[0] == "config"


def test_usage_knows_no_saved_seconds_before_an_engine_reports(api: Api, engine: Engine) -> None:
    (mine, _) = api.get("/v1/usage")["tenants"]
    assert mine["compute_seconds_saved"] is None
    engine.save("usage", 2)
    engine.client.report_prefill(NAMESPACE, 1000, 2.0)
    opened = engine.client.open_scope(NAMESPACE).result
    assert opened is not None
    ticket = engine.client.match_and_lease([opened.shelf()], engine.keys("usage", 2))
    assert engine.client.wait(ticket, 30)
    engine.client.release(ticket.result.fetched[0])
    (mine, _) = api.get("/v1/usage")["tenants"]
    assert mine["blocks_served"] >= 2
    assert mine["compute_seconds_saved"] == pytest.approx(2 * LAYOUT.block_tokens * 0.002)
    assert mine["byte_seconds"]["dram"] > 0


def test_a_prompt_published_to_a_share_group_is_read_by_its_readers(api: Api, engine: Engine) -> None:
    engine.save("prompt", 5)
    body = {"tenant": "default", "namespace": NAMESPACE.hex(), "block_tokens": LAYOUT.block_tokens}
    prompt = tokens("prompt", 6)
    answer = api.post("/v1/share-groups/prompts/publish", body | {"tokens": prompt})
    assert answer == {"copied": 5, "present": 0, "missing": 1, "rejected": 0}
    text = " ".join(map(str, prompt))
    answer = api.post("/v1/share-groups/prompts/publish", body | {"tokens": text})
    assert answer == {"copied": 0, "present": 5, "missing": 1, "rejected": 0}
    ticket = engine.client.open_scope(NAMESPACE, group="prompts")
    assert engine.client.wait(ticket, 30)
    assert ticket.result is not None
    keys = chain(ticket.result.root, prompt, LAYOUT.block_tokens)
    leased = engine.client.match_and_lease([ticket.result.shelf()], keys)
    assert engine.client.wait(leased, 30)
    (fetched,) = leased.result.fetched
    assert [int(payload[0]) for payload in fetched.payloads] == [1, 2, 3, 4, 5]
    assert all((payload == payload[0]).all() for payload in fetched.payloads)
    engine.client.release(fetched)


def test_tokens_that_are_none_are_refused_without_repeating_them(api: Api) -> None:
    body = {"tenant": "default", "namespace": NAMESPACE.hex(), "block_tokens": 64, "tokens": "1 2 password"}
    kind, message = api.error("POST", "/v1/share-groups/prompts/publish", body, status=409)
    assert kind == "rejected"
    assert "password" not in message
    assert api.error("POST", "/v1/share-groups/nothing/publish", body, status=404)[0] == "not_found"


# The audit log ---------------------------------------------------------------------------------------------


def test_every_change_is_in_the_audit_log_and_no_look_is(api: Api, reader: Api, engine: Engine) -> None:
    path = api.node.folder / "audit.log"
    keys = engine.save("audit", 2)
    before = len(path.read_text().splitlines())
    api.get("/v1/status")
    api.post("/v1/lookup", blocks(keys))
    api.post("/v1/warm", blocks(keys))
    reader.error("POST", "/v1/warm", blocks(keys), status=403)
    api.error("DELETE", "/v1/pins/none", status=404)
    warm, denied, unpin = (json.loads(line) for line in path.read_text().splitlines()[before:])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (warm["who"], warm["address"], warm["verb"], warm["result"]) == ("node", "127.0.0.1", "warm", "ok")
    assert warm["arguments"]["keys"] == 2
    assert warm["arguments"]["first_key"] == keys[0].hex()[:8]
    assert (denied["who"], denied["result"]) == ("grafana", "denied")
    assert (unpin["verb"], unpin["arguments"], unpin["result"]) == ("unpin", {"id": "none"}, "not_found")


# Coming and going ------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--folder", str(tmp_path), "--dram-bytes-max", "4MiB", "--disk-bytes-max", "0"]
        command = [sys.executable, "-m", "kvtide", "serve", *flags, "--admin-port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=_without_settings())
    assert done.returncode == 2
    assert f"admin.port {port} is in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_url_is_gone_after_the_service_and_the_token_stays(tmp_path: Path) -> None:
    flags = ["--dram-bytes-max", "4MiB", "--disk-bytes-max", "0", "--admin-port", "0"]
    with ServedNode(tmp_path / "node", *flags) as node:
        token = (node.folder / "admin.token").read_text()
        api = Api(node, token.strip())
        with api.http:
            assert api.get("/v1/status")["is_serving"]
        assert node.stop() == 0
        assert not (node.folder / "admin.url").exists()
        node.start()
        assert (node.folder / "admin.token").read_text() == token
        assert node.stop() == 0


def test_the_admin_side_can_be_left_out(tmp_path: Path) -> None:
    flags = ["--dram-bytes-max", "4MiB", "--disk-bytes-max", "0", "--admin-is-on", "false"]
    with ServedNode(tmp_path / "node", *flags) as node:
        assert not (node.folder / "admin.url").exists()
        assert not (node.folder / "admin.token").exists()
        assert node.stop() == 0


def test_an_address_that_others_reach_is_warned_of(tmp_path: Path) -> None:
    flags = ["--dram-bytes-max", "4MiB", "--disk-bytes-max", "0", "--admin-port", "0", "--admin-host", "0.0.0.0"]
    with ServedNode(tmp_path / "node", *flags) as node:
        assert "admin.not_loopback host=0.0.0.0" in node.log.read_text()
        url = (node.folder / "admin.url").read_text().strip()
        assert url.startswith("http://127.0.0.1:")
        with httpx.Client(base_url=url, trust_env=False) as http:
            assert http.get("/health", headers={"Host": "10.1.2.3:9733"}).status_code == 200
            assert http.get("/health", headers={"Host": "evil.example"}).status_code == 421
        assert node.stop() == 0


def _without_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
