# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md, made from the settings themselves. A test keeps the file equal to `reference()`."""

from __future__ import annotations

import msgspec

from kvtide.config.catalogue import SECTIONS, Setting, list_settings, value_text
from kvtide.config.settings import (
    AdminClientSettings,
    ClientSettings,
    ScopeSettings,
    ShareGroupSettings,
    TenantSettings,
)

_INTRO = """\
# Configuration

Every setting has one name and three spellings: `disk.bytes_max` in `kvtide.yaml` (`bytes_max` under `disk`),
`KVTIDE_DISK__BYTES_MAX` in the environment, `--disk-bytes-max` as a flag. Flags win over the environment, and the
environment wins over the file. The file is what `--config` or `KVTIDE_CONFIG` names, or `kvtide.yaml` in the current
folder. A name that is not known is an error, wherever it stands. `kvtide doctor` checks a machine against its settings.

| Value | Written as |
|---|---|
| sizes | bytes, or with a unit: `4096`, `512MiB`, `1.5GB` |
| times | seconds, or with a unit: `30`, `30s`, `5m`, `200ms` |
| permissions | octal: `"0660"` |
| yes or no | `true` or `false`; in the environment and in flags also `yes`, `no`, `1`, `0` |
| none | `null` in YAML, `none` elsewhere: the default of settings that depend on the machine |

These names in the environment are no settings, and kvtide reads them elsewhere: `KVTIDE_CONFIG`, `KVTIDE_SOCKET`,
`KVTIDE_TOKEN`, `KVTIDE_TENANT`, `KVTIDE_ADMIN_URL`, `KVTIDE_ADMIN_TOKEN`, `KVTIDE_API_KEY`, `KVTIDE_TRACES`. What
Kubernetes adds for a service called kvtide (`KVTIDE_SERVICE_HOST` and the like) is ignored.
"""

_LISTS = """\
## In the file only

What there can be several of has neither flags nor names in the environment.
"""

# Class of each entry by where it stands.
_ENTRIES: dict[str, type[msgspec.Struct]] = {
    "admin.clients[]": AdminClientSettings,
    "tenants.NAME": TenantSettings,
    "tenants.NAME.clients[]": ClientSettings,
    "tenants.NAME.scopes.NAME": ScopeSettings,
    "share_groups.NAME": ShareGroupSettings,
}

# What the example says instead of the default.
_EXAMPLE_VALUES = {
    "folder": "/var/lib/kvtide",
    "dram.bytes_max": "64GiB",
    "disk.folder": "/mnt/nvme/kvtide",
    "disk.bytes_max": "1TiB",
    "disk.spill_queue_bytes_max": "8GiB",
    "disk.bytes_written_daily_max": "2TB",
    "node.socket": "/run/kvtide/kvtide.sock",
    "node.socket_mode": '"0660"',
    "admin.is_metrics_open": "false",
}

_EXAMPLE_LISTS = """\
  # who may come in, beside the token in `folder`, which always works
  clients:
    - name: grafana
      role: reader
      token_sha256: 6a6a0a1b6f6e3a7d5a1cf3b1a4b0c5d5e1d6b7f8091a2b3c4d5e6f708192a3b4

# each with its own secret, arena and blocks
tenants:
  search:
    clients:
      - uid: 1001
      - role: operator
        token_sha256: 0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a69788796a5b4c3d2e1f0
    # an arena of its own, out of dram.bytes_max
    dram:
      bytes_max: 32GiB
    disk:
      bytes_reserved: 200GiB
      bytes_max: 600GiB
    reads: [prompts]
  chat:
    # nodes that share blocks need the same secret
    secret_file: /etc/kvtide/chat.secret
    clients:
      - uid: 1002
    # no dram: its arena is what the others leave
    disk:
      bytes_reserved: 100GiB
    # customers with quotas, out of the tenant's; others need no entry
    scopes:
      customer-17:
        dram:
          bytes_max: 4GiB
        disk:
          bytes_reserved: 20GiB
          bytes_max: 50GiB
      customer-18:
        disk:
          bytes_max: 10GiB
    reads: [prompts]

# blocks that operators publish and tenants may read
share_groups:
  prompts:
    dram:
      bytes_max: 4GiB
    disk:
      bytes_reserved: 20GiB
"""


def reference() -> str:
    """The whole page."""
    pieces = [_INTRO]
    settings = list(list_settings())
    for section, struct in SECTIONS.items():
        rows = [setting for setting in settings if setting.section == section and setting.is_scalar]
        about = f"## {section}\n\n{_about(struct)}" if section else "## The service"
        pieces.append(f"{about}\n\n{_table(rows)}")
    pieces.append(_LISTS)
    pieces.append("\n".join(f"* `{each.name}`: {_meaning(each)}" for each in settings if not each.is_scalar) + "\n")
    for place, struct in _ENTRIES.items():
        pieces.append(f"### {place}\n\n{_about(struct)}\n\n{_entry_table(struct)}")
    pieces.append(f"## An example with everything\n\n```yaml\n{example()}```\n")
    return "\n".join(pieces)


def example() -> str:
    """A kvtide.yaml that names every setting, with two tenants and a share group."""
    lines: list[str] = []
    for section, struct in SECTIONS.items():
        if section:
            lines += ["", f"# {_about(struct)}", f"{section}:"]
        for setting in list_settings():
            if setting.section == section and setting.is_scalar:
                indent = "  " if section else ""
                word = setting.name.rpartition(".")[2]
                lines += [f"{indent}# {setting.meaning}", f"{indent}{word}: {_example_value(setting)}"]
    assert section == "admin", "its clients follow"
    return "\n".join(lines) + "\n" + _EXAMPLE_LISTS


def _example_value(setting: Setting) -> str:
    return _EXAMPLE_VALUES.get(setting.name) or value_text(setting.name, setting.default)


def _table(settings: list[Setting]) -> str:
    rows = ["| Setting | Default | Environment | Flag | Meaning |", "|---|---|---|---|---|"]
    for setting in settings:
        row = [f"`{setting.name}`", _default(setting), f"`{setting.env}`", f"`{setting.flag}`", _meaning(setting)]
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows) + "\n"


def _entry_table(struct: type[msgspec.Struct]) -> str:
    rows = ["| Setting | Default | Meaning |", "|---|---|---|"]
    for setting in list_settings(struct):
        rows.append(f"| `{setting.name}` | {_default(setting)} | {_meaning(setting)} |")
    return "\n".join(rows) + "\n"


def _default(setting: Setting) -> str:
    if not setting.is_scalar:
        return "none"
    text = setting.default_text()
    return text if not isinstance(setting.default, int | float | str) else f"`{text}`"


def _meaning(setting: Setting) -> str:
    words = f": `{'`, `'.join(setting.choices)}`" if setting.choices else ""
    return (setting.meaning + words).replace("|", "\\|")


def _about(struct: type[msgspec.Struct]) -> str:
    return (struct.__doc__ or "").partition("\n")[0]
