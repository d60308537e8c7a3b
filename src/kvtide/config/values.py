# SPDX-License-Identifier: Apache-2.0
"""What a setting's value may look like: `16GiB`, `200ms`, `0660`, `true`. Pure functions of text or data.

Text comes from the environment and from flags; data from YAML, where numbers are numbers already. Both end in
`Unfit` when they do not fit; whoever asked knows where the value stood and makes an error of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

_UNITS = "kmgtp"
_SIZE = re.compile(rf"(\d{{1,30}}(?:\.\d{{1,30}})?)\s*(?:([{_UNITS}])(i?))?(b?)", re.IGNORECASE | re.ASCII)
_TIME = re.compile(r"(\d{1,30}(?:\.\d{1,30})?(?:e[+-]?\d{1,3})?)\s*(ms|s|m|h|d)?", re.IGNORECASE | re.ASCII)
_SECONDS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600), "d": Fraction(86_400)}
_INT = re.compile(r"[+-]?\d{1,30}", re.ASCII)
_MODE = re.compile(r"(?:0o)?([0-7]{1,6})", re.IGNORECASE)
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
NONES = ("none", "null")


class Unfit(ValueError):
    """A value that its setting cannot take. The text says what it takes."""


Read = Callable[[object], object]


def size(value: object) -> int:
    """Bytes, from a whole number or from text with a unit: decimal (GB) or binary (GiB). Parts of a byte are cut."""
    if type(value) is int and value >= 0:
        return value
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or (found[2] and not found[4]) or ("." in found[1] and not found[2]):
        raise Unfit("a size in bytes, such as 4096, 512MiB or 1.5GB")
    number, unit, binary, _ = found.groups()
    power = _UNITS.index(unit.lower()) + 1 if unit else 0
    return int(Fraction(number) * (1024 if binary else 1000) ** power)


def size_text(size_bytes: int) -> str:
    """The shortest exact way to write a size that `size` reads."""
    for power, unit in reversed(list(enumerate(_UNITS.upper(), 1))):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{unit}iB"
    return str(size_bytes)


def seconds(value: object) -> float:
    """Seconds, from a number or from text with a unit."""
    what = "a time, such as 30, 30s, 5m or 200ms"
    if isinstance(value, str):
        found = _TIME.fullmatch(value.strip())
        if found is None:
            raise Unfit(what)
        number, unit = found.groups()
        value = Fraction(number) * _SECONDS[unit.lower()] if unit else float(number)
    return _finite(value, what)


def number(value: object) -> float:
    what = "a number, such as 0.5"
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise Unfit(what) from None
    return _finite(value, what)


def mode(value: object) -> int:
    """Permissions: text is octal, as chmod reads it; a number is taken as it is (YAML reads 0660 as octal)."""
    if type(value) is int:
        return value
    found = _MODE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise Unfit('permissions in octal, such as "0660"')
    return int(found[1], 8)


def whole_data(value: object) -> int:
    if type(value) is not int:
        raise Unfit("a whole number")
    return value


def whole_text(value: object) -> int:
    if not isinstance(value, str) or not _INT.fullmatch(value.strip()):
        raise Unfit("a whole number")
    return int(value)


def flag_data(value: object) -> bool:
    if not isinstance(value, bool):
        raise Unfit("true or false")
    return value


def flag_text(value: object) -> bool:
    found = _BOOLS.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        raise Unfit("true or false")
    return found


def text(value: object) -> str:
    if not isinstance(value, str):
        raise Unfit("text; put it in quotes")
    return value


def choice(words: tuple[str, ...]) -> Read:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise Unfit(f"one of {', '.join(words)}")
        return value

    return read


def _finite(value: object, what: str) -> float:
    if not isinstance(value, int | float | Fraction) or isinstance(value, bool):
        raise Unfit(what)
    try:
        result = float(value)
    except OverflowError:  # a number of hundreds of digits
        raise Unfit(what) from None
    if not math.isfinite(result):
        raise Unfit(what)
    return result
