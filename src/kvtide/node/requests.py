# SPDX-License-Identifier: Apache-2.0
"""From a message to a call of the store, and from its result to the answer.

Everything that a client says is checked here: whose shelves they are, what its role allows, and every number
that goes on into the store. What the store cannot do at once stays with the session until its ticket is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvtide import wire
from kvtide.config import Role
from kvtide.errors import Busy, Denied, ProtocolError, QuotaExceeded, Rejected
from kvtide.frame import HEADER_BYTES
from kvtide.keys import Digest, Key, Keys, Shelf
from kvtide.layout import Layout
from kvtide.node.domains import Domains
from kvtide.node.session import Seat, Session, Waiting
from kvtide.node.sharing import find
from kvtide.tickets import Fetched, Leased, Match, Plan, Reservation, Ticket

T = TypeVar("T")
Handler = Callable[["Requests", Session, Any], wire.Answer | None]

_WRITERS: tuple[Role, ...] = ("engine", "operator")


class Requests:
    """Answers requests of sessions that are logged in. Called by the service's loop only."""

    def __init__(
        self, domains: Domains, requests_max: int, earlier: Callable[[Session, int], Session | None] = lambda *_: None
    ) -> None:
        """`earlier` finds a session of the same process, by its number, that was lost without a goodbye."""
        self._domains = domains
        self._earlier = earlier
        self._requests_max = requests_max

    def handle(self, session: Session, request: wire.Request) -> wire.Answer | None:
        """The answer, or None: there is none, or it comes later. Raises KvtideError for what is refused."""
        return _HANDLERS[type(request)](self, session, request)

    # Finding and reading -----------------------------------------------------------------------------------

    def _open_scope(self, session: Session, request: wire.OpenScope) -> wire.Answer:
        seat = session.seat if not request.group else self._group_seat(session, request.group)
        scope = seat.domain.tenant.scope(Digest(request.namespace), Digest(request.scope))
        return wire.ScopeOpened(request.id, scope.tenant, scope.root)

    def _group_seat(self, session: Session, group: str) -> Seat:
        domain = self._domains.groups.get(group)
        seat = session.seats.get(domain.tenant.digest) if domain else None
        if seat is None:  # in the same words whether there is such a group or not
            raise Denied(f"this tenant does not read share group {group!r}: have it added to tenants.*.reads")
        return seat

    def _find(self, session: Session, request: wire.Find) -> wire.Answer | None:
        seat, shelves = self._shelves(session, request.shelves)
        ticket = seat.domain.store.match(shelves, _keys(request.keys, len(shelves)))

        def answer(match: Match) -> wire.Answer:
            sizes = tuple(wire.pack_numbers(each[: match.blocks]) for each in match.frame_bytes)
            tiers = tuple(each[: match.blocks].tobytes() for each in match.tiers)
            return wire.Found(request.id, match.blocks, sizes, tiers)

        return self._when_done(session, request.id, "match", ticket, answer)

    def _match_and_lease(self, session: Session, request: wire.MatchAndLease) -> wire.Answer | None:
        seat, shelves = self._shelves(session, request.shelves)
        self._check_holdings(session, len(shelves))
        ticket = seat.domain.store.match_and_lease(
            shelves,
            _keys(request.keys, len(shelves)),
            first_page=request.first_page,
            pages_per_block=request.pages_per_block,
            deadline_s=min(request.deadline_s, self._domains.settings.leases.fetch_s),
            holder=session.number,
        )

        def answer(leased: Leased) -> wire.Answer:
            for shelf, fetched in zip(shelves, leased.fetched, strict=True):
                seat.domain.usage.served(shelf, fetched)
            pieces = tuple(_piece(session, seat, fetched) for fetched in leased.fetched)
            return wire.PiecesLeased(request.id, leased.matched_blocks, leased.first_block, pieces)

        return self._when_done(session, request.id, "match_and_lease", ticket, answer)

    def _fetch(self, session: Session, request: wire.Fetch) -> wire.Answer | None:
        self._check_holdings(session, 1)
        seat, plan = self._plan(session, request, request.first_page)
        store, deadline_s = seat.domain.store, min(request.deadline_s, self._domains.settings.leases.fetch_s)
        if request.pin_s:
            self._check_role(session, ("operator",), "pin blocks")
            if not seat.is_writable:
                raise Denied("share groups are pinned by the service's operators, not by their readers")
            ticket = store.pin(plan, ttl_s=request.pin_s, deadline_s=deadline_s, holder=session.number)
        else:
            ticket = store.fetch(plan, deadline_s=deadline_s, holder=session.number)

        def answer(fetched: Fetched) -> wire.Answer:
            seat.domain.usage.served(plan.match.shelves[0], fetched)
            return wire.PieceFetched(request.id, _piece(session, seat, fetched))

        return self._when_done(session, request.id, "fetch", ticket, answer)

    def _prefetch(self, session: Session, request: wire.Prefetch) -> wire.Answer | None:
        seat, plan = self._plan(session, request, 0)
        return wire.Counted(request.id, seat.domain.store.prefetch(plan).result)

    def _return(self, session: Session, request: wire.Return) -> None:
        holder = self._earlier(session, request.session) if request.session else session
        if holder is not None:
            _give_back(holder, request.leases)

    def _keep(self, session: Session, request: wire.Keep) -> None:
        if (earlier := self._earlier(session, request.session)) is not None:
            _give_back(earlier, set(earlier.holdings).difference(request.leases))

    # Writing -----------------------------------------------------------------------------------------------

    def _reserve(self, session: Session, request: wire.Reserve) -> wire.Answer:
        self._check_role(session, _WRITERS, "save blocks")
        self._check_holdings(session, 1)
        seat = self._seat(session, shelf := _shelf(request.shelf))
        if not seat.is_writable:
            raise Denied("share groups are filled by operators, not by engines")
        layout = Layout(request.layers, request.pages, request.page_tokens, request.page_bytes)
        bytes_max = seat.domain.store.dram.bytes_max_of(shelf)
        if HEADER_BYTES + layout.payload_bytes > bytes_max:
            raise QuotaExceeded(
                f"a block takes {HEADER_BYTES + layout.payload_bytes:,} bytes, but this tenant or scope may have "
                f"{bytes_max:,} in DRAM: raise its dram.bytes_max, or choose smaller blocks"
            )
        reservation = seat.domain.store.reserve(
            shelf,
            wire.unpack_keys(request.keys),
            layout,
            position=request.position,
            parent=Key(request.parent),
            holder=session.number,
        ).result
        lease = session.hold(seat, reservation) if reservation.lease is not None else 0
        outcomes = wire.pack_outcomes(reservation.outcomes)
        return wire.Reserved(request.id, lease, seat.arena, outcomes, wire.pack_numbers(reservation.slots.offsets))

    def _publish(self, session: Session, request: wire.Publish) -> wire.Answer:
        holding = session.holdings.get(request.lease)
        if holding is None or not isinstance(holding.what, Reservation):
            raise Rejected("this reservation is not held any more")
        which = None if request.which is None else _places(request.which, len(holding.what.keys))
        del session.holdings[request.lease]
        outcomes = holding.seat.domain.store.publish(holding.what, which).result
        return wire.Published(request.id, wire.pack_outcomes(outcomes))

    # The rest ----------------------------------------------------------------------------------------------

    def _clear(self, session: Session, request: wire.Clear) -> wire.Answer | None:
        self._check_role(session, ("operator",), "clear")
        domain = session.seat.domain
        namespace = None if request.namespace is None else Digest(request.namespace)
        prefix = None if request.prefix is None else Key(request.prefix)
        ticket = self._domains.clear_later(domain, namespace, prefix)

        def answer(result: int | Exception) -> wire.Answer:
            if isinstance(result, Exception):
                raise result
            return wire.Counted(request.id, result)

        return self._when_done(session, request.id, "clear", ticket, answer)

    def _ask_stats(self, session: Session, request: wire.AskStats) -> wire.Answer:
        return wire.Stats(request.id, msgspec.json.encode(session.seat.domain.own_stats()))

    def _report_prefill(self, session: Session, request: wire.ReportPrefill) -> None:
        self._check_role(session, _WRITERS, "report")
        session.seat.domain.usage.prefilled(Digest(request.namespace), request.tokens, request.seconds)

    def _bye(self, session: Session, request: wire.Bye) -> None:
        session.has_said_bye = True

    # What they have in common ------------------------------------------------------------------------------

    def _when_done(
        self, session: Session, id: int, op: str, ticket: Ticket[T], answer: Callable[[T], wire.Answer]
    ) -> wire.Answer | None:
        if ticket.is_done:
            return answer(ticket.result)
        session.waiting.append(Waiting(id, ticket, answer, op, time.perf_counter()))
        return None

    def _check_holdings(self, session: Session, more: int) -> None:
        if len(session.holdings) + len(session.waiting) + more > wire.LEASES_MAX:
            session.drop_ended()
        if len(session.holdings) + len(session.waiting) + more > wire.LEASES_MAX:
            raise Busy(f"{len(session.holdings)} leases are held already: return some first")

    def _check_role(self, session: Session, roles: Sequence[Role], what: str) -> None:
        assert session.principal is not None
        if session.principal.role not in roles:
            raise Denied(f"a {session.principal.role} may not {what}: that takes the role {' or '.join(roles)}")

    def _seat(self, session: Session, shelf: Shelf) -> Seat:
        seat = session.seats.get(shelf.tenant)
        if seat is None:
            raise Denied("this shelf is another tenant's: derive shelves from a scope that this service opened")
        return seat

    def _shelves(self, session: Session, packed: tuple[bytes, ...]) -> tuple[Seat, tuple[Shelf, ...]]:
        """Shelves of one domain: one request is one arena's."""
        if len(packed) == 1:
            shelf = _shelf(packed[0])
            return self._seat(session, shelf), (shelf,)
        shelves = tuple(map(_shelf, packed))
        if not shelves:
            raise ProtocolError("a request about no shelf")
        seats = {id(seat): seat for seat in (self._seat(session, shelf) for shelf in shelves)}
        if len(seats) > 1:
            raise Rejected("these shelves are of several tenants: ask for those of one at a time")
        return next(iter(seats.values())), shelves

    def _plan(self, session: Session, request: wire.Fetch | wire.Prefetch, first_page: int) -> tuple[Seat, Plan]:
        shelf = _shelf(request.shelf)
        seat = self._seat(session, shelf)
        keys, sizes = wire.unpack_keys(request.keys), wire.unpack_numbers(request.frame_bytes)
        tiers = np.frombuffer(request.tiers, np.int8)
        if not len(keys) == len(sizes) == len(tiers):
            raise ProtocolError("keys, sizes and tiers of a plan differ in number")
        store = seat.domain.store
        if len(keys):
            self._check_sizes(sizes, tiers, len(store.tiers))
        # What a client says of sizes and tiers is not believed: it would take room, and with it the room of others,
        # for blocks that do not exist, or more than its share under a small name.
        sizes, tiers = find(store, shelf, keys)
        match = Match((shelf,), keys, len(keys), (sizes,), (tiers,))
        plan = store.plan(match)
        if plan.end_block < len(keys):
            raise Rejected("a plan over the request's share of DRAM: plan with what Welcome said")
        return seat, replace(plan, first_page=first_page)

    def _check_sizes(self, sizes: npt.NDArray[np.int64], tiers: npt.NDArray[np.int8], tiers_known: int) -> None:
        if sizes.min() < HEADER_BYTES or sizes.max() > 1 << 41 or tiers.min() < 0 or tiers.max() >= tiers_known:
            raise ProtocolError("a plan with sizes or tiers that no match has")


_LOOKUPS_MAX = wire.MESSAGE_BYTES_MAX // 16  # with an offset and a size for each, an answer is one message


def _keys(packed: bytes, shelves: int) -> Keys:
    """The keys of a question about so many shelves: no more than an answer could hold, nor than others can wait for."""
    keys = wire.unpack_keys(packed)
    if len(keys) * shelves > _LOOKUPS_MAX:
        raise Rejected(f"{len(keys)} keys on {shelves} shelves: ask for at most {_LOOKUPS_MAX} blocks at a time")
    return keys


def _give_back(session: Session, leases: Iterable[int]) -> None:
    for number in leases:
        holding = session.holdings.pop(number, None)  # twice is once
        if holding is None:
            continue
        if isinstance(holding.what, Fetched):
            holding.seat.domain.store.release(holding.what)
        else:
            holding.seat.domain.store.abort(holding.what)


_shelf_cache: dict[bytes, Shelf] = {}
_SHELF_CACHE_MAX = 4096


def _shelf(packed: bytes) -> Shelf:
    """Engines ask for the same few shelves all the time."""
    shelf = _shelf_cache.get(packed)
    if shelf is None:
        try:
            shelf = Shelf.unpack(packed)
        except ValueError as error:
            raise ProtocolError(f"a shelf that cannot be one: {error}") from error
        if len(_shelf_cache) >= _SHELF_CACHE_MAX:
            _shelf_cache.clear()
        _shelf_cache[packed] = shelf
    return shelf


def _piece(session: Session, seat: Seat, fetched: Fetched) -> wire.Piece:
    lease = session.hold(seat, fetched) if fetched.lease is not None else 0
    slots = fetched.slots
    return wire.Piece(
        lease,
        seat.arena,
        fetched.first_page,
        wire.pack_numbers(slots.offsets),
        wire.pack_numbers(slots.sizes),
        wire.outcome_code(fetched.outcome),
    )


def _places(packed: bytes, count: int) -> list[int]:
    if len(packed) % 4:
        raise ProtocolError("places that do not end with a whole number")
    places = cast(list[int], np.frombuffer(packed, "<u4").tolist())
    if places and max(places) >= count:
        raise ProtocolError(f"place {max(places)} of a reservation of {count} blocks")
    return places


_HANDLERS: dict[type[wire.Request], Handler] = {
    wire.OpenScope: Requests._open_scope,
    wire.Find: Requests._find,
    wire.MatchAndLease: Requests._match_and_lease,
    wire.Fetch: Requests._fetch,
    wire.Prefetch: Requests._prefetch,
    wire.Return: Requests._return,
    wire.Reserve: Requests._reserve,
    wire.Publish: Requests._publish,
    wire.Clear: Requests._clear,
    wire.AskStats: Requests._ask_stats,
    wire.ReportPrefill: Requests._report_prefill,
    wire.Bye: Requests._bye,
    wire.Keep: Requests._keep,
}
