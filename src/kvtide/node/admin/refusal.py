# SPDX-License-Identifier: Apache-2.0
"""What is not done, and how HTTP says so: always with a word to act on and a sentence that tells what to do."""

from __future__ import annotations

from msgspec import Struct

from kvtide.errors import (
    Busy,
    Closed,
    ConfigError,
    Denied,
    KvtideError,
    MediumFailed,
    Rejected,
    TooLarge,
    Unavailable,
)


class Refusal(KvtideError):
    """An answer that is no success, with its own status and kind."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class ErrorBody(Struct, frozen=True):
    """`kind` is a stable word for programs, `message` says what to do."""

    kind: str
    message: str


class ErrorAnswer(Struct, frozen=True):
    """What every answer with a status of 400 or more looks like."""

    error: ErrorBody


_STATUS: tuple[tuple[type[KvtideError], int], ...] = (  # the first one that fits
    (Denied, 403),
    (TooLarge, 413),
    (Busy, 503),
    (Rejected, 409),
    (ConfigError, 422),
    (MediumFailed, 503),
    (Unavailable, 503),
    (Closed, 503),
)


def status_of(error: KvtideError) -> int:
    if isinstance(error, Refusal):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def not_found(what: str) -> Refusal:
    return Refusal(404, "not_found", what)


def invalid(what: str) -> Refusal:
    return Refusal(422, "invalid", what)
