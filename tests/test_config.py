# SPDX-License-Identifier: Apache-2.0
"""Settings: the defaults work, what no machine could make work is refused, and the message names the mend."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvtide.config import MIB, DiskSettings, DramSettings, LeaseSettings, Settings
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
