# SPDX-License-Identifier: Apache-2.0
"""One suite for whatever an engine may have as its cache: a store of its own, or a client of the service."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import pytest

from kvtide import wire
from kvtide.client import Client
from kvtide.config import DiskSettings, DramSettings, Settings
from kvtide.store import Store, open_store
from kvtide.testing.node import ServedNode
from kvtide.testing.store_suite import StoreSuite

TOKEN = "a token of tenant ada"
TENANTS = f"""
dram: {{bytes_max: 8MiB}}
disk: {{bytes_max: 256MiB}}
tenants:
  ada:
    clients: [{{role: operator, token_sha256: {sha256(TOKEN.encode()).hexdigest()}}}]
    dram: {{bytes_max: 4MiB}}
  bob:
    clients: [{{uid: 12345}}]
share_groups:
  common: {{dram: {{bytes_max: 2MiB}}}}
"""


class TestStore(StoreSuite):
    """In the engine's own process, with a disk."""

    is_closed_an_error = False

    def make_cache(self, folder: Path) -> Store:
        disk = DiskSettings(folder=str(folder), bytes_max=256 << 20)
        return open_store(Settings(dram=DramSettings(bytes_max=self.arena_bytes, huge_pages=False), disk=disk))


class TestStoreOfDramAlone(StoreSuite):
    is_closed_an_error = False
    has_lower_tier = False

    def make_cache(self, folder: Path) -> Store:
        return open_store(Settings(dram=DramSettings(bytes_max=self.arena_bytes, huge_pages=False)))


class OfAService(StoreSuite):
    """All tests of a class share one service."""

    keys_max = wire.KEYS_MAX
    token: ClassVar[str] = ""
    node: ServedNode

    def make_cache(self, folder: Path) -> Client:
        return self.node.connect(token=self.token, control_s=30.0)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    flags = ["--dram-bytes-max", "4MiB", "--disk-bytes-max", "256MiB", "--admin-port", "0"]
    with ServedNode(tmp_path_factory.mktemp("node"), *flags) as node:
        yield node


class TestClient(OfAService):
    """Of a service for one user."""

    @pytest.fixture(autouse=True)
    def _serve(self, node: ServedNode) -> None:
        self.node = node


@pytest.fixture(scope="module")
def node_with_tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with ServedNode(tmp_path_factory.mktemp("node"), "--admin-port", "0", config=TENANTS) as node:
        yield node


class TestClientOfATenant(OfAService):
    """Of a service that knows several tenants, as one of them, let in by a token."""

    token = TOKEN

    @pytest.fixture(autouse=True)
    def _serve(self, node_with_tenants: ServedNode) -> None:
        self.node = node_with_tenants
