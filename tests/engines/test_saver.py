# SPDX-License-Identifier: Apache-2.0
"""Saving blocks beside the engine's work: within a bound, and at nobody's cost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from faulty_cache import FaultyCache
from tiny import BLOCK, KINDS, PATIENCE_S, prompt_of
from transformers import LlamaConfig

from kvtide.config import DramSettings, Settings
from kvtide.engines.transformers.buffer import Buffers, KvBuffer
from kvtide.engines.transformers.saver import Blocks, Saver
from kvtide.engines.transformers.shape import KvShape
from kvtide.keys import NO_PARENT, Digest, Key, Shelf, chain
from kvtide.outcome import Outcome
from kvtide.store import Store, open_store
from kvtide.testing.store_suite.tools import eventually

SHAPE = KvShape(3, 2, 16, torch.float32, torch.device("cpu"))
LAYOUT = SHAPE.layout(BLOCK)
NAMESPACE = Digest(sha256(b"a model").digest())
CONFIG = LlamaConfig(**KINDS["llama"][1])


class Desk:
    """A saver, and sequences to save."""

    def __init__(self, cache: Any, store: Store, blocks_max: int = 64, sequences_max: int = 16) -> None:
        self.store = store
        self.buffers = Buffers(SHAPE, LAYOUT, CONFIG, 1 << 30)
        self.saver = Saver(cache, LAYOUT, self.buffers, blocks_max, sequences_max)
        scope = store.open_scope(NAMESPACE).result
        assert scope is not None
        self.shelf: Shelf = scope.shelf()
        self.root: Key = scope.root
        self.taken: list[KvBuffer] = []

    def sequence(self, name: object, blocks: int) -> tuple[KvBuffer, list[Key]]:
        buffer = self.buffers.take(blocks * BLOCK)
        buffer.length = buffer.tokens_max
        torch.manual_seed(len(self.taken))
        for layer in buffer.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.taken.append(buffer)
        return buffer, chain(self.root, prompt_of(name, blocks * BLOCK), BLOCK)

    def submit(self, buffer: KvBuffer, keys: Sequence[Key], first: int = 0, end: int | None = None) -> None:
        parent = keys[first - 1] if first else NO_PARENT
        self.saver.submit(Blocks(buffer, self.shelf, keys[first:end], first, parent))

    def assert_saved(self, buffer: KvBuffer, keys: Sequence[Key], first: int = 0) -> None:
        match = self.store.match([self.shelf], keys[first:]).result
        assert match.blocks == len(keys) - first
        ticket = self.store.fetch(self.store.plan(match))
        assert self.store.wait(ticket, PATIENCE_S)
        for number, payload in enumerate(ticket.result.payloads, first):
            expected = np.empty_like(payload)
            buffer.save(number, expected)
            assert np.array_equal(payload, expected)
        self.store.release(ticket.result)

    @property
    def counts(self) -> tuple[int, int]:
        return self.saver.saved, self.saver.dropped

    def assert_nobody_holds_anything(self) -> None:
        for buffer in self.taken:
            self.buffers.release(buffer)
        assert {buffer.holders for buffer in self.taken} <= {0}
        assert self.store.stats().leases == 0


@pytest.fixture
def desk_of(store: Store) -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(cache: Any = None, blocks_max: int = 64, of: Store = store, sequences_max: int = 16) -> Desk:
        desks.append(Desk(cache or of, of, blocks_max, sequences_max))
        return desks[-1]

    yield make
    for desk in desks:
        desk.saver.close(PATIENCE_S)
        desk.assert_nobody_holds_anything()


def test_blocks_are_saved_as_they_stand_in_the_buffer(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of()
    buffer, keys = desk.sequence("a", 5)
    desk.submit(buffer, keys, 0, 2)
    desk.submit(buffer, keys, 2, 3)
    desk.submit(buffer, keys, 3)
    assert desk.saver.flush(PATIENCE_S)
    desk.assert_saved(buffer, keys)
    assert desk.counts == (5, 0)


def test_what_is_there_already_is_saved(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of()
    buffer, keys = desk.sequence("a", 3)
    for _ in range(2):
        desk.submit(buffer, keys)
    assert desk.saver.flush(PATIENCE_S)
    assert desk.counts == (6, 0)
    desk.assert_saved(buffer, keys)


def test_what_somebody_else_is_saving_is_saved(desk_of: Callable[..., Desk], store: Store) -> None:
    desk = desk_of()
    buffer, keys = desk.sequence("a", 3)
    other = store.reserve(desk.shelf, keys[:2], LAYOUT).result
    desk.submit(buffer, keys)
    assert desk.saver.flush(PATIENCE_S)
    assert desk.counts == (3, 0)
    desk.assert_saved(buffer, keys, 2)
    store.abort(other)
    assert store.match([desk.shelf], keys).result.blocks == 0


def test_a_buffer_is_held_until_its_blocks_are_copied(desk_of: Callable[..., Desk], store: Store) -> None:
    cache = FaultyCache(store)
    desk = desk_of(cache)
    buffer, keys = desk.sequence("a", 3)
    with cache.gate("reserve") as gate:
        desk.submit(buffer, keys)
        gate.wait_reached()
        desk.taken.clear()
        desk.buffers.release(buffer)  # as an engine does whose answer has ended
        assert buffer.holders == 1
        assert desk.buffers.take(1) is not buffer
        assert not desk.saver.flush(0.0)
    assert desk.saver.flush(PATIENCE_S)
    desk.assert_saved(buffer, keys)
    assert desk.buffers.take(1) is buffer
    desk.taken.append(buffer)


def test_what_is_beyond_the_bound_is_dropped_and_counted(desk_of: Callable[..., Desk], store: Store) -> None:
    cache = FaultyCache(store)
    desk = desk_of(cache, blocks_max=4)
    sequences = [desk.sequence(name, 2) for name in range(5)]
    with cache.gate("reserve") as gate:
        for buffer, keys in sequences[:2]:
            desk.submit(buffer, keys)
        gate.wait_reached()
        for buffer, keys in sequences[2:]:
            desk.submit(buffer, keys)
        assert desk.counts == (0, 6)
        assert [buffer.holders for buffer, _ in sequences] == [2, 2, 1, 1, 1]
    assert desk.saver.flush(PATIENCE_S)
    assert desk.counts == (4, 6)
    for buffer, keys in sequences[:2]:
        desk.assert_saved(buffer, keys)
    desk.submit(*sequences[2])
    assert desk.saver.flush(PATIENCE_S)
    assert desk.counts == (6, 6), "there is room again"
    buffer, keys = desk.sequence("long", 5)
    desk.submit(buffer, keys)
    assert desk.counts == (6, 11), "more at once than may ever wait"


def test_no_more_sequences_are_held_than_the_bound_though_few_blocks_wait(
    desk_of: Callable[..., Desk], store: Store
) -> None:
    cache = FaultyCache(store)
    desk = desk_of(cache, sequences_max=2)
    sequences = [desk.sequence(name, 2) for name in range(4)]
    with cache.gate("reserve") as gate:
        desk.submit(*sequences[0])
        gate.wait_reached()  # it is being saved now; those after it wait
        for buffer, keys in sequences[1:]:
            desk.submit(buffer, keys, 0, 1)
        desk.submit(*sequences[1], 1, 2)
        assert desk.counts == (0, 1), "one more block of a sequence that waits already takes no more memory"
        assert [buffer.holders for buffer, _ in sequences] == [2, 3, 2, 1]
    assert desk.saver.flush(PATIENCE_S)
    assert desk.counts == (5, 1)


@pytest.mark.parametrize("fault", ["nothing", "closed", "error", "late"])
@pytest.mark.parametrize("call", ["reserve", "publish"])
def test_a_fault_of_the_cache_costs_the_blocks_and_nothing_else(
    desk_of: Callable[..., Desk], store: Store, call: str, fault: Any
) -> None:
    cache = FaultyCache(store)
    desk = desk_of(cache)
    (one, its_keys), (other, others_keys) = desk.sequence("a", 3), desk.sequence("b", 3)
    cache.faults[call] = fault
    desk.submit(one, its_keys)
    assert desk.saver.flush(PATIENCE_S)
    assert desk.counts == (0, 3)
    assert store.stats().leases == 0, "nobody fills these slots any more"
    cache.faults.clear()
    desk.submit(other, others_keys)
    assert desk.saver.flush(PATIENCE_S)
    assert desk.counts == (3, 3)
    desk.assert_saved(other, others_keys)


def test_a_copy_that_fails_gives_the_slots_back(desk_of: Callable[..., Desk], store: Store) -> None:
    desk = desk_of()
    buffer, keys = desk.sequence("a", 16)
    assert buffer.tokens_max == 16 * BLOCK
    beyond = chain(keys[-1], prompt_of("more", 2 * BLOCK), BLOCK, position=16 * BLOCK)
    desk.submit(buffer, [*keys, *beyond], 15)
    assert desk.saver.flush(PATIENCE_S)
    assert desk.counts == (0, 3)
    assert store.stats().leases == 0
    assert store.match([desk.shelf], keys[15:]).result.blocks == 0


def test_a_store_too_small_for_the_blocks_takes_what_it_can(desk_of: Callable[..., Desk]) -> None:
    slot_bytes = 4096 + LAYOUT.payload_bytes
    with open_store(Settings(dram=DramSettings(bytes_max=8 * slot_bytes, huge_pages=False))) as store:
        desk = desk_of(of=store)
        buffer, keys = desk.sequence("a", 10)
        desk.submit(buffer, keys)
        assert desk.saver.flush(PATIENCE_S)
        assert desk.counts == (4, 6), "one request gets half of the arena"
        desk.assert_saved(buffer, keys[:4])


def test_a_store_too_small_for_one_block_takes_none(desk_of: Callable[..., Desk]) -> None:
    with open_store(Settings(dram=DramSettings(bytes_max=16 << 10, huge_pages=False))) as store:
        desk = desk_of(of=store)
        buffer, keys = desk.sequence("a", 3)
        desk.submit(buffer, keys)
        assert desk.saver.flush(PATIENCE_S)
        assert desk.counts == (0, 3)


# The end ------------------------------------------------------------------------------------------------------


def test_what_waits_is_saved_before_the_end(desk_of: Callable[..., Desk], store: Store) -> None:
    cache = FaultyCache(store)
    desk = desk_of(cache)
    sequences = [desk.sequence(name, 2) for name in range(4)]
    with cache.gate("reserve") as gate:
        for buffer, keys in sequences:
            desk.submit(buffer, keys)
        gate.wait_reached()
    desk.saver.close(PATIENCE_S)
    assert desk.counts == (8, 0)
    for buffer, keys in sequences:
        desk.assert_saved(buffer, keys)


def test_what_does_not_make_it_in_time_is_dropped_at_the_end(desk_of: Callable[..., Desk], store: Store) -> None:
    cache = FaultyCache(store)
    desk = desk_of(cache)
    sequences = [desk.sequence(name, 2) for name in range(4)]
    with cache.gate("publish") as gate:
        for buffer, keys in sequences:
            desk.submit(buffer, keys)
        gate.wait_reached()
        flushed = desk.saver.flush(0.0)
        assert not flushed
        ending = Ending(desk.saver)
        eventually(lambda: desk.saver.dropped == 6, "what waits is dropped")
    ending.join()
    assert desk.counts == (2, 6)


class Ending:
    """A close that does not wait for what is queued, on a thread of its own."""

    def __init__(self, saver: Saver) -> None:
        self._thread = threading.Thread(target=saver.close, args=(0.0,))
        self._thread.start()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_after_the_end_everything_is_dropped(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of()
    buffer, keys = desk.sequence("a", 3)
    for _ in range(2):
        desk.saver.close(PATIENCE_S)
    desk.submit(buffer, keys)
    assert desk.counts == (0, 3)
    assert buffer.holders == 1
    assert desk.saver.flush(0.0)


def test_a_store_that_was_closed_takes_nothing(desk_of: Callable[..., Desk]) -> None:
    with open_store(Settings(dram=DramSettings(bytes_max=1 << 20, huge_pages=False))) as store:
        desk = desk_of(of=store)
        buffer, keys = desk.sequence("a", 3)
        store.close()
        desk.submit(buffer, keys)
        assert desk.saver.flush(PATIENCE_S)
        assert desk.counts == (0, 3)
        assert store.reserve(desk.shelf, keys, LAYOUT).result.outcomes == [Outcome.REJECTED] * 3
