# SPDX-License-Identifier: Apache-2.0
"""The list of all settings, made from their classes: name, meaning, default, and what each takes.

One name, three spellings: `disk.bytes_max` in YAML, `KVTIDE_DISK__BYTES_MAX` in the environment and
`--disk-bytes-max` as a flag. Whatever comes in numbers (tenants, share groups, admin clients) has no name that
could be fixed beforehand, so it stands in YAML only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import msgspec
from msgspec import NODEFAULT, inspect

from kvtide.config import values
from kvtide.config.settings import Settings

ENV_PREFIX = "KVTIDE_"
_SCALARS = (inspect.IntType, inspect.FloatType, inspect.BoolType, inspect.StrType, inspect.LiteralType)
SECRETS = frozenset({"token_sha256"})  # never shown, whatever was written there


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of the tree. `none` says what None stands for, where it may be None."""

    name: str
    meaning: str
    takes: inspect.Type
    default: object
    none: str

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper().replace(".", "__")

    @property
    def flag(self) -> str:
        return "--" + self.name.replace(".", "-").replace("_", "-")

    @property
    def is_scalar(self) -> bool:
        return isinstance(self.takes, _SCALARS)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(map(str, self.takes.values)) if isinstance(self.takes, inspect.LiteralType) else ()

    def default_text(self) -> str:
        """The default, as one would write it."""
        if self.default is None:
            return self.none
        if self.default is NODEFAULT:
            return "(has to be given)"
        return value_text(self.name, self.default)


def value_text(name: str, value: object) -> str:
    """A value as one would write it in YAML, in the environment or in a flag."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and is_size(name):
        return values.size_text(value)
    if isinstance(value, int) and is_mode(name):
        return f"0{value:o}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def is_size(name: str) -> bool:
    return "bytes" in name.rpartition(".")[2]


def is_time(name: str) -> bool:
    return "s" in name.rpartition(".")[2].split("_")  # the unit: lease_s, reconnect_s_max


def is_mode(name: str) -> bool:
    return name.endswith("_mode")


def reader(name: str, takes: inspect.Type, *, is_text: bool) -> values.Read:
    """The function that reads a value of this setting: from text (environment, flags) or from data (YAML)."""
    match takes:
        case inspect.BoolType():
            return values.flag_text if is_text else values.flag_data
        case inspect.IntType():
            if is_size(name):
                return values.size
            if is_mode(name):
                return values.mode
            return values.whole_text if is_text else values.whole_data
        case inspect.FloatType():
            return values.seconds if is_time(name) else values.number
        case inspect.LiteralType():
            return values.choice(tuple(map(str, takes.values)))
        case inspect.StrType():
            return values.text
    raise AssertionError(f"no setting is of the type {takes}")


def without_none(takes: inspect.Type) -> tuple[inspect.Type, bool]:
    """The type behind its description, and whether it may be None as well."""
    if isinstance(takes, inspect.Metadata):
        takes = takes.type
    if isinstance(takes, inspect.UnionType):
        (inner,) = (kind for kind in takes.types if not isinstance(kind, inspect.NoneType))
        return inner, True
    return takes, False


@cache
def fields_of(struct: type[msgspec.Struct]) -> dict[str, inspect.Field]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.name: field for field in info.fields}


def list_settings(struct: type[msgspec.Struct] = Settings, prefix: str = "") -> Iterator[Setting]:
    """All settings below a class, in their order; sections are entered, and what stands in YAML only is one setting."""
    for name, field in fields_of(struct).items():
        takes, is_optional = without_none(field.type)
        if isinstance(takes, inspect.StructType):
            yield from list_settings(takes.cls, f"{prefix}{name}.")
        else:
            yield _describe(prefix + name, field, takes, is_optional)


def _describe(name: str, field: inspect.Field, takes: inspect.Type, is_optional: bool) -> Setting:
    assert isinstance(field.type, inspect.Metadata), f"{name} has no description"
    schema, extra = field.type.extra_json_schema or {}, field.type.extra or {}
    assert bool(extra["none"]) == is_optional, f"{name}: say what None stands for, where it may be None"
    default = field.default if field.default_factory is NODEFAULT else field.default_factory()
    return Setting(name, schema["description"], takes, default, extra["none"])


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "": Settings,
    **{
        name: kind.cls
        for name, field in fields_of(Settings).items()
        if isinstance(kind := without_none(field.type)[0], inspect.StructType)
    },
}
