# SPDX-License-Identifier: Apache-2.0
"""Settings: the defaults work, what no machine could make work is refused, and the message names the mend."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvtide.config import (
    GIB,
    MIB,
    AdminClientSettings,
    AdminSettings,
    ArenaSettings,
    CallSettings,
    DiskSettings,
    DramSettings,
    LeaseSettings,
    NodeSettings,
    QuotaSettings,
    Settings,
    ShareGroupSettings,
    TenantSettings,
)
from kvtide.config.defaults import resolve, resolve_tiers
from kvtide.errors import ConfigError


def test_the_defaults_are_fine() -> None:
    Settings().check()
    Settings(disk=DiskSettings(folder="/somewhere")).check()


@pytest.mark.parametrize(
    "settings",
    [
        Settings(disk=DiskSettings(folder="x", io_threads=1)),
        Settings(dram=DramSettings(bytes_max=8 * MIB), disk=DiskSettings(folder="x", spill_queue_bytes_max=4 * MIB)),
        Settings(disk=DiskSettings(folder="x", spill_queue_bytes_max=1)),
        Settings(leases=LeaseSettings(lease_s=0.001, fetch_s=0.001)),
        Settings(leases=LeaseSettings(request_share=1.0, pinned_share=1.0, quarantine_share=1.0)),
        Settings(leases=LeaseSettings(request_share=0.001, pinned_share=0.001, quarantine_share=0.001)),
    ],
)
def test_values_at_the_edge_are_fine(settings: Settings) -> None:
    settings.check()


@pytest.mark.parametrize("threads", [0, -1])
def test_a_disk_without_threads_is_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match=rf"disk\.io_threads is {threads}: give it 1 or more"):
        Settings(disk=DiskSettings(folder="x", io_threads=threads)).check()


@pytest.mark.parametrize("queue", [0, -1, 4 * MIB + 1, 100 * MIB])
def test_a_spill_queue_beyond_half_of_dram_is_refused(queue: int) -> None:
    settings = Settings(
        dram=DramSettings(bytes_max=8 * MIB), disk=DiskSettings(folder="x", spill_queue_bytes_max=queue)
    )
    with pytest.raises(ConfigError, match=rf"disk\.spill_queue_bytes_max is {queue}.*\({4 * MIB}\)"):
        settings.check()


@pytest.mark.parametrize("name", ["lease_s", "fetch_s"])
@pytest.mark.parametrize("value", [0.0, -5.0])
def test_a_time_that_is_over_at_once_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"leases\.{name} is {value}: give it more than 0 seconds"):
        Settings(leases=LeaseSettings(**{name: value})).check()


@pytest.mark.parametrize("name", ["request_share", "pinned_share", "quarantine_share"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.1])
def test_a_share_that_is_none_or_more_than_all_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"leases\.{name} is {re.escape(str(value))}: give it a share"):
        Settings(leases=LeaseSettings(**{name: value})).check()


@pytest.mark.parametrize("name", ["request_share", "pinned_share", "quarantine_share"])
def test_a_value_that_is_no_number_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"leases\.{name}"):
        Settings(leases=LeaseSettings(**{name: float("nan")})).check()


def test_settings_read_from_data_have_their_types_checked() -> None:
    settings = msgspec.convert(
        {"dram": {"bytes_max": 8 * MIB}, "disk": {"folder": "x", "spill_when": "evict"}}, Settings
    )
    settings.check()
    assert settings.disk == DiskSettings(folder="x", spill_when="evict")
    with pytest.raises(msgspec.ValidationError, match="spill_when"):
        msgspec.convert({"disk": {"folder": "x", "spill_when": "never"}}, Settings)


# Settings of the node service -----------------------------------------------------------------------------

SHA = "0123456789abcdef" * 4


def tenant(**fields: object) -> Settings:
    return Settings(tenants={"a": msgspec.convert(fields, TenantSettings)}, disk=DiskSettings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(folder=""), r"folder is ''.*name a path"),
        (Settings(dram=DramSettings(bytes_max=0)), r"dram\.bytes_max is 0: give it 64MiB"),
        (Settings(disk=DiskSettings(folder="")), r"disk\.folder is ''.*name a path"),
        (Settings(disk=DiskSettings(bytes_max=-1)), r"disk\.bytes_max is -1: .*or 0 for no disk tier"),
        (Settings(disk=DiskSettings(spill_queue_bytes_max=0)), r"disk\.spill_queue_bytes_max is 0: give it a size"),
        (Settings(disk=DiskSettings(bytes_written_daily_max=-1)), r"disk\.bytes_written_daily_max is -1: give it"),
        (Settings(calls=CallSettings(match_s=0.0)), r"calls\.match_s is 0\.0: give it more than 0"),
        (Settings(leases=LeaseSettings(fetch_s=float("inf"))), r"leases\.fetch_s is inf: give it"),
        (Settings(node=NodeSettings(sessions_max=0)), r"node\.sessions_max is 0: give it 1 or more"),
        (Settings(node=NodeSettings(requests_max=-2)), r"node\.requests_max is -2: give it 1 or more"),
        (Settings(node=NodeSettings(drain_s=-1.0)), r"node\.drain_s is -1\.0: give it 0 or more"),
        (Settings(node=NodeSettings(socket_mode=0o1000)), r'node\.socket_mode is 0o1000: .*such as "0660"'),
        (Settings(node=NodeSettings(socket_mode=-1)), r"node\.socket_mode is -0o1"),
        (Settings(node=NodeSettings(socket="/" + "x" * 107)), r"node\.socket is .*107 bytes.*name a shorter one"),
        (Settings(node=NodeSettings(socket="")), r"node\.socket is ''.*name a path"),
        (Settings(admin=AdminSettings(port=65_536)), r"admin\.port is 65536: give it a port"),
        (Settings(admin=AdminSettings(port=-1)), r"admin\.port is -1"),
        (Settings(admin=AdminSettings(host="")), r"admin\.host is empty: name an address"),
        (Settings(tenants={"A": TenantSettings()}), r"the name of tenants\.A is 'A': give it 1 to 64 lower-case"),
        (Settings(tenants={"..": TenantSettings()}), r"no dot in front"),
        (Settings(tenants={"": TenantSettings()}), r"give it 1 to 64"),
        (Settings(tenants={"x" * 65: TenantSettings()}), r"give it 1 to 64"),
        (Settings(share_groups={"a/b": ShareGroupSettings()}), r"the name of share_groups\.a/b"),
        (Settings(share_groups={"a": ShareGroupSettings(secret_file="")}), r"share_groups\.a\.secret_file is ''"),
        (tenant(secret_file="a\0b"), r"tenants\.a\.secret_file .*name a path"),
        (tenant(clients=[{}]), r"tenants\.a\.clients\[0\] has neither: give it uid or token_sha256"),
        (tenant(clients=[{"uid": 1, "token_sha256": SHA}]), r"tenants\.a\.clients\[0\] has both"),
        (tenant(clients=[{"uid": -1}]), r"tenants\.a\.clients\[0\]\.uid is -1: give it a user id"),
        (tenant(reads=["docs"]), r"tenants\.a\.reads names 'docs', which is no share group: there is none, or add it"),
        (tenant(dram={"bytes_max": 1}), r"tenants\.a\.dram\.bytes_max is 1: give it 1MiB or more"),
        (tenant(disk={"bytes_reserved": -1}), r"tenants\.a\.disk\.bytes_reserved is -1: give it 0"),
        (tenant(disk={"bytes_max": -1}), r"tenants\.a\.disk\.bytes_max is -1: give it a size"),
        (tenant(disk={"bytes_reserved": 2 * GIB, "bytes_max": GIB}), r"bytes_reserved is 2GiB, more than .*1GiB"),
        (tenant(scopes={"": {}}), r"a scope of tenants\.a has a name of 0 characters: give it 1 to 256"),
        (tenant(scopes={"x" * 257: {}}), r"a name of 257 characters"),
        (
            tenant(scopes={"s": {"dram": {"bytes_max": 2 * GIB}}}, dram={"bytes_max": GIB}),
            r"tenants\.a\.scopes\.s\.dram\.bytes_max is 2GiB, more than tenants\.a\.dram\.bytes_max \(1GiB\): lower",
        ),
        (
            tenant(scopes={"s": {"disk": {"bytes_max": 2 * GIB}}}, disk={"bytes_max": GIB}),
            r"tenants\.a\.scopes\.s\.disk\.bytes_max is 2GiB, more than",
        ),
        (
            tenant(scopes={n: {"dram": {"bytes_reserved": GIB}} for n in "st"}, dram={"bytes_max": GIB}),
            r"the scopes of tenants\.a reserve 2GiB of DRAM.*raise tenants\.a\.dram\.bytes_max from 1GiB",
        ),
        (
            tenant(scopes={"s": {"disk": {"bytes_reserved": GIB}}}),
            r"the scopes of tenants\.a reserve 1GiB of the disk.*raise tenants\.a\.disk\.bytes_reserved from 0",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write_instead(settings: Settings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.check()


@pytest.mark.parametrize("text", ["swordfish", SHA[:-1], SHA + "0", SHA[:-1] + "g"])
def test_what_is_no_hash_of_a_token_is_refused_and_not_shown(text: str) -> None:
    admin = AdminSettings(clients=(AdminClientSettings(name="grafana", token_sha256=text),))
    for settings in (tenant(clients=[{"token_sha256": text}]), Settings(admin=admin)):
        with pytest.raises(ConfigError, match=r"clients\[0\]\.token_sha256 is not.*sha256sum") as caught:
            settings.check()
        assert text not in str(caught.value)


def test_two_admin_clients_of_one_name_are_refused() -> None:
    client = AdminClientSettings(name="grafana", token_sha256=SHA)
    with pytest.raises(ConfigError, match=r"admin\.clients\[1\]\.name is 'grafana' once more"):
        Settings(admin=AdminSettings(clients=(client, client))).check()


def test_a_share_group_that_is_not_there_is_answered_with_those_that_are() -> None:
    groups = {"docs": ShareGroupSettings(), "code": ShareGroupSettings()}
    Settings(tenants={"a": TenantSettings(reads=("docs",))}, share_groups=groups).check()
    with pytest.raises(ConfigError, match=r"'doc', which is no share group: name one of docs, code"):
        Settings(tenants={"a": TenantSettings(reads=("doc",))}, share_groups=groups).check()


def arenas(total: int | None, *sizes: int | None) -> Settings:
    named = {f"t{place}": TenantSettings(dram=ArenaSettings(bytes_max=size)) for place, size in enumerate(sizes[1:])}
    group = {"g": ShareGroupSettings(dram=ArenaSettings(bytes_max=sizes[0]))}
    return Settings(dram=DramSettings(bytes_max=total), tenants=named, share_groups=group)


@pytest.mark.parametrize(
    "settings",
    [
        arenas(8 * MIB, 2 * MIB, 6 * MIB),
        arenas(8 * MIB, 2 * MIB, 5 * MIB, None),
        arenas(8 * MIB, None, None, None),
        arenas(None, 8 * GIB, 8 * GIB),
    ],
)
def test_arenas_that_fit_into_dram_are_fine(settings: Settings) -> None:
    settings.check()
    assert settings.tenants


def test_arenas_that_are_more_than_dram_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tenants\.t0, share_groups\.g take 9MiB together, more than .*\(8MiB\)"):
        arenas(8 * MIB, 2 * MIB, 7 * MIB).check()


def test_arenas_that_leave_nothing_for_the_others_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0 are left for tenants\.t1, and each needs 1MiB or more: raise"):
        arenas(8 * MIB, 2 * MIB, 6 * MIB, None).check()
    with pytest.raises(ConfigError, match=r"1MiB are left for tenants\.t1, tenants\.t2, and each needs"):
        arenas(8 * MIB, 2 * MIB, 5 * MIB, None, None).check()


def reserved(disk: DiskSettings | None, each: int) -> Settings:
    quota = QuotaSettings(bytes_reserved=each)
    names = "abcdef"
    return Settings(
        disk=disk,
        tenants={name: TenantSettings(disk=quota) for name in names},
        share_groups={"g": ShareGroupSettings(disk=quota)},
    )


def test_reservations_of_the_disk_have_to_fit_on_it() -> None:
    reserved(DiskSettings(bytes_max=7 * GIB), GIB).check()
    reserved(DiskSettings(), 999 * GIB).check()  # not known yet
    reserved(None, 0).check()
    with pytest.raises(ConfigError, match=r"tenants\.a, .*tenants\.e and others reserve 7GiB of the disk, more than"):
        reserved(DiskSettings(bytes_max=7 * GIB - 1), GIB).check()
    with pytest.raises(ConfigError, match=r"reserve 7GiB of the disk, and there is no disk tier: raise"):
        reserved(None, GIB).check()


# What depends on the machine ------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (40 * GIB, 10 * GIB),
        (1 << 50, 64 * GIB),
        (0, 64 * MIB),
        (4 * (100 * MIB + 1), 100 * MIB),
        (4 * (103 * MIB), 102 * MIB),
    ],
)
def test_dram_is_a_quarter_of_what_is_available_within_bounds(available: int, expected: int) -> None:
    assert resolve_tiers(Settings(), lambda: available).dram.bytes_max == expected


def test_what_is_set_stays(home: Path) -> None:
    settings = Settings(
        folder="/srv/kvtide",
        dram=DramSettings(bytes_max=MIB + 1),
        disk=DiskSettings(folder="/mnt/x", bytes_max=123),
        node=NodeSettings(socket="/run/k.sock"),
    )
    assert resolve(settings) == settings


def test_paths_are_inside_the_folder_of_the_service(home: Path) -> None:
    settings = resolve(Settings(folder="~/k", disk=DiskSettings()))
    assert settings.folder == str(home / "k")
    assert settings.disk is not None
    assert settings.disk.folder == str(home / "k" / "blocks")
    assert settings.node.socket == str(home / "k" / "kvtide.sock")
    assert not (home / "k").exists()


def test_every_tilde_is_expanded(home: Path) -> None:
    settings = resolve(
        Settings(
            disk=DiskSettings(folder="~/d", bytes_max=MIB),
            node=NodeSettings(socket="~/s"),
            tenants={"a": TenantSettings(secret_file="~/a"), "b": TenantSettings()},
            share_groups={"g": ShareGroupSettings(secret_file="~/g"), "h": ShareGroupSettings()},
        )
    )
    assert "~" not in repr(settings)
    assert (settings.tenants["a"].secret_file, settings.tenants["b"].secret_file) == (str(home / "a"), None)
    assert (settings.share_groups["g"].secret_file, settings.share_groups["h"].secret_file) == (str(home / "g"), None)


def test_resolving_twice_changes_nothing(home: Path) -> None:
    once = resolve(Settings(disk=DiskSettings()))
    once.check()
    assert resolve(once) == once


def test_a_disk_of_no_bytes_is_no_disk() -> None:
    assert resolve(Settings(disk=DiskSettings(bytes_max=0))).disk is None
    assert resolve(Settings()).disk is None


def test_the_disk_is_a_quarter_of_what_is_free_or_already_held(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [40 * GIB]

    def statvfs(path: Path) -> SimpleNamespace:
        assert path.exists()
        return SimpleNamespace(f_bavail=free[0] // 4096, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)

    def bound() -> int | None:
        disk = resolve_tiers(Settings(disk=DiskSettings(folder="~/d"))).disk
        return disk and disk.bytes_max

    assert bound() == 10 * GIB
    (home / "d").mkdir()
    (home / "d" / "blocks.data").write_bytes(bytes(8 * MIB))
    free[0] -= (home / "d" / "blocks.data").stat().st_blocks * 512
    assert bound() == 10 * GIB  # as before the first block
    free[0] = 1 << 50
    assert bound() == 256 * GIB
    free[0] = 100 * MIB
    with pytest.raises(ConfigError, match=r"disk\.folder .* too few for a disk tier: free some, name another"):
        bound()


def test_a_folder_that_cannot_be_looked_at_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def statvfs(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(ConfigError, match=r"disk\.folder .* cannot be used: Permission denied; name a folder"):
        resolve_tiers(Settings(disk=DiskSettings()))


def test_a_socket_whose_path_would_be_too_long_is_refused_by_its_setting() -> None:
    folder = "/" + "x" * 94
    assert resolve(Settings(folder=folder)).node.socket == f"{folder}/kvtide.sock"
    assert resolve_tiers(Settings(folder=folder + "xxx")).folder == folder + "xxx"
    with pytest.raises(ConfigError, match=r"node\.socket is .*longer than 107 bytes"):
        resolve(Settings(folder=folder + "x"))
