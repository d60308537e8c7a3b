# SPDX-License-Identifier: Apache-2.0
"""What calls bring and what they get back, beside the values of `kvtide.node.status`. Every length has a bound."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvtide.node.status import TenantStatus, TierStatus, UsageStatus
from kvtide.wire import KEYS_MAX, SHELVES_MAX

PIN_S_MAX = 30 * 86_400
DRAIN_S_MAX = 600

Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", description="32 bytes in hex")]
Keys = Annotated[list[Hex], Meta(min_length=1, max_length=KEYS_MAX, description="of blocks that follow each other")]
TenantName = Annotated[
    str, Meta(min_length=1, max_length=80, description="of a tenant, or `group:NAME`; `default` where there are none")
]
ScopeName = Annotated[str, Meta(max_length=256, description="of a customer inside the tenant")]
Number = Annotated[int, Meta(ge=0, lt=1 << 16)]
Size = Annotated[int, Meta(ge=0, lt=1 << 62)]


class PartBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which piece of the blocks: of a group, a rank, a range of layers. By default the whole."""

    group: Number = 0
    rank: Number = 0
    ranks: Number = 1
    layer_first: Number = 0
    layer_count: Number = 0


# Asked for ------------------------------------------------------------------------------------------------


class BypassRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`on`: take the tier out of use, or (false) back into use."""

    on: bool


class DrainRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    timeout_s: Annotated[float, Meta(gt=0, le=DRAIN_S_MAX)] = 30.0


class BlocksRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Blocks of one chain, by their keys."""

    tenant: TenantName
    namespace: Hex
    keys: Keys
    scope: ScopeName = ""
    part: PartBody = PartBody()


class PinRequest(BlocksRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttl_s: Annotated[float, Meta(gt=0, le=PIN_S_MAX)]


class ClearRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tenant` may be `*`: all of them. `prefix`: that block, and all that follow it in their chains."""

    tenant: TenantName
    namespace: Hex | None = None
    prefix: Hex | None = None


class QuotaRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tier: Literal["disk", "dram"]
    scope: ScopeName | None = None
    bytes_reserved: Size = 0
    bytes_max: Size | None = None


class PublishRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tokens`: ids, or the text of a file with ids."""

    tenant: TenantName
    namespace: Hex
    tokens: list[Annotated[int, Meta(ge=0, lt=1 << 32)]] | str
    block_tokens: Annotated[int, Meta(ge=1, lt=1 << 32)]
    scope: ScopeName = ""
    parts: Annotated[list[PartBody], Meta(min_length=1, max_length=SHELVES_MAX)] | None = None


# Answered -------------------------------------------------------------------------------------------------


class Health(Struct, frozen=True, kw_only=True):
    status: Literal["ok", "not_ready"]


class TiersAnswer(Struct, frozen=True, kw_only=True):
    tiers: list[TierStatus]


class DrainAnswer(Struct, frozen=True, kw_only=True):
    """`is_drained` false: the time was too short."""

    is_drained: bool
    queued_bytes: int


class Found(Struct, frozen=True, kw_only=True):
    """A block: on which tiers it is, and the bytes of its frame (0: nowhere)."""

    tiers: list[str]
    frame_bytes: int


class LookupAnswer(Struct, frozen=True, kw_only=True):
    """One entry for each key, in their order. `prefix_blocks`: how many from the first on are there."""

    blocks: list[Found]
    prefix_blocks: int


class PinAnswer(Struct, frozen=True, kw_only=True):
    id: str
    blocks: int
    bytes: int
    expires_s: float


class Pin(PinAnswer, frozen=True, kw_only=True):
    tenant: str
    namespace: str
    scope: str


class PinsAnswer(Struct, frozen=True, kw_only=True):
    pins: list[Pin]


class BlocksAnswer(Struct, frozen=True, kw_only=True):
    blocks: int


class TenantsAnswer(Struct, frozen=True, kw_only=True):
    tenants: list[TenantStatus]


class QuotaAnswer(Struct, frozen=True, kw_only=True):
    """It holds until the service restarts: what shall stay stands in kvtide.yaml."""

    tenant: str
    scope: str | None
    tier: str
    bytes_reserved: int
    bytes_max: int | None
    until: Literal["restart"] = "restart"


class UsageAnswer(Struct, frozen=True, kw_only=True):
    tenants: list[UsageStatus]


class PublishAnswer(Struct, frozen=True, kw_only=True):
    """Blocks, each part counted: copied now, in the group before, not there to copy, and for which there is no room."""

    copied: int
    present: int
    missing: int
    rejected: int
