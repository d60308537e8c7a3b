# SPDX-License-Identifier: Apache-2.0
"""All settings, with defaults that work. The words here are the words everywhere: files, flags, messages."""

from kvtide.config.settings import (
    GIB,
    MIB,
    AdminClientSettings,
    AdminSettings,
    ArenaSettings,
    CallSettings,
    ClientSettings,
    DiskSettings,
    DramSettings,
    LeaseSettings,
    NodeSettings,
    QuotaSettings,
    Role,
    ScopeSettings,
    Settings,
    ShareGroupSettings,
    SpillWhen,
    TenantSettings,
)

__all__ = [
    "GIB",
    "MIB",
    "AdminClientSettings",
    "AdminSettings",
    "ArenaSettings",
    "CallSettings",
    "ClientSettings",
    "DiskSettings",
    "DramSettings",
    "LeaseSettings",
    "NodeSettings",
    "QuotaSettings",
    "Role",
    "ScopeSettings",
    "Settings",
    "ShareGroupSettings",
    "SpillWhen",
    "TenantSettings",
]
