# SPDX-License-Identifier: Apache-2.0
"""The one model of all settings: plain values with defaults, each with the line that documents it.

What depends on the machine is None here; `kvtide.config.defaults` fills it in. Flags, environment names and the
reference are made from these classes, so a setting is added here and nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MIB, GIB = 1 << 20, 1 << 30
SpillWhen = Literal["publish", "evict", "second_use"]
Role = Literal["engine", "reader", "operator"]


def _says(meaning: str, *, none: str = "") -> msgspec.Meta:
    """What a setting means, and what it is when it is None."""
    return msgspec.Meta(description=meaning, extra={"none": none})


class DramSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The arenas: shared memory that holds the blocks in use."""

    bytes_max: Annotated[
        int | None, _says("size of all arenas together", none="a quarter of the available memory, 64MiB to 64GiB")
    ] = None
    huge_pages: Annotated[bool, _says("use huge pages where the machine has them")] = True


class DiskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The disk tier: a local folder with one owner."""

    folder: Annotated[str | None, _says("where blocks are kept", none="`blocks` in `folder`")] = None
    bytes_max: Annotated[
        int | None,
        _says(
            "bound of everything in the folder; 0: no disk tier",
            none="a quarter of what is free there or already kvtide's, at most 256GiB",
        ),
    ] = None
    io_threads: Annotated[int, _says("threads that read and write")] = 4
    spill_when: Annotated[SpillWhen, _says("when a block is copied from DRAM to disk")] = "publish"
    spill_queue_bytes_max: Annotated[
        int | None, _says("what may wait in DRAM to be written", none="a quarter of the arena")
    ] = None
    bytes_written_daily_max: Annotated[
        int | None, _says("budget of bytes written in a day (UTC): SSDs wear", none="no budget")
    ] = None


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long things may take, and how much one request may hold."""

    lease_s: Annotated[float, _says("time after which a lease or reservation that was not returned is quarantined")] = (
        30.0
    )
    fetch_s: Annotated[float, _says("time after which a fetch gives what has arrived")] = 10.0
    request_share: Annotated[float, _says("share of the arena that one request may hold")] = 0.5
    pinned_share: Annotated[float, _says("share of the arena that all pins together may hold")] = 0.5
    quarantine_share: Annotated[
        float, _says("share of the arena that one holder may have in quarantine before he gets nothing new")
    ] = 0.125


class CallSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long a client waits for the node service before an answer counts as a miss."""

    match_s: Annotated[float, _says("wait for a match")] = 0.05
    control_s: Annotated[float, _says("wait for everything else but fetches, which bring their own deadline")] = 0.2
    connect_s: Annotated[float, _says("wait for the first login")] = 2.0
    reconnect_s_max: Annotated[float, _says("longest pause between two attempts to find a service that is gone")] = 0.5


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The service on its Unix socket."""

    socket: Annotated[str | None, _says("path of the socket, at most 107 bytes", none="`kvtide.sock` in `folder`")] = (
        None
    )
    socket_mode: Annotated[int, _says("permissions of the socket, in octal: who may connect at all")] = 0o600
    sessions_max: Annotated[int, _says("clients connected at a time; more are turned away")] = 256
    requests_max: Annotated[int, _says("requests of one session that wait for answers; more are rejected")] = 64
    drain_s: Annotated[float, _says("time to spill what is in DRAM, when the service is asked to end")] = 30.0


class AdminClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who may use the admin API."""

    name: Annotated[str, _says("stands in the audit log")]
    token_sha256: Annotated[str, _says("SHA-256 of his token, 64 hex digits: `printf %s TOKEN | sha256sum`")]
    role: Annotated[Literal["reader", "operator"], _says("a reader looks, an operator also changes things")] = (
        "operator"
    )


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side: health, metrics, administration."""

    host: Annotated[str, _says("address to listen on")] = "127.0.0.1"
    port: Annotated[int, _says("port to listen on; 0: any that is free")] = 9733
    is_on: Annotated[bool, _says("whether there is an HTTP side at all")] = True
    is_metrics_open: Annotated[
        bool | None, _says("whether metrics can be read without a token", none="true without tenants, false with them")
    ] = None
    clients: Annotated[
        tuple[AdminClientSettings, ...], _says("who may come in, beside the token in `folder`, which always works")
    ] = ()


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody may take of a medium."""

    bytes_reserved: Annotated[int, _says("what nobody else can take")] = 0
    bytes_max: Annotated[int | None, _says("the most that can be taken", none="all of it")] = None


class ArenaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """An arena of its own, out of `dram.bytes_max`."""

    bytes_max: Annotated[int | None, _says("its size", none="an equal share of what the others leave")] = None


class ScopeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A customer inside a tenant, with quotas out of the tenant's."""

    dram: Annotated[QuotaSettings, _says("of the tenant's arena")] = QuotaSettings()
    disk: Annotated[QuotaSettings, _says("of the tenant's share of the disk")] = QuotaSettings()


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may connect as a tenant: a user of this machine, or whoever knows a token."""

    role: Annotated[
        Role, _says("an engine saves and fetches, a reader fetches, an operator also clears, pins and publishes")
    ] = "engine"
    uid: Annotated[int | None, _says("user id of the process", none="not by user id")] = None
    token_sha256: Annotated[
        str | None, _says("SHA-256 of the token, 64 hex digits: `printf %s TOKEN | sha256sum`", none="not by token")
    ] = None


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A trust boundary: own secret, own arena, own blocks."""

    secret_file: Annotated[
        str | None,
        _says("holds the secret of its keys; nodes that share blocks need the same", none="made once, in `folder`"),
    ] = None
    clients: Annotated[tuple[ClientSettings, ...], _says("who may connect")] = ()
    dram: Annotated[ArenaSettings, _says("its arena")] = ArenaSettings()
    disk: Annotated[QuotaSettings, _says("its share of the disk")] = QuotaSettings()
    scopes: Annotated[dict[str, ScopeSettings], _says("its customers that have quotas, by name")] = {}
    reads: Annotated[tuple[str, ...], _says("the share groups that it may read")] = ()


class ShareGroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that operators publish and tenants may read, never write."""

    secret_file: Annotated[
        str | None,
        _says("holds the secret of its keys; nodes that share blocks need the same", none="made once, in `folder`"),
    ] = None
    dram: Annotated[ArenaSettings, _says("its arena")] = ArenaSettings()
    disk: Annotated[QuotaSettings, _says("its share of the disk")] = QuotaSettings()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. A store needs `dram`, `disk` and `leases`; the node service needs the rest, too."""

    folder: Annotated[str, _says("what the service keeps: blocks, socket, secrets, audit log")] = "~/.cache/kvtide"
    dram: DramSettings = DramSettings()
    disk: DiskSettings | None = None
    leases: LeaseSettings = LeaseSettings()
    calls: CallSettings = CallSettings()
    node: NodeSettings = NodeSettings()
    admin: AdminSettings = AdminSettings()
    tenants: Annotated[
        dict[str, TenantSettings],
        _says("by name; without any there is one user, one arena, and whoever has the service's user id may connect"),
    ] = {}
    share_groups: Annotated[dict[str, ShareGroupSettings], _says("by name")] = {}

    def check(self) -> None:
        """Raise ConfigError for values that cannot work, with what to write instead. What is None is not judged."""
        from kvtide.config.checks import check  # here, because the checks need the classes above

        check(self)
