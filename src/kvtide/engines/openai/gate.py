# SPDX-License-Identifier: Apache-2.0
"""Who may call: whoever has the key, or, without one, whoever reaches the address and means it.

A web page of a stranger can make a browser call a server on the same machine. It can neither read the answer (there
is no CORS) nor send JSON; a name of its own that points here would be in Host.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from ipaddress import ip_address

from kvtide.engines.openai.refusal import Refusal

OPEN_PATHS = frozenset({"/health", "/metrics"})


class Gate:
    """`key` None: none is needed."""

    def __init__(self, host: str, key: str | None) -> None:
        self._digest = None if key is None else sha256(key.encode()).digest()
        self._hosts: frozenset[str] | None = None
        if key is None and is_loopback(host):
            self._hosts = frozenset({"localhost", "127.0.0.1", "::1", host.lower()})

    def check(self, path: str, host: str, authorization: str) -> None:
        """Raise Refusal for a call that may not come in."""
        if self._hosts is not None and _without_port(host) not in self._hosts:
            raise Refusal(421, "wrong_host", "the Host of this call is not this server: call it by its address")
        if self._digest is None or path in OPEN_PATHS:
            return
        scheme, _, key = authorization.partition(" ")
        given = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._digest):
            raise Refusal(401, "invalid_api_key", "send the API key of this server as `Authorization: Bearer KEY`")


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):  # IPv6
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
