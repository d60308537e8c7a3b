# SPDX-License-Identifier: Apache-2.0
"""What each call does. Plain methods on threads that may wait: nothing here knows of HTTP, and no event loop runs it.

Whoever comes with a tenant's token is told nothing of others: a tenant that is not his and one that is not there
get the same words.
"""

from __future__ import annotations

import time
from difflib import get_close_matches
from threading import Event

import numpy as np

from kvtide.deadline import Deadline
from kvtide.errors import Rejected
from kvtide.keys import Digest, Key, Part, Shelf, scope_digest
from kvtide.node import sharing
from kvtide.node.admin import bodies
from kvtide.node.admin.gate import Caller
from kvtide.node.admin.pins import Pins
from kvtide.node.admin.refusal import Refusal, invalid, not_found
from kvtide.node.admin.samples import samples
from kvtide.node.domains import GROUP_PREFIX, Domain
from kvtide.node.serve import Node
from kvtide.node.sharing import HOLDER, find
from kvtide.node.status import Status, status_of, tenants_of, tiers_of, usage_of
from kvtide.observe.metrics import expose
from kvtide.outcome import Outcome
from kvtide.policy.pools import Quota
from kvtide.tickets import Match, Plan
from kvtide.tiers.wrappers import Switch

ALL_TENANTS = "*"
_SLICE_S = 0.25  # of long waits: so soon they notice that the service ends


class Desk:
    """One for a node. `is_ending` cuts waits short."""

    def __init__(self, node: Node) -> None:
        self.is_ending = Event()
        self._node = node
        self._domains = node.domains
        self._pins = Pins()
        self._started_at_s = time.monotonic()
        self._start_time_s = time.time()

    # The node ----------------------------------------------------------------------------------------------

    def health(self, caller: Caller) -> bodies.Health:
        return bodies.Health(status="ok")

    def ready(self, caller: Caller) -> bodies.Health:
        if not self._node.service.is_serving:
            raise Refusal(503, "not_ready", "the service does not serve at this moment: it starts, ends, or is stuck")
        return bodies.Health(status="ok")

    def metrics(self) -> bytes:
        return expose(lambda: samples(self._node, self._started_at_s, self._start_time_s))

    def status(self, caller: Caller) -> Status:
        return status_of(self._node, self._started_at_s)

    def tiers(self, caller: Caller) -> bodies.TiersAnswer:
        return bodies.TiersAnswer(tiers=tiers_of(self._domains))

    def bypass(self, caller: Caller, request: bodies.BypassRequest, name: str) -> bodies.TiersAnswer:
        self._switch(name).is_bypassed = request.on
        return self.tiers(caller)

    def drain(self, caller: Caller, request: bodies.DrainRequest, name: str) -> bodies.DrainAnswer:
        self._switch(name)
        deadline = Deadline.after(request.timeout_s)
        stores = [domain.store for domain in self._domains]
        while True:
            is_drained = all(store.drain(min(_SLICE_S, deadline.left_s)) for store in stores)
            if is_drained or deadline.has_passed or self.is_ending.is_set():
                break
        queued = [store.stats([]).spill for store in stores]
        return bodies.DrainAnswer(
            is_drained=is_drained, queued_bytes=sum(each[name].queued_bytes for each in queued if name in each)
        )

    def _switch(self, name: str) -> Switch:
        switch = self._domains.switches.get(name)
        if switch is None:
            known = ", ".join(self._domains.switches) or "none"
            raise not_found(f"{name[:80]!r} is no tier below DRAM; there is: {known}")
        return switch

    # Blocks ------------------------------------------------------------------------------------------------

    def lookup(self, caller: Caller, request: bodies.BlocksRequest) -> bodies.LookupAnswer:
        domain, shelf, keys = self._place(caller, request)
        tiers = domain.store.tiers
        sizes = np.array([tier.lookup(shelf, keys) for tier in tiers])
        names = [tier.traits.name for tier in tiers]
        blocks = [
            bodies.Found(
                tiers=[name for name, size in zip(names, of_key, strict=True) if size], frame_bytes=max(of_key)
            )
            for of_key in sizes.T.tolist()
        ]
        prefix = next((n for n, block in enumerate(blocks) if not block.tiers), len(blocks))
        return bodies.LookupAnswer(blocks=blocks, prefix_blocks=prefix)

    def pin(self, caller: Caller, request: bodies.PinRequest) -> bodies.PinAnswer:
        domain, plan = self._plan(caller, request)
        self._pins.check_room(domain)
        fetch_s = self._node.settings.leases.fetch_s
        ticket = domain.store.pin(plan, ttl_s=request.ttl_s, deadline_s=fetch_s, holder=HOLDER)
        domain.store.wait(ticket, fetch_s + 1.0)
        fetched = ticket.result
        if fetched.lease is None:
            if fetched.outcome is Outcome.REJECTED:
                raise Rejected(
                    "no room to pin these: remove other pins, pin fewer blocks, or raise leases.pinned_share"
                )
            raise not_found("these blocks could not be brought into DRAM: look them up, and try again")
        kept = self._pins.add(domain, request.namespace, request.scope, fetched, request.ttl_s).show()
        return bodies.PinAnswer(id=kept.id, blocks=kept.blocks, bytes=kept.bytes, expires_s=kept.expires_s)

    def pins(self, caller: Caller) -> bodies.PinsAnswer:
        return bodies.PinsAnswer(pins=[pin.show() for pin in self._pins.all() if caller.sees(pin.domain.name)])

    def unpin(self, caller: Caller, id: str) -> bodies.BlocksAnswer:
        pin = next((pin for pin in self._pins.all() if pin.id == id and caller.sees(pin.domain.name)), None)
        if pin is None or self._pins.pop(id) is None:
            raise not_found("there is no such pin, or it has expired")
        pin.domain.store.release(pin.fetched)
        return bodies.BlocksAnswer(blocks=pin.fetched.blocks)

    def warm(self, caller: Caller, request: bodies.BlocksRequest) -> bodies.BlocksAnswer:
        domain, plan = self._plan(caller, request)
        return bodies.BlocksAnswer(blocks=domain.store.prefetch(plan).result)

    def clear(self, caller: Caller, request: bodies.ClearRequest) -> bodies.BlocksAnswer:
        namespace = None if request.namespace is None else Digest(bytes.fromhex(request.namespace))
        prefix = None if request.prefix is None else Key(bytes.fromhex(request.prefix))
        is_all = request.tenant == ALL_TENANTS and caller.tenants is None
        domains = list(self._domains) if is_all else [self._domain(caller, request.tenant)]
        if prefix is None:  # a pin on what is gone would only keep its memory from others
            for pin in self._pins.all():
                if pin.domain in domains and request.namespace in (None, pin.namespace):
                    self._pins.pop(pin.id)
                    pin.domain.store.release(pin.fetched)
        blocks = 0
        for domain in domains:
            blocks += domain.store.clear(namespace=namespace, tenant=domain.tenant.digest, prefix=prefix)
        if is_all:  # what tenants left behind that are in the settings no more
            for switch in self._domains.switches.values():
                blocks += switch.clear(namespace=namespace, prefix=prefix)
        return bodies.BlocksAnswer(blocks=blocks)

    # Tenants -----------------------------------------------------------------------------------------------

    def tenants(self, caller: Caller) -> bodies.TenantsAnswer:
        return bodies.TenantsAnswer(tenants=tenants_of(self._node))

    def set_quota(self, caller: Caller, request: bodies.QuotaRequest, name: str) -> bodies.QuotaAnswer:
        domain = self._domain(caller, name)
        self._domains.set_quota(
            domain.name, request.scope, request.tier, Quota(request.bytes_reserved, request.bytes_max)
        )
        return bodies.QuotaAnswer(
            tenant=domain.name,
            scope=request.scope,
            tier=request.tier,
            bytes_reserved=request.bytes_reserved,
            bytes_max=request.bytes_max,
        )

    def usage(self, caller: Caller) -> bodies.UsageAnswer:
        seen = [domain for domain in self._domains if caller.sees(domain.name)]
        return bodies.UsageAnswer(tenants=[usage_of(self._domains, domain) for domain in seen])

    def publish(self, caller: Caller, request: bodies.PublishRequest, group: str) -> bodies.PublishAnswer:
        source, target = self._domain(caller, request.tenant), self._domain(caller, GROUP_PREFIX + group)
        tokens = sharing.read_tokens(request.tokens) if isinstance(request.tokens, str) else request.tokens
        shared = sharing.publish(
            source,
            target,
            Digest(bytes.fromhex(request.namespace)),
            request.scope,
            tokens,
            request.block_tokens,
            [_part(part) for part in request.parts or [bodies.PartBody()]],
            self._node.settings.leases.fetch_s,
            lambda: not self.is_ending.is_set(),
        )
        return bodies.PublishAnswer(
            copied=shared.copied, present=shared.present, missing=shared.missing, rejected=shared.rejected
        )

    # What they have in common ------------------------------------------------------------------------------

    def _domain(self, caller: Caller, name: str) -> Domain:
        if not caller.sees(name):
            raise Refusal(403, "denied", "this token is for one tenant: name that one")
        known = {domain.name: domain for domain in self._domains}
        if name not in known:
            near = get_close_matches(name, known, 1)
            mend = f"did you mean {near[0]}?" if near else "`kvtide tenant list` shows all"
            what = "share group" if name.startswith(GROUP_PREFIX) else "tenant"
            raise not_found(f"{name.removeprefix(GROUP_PREFIX)[:80]!r} is no {what} of this service; {mend}")
        return known[name]

    def _place(self, caller: Caller, request: bodies.BlocksRequest) -> tuple[Domain, Shelf, list[Key]]:
        domain = self._domain(caller, request.tenant)
        scope = scope_digest(request.scope)
        shelf = Shelf(Digest(bytes.fromhex(request.namespace)), domain.tenant.digest, scope, _part(request.part))
        return domain, shelf, [Key(bytes.fromhex(key)) for key in request.keys]

    def _plan(self, caller: Caller, request: bodies.BlocksRequest) -> tuple[Domain, Plan]:
        """As many of these blocks, from the first on, as there are and as one request may hold."""
        domain, shelf, keys = self._place(caller, request)
        sizes, tiers = find(domain.store, shelf, keys)
        missing = np.flatnonzero(sizes == 0)
        blocks = int(missing[0]) if len(missing) else len(keys)
        if not blocks:
            raise not_found("the first of these blocks is on no tier: look them up")
        return domain, domain.store.plan(Match((shelf,), keys, blocks, (sizes,), (tiers,)))


def _part(part: bodies.PartBody) -> Part:
    try:
        return Part(part.group, part.rank, part.ranks, part.layer_first, part.layer_count)
    except ValueError as error:
        raise invalid(str(error)) from None
