# SPDX-License-Identifier: Apache-2.0
"""Whose blocks these are: a tenant holds the secret, a scope is what an engine gets to see of it.

An engine asks for a scope once for each namespace and customer, and derives all keys and shelves from it.
It never sees the secret: whoever holds a root can make keys of that scope and of no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtide.keys import PUBLIC_SECRET, Digest, Key, Part, Shelf, derive_root, tenant_digest

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Scope:
    """Where the blocks of one customer, tenant and namespace stand, and what their key chains start from."""

    namespace: Digest
    tenant: Digest
    digest: Digest
    root: Key = field(repr=False)

    def shelf(self, part: Part | None = None) -> Shelf:
        return Shelf(self.namespace, self.tenant, self.digest, part or Part())


@dataclass(frozen=True, slots=True)
class Tenant:
    """A trust boundary."""

    name: str = DEFAULT_TENANT
    secret: bytes = field(default=PUBLIC_SECRET, repr=False)

    @property
    def digest(self) -> Digest:
        return tenant_digest(self.name)

    def scope(self, namespace: Digest, scope: Digest) -> Scope:
        """The scope of this digest: a service needs no customer's name."""
        return Scope(namespace, self.digest, scope, derive_root(self.secret, namespace, scope))
