# SPDX-License-Identifier: Apache-2.0
"""The one model of all settings. Plain values with defaults; what depends on the machine is None here."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvtide.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
SpillWhen = Literal["publish", "evict", "second_use"]
Role = Literal["engine", "reader", "operator"]


class DramSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The arenas: shared memory that holds the blocks in use. One bound for all of them."""

    bytes_max: int = GIB
    huge_pages: bool = True  # use them where the machine has them


class DiskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A local folder. `bytes_max` bounds everything in it."""

    folder: str
    bytes_max: int = 16 * GIB
    io_threads: int = 4
    spill_when: SpillWhen = "publish"
    spill_queue_bytes_max: int | None = None  # None: a quarter of the arena
    bytes_written_daily_max: int | None = None  # None: no budget; SSDs wear


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long things may take, in seconds, and how much one request may hold."""

    lease_s: float = 30.0  # then a lease or reservation that was not returned is quarantined
    fetch_s: float = 10.0  # then a fetch gives what has arrived
    request_share: float = 0.5  # of the arena, for one request
    pinned_share: float = 0.5  # of the arena, for all pins together
    quarantine_share: float = 0.125  # of the arena, for one holder; beyond it the holder gets nothing new


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The service on its Unix socket."""

    socket: str | None = None  # None: kvtide.sock in `folder`
    socket_mode: int = 0o600  # who may connect at all; who is who is decided after that
    sessions_max: int = 256
    requests_max: int = 64  # of one session, waiting for their answers; more are rejected
    keys_max: int = 16_384  # in one message
    drain_s: float = 30.0  # for spilling what is in DRAM, when the service is asked to end


class AdminClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who may use the admin API: a reader looks, an operator also changes things."""

    name: str
    token_sha256: str
    role: Literal["reader", "operator"] = "operator"


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side: health, metrics, administration."""

    host: str = "127.0.0.1"
    port: int = 9733  # 0: any that is free
    is_on: bool = True
    is_metrics_open: bool | None = None  # to whoever can connect; None: unless there are tenants
    clients: tuple[AdminClientSettings, ...] = ()  # beside the token in `folder`, which always works


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody may take of a medium, and what nobody else can take from him."""

    bytes_reserved: int = 0
    bytes_max: int | None = None  # None: all of it


class ArenaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """An arena of its own, out of dram.bytes_max."""

    bytes_max: int | None = None  # None: an equal share of what the others leave


class ScopeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A customer inside a tenant, with quotas out of the tenant's."""

    dram: QuotaSettings = QuotaSettings()
    disk: QuotaSettings = QuotaSettings()


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may connect as a tenant: a user of this machine, or whoever knows a token."""

    role: Role = "engine"
    uid: int | None = None
    token_sha256: str | None = None


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A trust boundary: own secret, own arena, own blocks."""

    secret_file: str | None = None  # None: made once and kept in `folder`; give nodes that share blocks the same one
    clients: tuple[ClientSettings, ...] = ()
    dram: ArenaSettings = ArenaSettings()
    disk: QuotaSettings = QuotaSettings()
    scopes: dict[str, ScopeSettings] = {}
    reads: tuple[str, ...] = ()  # share groups


class ShareGroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that operators publish and tenants may read, never write."""

    secret_file: str | None = None
    dram: ArenaSettings = ArenaSettings()
    disk: QuotaSettings = QuotaSettings()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. A store needs `dram`, `disk` and `leases`; the node service needs the rest, too."""

    folder: str = "~/.cache/kvtide"  # of the service: blocks, socket, secrets, audit log
    dram: DramSettings = DramSettings()
    disk: DiskSettings | None = None
    leases: LeaseSettings = LeaseSettings()
    node: NodeSettings = NodeSettings()
    admin: AdminSettings = AdminSettings()
    tenants: dict[str, TenantSettings] = {}  # none: one user, one arena, and whoever has his user id
    share_groups: dict[str, ShareGroupSettings] = {}

    def check(self) -> None:
        """Raise ConfigError for values that no machine could make work."""
        if self.disk is not None:
            if self.disk.io_threads < 1:
                raise ConfigError(f"disk.io_threads is {self.disk.io_threads}: give it 1 or more")
            queue = self.disk.spill_queue_bytes_max
            if queue is not None and not 0 < queue <= self.dram.bytes_max // 2:
                raise ConfigError(
                    f"disk.spill_queue_bytes_max is {queue}: what waits to be written stays in DRAM, "
                    f"so give it at most half of dram.bytes_max ({self.dram.bytes_max // 2})"
                )
        for name in ("lease_s", "fetch_s"):
            if getattr(self.leases, name) <= 0:
                raise ConfigError(f"leases.{name} is {getattr(self.leases, name)}: give it more than 0 seconds")
        for name in ("request_share", "pinned_share", "quarantine_share"):
            if not 0 < getattr(self.leases, name) <= 1:
                raise ConfigError(f"leases.{name} is {getattr(self.leases, name)}: give it a share between 0 and 1")
