# SPDX-License-Identifier: Apache-2.0
"""The admin side with tenants: each sees its own and nothing else, and nothing that is secret is ever shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256

import pytest

from kvtide.keys import Key
from kvtide.testing.node import ServedNode
from test_admin import LAYOUT, NAMESPACE, Api, Engine, blocks, tokens

ADA, BOB, BOBS_ENGINE, READER = (
    f"{name}-{sha256(name.encode()).hexdigest()[:24]}" for name in ("ada", "bob", "e", "r")
)
CONFIG = f"""
dram: {{bytes_max: 24MiB}}
disk: {{bytes_max: 128MiB}}
admin:
  port: 0
  clients: [{{name: grafana, role: reader, token_sha256: {sha256(READER.encode()).hexdigest()}}}]
tenants:
  ada:
    clients: [{{role: operator, token_sha256: {sha256(ADA.encode()).hexdigest()}}}]
    dram: {{bytes_max: 8MiB}}
    disk: {{bytes_reserved: 16MiB, bytes_max: 64MiB}}
    scopes: {{customer: {{disk: {{bytes_max: 16MiB}}}}}}
    reads: [prompts]
  bob:
    clients:
      - {{role: operator, token_sha256: {sha256(BOB.encode()).hexdigest()}}}
      - {{role: engine, token_sha256: {sha256(BOBS_ENGINE.encode()).hexdigest()}}}
share_groups:
  prompts: {{dram: {{bytes_max: 4MiB}}}}
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with ServedNode(tmp_path_factory.mktemp("tenants"), "--log-level", "debug", config=CONFIG) as node:
        yield node
        assert node.stop() == 0


@pytest.fixture(scope="module")
def apis(node: ServedNode) -> Iterator[dict[str, Api]]:
    local = (node.folder / "admin.token").read_text().strip()
    with ExitStack() as stack:
        apis = {
            name: Api(node, token)
            for name, token in (("node", local), ("ada", ADA), ("bob", BOB), ("reader", READER), ("nobody", None))
        }
        for api in apis.values():
            stack.enter_context(api.http)
        yield apis


@pytest.fixture(scope="module")
def ada(node: ServedNode) -> Iterator[Engine]:
    with node.connect(token=ADA) as client:
        yield Engine(client)


def test_tenants_are_listed_with_their_shares_and_sessions(apis: dict[str, Api], ada: Engine) -> None:
    listed = {tenant["name"]: tenant for tenant in apis["reader"].get("/v1/tenants")["tenants"]}
    assert list(listed) == ["ada", "bob", "group:prompts"]
    assert listed["ada"]["arena_bytes"] == 8 << 20
    assert listed["ada"]["scopes"] == ["customer"]
    assert (listed["ada"]["reads"], listed["bob"]["reads"]) == (["prompts"], [])
    assert listed["ada"]["sessions"] == {"operator": 1}
    quotas = {(each["tier"], each["scope"]): each for each in listed["ada"]["quotas"]}
    assert quotas["disk", None]["bytes_reserved"] == 16 << 20
    assert quotas["disk", "customer"]["bytes_max"] == 16 << 20


def test_an_operator_of_a_tenant_works_on_his_own(apis: dict[str, Api], ada: Engine) -> None:
    keys, mine = ada.save("own", 3), apis["ada"]
    assert mine.post("/v1/lookup", blocks(keys, tenant="ada"))["prefix_blocks"] == 3
    assert mine.post("/v1/warm", blocks(keys, tenant="ada")) == {"blocks": 3}
    pin = mine.post("/v1/pins", blocks(keys, tenant="ada", ttl_s=60), 201)
    assert [each["id"] for each in mine.get("/v1/pins")["pins"]] == [pin["id"]]
    assert [each["tenant"] for each in mine.get("/v1/usage")["tenants"]] == ["ada"]
    assert mine.call("DELETE", f"/v1/pins/{pin['id']}") == {"blocks": 3}
    assert mine.post("/v1/clear", {"tenant": "ada", "prefix": keys[1].hex()})["blocks"] >= 2


def test_another_tenant_and_one_that_is_not_there_get_the_same_words(apis: dict[str, Api], ada: Engine) -> None:
    keys = ada.save("hidden", 2)
    for path, body in (
        ("/v1/lookup", blocks(keys)),
        ("/v1/warm", blocks(keys)),
        ("/v1/pins", blocks(keys, ttl_s=60)),
        ("/v1/clear", {}),
    ):
        answers = {
            apis["bob"].error("POST", path, body | {"tenant": name}, status=403)
            for name in ("ada", "nobody", "group:prompts", "group:nothing", "*", "default")
        }
        assert len(answers) == 1, path
        assert "ada" not in str(answers)
    assert apis["node"].post("/v1/lookup", blocks(keys, tenant="ada"))["prefix_blocks"] == 2


def test_pins_of_others_are_not_there(apis: dict[str, Api], ada: Engine) -> None:
    pin = apis["ada"].post("/v1/pins", blocks(ada.save("my pin", 1), tenant="ada", ttl_s=60), 201)
    assert apis["bob"].get("/v1/pins") == {"pins": []}
    of_another = apis["bob"].error("DELETE", f"/v1/pins/{pin['id']}", status=404)
    assert of_another == apis["bob"].error("DELETE", "/v1/pins/0123456789abcdef", status=404)
    assert len(apis["reader"].get("/v1/pins")["pins"]) == 1
    apis["ada"].call("DELETE", f"/v1/pins/{pin['id']}")


def test_calls_about_the_node_are_not_for_tenants(apis: dict[str, Api]) -> None:
    calls = [
        ("GET", "/v1/status", None),
        ("GET", "/v1/tiers", None),
        ("GET", "/v1/tenants", None),
        ("GET", "/metrics", None),
        ("POST", "/v1/tiers/disk/bypass", {"on": True}),
        ("POST", "/v1/tiers/disk/drain", {}),
        ("PUT", "/v1/tenants/ada/quota", {"tier": "disk"}),
        ("PUT", "/v1/tenants/nobody/quota", {"tier": "disk"}),
        ("POST", "/v1/share-groups/prompts/publish", {}),
    ]
    answers = {apis["ada"].error(method, path, body, status=403) for method, path, body in calls}
    assert len(answers) == 1


def test_the_token_of_an_engine_is_none_here(node: ServedNode) -> None:
    api = Api(node, BOBS_ENGINE)
    with api.http:
        assert api.error("GET", "/v1/usage", status=401)[0] == "bad_token"


def test_metrics_take_a_token_where_there_are_tenants(apis: dict[str, Api]) -> None:
    assert apis["nobody"].error("GET", "/metrics", status=401)[0] == "no_token"
    assert 'tenant="ada"' in apis["reader"].http.get("/metrics").text


def test_a_scopes_quota_is_changed_by_its_name(apis: dict[str, Api]) -> None:
    body = {"tier": "disk", "scope": "customer", "bytes_max": 8 << 20}
    assert apis["node"].call("PUT", "/v1/tenants/ada/quota", body)["scope"] == "customer"
    body["scope"] = "stranger"
    assert "no share of its own" in apis["node"].error("PUT", "/v1/tenants/ada/quota", body, status=422)[1]


def test_no_secret_token_or_whole_key_is_shown_anywhere(node: ServedNode, apis: dict[str, Api], ada: Engine) -> None:
    """A bit of everything, right and wrong; then all that was written down or answered is searched."""
    answers: list[str] = []
    for api in apis.values():
        api.http.event_hooks["response"] = [lambda response: answers.append(response.read().decode())]
    keys = ada.save("searched", 4)
    prompt = [3987654321, *tokens("searched", 4)[1:]]
    root = ada.client.open_scope(NAMESPACE).result
    assert root is not None
    everything = [
        ("GET", "/v1/status", None),
        ("GET", "/v1/tiers", None),
        ("GET", "/v1/tenants", None),
        ("GET", "/v1/usage", None),
        ("POST", "/v1/lookup", blocks(keys, tenant="ada")),
        ("POST", "/v1/warm", blocks(keys, tenant="ada")),
        ("POST", "/v1/pins", blocks(keys, tenant="ada", ttl_s=60)),
        ("POST", "/v1/pins", blocks([Key(bytes(31) + b"\1")], tenant="ada", ttl_s=60)),
        ("POST", "/v1/lookup", blocks(keys, tenant="ada") | {"keyss": [keys[0].hex()]}),
        ("POST", "/v1/lookup", blocks(keys, tenant="ada") | {"keys": [keys[0].hex() + "z"]}),
        ("GET", "/v1/pins", None),
        ("POST", "/v1/tiers/disk/drain", {}),
        ("PUT", "/v1/tenants/ada/quota", {"tier": "disk", "bytes_max": 64 << 20}),
        (
            "POST",
            "/v1/share-groups/prompts/publish",
            {"tenant": "ada", "namespace": NAMESPACE.hex(), "tokens": prompt, "block_tokens": LAYOUT.block_tokens},
        ),
        ("POST", "/v1/clear", {"tenant": "ada", "prefix": keys[1].hex()}),
        ("POST", f"/v1/tiers/{keys[0].hex()[:12]}/bypass", {"on": True}),
        ("GET", "/metrics", None),
        ("GET", "/openapi.json", None),
        ("GET", f"/v1/{ADA}", None),
    ]
    for api in apis.values():
        for method, path, body in everything:
            api.http.request(method, path, json=body)
    wrong = Api(node, "wrong-" + ADA)
    with wrong.http:
        answers.append(wrong.http.get("/v1/status").text)
    texts = {
        "log": node.log.read_text(),
        "audit": (node.folder / "audit.log").read_text(),
        "answers": "\n".join(answers),
    }
    assert len(answers) > 80
    secrets = [path.read_text().strip() for path in (node.folder / "secrets").rglob("*") if path.is_file()]
    secrets += [(node.folder / "admin.token").read_text().strip(), root.root.hex(), ADA, BOB, BOBS_ENGINE, READER]
    secrets += [sha256(token.encode()).hexdigest() for token in (ADA, BOB, BOBS_ENGINE, READER)]
    secrets += [key.hex() for key in keys] + ["3987654321"]
    assert len(secrets) >= 3 + 1 + 1 + 4 + 4 + 4 + 1
    for where, text in texts.items():
        for number, secret in enumerate(secrets):
            assert secret not in text, f"secret {number} in the {where}"
    assert keys[0].hex()[:8] in texts["audit"]
    assert "Traceback" not in texts["log"]


def test_the_audit_log_names_the_tenants_operator(node: ServedNode, apis: dict[str, Api]) -> None:
    apis["ada"].post("/v1/clear", {"tenant": "ada"})
    last = (node.folder / "audit.log").read_text().splitlines()[-1]
    assert '"who":"tenant:ada"' in last
