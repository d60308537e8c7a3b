# SPDX-License-Identifier: Apache-2.0
"""Who may come in, and as whom: by the user id of the process, or by a token.

Without tenants in the configuration there is one tenant, and whoever has the service's own user id is its
operator. With tenants, a client is whoever an entry of the configuration says he is, and nobody else comes in.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from kvtide.config import Role, TenantSettings
from kvtide.errors import Denied
from kvtide.tenant import DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class Principal:
    """As whom a client came in."""

    tenant: str
    role: Role


class Doorkeeper:
    """Decides once, at login."""

    def __init__(self, tenants: Mapping[str, TenantSettings], own_uid: int) -> None:
        self._tenants = tenants
        self._own_uid = own_uid

    def admit(self, uid: int, token: str, tenant: str) -> Principal:
        """Who this is. Raises Denied, in words that do not tell which tenants there are."""
        if not self._tenants:
            return self._admit_user(uid, tenant)
        hashed = sha256(token.encode()).hexdigest() if token else ""
        found = [
            Principal(name, client.role)
            for name, settings in self._tenants.items()
            for client in settings.clients
            if (client.uid is not None and client.uid == uid)
            # All entries are compared in full, so the time tells nothing about a token.
            or (client.token_sha256 is not None and hmac.compare_digest(client.token_sha256.lower(), hashed))
        ]
        if tenant:
            found = [principal for principal in found if principal.tenant == tenant]
        names = {principal.tenant for principal in found}
        if not names:
            raise Denied(
                "no tenant lets this client in: give the token of the right one (KVTIDE_TOKEN), or have its operator "
                f"add user id {uid} or a token to tenants.*.clients",
            )
        if len(names) > 1:
            raise Denied("this client may come in for several tenants: say for which one (KVTIDE_TENANT)")
        return max(found, key=lambda principal: _RANK[principal.role])

    def _admit_user(self, uid: int, tenant: str) -> Principal:
        if uid not in (self._own_uid, 0):
            raise Denied(
                f"this service is for user id {self._own_uid} alone, not for {uid}: "
                "run a service of your own, or have its operator configure tenants"
            )
        if tenant not in ("", DEFAULT_TENANT):
            raise Denied("this service has no tenants: leave KVTIDE_TENANT empty, or configure tenants")
        return Principal(DEFAULT_TENANT, "operator")


_RANK: dict[Role, int] = {"reader": 0, "engine": 1, "operator": 2}
