# SPDX-License-Identifier: Apache-2.0
"""Who comes in, and as whom: only whoever the configuration names, and a refusal tells nothing about the others."""

from __future__ import annotations

from hashlib import sha256

import pytest

from kvtide.config import ClientSettings, Role, TenantSettings
from kvtide.errors import Denied
from kvtide.node.doorkeeper import Doorkeeper, Principal

OWN, OTHER = 1000, 2000


def by_token(token: str, role: Role = "engine") -> ClientSettings:
    return ClientSettings(role=role, token_sha256=sha256(token.encode()).hexdigest())


def by_uid(uid: int, role: Role = "engine") -> ClientSettings:
    return ClientSettings(role=role, uid=uid)


def keeper(**tenants: tuple[ClientSettings, ...]) -> Doorkeeper:
    return Doorkeeper({name: TenantSettings(clients=clients) for name, clients in tenants.items()}, OWN)


def refusal(doorkeeper: Doorkeeper, uid: int = OTHER, token: str = "", tenant: str = "") -> str:
    with pytest.raises(Denied) as caught:
        doorkeeper.admit(uid, token, tenant)
    return str(caught.value)


def test_without_tenants_the_own_user_and_root_are_operators() -> None:
    doorkeeper = keeper()
    for uid in (OWN, 0):
        assert doorkeeper.admit(uid, "", "") == Principal("default", "operator")
        assert doorkeeper.admit(uid, "", "default") == Principal("default", "operator")


def test_without_tenants_nobody_else_comes_in() -> None:
    assert "user id" in refusal(keeper(), OTHER)
    refusal(keeper(), OTHER, "any token", "default")


def test_without_tenants_the_name_of_one_is_refused() -> None:
    refusal(keeper(), OWN, tenant="search")


def test_a_token_lets_in_as_its_tenant() -> None:
    doorkeeper = keeper(search=(by_token("a"),), chat=(by_token("b", "reader"),))
    assert doorkeeper.admit(OTHER, "a", "") == Principal("search", "engine")
    assert doorkeeper.admit(OTHER, "b", "") == Principal("chat", "reader")
    assert doorkeeper.admit(OTHER, "b", "chat") == Principal("chat", "reader")


def test_a_user_id_lets_in_as_its_tenant() -> None:
    doorkeeper = keeper(search=(by_uid(OTHER),), chat=(by_uid(OWN, "operator"),))
    assert doorkeeper.admit(OTHER, "", "") == Principal("search", "engine")
    assert doorkeeper.admit(OWN, "", "") == Principal("chat", "operator")


def test_with_tenants_neither_the_own_user_nor_root_comes_in_without_an_entry() -> None:
    doorkeeper = keeper(search=(by_token("a"),))
    for uid in (OWN, 0):
        refusal(doorkeeper, uid)


def test_a_hash_in_capital_letters_is_the_same_hash() -> None:
    hashed = sha256(b"a").hexdigest().upper()
    doorkeeper = keeper(search=(ClientSettings(token_sha256=hashed),))
    assert doorkeeper.admit(OTHER, "a", "").tenant == "search"


def test_the_hash_of_a_token_is_no_token() -> None:
    refusal(keeper(search=(by_token("a"),)), token=sha256(b"a").hexdigest())


def test_no_token_is_not_the_token_without_letters() -> None:
    refusal(keeper(search=(by_token(""),)), token="")


@pytest.mark.parametrize("token", ["A", "a ", " a", "a\0", "ä", "\U0001f600", "a" * 256])
def test_a_token_that_is_nearly_right_is_wrong(token: str) -> None:
    refusal(keeper(search=(by_token("a"),)), token=token)


def test_an_entry_without_user_and_token_lets_nobody_in() -> None:
    doorkeeper = keeper(search=(ClientSettings(),))
    refusal(doorkeeper)
    refusal(doorkeeper, OWN, "None")


def test_a_tenant_without_clients_lets_nobody_in() -> None:
    refusal(keeper(search=()), OWN, tenant="search")


def test_the_highest_of_several_roles_counts() -> None:
    doorkeeper = keeper(search=(by_uid(OTHER, "reader"), by_token("a", "operator"), by_token("b", "engine")))
    assert doorkeeper.admit(OTHER, "", "").role == "reader"
    assert doorkeeper.admit(OTHER, "b", "").role == "engine"
    assert doorkeeper.admit(OTHER, "a", "").role == "operator"


def test_who_may_come_in_for_several_tenants_says_for_which() -> None:
    doorkeeper = keeper(search=(by_uid(OTHER),), chat=(by_token("a", "operator"),))
    assert "several" in refusal(doorkeeper, token="a")
    assert doorkeeper.admit(OTHER, "a", "search") == Principal("search", "engine")
    assert doorkeeper.admit(OTHER, "a", "chat") == Principal("chat", "operator")


def test_a_right_token_does_not_open_another_tenant() -> None:
    doorkeeper = keeper(search=(by_token("a"),), chat=(by_token("b"),))
    refusal(doorkeeper, token="a", tenant="chat")


def test_a_refusal_says_the_same_whether_there_is_such_a_tenant_or_not() -> None:
    doorkeeper = keeper(search=(by_token("a"),), chat=(by_token("b"),))
    asked = [("", ""), ("wrong", ""), ("wrong", "search"), ("wrong", "nobody"), ("a", "chat"), ("a", "nobody")]
    refusals = {refusal(doorkeeper, token=token, tenant=tenant) for token, tenant in asked}
    assert len(refusals) == 1
    (text,) = refusals
    assert not any(name in text for name in ("search", "chat"))


def test_who_may_come_in_for_several_is_not_told_their_names() -> None:
    doorkeeper = keeper(search=(by_uid(OTHER),), chat=(by_uid(OTHER),))
    text = refusal(doorkeeper)
    assert "search" not in text
    assert "chat" not in text
    assert refusal(doorkeeper, tenant="nobody") == refusal(keeper(search=(by_uid(OWN),)), tenant="search")


def test_a_refusal_does_not_repeat_the_token() -> None:
    assert "open-sesame" not in refusal(keeper(search=(by_token("a"),)), token="open-sesame")
