# SPDX-License-Identifier: Apache-2.0
"""Pins that operators set: kept here until they expire or are removed. A restart ends all of them."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.deadline import Deadline
from kvtide.errors import Busy
from kvtide.node.admin.bodies import Pin

if TYPE_CHECKING:
    from kvtide.node.domains import Domain
    from kvtide.tickets import Fetched

PINS_MAX = 256  # of each tenant


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A pin and the lease behind it."""

    id: str
    domain: Domain
    namespace: str
    scope: str
    fetched: Fetched
    ends: Deadline

    @property
    def is_over(self) -> bool:
        return self.ends.has_passed or self.fetched.lease is None or self.fetched.lease.is_over

    def show(self) -> Pin:
        lease = self.fetched.lease
        return Pin(
            id=self.id,
            blocks=self.fetched.blocks,
            bytes=lease.size_bytes if lease else 0,
            expires_s=max(0.0, self.ends.left_s),
            tenant=self.domain.name,
            namespace=self.namespace,
            scope=self.scope,
        )


class Pins:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pins: dict[str, Kept] = {}

    def check_room(self, domain: Domain) -> None:
        with self._lock:
            self._tidy()
            here = sum(pin.domain is domain for pin in self._pins.values())
        if here >= PINS_MAX:
            raise Busy(f"{here} pins are set already: remove some, or wait until they expire")

    def add(self, domain: Domain, namespace: str, scope: str, fetched: Fetched, ttl_s: float) -> Kept:
        pin = Kept(secrets.token_hex(8), domain, namespace, scope, fetched, Deadline.after(ttl_s))
        with self._lock:
            self._pins[pin.id] = pin
        return pin

    def all(self) -> list[Kept]:
        with self._lock:
            self._tidy()
            return list(self._pins.values())

    def pop(self, id: str) -> Kept | None:
        with self._lock:
            self._tidy()
            return self._pins.pop(id, None)

    def _tidy(self) -> None:
        self._pins = {id: pin for id, pin in self._pins.items() if not pin.is_over}
