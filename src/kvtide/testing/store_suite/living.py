# SPDX-License-Identifier: Apache-2.0
"""Many threads at once, and what is left after the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import Closed
from kvtide.keys import Digest
from kvtide.testing.blocks import chain_keys
from kvtide.testing.store_suite.tools import (
    HIT,
    KEYS,
    LAYOUT,
    MISS,
    PENDING,
    REJECTED,
    CacheFacts,
    ClearableCache,
    User,
    assert_bytes,
    at_once,
    eventually,
)
from kvtide.tickets import Ticket

THREADS = 8


class LivingFacts(CacheFacts):
    """Many threads at once, and what is left after the end."""

    # Threads ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", [1, 2])
    def test_many_threads_at_once_never_see_a_wrong_byte(self, user: User, seed: int) -> None:
        chains = [[*chain_keys("trunk", 2), *chain_keys(name, 6)] for name in range(self.slots // 6)]

        def work(number: int) -> int:
            draw = random.Random(seed * THREADS + number)
            hits = 0
            for _ in range(25):
                keys = draw.choice(chains)[: draw.randint(1, 8)]
                reservation = user.reserved(keys)
                if draw.random() < 0.1:
                    user.cache.abort(reservation)
                else:
                    outcomes = user.done(user.cache.publish(reservation))
                    assert {*outcomes} <= {HIT, PENDING, REJECTED}
                keys = draw.choice(chains)
                leased = user.lease(keys, first_page=draw.randint(0, 9), pages_per_block=LAYOUT.pages)
                for fetched in leased.fetched:
                    assert_bytes(fetched, keys[leased.first_block :], user.here)
                    hits += fetched.blocks
                fetched = user.fetch(keys)
                assert_bytes(fetched, keys, user.here)
                hits += fetched.blocks
                for each in (fetched, *leased.fetched):
                    user.cache.release(each)
            return hits

        assert sum(at_once([partial(work, number) for number in range(THREADS)])) > 0
        eventually(lambda: user.leases == 0, "every lease is back")

    def test_of_many_writers_of_a_block_one_gets_the_slot(self, user: User) -> None:
        reservations = at_once([user.reserved] * THREADS)
        outcomes = [reservation.outcomes for reservation in reservations]
        for place in range(len(KEYS)):
            of_block = [each[place] for each in outcomes]
            assert of_block.count(MISS) == 1
            assert of_block.count(PENDING) == THREADS - 1
        for reservation in reservations:
            user.done(user.cache.publish(reservation))
        user.assert_right(user.fetch())
        eventually(lambda: user.leases == 1, "only the fetch is a lease now")

    def test_each_thread_waits_for_its_own_ticket(self, user: User) -> None:
        user.save()

        def ask(blocks: int) -> int:
            for _ in range(50):
                assert user.matched(KEYS[:blocks]).blocks == blocks
            return blocks

        calls: list[Callable[[], int]] = [partial(ask, number % 6 + 1) for number in range(THREADS)]
        assert at_once(calls) == [number % 6 + 1 for number in range(THREADS)]

    def test_a_ticket_may_be_awaited_by_many_threads_while_another_polls(self, user: User) -> None:
        user.save()
        self.cool(user)
        ticket = user.cache.fetch(user.plan())

        def poll() -> bool:
            eventually(lambda: user.cache.poll() is not None and ticket.is_done, "the ticket is done")
            return True

        assert all(at_once([poll, *[partial(user.cache.wait, ticket, 30.0)] * THREADS]))
        user.assert_right(ticket.result)

    # The end ------------------------------------------------------------------------------------------------

    def test_to_close_twice_is_to_close_once(self, tmp_path: Path) -> None:
        cache = self.make_cache(tmp_path / "another")
        for _ in range(3):
            cache.close()

    def test_a_closed_cache_raises_closed_or_gives_nothing(self, tmp_path: Path, namespace: Digest) -> None:
        cache = self.make_cache(tmp_path / "another")
        user = self.user_of(cache, namespace)
        user.save()
        plan, reservation = user.plan(), user.reserved(chain_keys("late", 2))
        cache.close()
        calls: list[Callable[[], object]] = [
            lambda: cache.match([user.here], KEYS),
            lambda: cache.match_and_lease([user.here], KEYS),
            lambda: cache.fetch(plan),
            lambda: cache.pin(plan, ttl_s=1.0),
            lambda: cache.prefetch(plan),
            lambda: cache.reserve(user.here, chain_keys("later", 2), LAYOUT),
            lambda: cache.report_prefill(namespace, 1000, 1.0),
        ]
        if self.is_closed_an_error:
            for call in calls:
                with pytest.raises(Closed):
                    call()
            return
        assert user.matched().blocks == 0
        assert user.lease().blocks == 0
        assert user.done(cache.fetch(plan)).outcome is REJECTED
        assert user.done(cache.pin(plan, ttl_s=1.0)).outcome is REJECTED
        assert user.done(cache.prefetch(plan)) == 0
        assert user.reserved(chain_keys("later", 2)).outcomes == [REJECTED] * 2
        user.done(cache.publish(reservation))
        cache.report_prefill(namespace, 1000, 1.0)

    def test_what_is_given_back_after_the_end_is_no_error(self, tmp_path: Path, namespace: Digest) -> None:
        cache = self.make_cache(tmp_path / "another")
        user = self.user_of(cache, namespace)
        user.save()
        fetched, reservation = user.fetch(), user.reserved(chain_keys("late", 2))
        cache.close()
        for _ in range(2):
            cache.release(fetched)
            cache.abort(reservation)
        assert cache.poll() is not None
        assert cache.wait(Ticket.done(1))
        assert cache.tier_names[0] == "dram", "what was found before the end can still be told"

    def test_what_was_leased_is_readable_until_it_is_dropped_even_after_the_end(
        self, tmp_path: Path, namespace: Digest
    ) -> None:
        cache = self.make_cache(tmp_path / "another")
        user = self.user_of(cache, namespace)
        user.save()
        fetched = user.fetch()
        cache.close()
        user.assert_right(fetched)

    def test_every_ticket_is_done_after_the_end(self, tmp_path: Path, namespace: Digest) -> None:
        cache = self.make_cache(tmp_path / "another")
        user = self.user_of(cache, namespace)
        user.save()
        if self.has_lower_tier:
            self.cool(user)
        tickets: list[Ticket[Any]] = [cache.fetch(user.plan()) for _ in range(10)]
        cache.close()
        assert all(ticket.is_done for ticket in tickets)

    def test_what_a_cache_held_is_back_when_it_is_closed(self, tmp_path: Path, cache: ClearableCache) -> None:
        user = self.user_of(cache, Digest(bytes(range(32))))
        other = self.make_cache(tmp_path / "another")
        others = self.user_of(other, user.scope.namespace)
        others.save()
        others.fetch()
        others.reserved(chain_keys("late", 2))
        other.close()
        eventually(lambda: user.leases == 0, "nobody holds anything")
