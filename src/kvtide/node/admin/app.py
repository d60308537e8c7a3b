# SPDX-License-Identifier: Apache-2.0
"""From HTTP to calls of the desk and back: who calls, what he sends, which thread does it, what goes into the audit.

Bodies, waits and calls under way are bounded. Errors are JSON, and say what to do.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtide.errors import Busy, KvtideError
from kvtide.node.admin.audit import AuditLog, shown
from kvtide.node.admin.desk import Desk
from kvtide.node.admin.gate import Caller, Gate
from kvtide.node.admin.openapi import document
from kvtide.node.admin.refusal import ErrorAnswer, ErrorBody, Refusal, invalid, status_of
from kvtide.node.admin.routes import CALLS, Call
from kvtide.observe.fault_log import FaultLog
from kvtide.observe.metrics import CONTENT_TYPE

log = logging.getLogger(__name__)
faults = FaultLog(log)

T = TypeVar("T")

BODY_BYTES_MAX = 4 << 20
_BODY_S = 10.0  # to send it
_THREADS = 4  # for calls that are done at once, and as many again for those that may wait
_WAITING_MAX = 32  # calls that wait for a thread
# How much of what stands in a path goes into the audit log: a name, or a pin, but no key that somebody put there.
_WORD_CHARS = {"name": 80, "group": 80, "id": 16}
_NOBODY = Caller("nobody", "reader", frozenset())
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class App:
    """The ASGI application of one node."""

    def __init__(self, desk: Desk, gate: Gate, audit: AuditLog, *, is_metrics_open: bool) -> None:
        self._desk = desk
        self._gate = gate
        self._audit = audit
        self._is_metrics_open = is_metrics_open
        self._fast: CapacityLimiter | None = None  # made where the event loop runs
        self._slow: CapacityLimiter | None = None
        self._document = document(CALLS)
        routes = [Route(call.path, partial(self._answer, call), methods=[call.method]) for call in CALLS]
        routes.append(Route("/metrics", self._metrics))
        routes.append(Route("/openapi.json", self._openapi))
        handlers = {404: _no_route, 405: _no_method}
        self._app = Starlette(routes=routes, exception_handlers=handlers)
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http":
            host = next((value for name, value in scope["headers"] if name == b"host"), b"")
            try:
                self._gate.check_host(host.decode("latin-1"))
            except Refusal as refusal:
                app = _refused(refusal)
        await app(scope, receive, send)

    # Calls -------------------------------------------------------------------------------------------------

    async def _answer(self, call: Call, request: Request) -> Response:
        caller = _NOBODY
        arguments: dict[str, object] = {name: word[: _WORD_CHARS[name]] for name, word in request.path_params.items()}
        try:
            if call.role is not None:
                caller = self._gate.admit(request.headers.get("authorization"))
                self._gate.check_role(caller, call.role, is_for_tenants=call.is_for_tenants)
            body = [] if call.request is None else [decode(call.request, await _read_body(request))]
            arguments |= shown(body[0]) if body else {}
            work = partial(call.handle, self._desk, caller, *body, **request.path_params)
            # What is open to all takes no locks, and answers whatever the threads are busy with.
            answer = await self._in_thread(work, is_slow=call.is_slow) if call.role else work()
        except KvtideError as error:
            if status_of(error) == 401:
                faults.warn("admin.denied", verb=call.verb, address=_address(request), kind=error.kind)
            else:
                await self._record(call, caller, request, arguments, error.kind)
            return _refused(error)
        except ClientDisconnect:
            return _refused(Refusal(400, "gone", "the body ended early: send all of it"))
        except Exception:
            log.exception("admin.call_failed verb=%s", call.verb)
            await self._record(call, caller, request, arguments, "error")
            return _refused(Refusal(500, "error", "the service made a mistake with this call; its log says more"))
        await self._record(call, caller, request, arguments, "ok")
        return Response(msgspec.json.encode(answer), call.success, _HEADERS, "application/json")

    async def _record(
        self, call: Call, caller: Caller, request: Request, arguments: dict[str, object], result: str
    ) -> None:
        if call.is_change:
            log.info("admin.changed verb=%s who=%s result=%s", call.verb, caller.name, result)
            write = partial(self._audit.write, caller.name, _address(request), call.verb, arguments, result)
            await anyio.to_thread.run_sync(write)

    async def _metrics(self, request: Request) -> Response:
        try:
            if not self._is_metrics_open:
                caller = self._gate.admit(request.headers.get("authorization"))
                self._gate.check_role(caller, "reader", is_for_tenants=False)
            text = await self._in_thread(self._desk.metrics, is_slow=False)
        except KvtideError as error:
            return _refused(error)
        except Exception:
            log.exception("admin.call_failed verb=metrics")
            return _refused(Refusal(500, "error", "the service made a mistake with this call; its log says more"))
        return Response(text, 200, _HEADERS | {"Content-Type": CONTENT_TYPE})

    async def _openapi(self, request: Request) -> Response:
        return Response(self._document, 200, _HEADERS, "application/json")

    async def _in_thread(self, work: Callable[[], T], *, is_slow: bool) -> T:
        """Slow calls have threads of their own: they must not keep anybody from looking at the status."""
        if self._fast is None or self._slow is None:
            self._fast, self._slow = CapacityLimiter(_THREADS), CapacityLimiter(_THREADS)
        limiter = self._slow if is_slow else self._fast
        if limiter.statistics().tasks_waiting >= _WAITING_MAX:
            raise Busy("too many calls are under way: try again")
        return await anyio.to_thread.run_sync(work, limiter=limiter)


def decode(request: type[T], body: bytes) -> T:
    """The body of a call. Raises Refusal: 400 for what is no JSON, 422 for what does not fit, with what would."""
    try:
        return msgspec.json.decode(body or b"{}", type=request)
    except msgspec.ValidationError as error:
        message = str(error)
        if found := _UNKNOWN_FIELD.search(message):
            known = sorted(_fields(request))
            near = get_close_matches(found[1], known, 1)
            mend = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}"
            raise invalid(f"`{found[1][:80]}` is no field of this call; {mend}") from None
        raise invalid(message) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refusal(400, "not_json", "the body is no JSON: send an object as /openapi.json describes it") from None


def _fields(kind: object) -> set[str]:
    """All names that may stand in a body, those of its pieces included."""
    names: set[str] = set()
    waiting = [msgspec.inspect.type_info(kind)]
    while waiting:
        info = waiting.pop()
        match info:
            case msgspec.inspect.Metadata():
                waiting.append(info.type)
            case msgspec.inspect.UnionType():
                waiting += info.types
            case msgspec.inspect.ListType():
                waiting.append(info.item_type)
            case msgspec.inspect.StructType():
                names |= {field.encode_name for field in info.fields}
                waiting += [field.type for field in info.fields]
    return names


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    with anyio.move_on_after(_BODY_S) as patience:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES_MAX:
                raise Refusal(413, "too_large", f"a body has at most {BODY_BYTES_MAX:,} bytes: send less at a time")
    if patience.cancelled_caught:
        raise Refusal(408, "too_slow", f"a body has {_BODY_S:g} seconds to arrive: send it at once")
    return bytes(body)


def _refused(error: KvtideError) -> Response:
    status = status_of(error)
    body = msgspec.json.encode(ErrorAnswer(ErrorBody(error.kind, str(error))))
    headers = _HEADERS | ({"WWW-Authenticate": "Bearer"} if status == 401 else {})
    return Response(body, status, headers, "application/json")


async def _no_route(_request: Request, _error: Exception) -> Response:
    return _refused(Refusal(404, "no_route", "there is no such call: /openapi.json lists all"))


async def _no_method(_request: Request, _error: Exception) -> Response:
    return _refused(Refusal(405, "no_method", "this call takes another method: /openapi.json lists all"))


def _address(request: Request) -> str:
    return request.client.host if request.client else ""
