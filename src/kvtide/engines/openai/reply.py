# SPDX-License-Identifier: Apache-2.0
"""An answer on its way to the client: whole, or as server-sent events. A client that leaves ends the work for it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvtide.engines.openai.answering import Answering, Reader
from kvtide.engines.openai.answers import (
    Answer,
    ChatChoice,
    ChatDelta,
    ChatMessage,
    Choice,
    CompletionChoice,
    Delta,
    FinishReason,
)
from kvtide.engines.openai.refusal import Refusal, body_of, refusal_of
from kvtide.errors import KvtideError

log = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"


class Reply:
    """An ASGI application for one call. `refused` makes the answer to a call that failed before it was answered."""

    def __init__(
        self,
        answering: Answering,
        model: str,
        refused: Callable[[KvtideError], Response],
        on_end: Callable[[], None],
    ) -> None:
        self._answering = answering
        self._is_chat = answering.task.is_chat
        self._model = model
        self._refused = refused
        self._on_end = on_end
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created_s = int(time.time())
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            work = self._stream(send) if self._answering.task.is_stream else self._whole(scope, receive, send)
            await _unless_gone(receive, work)
        except Exception as error:
            failure = _failure(error)
            if self._has_begun:
                await self._send(send, _event(body_of(refusal_of(failure))) + _DONE, is_last=True)
            else:
                await self._refused(failure)(scope, receive, send)
        finally:
            self._answering.close()
            self._on_end()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: dict[int, list[str]] = {}
        finishes: dict[int, FinishReason | None] = {}
        async for reader, text in self._answering.pieces():
            texts.setdefault(reader.index, []).append(text)
            finishes[reader.index] = reader.finish
        choices = [self._choice(index, "".join(texts[index]), finishes[index]) for index in sorted(texts)]
        answer = Answer(
            id=self._id,
            object="chat.completion" if self._is_chat else "text_completion",
            created=self._created_s,
            model=self._model,
            choices=choices,
            usage=self._answering.usage(),
            kvtide=self._answering.kvtide(),
        )
        headers = {"Cache-Control": "no-store", "X-Request-Id": self._id}
        response = Response(msgspec.json.encode(answer), 200, headers, "application/json")
        self._has_begun = True
        await response(scope, receive, send)

    def _choice(self, index: int, text: str, finish: FinishReason | None) -> Choice:
        if self._is_chat:
            return ChatChoice(index=index, message=ChatMessage(content=text), finish_reason=finish)
        return CompletionChoice(index=index, text=text, finish_reason=finish)

    # Streams -------------------------------------------------------------------------------------------------

    async def _stream(self, send: Send) -> None:
        """The status is sent with the first piece: an engine that fails before it is still an honest 500."""
        async for reader, text in self._answering.pieces():
            if not self._has_begun:
                await self._begin(send)
            if text:
                await self._send(send, self._chunk([self._piece(reader, text)]))
            if reader.finish is not None:
                await self._send(send, self._chunk([self._piece(reader, None)]))
        last = self._chunk([], is_usage=True) if self._answering.task.has_usage else b""
        await self._send(send, last + _DONE, is_last=True)

    async def _begin(self, send: Send) -> None:
        self._has_begun = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # for proxies: pass it on as it comes
            (b"x-request-id", self._id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._is_chat:
            delta = Delta(role="assistant", content="")
            await self._send(send, self._chunk([ChatDelta(index=0, delta=delta, finish_reason=None)]))

    def _piece(self, reader: Reader, text: str | None) -> Choice:
        """A piece of text, or (None) the end."""
        finish = reader.finish if text is None else None
        if self._is_chat:
            delta = Delta() if text is None else Delta(content=text)
            return ChatDelta(index=reader.index, delta=delta, finish_reason=finish)
        return CompletionChoice(index=reader.index, text=text or "", finish_reason=finish)

    def _chunk(self, choices: list[Choice], *, is_usage: bool = False) -> bytes:
        answer = Answer(
            id=self._id,
            object="chat.completion.chunk" if self._is_chat else "text_completion",
            created=self._created_s,
            model=self._model,
            choices=choices,
        )
        if is_usage:
            usage, kvtide = self._answering.usage(), self._answering.kvtide()
            answer = msgspec.structs.replace(answer, usage=usage, kvtide=kvtide)
        elif self._answering.task.has_usage:
            answer = msgspec.structs.replace(answer, usage=None)
        return _event(answer)

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _event(data: object) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _failure(error: Exception) -> KvtideError:
    if isinstance(error, KvtideError):
        return error
    log.error("engine.reply_failed", exc_info=error)
    return Refusal(500, "internal_error", "the server made a mistake with this request; its log says more")


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do it, as long as the client is there."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
