# SPDX-License-Identifier: Apache-2.0
"""Who calls, and what he may do: a token in each request, and a Host that a browser cannot be tricked into.

The token in `folder` is the node's operator. Others come from the settings: clients of the admin side, for the whole
node; operators of tenants, for their own tenant and in words that tell nothing about anybody else's.
"""

from __future__ import annotations

import hmac
import socket
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address
from typing import Literal

from kvtide.config import Settings
from kvtide.node.admin.refusal import Refusal

Role = Literal["reader", "operator"]
LOCAL_NAME = "node"  # of whoever has the token in the folder
_TOKEN_CHARS_MAX = 512


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenants`: whose blocks this is about, and no others; None: the whole node."""

    name: str
    role: Role
    tenants: frozenset[str] | None = None

    def sees(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants


class Gate:
    """Knows all tokens by their hash. Made once, from the settings and the folder's token."""

    def __init__(self, settings: Settings, local_token: bytes) -> None:
        self._callers: list[tuple[bytes, Caller]] = [
            (sha256(local_token).hexdigest().encode(), Caller(LOCAL_NAME, "operator"))
        ]
        for client in settings.admin.clients:
            self._callers.append((client.token_sha256.lower().encode(), Caller(client.name, client.role)))
        tenants: dict[bytes, set[str]] = {}
        for name, tenant in settings.tenants.items():
            for each in tenant.clients:
                if each.token_sha256 is not None and each.role == "operator":
                    tenants.setdefault(each.token_sha256.lower().encode(), set()).add(name)
        for hashed, names in tenants.items():
            self._callers.append((hashed, Caller(f"tenant:{','.join(sorted(names))}", "operator", frozenset(names))))
        self._hosts = _hosts(settings.admin.host)
        self._is_any_address = _is_wildcard(settings.admin.host)

    def admit(self, authorization: str | None) -> Caller:
        """Who sends this header. Raises Refusal (401) with what to send instead."""
        if authorization is None:
            raise Refusal(
                401,
                "no_token",
                "this call needs a token: send `Authorization: Bearer TOKEN`, with the token in the file admin.token "
                "of the service's folder or one from admin.clients",
            )
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not 0 < len(token) <= _TOKEN_CHARS_MAX:
            raise Refusal(401, "no_token", "send the token as `Authorization: Bearer TOKEN`")
        hashed = sha256(token.encode()).hexdigest().encode()
        # All of them are compared in full, so the time tells nothing about a token.
        found = [caller for known, caller in self._callers if hmac.compare_digest(known, hashed)]
        if not found:
            raise Refusal(
                401,
                "bad_token",
                "nobody who may come in has this token: use that in admin.token of the service's folder, or have an "
                "operator add its SHA-256 to admin.clients (`kvtide token` makes one)",
            )
        return found[0]  # those of the node stand first

    def check_role(self, caller: Caller, role: Role, *, is_for_tenants: bool) -> None:
        """Raise Refusal (403) where this caller may not make such a call at all."""
        if caller.tenants is not None and not is_for_tenants:
            raise Refusal(403, "denied", "this call is for operators of the node: a tenant's token does not do")
        if role == "operator" and caller.role != "operator":
            raise Refusal(403, "denied", f"{caller.name} may look, not change: this call takes the role operator")

    def check_host(self, host: str | None) -> None:
        """A web page of a stranger can have its own name point to this machine; then that name is in Host."""
        name = _without_port(host or "")
        if name in self._hosts or (self._is_any_address and _is_address(name)):
            return
        raise Refusal(
            421,
            "wrong_host",
            "the Host of this call is not this service: call it by its address, as in admin.url of its folder",
        )


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _hosts(host: str) -> frozenset[str]:
    names = {"localhost", "127.0.0.1", "::1", host.lower()}
    if _is_wildcard(host):
        names.add(socket.gethostname().lower())
    return frozenset(names)


def _is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):  # IPv6
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
