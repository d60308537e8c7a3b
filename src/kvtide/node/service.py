# SPDX-License-Identifier: Apache-2.0
"""The service's loop: one thread, one epoll, no request that waits for a medium.

Each turn reads what has arrived, then answers one request of every session that has any: a client that sends
many at once waits for its own, not the others for it. Requests beyond a session's bound are refused at once.
Nobody is read from while much of what he sent was not looked at yet.

What ends a session: its goodbye, the end of its process, or a breach of the protocol. Only the first two give
back what it held; a process that was cut off may still be copying, so its slots wait until it is dead.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import deque

from kvtide import __version__, wire
from kvtide.config import Settings
from kvtide.errors import Busy, KvtideError, ProtocolError
from kvtide.keys import Digest
from kvtide.node.domains import Domains
from kvtide.node.doorkeeper import Doorkeeper
from kvtide.node.meter import Meter
from kvtide.node.peer import NO_FD, peer_of
from kvtide.node.requests import Requests
from kvtide.node.session import Seat, Session
from kvtide.observe.fault_log import FaultLog
from kvtide.spin import Spin

log = logging.getLogger(__name__)
faults = FaultLog(log)

_LATE_S = 0.8  # for a login, or for the rest of a message: cut off within a second, housekeeping included
_TIDY_S = 0.1
_STRANGERS_MAX = 64  # connections that have not logged in
_TAKEN_MAX = 256  # messages of one session in one turn: a few milliseconds, though thousands of them fit into a read
_QUEUED_BYTES_MAX = 1 << 20  # of one session's requests, beyond which no more are taken until some are answered
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_OP_OF = {
    wire.OpenScope: "open_scope",
    wire.Find: "match",
    wire.MatchAndLease: "match_and_lease",
    wire.Fetch: "fetch",
    wire.Prefetch: "prefetch",
    wire.Return: "return",
    wire.Reserve: "reserve",
    wire.Publish: "publish",
    wire.Clear: "clear",
    wire.AskStats: "stats",
    wire.ReportPrefill: "report_prefill",
    wire.Bye: "bye",
    wire.Keep: "keep",
}
OPS = frozenset(_OP_OF.values())
_AT_ONCE = (wire.Return, wire.ReportPrefill, wire.Bye, wire.Keep)  # have no answer, and so no place in the line


class Service:
    """Serves a listening socket until `stop`. `stop`, `sessions` and `meter` may be used from other threads."""

    def __init__(self, settings: Settings, domains: Domains, doorkeeper: Doorkeeper, listener: socket.socket) -> None:
        self.meter = Meter()
        self._settings = settings
        self._domains = domains
        self._doorkeeper = doorkeeper
        self._listener = listener
        self._requests = Requests(domains, settings.node.requests_max, self._earlier)
        self._instance = secrets.randbits(48)
        self._epoll = select.epoll()
        self._spin = Spin()
        self._wake_lock = threading.RLock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sessions: dict[int, Session] = {}  # by the fd of the connection
        self._processes: dict[int, Session] = {}  # by the fd of the process, until it is dead
        self._line: deque[Session] = deque()  # with requests to answer
        self._unread: deque[Session] = deque()  # with messages that were not looked at yet
        self._last_number = 0
        self._is_stopping = False
        self._tidy_at_s = 0.0
        listener.setblocking(False)
        self._epoll.register(listener.fileno(), _READ)
        self._epoll.register(self._wake, _READ)
        domains.on_complete = self.wake

    @property
    def sessions(self) -> list[Session]:
        """Those that are logged in."""
        return [session for session in list(self._sessions.values()) if session.principal is not None]

    @property
    def lingering(self) -> int:
        """Sessions that ended without a goodbye while their process lives on: what they held is out of use."""
        return sum(session.is_over for session in list(self._processes.values()))

    @property
    def is_serving(self) -> bool:
        """The loop has come around within the last five seconds, and nobody has asked it to stop."""
        return not self._is_stopping and time.monotonic() < self._tidy_at_s + 5.0

    def stop(self) -> None:
        self._is_stopping = True
        self.wake()

    def wake(self) -> None:
        """Also a signal during the drain calls this: by then the number may be another file's."""
        with self._wake_lock:
            if self._wake != NO_FD:
                os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Serve. Returns after `stop`, with every session ended."""
        try:
            while not self._is_stopping:
                for fd, events in self._spin.wait(self._epoll.poll, self._rest_s()):
                    self._handle_event(fd, events)
                for _ in range(len(self._unread)):
                    self._take_some(self._unread.popleft())
                for _ in range(len(self._line)):
                    self._answer_next(self._line.popleft())
                if time.monotonic() >= self._tidy_at_s:
                    self._tidy()
        finally:
            for session in list(self._sessions.values()):
                self._end(session, "stopping")
            for session in list(self._processes.values()):
                # Without taking back what it holds: it may be copying, and its slots are not needed any more.
                self._unwatch(session)
            self._domains.on_complete = lambda: None
            self._epoll.close()
            with self._wake_lock:
                os.close(self._wake)
                self._wake = NO_FD

    def _rest_s(self) -> float:
        """How long there is nothing to do, unless somebody comes."""
        if self._line or self._unread:
            return 0.0
        return min(_TIDY_S, max(0.0, self._tidy_at_s - time.monotonic()))

    def _handle_event(self, fd: int, events: int) -> None:
        if (known := self._sessions.get(fd)) is not None:
            if events & _WRITE:
                known.flush()
                self._watch(known)
            if events & ~_WRITE and not known.is_paused:
                self._receive(known)
        elif fd == self._wake:
            os.eventfd_read(self._wake)
            for session in list(self._sessions.values()):
                if session.waiting:
                    self._answer_waiting(session)
        elif fd == self._listener.fileno():
            self._accept()
        elif fd in self._processes:
            self._process_died(self._processes[fd])

    # Coming ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # out of file descriptors, or the client has changed its mind
            faults.warn("node.accept_failed", error=error.strerror)
            return
        connection.setblocking(False)
        strangers = sum(session.principal is None for session in self._sessions.values())
        if strangers >= _STRANGERS_MAX:
            _refuse(connection, Busy("too many clients are logging in at this moment: try again"))
            connection.close()
            self.meter.cut_off["busy"] += 1
            return
        try:
            peer = peer_of(connection)
        except OSError as error:  # without a descriptor of its process nobody would know when that is over
            faults.warn("node.accept_failed", error=error.strerror)
            _refuse(connection, Busy("the service has no file descriptor left: raise its limit (LimitNOFILE)"))
            connection.close()
            return
        self._last_number += 1
        session = Session(self._last_number, connection, peer, time.monotonic())
        self._sessions[session.fd] = session
        self._epoll.register(session.fd, _READ)

    def _log_in(self, session: Session, hello: wire.Hello) -> None:
        if hello.version != wire.VERSION:
            raise ProtocolError(
                f"the service (kvtide {__version__}) speaks version {wire.VERSION} and the client (kvtide "
                f"{ascii(hello.software[:32])[1:-1]}) version {hello.version}: install the same kvtide on both sides"
            )
        principal = self._doorkeeper.admit(session.peer.uid, hello.token, hello.tenant)
        everybody = {*self._sessions.values(), *self._processes.values()}  # those that linger, too: each is a file
        here = sum(each.principal is not None and each.principal.tenant == principal.tenant for each in everybody)
        if here >= self._settings.node.sessions_max:
            raise Busy(f"{here} sessions are open: raise node.sessions_max, or close some")
        session.seats = self._seats(principal.tenant, principal.role != "reader")
        arenas = [wire.ArenaInfo(seat.domain.store.dram.bytes_max, seat.is_writable) for seat in session.seats.values()]
        welcome = wire.Welcome(
            wire.VERSION,
            __version__,
            session.number,
            principal.tenant,
            principal.role,
            tuple(arenas),
            session.seat.domain.store.request_bytes_max,
            self._settings.node.requests_max,
            self._settings.leases.fetch_s,
            self._instance,
            session.seat.domain.store.tier_names,
        )
        session.welcome(welcome, [seat.domain.arena_fd(seat.is_writable) for seat in session.seats.values()])
        session.principal = principal  # from here on its slots are its own until its process ends
        self.meter.sessions_total += 1
        if session.peer.pidfd != NO_FD:
            self._processes[session.peer.pidfd] = session
            self._epoll.register(session.peer.pidfd, _READ)
        log.info(
            "node.session_began session=%d tenant=%s role=%s pid=%d",
            session.number,
            principal.tenant,
            principal.role,
            session.peer.pid,
        )

    def _seats(self, tenant: str, is_writable: bool) -> dict[Digest, Seat]:
        own = self._domains.tenants[tenant]
        seats = {own.tenant.digest: Seat(own, 0, is_writable)}
        configured = self._settings.tenants.get(tenant)
        for name in configured.reads if configured else tuple(self._domains.groups):
            group = self._domains.groups[name]
            seats[group.tenant.digest] = Seat(group, len(seats), False)
        return seats

    # Asking and answering ----------------------------------------------------------------------------------

    def _receive(self, session: Session) -> None:
        try:
            messages = session.receive(time.monotonic())
            if messages is None:
                self._end(session, "closed")
                return
        except KvtideError as error:
            self._cut_off(session, error)
            return
        session.unread.extend(messages)
        self._take_some(session)

    def _take_some(self, session: Session) -> None:
        """Look at messages that have arrived; what is too much for one turn waits, and with it whatever comes after."""
        try:
            for _ in range(_TAKEN_MAX):
                if session.is_over or not session.unread or session.queued_bytes > _QUEUED_BYTES_MAX:
                    break
                body = session.unread.popleft()
                if session.principal is None:
                    self._log_in(session, wire.decode_hello(body))
                else:
                    self._take(session, wire.decode_request(body), len(body))
        except KvtideError as error:
            self._cut_off(session, error)
        if session.is_over:
            return
        if session.unread:
            self._unread.append(session)
        if session.is_paused != bool(session.unread):
            session.is_paused = bool(session.unread)
            if session.late_at_s is not None:  # while nobody reads from it, it cannot be late
                session.late_at_s = time.monotonic()
            self._watch(session)

    def _watch(self, session: Session) -> None:
        wanted = (0 if session.is_paused else _READ) | (_WRITE if session.has_unsent else 0)
        self._epoll.modify(session.fd, wanted)

    def _take(self, session: Session, request: wire.Request, size_bytes: int) -> None:
        if isinstance(request, _AT_ONCE):
            self._answer(session, request)
            if isinstance(request, wire.Bye):
                self._end(session, "goodbye")
        elif self._is_too_much(session, request):
            error = Busy(f"{self._settings.node.requests_max} requests are under way: wait for answers first")
            self.meter.answered(_OP_OF[type(request)], error.kind, 0.0)
            self._send(session, _refusal(request.id, error))
        else:
            if not session.requests:
                self._line.append(session)
            session.queue(request, size_bytes)

    def _is_too_much(self, session: Session, request: wire.Request) -> bool:
        if isinstance(request, wire.Publish):  # gives a lease back; more of them than leases is nobody's honest need
            return len(session.requests) >= self._settings.node.requests_max + wire.LEASES_MAX
        return len(session.requests) + len(session.waiting) >= self._settings.node.requests_max

    def _answer_next(self, session: Session) -> None:
        if session.is_over:
            return
        request = session.next_request()
        if session.requests:
            self._line.append(session)
        self._answer(session, request)

    def _answer(self, session: Session, request: wire.Request) -> None:
        op, began_s = _OP_OF[type(request)], time.perf_counter()
        result = "ok"
        answer: wire.Answer | None
        try:
            answer = self._requests.handle(session, request)
            if answer is None and not isinstance(request, _AT_ONCE):
                self._tidy_by_deadline()
                return  # it waits for its ticket, and is counted then
        except ProtocolError as error:
            self.meter.answered(op, error.kind, time.perf_counter() - began_s)
            self._cut_off(session, error)
            return
        except KvtideError as error:
            result = error.kind
            answer = None if isinstance(request, _AT_ONCE) else _refusal(request.id, error)
        except Exception:
            self._failed(session, op, began_s)
            return
        self.meter.answered(op, result, time.perf_counter() - began_s)
        if answer is not None:
            self._send(session, answer)

    def _tidy_by_deadline(self) -> None:
        """Come back in time for the next fetch whose deadline passes: its client waits no longer than that."""
        next_s = min(domain.store.next_deadline_s() for domain in self._domains)
        self._tidy_at_s = min(self._tidy_at_s, time.monotonic() + next_s)

    def _failed(self, session: Session, op: str, began_s: float) -> None:
        """A mistake of ours must not take the service from everybody else. It ends this session, loudly."""
        log.exception("node.request_failed op=%s session=%d", op, session.number)
        self.meter.answered(op, "error", time.perf_counter() - began_s)
        self._cut_off(session, ProtocolError("the service made a mistake with this request; its log says more"))

    def _answer_waiting(self, session: Session) -> None:
        done = [waiting for waiting in session.waiting if waiting.ticket.is_done]
        if not done:
            return
        session.waiting = [waiting for waiting in session.waiting if not waiting.ticket.is_done]
        for waiting in done:
            result = "ok"
            try:
                answer = waiting.answer(waiting.ticket.result)
            except KvtideError as error:
                result, answer = error.kind, _refusal(waiting.id, error)
            except Exception:
                self._failed(session, waiting.op, waiting.began_s)
                return
            self.meter.answered(waiting.op, result, time.perf_counter() - waiting.began_s)
            self._send(session, answer)

    def _send(self, session: Session, answer: wire.Answer) -> None:
        if session.is_over:
            return
        try:
            session.send(answer)
        except ProtocolError as error:
            self._cut_off(session, error)
            return
        if session.has_unsent:
            self._watch(session)

    # Going -------------------------------------------------------------------------------------------------

    def _cut_off(self, session: Session, error: KvtideError) -> None:
        if session.is_over:
            return
        faults.warn("node.cut_off", session=session.number, pid=session.peer.pid, kind=error.kind, error=error)
        self.meter.cut_off[error.kind] += 1
        if not session.has_unsent:
            session.send(_refusal(0, error))
        self._end(session, error.kind)

    def _end(self, session: Session, reason: str) -> None:
        """The connection is over. What it held comes back now only if nobody can be copying any more."""
        if session.is_over:
            return
        self._publish_rest(session)
        session.is_over = True
        session.requests.clear()
        session.unread.clear()
        del self._sessions[session.fd]
        self._epoll.unregister(session.fd)
        session.close_connection()
        if session.principal is not None:
            log.info("node.session_ended session=%d reason=%s", session.number, reason)
        # What waits was not told of any slot, so it is only what it holds that a living process may be copying.
        session.drop_ended()
        if session.has_said_bye or session.principal is None or session.peer.is_dead or not session.holdings:
            self._let_go(session)

    def _publish_rest(self, session: Session) -> None:
        """What was filled and handed in before the end of the connection is saved; nobody hears of it."""
        for request in session.requests:
            if isinstance(request, wire.Publish):
                try:
                    self._requests.handle(session, request)
                except KvtideError as error:
                    log.debug("node.late_publish_refused session=%d error=%s", session.number, error)

    def _earlier(self, session: Session, number: int) -> Session | None:
        """A session of the same process and tenant, by its number, whose connection was lost."""
        for earlier in self._processes.values():
            if earlier.number == number and earlier.peer.pid == session.peer.pid != 0:
                return earlier if earlier.principal == session.principal else None
        return None

    def _process_died(self, session: Session) -> None:
        self._end(session, "died")
        if session.peer.pidfd != NO_FD:
            self._let_go(session)

    def _let_go(self, session: Session) -> None:
        for seat in session.seats.values():
            seat.domain.store.forget(session.number)
        session.holdings.clear()
        session.waiting.clear()
        self._unwatch(session)

    def _unwatch(self, session: Session) -> None:
        if self._processes.pop(session.peer.pidfd, None) is not None:
            self._epoll.unregister(session.peer.pidfd)
        session.peer.close()

    def _tidy(self) -> None:
        now_s = time.monotonic()
        self._tidy_at_s = now_s + _TIDY_S
        for domain in self._domains:
            domain.store.poll()  # ends what is past its time
        self._tidy_by_deadline()
        for session in list(self._processes.values()):
            if session.is_over and not session.holdings:  # its process has returned all of it through a later one
                self._let_go(session)
        for session in list(self._sessions.values()):
            if session.late_at_s is not None and not session.is_paused and now_s - session.late_at_s > _LATE_S:
                what = "log in" if session.principal is None else "finish a message"
                self._cut_off(session, ProtocolError(f"a client has one second to {what}"))


def _refusal(id: int, error: KvtideError) -> wire.Refused:
    return wire.Refused(id, error.kind, str(error)[:1024])


def _refuse(connection: socket.socket, error: KvtideError) -> None:
    """Tell a client that is not let in at all, if it listens."""
    try:
        connection.send(wire.encode(_refusal(0, error)))
    except OSError as reason:
        log.debug("node.refusal_not_sent error=%s", reason.strerror)
