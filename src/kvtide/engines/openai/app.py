# SPDX-License-Identifier: Apache-2.0
"""From HTTP to the engine and back. Bodies, waits and calls under way are bounded; every error is OpenAI's JSON."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtide.engines.openai.answering import Answering
from kvtide.engines.openai.answers import Detokenized, Health, Model, Models, Tokenized
from kvtide.engines.openai.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
    check_messages,
    read,
)
from kvtide.engines.openai.gate import OPEN_PATHS, Gate
from kvtide.engines.openai.meter import Meter
from kvtide.engines.openai.refusal import Refusal, body_of, invalid, refusal_of
from kvtide.engines.openai.reply import Reply
from kvtide.engines.openai.task import Task, task_of
from kvtide.engines.openai.translator import Translator
from kvtide.errors import Busy, Closed, KvtideError, Unavailable
from kvtide.observe.catalogue import ENGINE_CATALOGUE
from kvtide.observe.metrics import CONTENT_TYPE, expose

if TYPE_CHECKING:
    from kvtide.engines.transformers.engine import Engine

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[ASGIApp]]

_BODY_BYTES_OF_TOKEN = 32  # several times what a token takes, as text or as a number
_BODY_BYTES_MIN, _BODY_BYTES_MAX = 1 << 20, 8 << 20
_UNREAD_BYTES_MAX = 64 << 20  # of a body that is too large: who is cut off while sending does not hear why
_BODY_S = 30.0  # to send it
_THREADS = 2  # that tokenise
_TOKENISING_MAX = 256  # calls that wait for one of them: as many as wait for an engine
_CALLS_MAX = 512  # under way
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model, as clients know it."""

    name: str
    engine: Engine
    translator: Translator
    dtype: str
    created_s: int


class App:
    """The ASGI application of one engine."""

    def __init__(self, served: Served, gate: Gate) -> None:
        self._served = served
        self._gate = gate
        self._meter = Meter(served.name, served.dtype)
        self._body_bytes_max = min(
            max(served.engine.context_tokens * _BODY_BYTES_OF_TOKEN, _BODY_BYTES_MIN), _BODY_BYTES_MAX
        )
        self._threads: CapacityLimiter | None = None  # made where the event loop runs
        self._calls = 0
        self._answerings: set[Answering] = set()
        self._is_ending = False
        routes = [
            self._route("POST", "/v1/completions", partial(self._generate, CompletionRequest)),
            self._route("POST", "/v1/chat/completions", partial(self._generate, ChatRequest)),
            self._route("GET", "/v1/models", self._models),
            self._route("GET", "/v1/models/{name:path}", self._model),
            self._route("POST", "/tokenize", self._tokenize),
            self._route("POST", "/detokenize", self._detokenize),
            self._route("GET", "/health", self._health),
            self._route("GET", "/metrics", self._metrics),
        ]
        self._app = Starlette(routes=routes, exception_handlers={404: self._no_route, 405: self._no_method})
        self._app.router.redirect_slashes = False

    def end(self) -> None:
        """Abort what is under way; health says no from now on. From any thread."""
        self._is_ending = True
        for answering in list(self._answerings):
            answering.abort()

    def stop_admitting(self) -> None:
        """Let what is under way go on, and turn away what comes now. From any thread."""
        self._is_ending = True

    # Around every call ---------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn was told so"
        headers = Headers(scope=scope)
        try:
            self._gate.check(scope["path"], headers.get("host", ""), headers.get("authorization", ""))
            if self._calls >= _CALLS_MAX and scope["path"] not in OPEN_PATHS:
                raise Busy(f"{self._calls} calls are under way: try again later")
        except KvtideError as error:
            await self._refused(error)(scope, receive, send)
            return
        self._calls += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._calls -= 1

    def _route(self, method: str, path: str, handle: Handler) -> Route:
        return Route(path, partial(self._answer, handle), methods=[method])

    async def _answer(self, handle: Handler, request: Request) -> ASGIApp:
        try:
            return await handle(request)
        except KvtideError as error:
            return self._refused(error)
        except ClientDisconnect:
            return Response(status_code=400)  # for nobody
        except Exception:
            log.exception("engine.call_failed path=%s", request.url.path)
            return self._refused(Refusal(500, "internal_error", "the server made a mistake; its log says more"))

    def _refused(self, error: KvtideError) -> Response:
        refusal = refusal_of(error)
        self._meter.refused[str(refusal.status)] += 1
        headers = dict(_HEADERS)
        if refusal.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if refusal.status in (429, 503):
            headers["Retry-After"] = "1"
        return Response(msgspec.json.encode(body_of(refusal)), refusal.status, headers, "application/json")

    async def _no_route(self, request: Request, _error: Exception) -> Response:
        return self._refused(Refusal(404, "unknown_url", f"there is no {request.method} {request.url.path[:200]} here"))

    async def _no_method(self, request: Request, _error: Exception) -> Response:
        sentence = f"{request.url.path[:200]} does not take {request.method[:20]}: use the other of GET and POST"
        return self._refused(Refusal(405, "method_not_supported", sentence))

    # Calls ---------------------------------------------------------------------------------------------------

    async def _generate(self, kind: type[Sampled], request: Request) -> ASGIApp:
        if self._is_ending:
            raise Closed("this server is ending: ask another one")
        task = await self._in_thread(partial(self._task, kind, await self._read_body(request)))
        served = self._served
        answering = Answering(task, served.engine, served.translator, self._meter)
        self._answerings.add(answering)
        return Reply(answering, served.name, self._refused, partial(self._answerings.discard, answering))

    def _task(self, kind: type[Sampled], body: bytes) -> Task:
        asked = read(kind, body)
        self._check_model(asked.model)
        return task_of(asked, self._served.translator, self._served.engine.context_tokens)

    async def _models(self, _request: Request) -> Response:
        return _json(Models(data=[self._shown()]))

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _json(self._shown())

    async def _tokenize(self, request: Request) -> Response:
        body = await self._read_body(request)
        return await self._in_thread(partial(self._tokenized, body))

    async def _detokenize(self, request: Request) -> Response:
        body = await self._read_body(request)
        return await self._in_thread(partial(self._detokenized, body))

    def _tokenized(self, body: bytes) -> Response:
        asked = read(TokenizeRequest, body)
        self._check_model(asked.model)
        translator = self._served.translator
        if (asked.prompt is None) == (asked.messages is None):
            raise invalid("send either prompt or messages", "prompt")
        if asked.messages is not None:
            check_messages(asked.messages)
            is_open = asked.add_generation_prompt is not False
            tokens = translator.encode_chat(asked.messages, add_generation_prompt=is_open)
        else:
            adds = asked.add_special_tokens is not False
            tokens = translator.encode(asked.prompt or "", add_special_tokens=adds)
        return _json(Tokenized(count=len(tokens), max_model_len=self._served.engine.context_tokens, tokens=tokens))

    def _detokenized(self, body: bytes) -> Response:
        asked = read(DetokenizeRequest, body)
        self._check_model(asked.model)
        return _json(Detokenized(prompt=self._served.translator.decode_all(asked.tokens)))

    async def _health(self, _request: Request) -> Response:
        if self._is_ending:
            raise Closed("this server is ending")
        if not self._served.engine.is_alive:
            raise Unavailable("the engine has stopped working: restart it; its log says why")
        return _json(Health())

    async def _metrics(self, _request: Request) -> Response:
        text = expose(partial(self._meter.samples, self._served.engine), ENGINE_CATALOGUE)
        return Response(text, 200, _HEADERS | {"Content-Type": CONTENT_TYPE})

    # What they need ------------------------------------------------------------------------------------------

    def _check_model(self, name: str | None) -> None:
        if name and name != self._served.name:
            sentence = f"the model {name[:200]!r} is not here: this server has {self._served.name!r}"
            raise Refusal(404, "model_not_found", sentence, "model")

    def _shown(self) -> Model:
        served = self._served
        return Model(id=served.name, created=served.created_s, max_model_len=served.engine.context_tokens)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._threads is None:
            self._threads = CapacityLimiter(_THREADS)
        is_full = self._threads.available_tokens < 1
        if is_full and self._threads.statistics().tasks_waiting >= _TOKENISING_MAX:
            raise Busy("too many prompts wait to be tokenised: try again later")
        return await anyio.to_thread.run_sync(work, limiter=self._threads)

    async def _read_body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "unsupported_media_type", "send JSON, with the header `Content-Type: application/json`")
        body, size = bytearray(), 0
        with anyio.move_on_after(_BODY_S) as patience:
            async for piece in request.stream():
                size += len(piece)
                if size <= self._body_bytes_max:
                    body += piece
                elif size > _UNREAD_BYTES_MAX:
                    break
        if patience.cancelled_caught:
            raise Refusal(408, "too_slow", f"a body has {_BODY_S:g} seconds to arrive: send it at once")
        if size > self._body_bytes_max:
            sentence = f"the body has more than {self._body_bytes_max:,} bytes, which no prompt that fits needs"
            raise Refusal(413, "request_too_large", sentence)
        return bytes(body)


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), 200, _HEADERS, "application/json")
