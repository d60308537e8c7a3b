# SPDX-License-Identifier: Apache-2.0
"""The one table of all calls: server, OpenAPI document and tests are made from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from kvtide.node.admin import bodies
from kvtide.node.admin.desk import Desk
from kvtide.node.admin.gate import Role
from kvtide.node.status import Status

Method = Literal["GET", "POST", "PUT", "DELETE"]


@dataclass(frozen=True, slots=True)
class Call:
    """`handle` gets the caller, the body where there is one, and what stands in the path. `role` None: no token."""

    method: Method
    path: str
    summary: str
    handle: Callable[..., Struct]
    answer: type[Struct]
    request: type[Struct] | None = None
    role: Role | None = "operator"
    is_for_tenants: bool = False  # for their own, operators of a tenant may call it, too
    is_change: bool = False  # goes into the audit log
    is_slow: bool = False  # may wait for a medium
    success: int = 200

    @property
    def verb(self) -> str:
        """Its name in logs."""
        return self.handle.__name__


CALLS: tuple[Call, ...] = (
    Call("GET", "/health", "Whether the process lives", Desk.health, bodies.Health, role=None),
    Call("GET", "/ready", "Whether clients are served now", Desk.ready, bodies.Health, role=None),
    Call("GET", "/v1/status", "Sessions, tiers, queues and leases at this moment", Desk.status, Status, role="reader"),
    Call("GET", "/v1/tiers", "What is on each tier", Desk.tiers, bodies.TiersAnswer, role="reader"),
    Call(
        "POST",
        "/v1/tiers/{name}/bypass",
        "Take a tier out of use, or back into use",
        Desk.bypass,
        bodies.TiersAnswer,
        bodies.BypassRequest,
        is_change=True,
    ),
    Call(
        "POST",
        "/v1/tiers/{name}/drain",
        "Wait until what is queued for a tier is written",
        Desk.drain,
        bodies.DrainAnswer,
        bodies.DrainRequest,
        is_change=True,
        is_slow=True,
    ),
    Call(
        "POST",
        "/v1/lookup",
        "On which tiers blocks are",
        Desk.lookup,
        bodies.LookupAnswer,
        bodies.BlocksRequest,
        role="reader",
        is_for_tenants=True,
    ),
    Call(
        "POST",
        "/v1/pins",
        "Keep blocks in DRAM for a time",
        Desk.pin,
        bodies.PinAnswer,
        bodies.PinRequest,
        is_for_tenants=True,
        is_change=True,
        is_slow=True,
        success=201,
    ),
    Call("GET", "/v1/pins", "The pins that are set", Desk.pins, bodies.PinsAnswer, role="reader", is_for_tenants=True),
    Call(
        "DELETE",
        "/v1/pins/{id}",
        "End a pin before its time",
        Desk.unpin,
        bodies.BlocksAnswer,
        is_for_tenants=True,
        is_change=True,
    ),
    Call(
        "POST",
        "/v1/warm",
        "Bring blocks up into DRAM; answers when that has begun",
        Desk.warm,
        bodies.BlocksAnswer,
        bodies.BlocksRequest,
        is_for_tenants=True,
        is_change=True,
    ),
    Call(
        "POST",
        "/v1/clear",
        "Forget blocks on every tier",
        Desk.clear,
        bodies.BlocksAnswer,
        bodies.ClearRequest,
        is_for_tenants=True,
        is_change=True,
        is_slow=True,
    ),
    Call(
        "GET",
        "/v1/tenants",
        "Tenants and share groups, with their shares",
        Desk.tenants,
        bodies.TenantsAnswer,
        role="reader",
    ),
    Call(
        "PUT",
        "/v1/tenants/{name}/quota",
        "Change a share of a tier until the next restart",
        Desk.set_quota,
        bodies.QuotaAnswer,
        bodies.QuotaRequest,
        is_change=True,
    ),
    Call(
        "GET",
        "/v1/usage",
        "What tenants took of the tiers, and what it saved them",
        Desk.usage,
        bodies.UsageAnswer,
        role="reader",
        is_for_tenants=True,
    ),
    Call(
        "POST",
        "/v1/share-groups/{group}/publish",
        "Copy a tenant's blocks into a share group",
        Desk.publish,
        bodies.PublishAnswer,
        bodies.PublishRequest,
        is_change=True,
        is_slow=True,
    ),
)
