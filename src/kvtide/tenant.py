# SPDX-License-Identifier: Apache-2.0
"""Whose blocks these are: a tenant holds the secret, a scope is what an engine gets to see of it.

An engine asks for a scope once for each namespace and customer, and derives all keys and shelves from it.
It never sees the secret: whoever holds a root can make keys of that scope and of no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtide.keys import PUBLIC_SECRET, Digest, Key, Part, Shelf, derive_root, scope_digest, tenant_digest

SCOPE_NAME_CHARS_MAX = 256  # a customer's id or a salt; bounded because it comes from requests
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

    def scope(self, namespace: Digest, name: str = "") -> Scope:
        digest = scope_digest(name)
        return Scope(namespace, self.digest, digest, derive_root(self.secret, namespace, digest))
