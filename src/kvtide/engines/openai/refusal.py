# SPDX-License-Identifier: Apache-2.0
"""What is not done, as OpenAI's API says so: a status, and a body with a sentence that tells what to send instead."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kvtide.errors import Busy, Closed, KvtideError, Rejected, TooLarge, Unavailable

Type = Literal["invalid_request_error", "rate_limit_error", "server_error"]


class Refusal(KvtideError):
    """`param` names the field that is to blame; `code` is a stable word for programs."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = code
        self.param = param


class ErrorBody(Struct, frozen=True):
    message: str
    type: Type
    param: str | None
    code: str


class ErrorAnswer(Struct, frozen=True):
    """What every answer with a status of 400 or more looks like, and an event that ends a stream early."""

    error: ErrorBody


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> Refusal:
    return Refusal(400, code, message, param)


def refusal_of(error: KvtideError) -> Refusal:
    """What an error of the engine is to a client."""
    match error:
        case Refusal():
            return error
        case TooLarge():
            return invalid(str(error), "prompt", "context_length_exceeded")
        case Busy():
            return Refusal(429, "rate_limit_exceeded", str(error))
        case Rejected():
            return invalid(str(error))
        case Closed() | Unavailable():
            return Refusal(503, "unavailable", str(error))
        case _:
            return Refusal(500, "internal_error", str(error))


def body_of(refusal: Refusal) -> ErrorAnswer:
    kind: Type = "invalid_request_error"
    if refusal.status == 429:
        kind = "rate_limit_error"
    elif refusal.status >= 500:
        kind = "server_error"
    return ErrorAnswer(ErrorBody(str(refusal), kind, refusal.param, refusal.kind))
