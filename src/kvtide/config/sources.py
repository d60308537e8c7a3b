# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: a file, then the environment, then flags. The later one wins, setting by setting.

What is not known or does not fit is refused, by its place and with what to write instead; a misspelt setting is
never ignored. Nothing here resolves or judges values: that is for `defaults.resolve` and `Settings.check`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import NoReturn

import msgspec
from msgspec import NODEFAULT, inspect

from kvtide.config.catalogue import (
    ENV_PREFIX,
    SECRETS,
    SECTIONS,
    Setting,
    fields_of,
    is_size,
    is_time,
    list_settings,
    reader,
    without_none,
)
from kvtide.config.settings import Settings
from kvtide.config.values import NONES, Unfit
from kvtide.errors import ConfigError, MissingExtra

FILE_BYTES_MAX = 1 << 20
DEFAULT_FILE = "kvtide.yaml"
CONFIG_ENV = "KVTIDE_CONFIG"
# Names with our prefix that are no settings: they are for clients, tests, and for finding the file.
OTHER_ENV = frozenset(
    {
        CONFIG_ENV,
        "KVTIDE_TRACES",
        "KVTIDE_SOCKET",
        "KVTIDE_TOKEN",
        "KVTIDE_TENANT",
        "KVTIDE_ADMIN_URL",
        "KVTIDE_ADMIN_TOKEN",
        "KVTIDE_API_KEY",
    }
)
# Kubernetes tells every pod of every service: one that is called kvtide, or kvtide-something, lands in our names.
_SERVICE_LINK = re.compile(
    r"KVTIDE_(?:[A-Z0-9_]+_)?(?:SERVICE_(?:HOST|PORT(?:_\w+)?)|PORT_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)"
)
_SERVICE_LINK_URL = re.compile(r"(?:tcp|udp|sctp)://")

_DEFAULTS = Settings()
_VALUE_CHARS_SHOWN = 60
_NAMES_SHOWN = 12
_KINDS = {dict: "a mapping", list: "a list", type(None): "empty"}

Changes = dict[str, object]  # what a source says, as a tree of names


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and a flag for each setting that has one. Values stay text until `load_settings`."""
    parser.allow_abbrev = False  # one name for one setting
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"settings in YAML (default: {CONFIG_ENV}, or {DEFAULT_FILE} here if there is one); "
        "the environment goes before the file, and flags go before both",
    )
    settings = list(list_settings())
    for section, struct in SECTIONS.items():
        about = (struct.__doc__ or "").partition("\n")[0] if section else "Of the whole service."
        group = parser.add_argument_group(f"settings: {section or 'general'}", about.replace("%", "%%"))
        for setting in settings:
            if setting.section == section and setting.is_scalar:
                text = f"{setting.meaning} (default: {setting.default_text()})"
                group.add_argument(setting.flag, metavar=_metavar(setting), help=text.replace("%", "%%"))
    only = ", ".join(setting.name for setting in settings if not setting.is_scalar)
    parser.add_argument_group("settings: in the file only", f"{only}: see docs/configuration.md")


def load_settings(
    args: argparse.Namespace | None = None, environ: Mapping[str, str] = os.environ, base: Settings = _DEFAULTS
) -> Settings:
    """Read all three sources over `base`. Raises ConfigError, and MissingExtra for a file without PyYAML."""
    settings = base
    if (path := _find_file(args, environ)) is not None:
        settings = _apply(settings, _read_tree(_read_yaml(path), path))
    settings = _apply(settings, _read_environ(environ))
    return _apply(settings, _read_flags(args))


# The environment and flags ---------------------------------------------------------------------------------


def _read_environ(environ: Mapping[str, str]) -> Changes:
    known = {setting.env: setting for setting in list_settings()}
    changes: Changes = {}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in OTHER_ENV or _is_service_link(name, environ[name]):
            continue
        if name not in known:
            for setting in known.values():
                if not setting.is_scalar and name.startswith(f"{setting.env}__"):
                    _refuse_in_file_only(name, setting)
            words = [env.removeprefix(ENV_PREFIX) for env, setting in known.items() if setting.is_scalar]
            _refuse_unknown("environment", ENV_PREFIX, name.removeprefix(ENV_PREFIX), words)
        if not known[name].is_scalar:
            _refuse_in_file_only(name, known[name])
        _put(changes, known[name], environ[name], f"environment: {name}")
    return changes


def _read_flags(args: argparse.Namespace | None) -> Changes:
    changes: Changes = {}
    for setting in list_settings():
        text = getattr(args, setting.flag.removeprefix("--").replace("-", "_"), None)
        if setting.is_scalar and text is not None:
            _put(changes, setting, text, f"flag {setting.flag}")
    return changes


def _put(changes: Changes, setting: Setting, text: str, where: str) -> None:
    section = changes
    if setting.section:
        child = changes.setdefault(setting.section, {})
        assert isinstance(child, dict)
        section = child
    name = setting.name.rpartition(".")[2]
    if setting.none and text.strip().lower() in NONES:
        section[name] = None
        return
    section[name] = _read_value(setting.name, setting.takes, text, where, is_text=True)


def _is_service_link(name: str, value: str) -> bool:
    if _SERVICE_LINK.fullmatch(name):
        return True
    return name.endswith("_PORT") and _SERVICE_LINK_URL.match(value) is not None


def _refuse_in_file_only(name: str, setting: Setting) -> NoReturn:
    raise ConfigError(
        f"environment: {name}: {setting.name} is set in {DEFAULT_FILE} only; take it out and write it there"
    )


# The file --------------------------------------------------------------------------------------------------


def _find_file(args: argparse.Namespace | None, environ: Mapping[str, str]) -> str | None:
    for named in (getattr(args, "config", None), environ.get(CONFIG_ENV)):
        if named:
            return os.path.expanduser(named)
    return DEFAULT_FILE if os.path.exists(DEFAULT_FILE) else None


def _read_yaml(path: str) -> object:
    """The data of a YAML file. Messages of the parser that quote the file are not passed on: it may hold secrets."""
    content = _read_bytes(path)
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra(f"{path}: reading it needs the package PyYAML: pip install 'kvtide[serve]'") from error
    try:
        text = content.decode()
        if twice := _find_twice(yaml.compose(text, yaml.SafeLoader)):
            raise ConfigError(f"{path}: {twice}")
        return yaml.safe_load(text)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; save it as that") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{path}: {place}not YAML: {error.problem or error.context}; mend that line") from None
    except yaml.YAMLError:
        raise ConfigError(f"{path}: has characters that YAML does not allow; take them out") from None
    except ValueError:  # a date or a number that Python cannot hold
        raise ConfigError(f"{path}: has a value that cannot be read; put dates and long numbers in quotes") from None
    except RecursionError:
        raise ConfigError(
            f"{path}: is nested too deeply to be settings; write them as docs/configuration.md shows"
        ) from None


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; name a file that this user may read (--config, {CONFIG_ENV})"
        ) from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {FILE_BYTES_MAX} bytes, so no settings; name the right file")
    return content


def _find_twice(root: object) -> str:
    """The first key that stands twice in a mapping, where YAML would take the last and say nothing."""
    import yaml

    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            keys: set[tuple[str, str]] = set()
            for key, value in node.value:
                waiting.append(value)
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
                if name in keys:
                    return (
                        f"line {key.start_mark.line + 1}: {key.value[:_VALUE_CHARS_SHOWN]} stands there twice; keep one"
                    )
                if name is not None:
                    keys.add(name)
    return ""


def _read_tree(data: object, path: str) -> Changes:
    if data is None:  # an empty file, or comments only
        return {}
    return _read_struct("", Settings, data, path)


def _read_struct(name: str, struct: type[msgspec.Struct], data: object, where: str) -> Changes:
    """What data says about a class of settings, by name. Unknown names are refused."""
    if not isinstance(data, dict):
        _refuse_value(where, name or "the file", data, "a mapping of settings")
    fields = fields_of(struct)
    prefix = f"{name}." if name else ""
    changes: Changes = {}
    for key, value in data.items():
        if key not in fields:
            _refuse_unknown(where, prefix, _key_text(key), fields)
        takes, is_optional = without_none(fields[key].type)
        if value is None and is_optional:
            changes[key] = None
        elif value is None and isinstance(takes, inspect.StructType):
            continue  # a section whose lines are all comments
        else:
            changes[key] = _read_data(prefix + key, takes, value, where)
    return changes


def _read_data(name: str, takes: inspect.Type, data: object, where: str) -> object:
    match takes:
        case inspect.StructType():
            return _read_struct(name, takes.cls, data, where)
        case inspect.DictType():
            if not isinstance(data, dict):
                _refuse_value(where, name, data, "a mapping by name")
            for key in data:
                if not isinstance(key, str):
                    raise ConfigError(
                        f"{where}: {name} has the key {_key_text(key)}, which is no text; put it in quotes"
                    )
            return {key: _build(f"{name}.{key}", takes.value_type, value, where) for key, value in data.items()}
        case inspect.VarTupleType():
            if not isinstance(data, list):
                _refuse_value(where, name, data, "a list")
            return tuple(_build(f"{name}[{at}]", takes.item_type, item, where) for at, item in enumerate(data))
        case _:
            return _read_value(name, takes, data, where, is_text=False)


def _build(name: str, takes: inspect.Type, data: object, where: str) -> object:
    """An entry of a mapping or list, complete: what is not said has its default, and what has none must be said."""
    if not isinstance(takes, inspect.StructType):
        return _read_data(name, takes, data, where)
    changes = _read_struct(name, takes.cls, {} if data is None else data, where)
    return _make(takes.cls, changes, name, where)


def _make(struct: type[msgspec.Struct], changes: Changes, name: str, where: str) -> msgspec.Struct:
    for field, info in fields_of(struct).items():
        takes, _ = without_none(info.type)
        if field not in changes and info.default is NODEFAULT and info.default_factory is NODEFAULT:
            raise ConfigError(f"{where}: {name} has no {field}; give it one")
        if isinstance(takes, inspect.StructType) and isinstance(inner := changes.get(field), dict):
            changes[field] = _make(takes.cls, inner, f"{name}.{field}", where)
    return struct(**changes)


# All of them -----------------------------------------------------------------------------------------------


def _apply(settings: Settings, changes: Changes) -> Settings:
    """Settings with what a source says; what it does not name stays."""
    done: Changes = {}
    for name, change in changes.items():
        if name in SECTIONS and isinstance(change, dict):
            section = getattr(settings, name)
            done[name] = SECTIONS[name](**change) if section is None else msgspec.structs.replace(section, **change)
        else:
            done[name] = change
    return msgspec.structs.replace(settings, **done)


def _read_value(name: str, takes: inspect.Type, value: object, where: str, *, is_text: bool) -> object:
    try:
        return reader(name, takes, is_text=is_text)(value)
    except Unfit as error:
        _refuse_value(where, name, value, str(error))


def _refuse_value(where: str, name: str, value: object, expected: str) -> NoReturn:
    raise ConfigError(f"{where}: {name} is {_shown(name, value)}; it takes {expected}", setting=name) from None


def _refuse_unknown(where: str, prefix: str, word: str, known: Iterable[str]) -> NoReturn:
    """Name what is nearest: the same word in another section, or else a neighbour that is spelt much like it."""
    known = list(known)
    near = [prefix + other for other in get_close_matches(word, known, 1, cutoff=0.5)]
    if prefix.rstrip(".") in SECTIONS:
        near = [setting.name for setting in list_settings() if setting.name.rpartition(".")[2] == word] or near
    if near:
        mend = f"did you mean {near[0]}?"
    elif len(known) <= _NAMES_SHOWN:
        mend = f"there are {', '.join(prefix + other for other in known)}"
    else:
        mend = "all of them stand in docs/configuration.md"
    raise ConfigError(f"{where}: {prefix}{word} is no setting; {mend}", setting=prefix + word)


def _shown(name: str, value: object) -> str:
    """A value for a message: short, nothing of a secret, and of a collection only what it is."""
    if type(value) in _KINDS:
        return _KINDS[type(value)]
    last = name.rpartition(".")[2]
    if last in SECRETS or last.startswith("clients"):  # a token that stands where its entry should be
        return "something else"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _VALUE_CHARS_SHOWN else text[:_VALUE_CHARS_SHOWN] + "..."


def _key_text(key: object) -> str:
    return str(key)[:_VALUE_CHARS_SHOWN] if isinstance(key, str | int | float | None) else type(key).__name__


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "{" + ",".join(setting.choices) + "}"
    last = setting.name.rpartition(".")[2]
    if isinstance(setting.takes, inspect.BoolType):
        return "{true,false}"
    if is_size(last):
        return "SIZE"
    if is_time(last):
        return "TIME"
    return {"folder": "DIR", "socket": "PATH", "socket_mode": "MODE", "host": "HOST"}.get(last, "N")
