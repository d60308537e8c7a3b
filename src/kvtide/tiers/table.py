# SPDX-License-Identifier: Apache-2.0
"""The table of a local tier: addresses to rows, rows to columns.

One dict per shelf, so that a lookup never sees a block of another tenant, scope, namespace or part;
columns instead of objects, so that a million blocks cost neither memory nor garbage collection. The table
also tells the policy which block is whose parent, whatever order they arrive in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvtide.keys import NO_PARENT, Address, Digest, Key, Keys, Part, Shelf
from kvtide.policy.policy import NO_ROW, Held, Policy, Rows
from kvtide.tiers.runs import RUN_MIN, Runs
from kvtide.tiers.tier import is_cleared

SHELVES_MAX = 65_536
_ROWS_AT_FIRST = 1024


class BlockTable:
    """No locks: its tier has one. A row is *taken* first and becomes visible with `insert`."""

    def __init__(self, policy: Policy, runs: Runs | None = None, *, tenants: int = 1) -> None:
        """`runs`: for a table that is asked for whole prompts all the time. `tenants`: how many divide the shelves."""
        self.policy = policy
        self._tenants = tenants
        self._tenant_shelves: Counter[Digest] = Counter()
        self._runs = runs
        self.blocks = 0
        self.offset: npt.NDArray[np.int64] = np.zeros(_ROWS_AT_FIRST, np.int64)  # where it is on the medium
        self.extent: npt.NDArray[np.int64] = np.zeros(_ROWS_AT_FIRST, np.int64)  # how many bytes it takes there
        self.frame_bytes: npt.NDArray[np.int64] = np.zeros(_ROWS_AT_FIRST, np.int64)
        self.shelf: npt.NDArray[np.int32] = np.full(_ROWS_AT_FIRST, NO_ROW, np.int32)
        self.pool: npt.NDArray[np.int16] = np.zeros(_ROWS_AT_FIRST, np.int16)  # to whose share it belongs
        self.held: Held = np.zeros(_ROWS_AT_FIRST, np.int32)  # readers, writers and pins that need it to stay
        self.key: list[Key | None] = []
        self._free_rows: list[int] = []
        self._shelf_ids: dict[Shelf, int] = {}
        self._shelves: list[Shelf] = []
        self._indexes: list[dict[Key, int]] = []
        # Blocks whose parent is not here (yet): found again by the parent's key when it arrives.
        self._orphans: dict[tuple[int, Key], dict[int, None]] = {}  # rows in order, as keys
        self._orphan_of: dict[int, tuple[int, Key]] = {}

    @property
    def rows(self) -> int:
        """One more than the highest row ever taken."""
        return len(self.key)

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    @property
    def visible(self) -> Rows:
        """The rows of all blocks."""
        return np.flatnonzero(self.shelf[: self.rows] != NO_ROW)

    def shelf_id(self, shelf: Shelf, busy: Collection[Shelf] = ()) -> int:
        """The number of a shelf; new ones get one, emptied ones lose theirs when SHELVES_MAX are known.

        `busy` ones keep theirs though they look empty. NO_ROW when every shelf is in use: the caller rejects the block.
        """
        known = self._shelf_ids.get(shelf)
        if known is not None:
            return known
        is_over = self._tenant_shelves[shelf.tenant] >= SHELVES_MAX // self._tenants
        if len(self._shelves) < SHELVES_MAX and not is_over:
            known = len(self._shelves)
            self._shelves.append(shelf)
            self._indexes.append({})
        else:
            known = self._empty_shelf(busy, shelf.tenant if is_over else None)
            if known == NO_ROW:
                return NO_ROW
            self._tenant_shelves[self._shelves[known].tenant] -= 1
            del self._shelf_ids[self._shelves[known]]
            self._shelves[known] = shelf
        self._tenant_shelves[shelf.tenant] += 1
        self._shelf_ids[shelf] = known
        return known

    def _empty_shelf(self, busy: Collection[Shelf], tenant: Digest | None) -> int:
        """One that can be given to another, of this tenant (None: of any); NO_ROW when there is none."""
        for number, (shelf, index) in enumerate(zip(self._shelves, self._indexes, strict=True)):
            if not index and shelf not in busy and tenant in (None, shelf.tenant):
                return number
        return NO_ROW

    def knows(self, shelf: Shelf) -> bool:
        return shelf in self._shelf_ids

    def find(self, shelf: Shelf, keys: Sequence[Key]) -> Rows:
        """The row of each key, NO_ROW where it is not here."""
        known = self._shelf_ids.get(shelf)
        if known is None:
            return np.full(len(keys), NO_ROW, np.int64)
        return np.fromiter(map(self._indexes[known].get, keys, repeat(NO_ROW)), np.int64, len(keys))

    def find_prefix(self, shelf: Shelf, keys: Keys) -> Rows:
        """The rows of the keys up to the first one that is not here."""
        known = self._shelf_ids.get(shelf)
        if known is None:
            return np.empty(0, np.int64)
        pieces: list[Rows] = []
        first = 0
        count = len(keys)
        while self._runs is not None and first < count >= RUN_MIN:
            row = self._indexes[known].get(keys[first], NO_ROW)
            piece = None if row == NO_ROW else self._runs.follow(row, keys, first)
            if piece is None:
                break
            if len(piece) == count:
                return piece
            pieces.append(piece)
            first += len(piece)
        rest = self.find(shelf, keys[first:]) if first else self.find(shelf, keys)
        missing = np.flatnonzero(rest == NO_ROW)
        rest = rest[: missing[0]] if len(missing) else rest
        return np.concatenate((*pieces, rest)) if pieces else rest

    def row(self, address: Address) -> int:
        known = self._shelf_ids.get(address.shelf)
        return NO_ROW if known is None else self._indexes[known].get(address.key, NO_ROW)

    def address(self, row: int) -> Address:
        key = self.key[row]
        assert key is not None
        return Address(self._shelves[self.shelf[row]], key)

    def take_rows(self, offsets: list[int], extent: int, frame_bytes: int, pool: int = 0) -> list[int]:
        """Rows for blocks of one size and pool that are not visible yet. Each is held once: by whoever fills it."""
        rows = []
        for _ in offsets:
            if self._free_rows:
                rows.append(self._free_rows.pop())
            else:
                rows.append(len(self.key))
                self.key.append(None)
        while len(self.key) > len(self.held):
            self._grow()
        at = np.array(rows, np.int64)
        self.offset[at], self.extent[at], self.frame_bytes[at], self.held[at] = offsets, extent, frame_bytes, 1
        self.pool[at] = pool
        return rows

    def insert(self, shelf: Shelf, rows: list[int], keys: Sequence[Key], parents: Sequence[Key]) -> bool:
        """Make taken rows visible under their keys, first block of a chain first. Blocks of a shelf are of one pool.

        False, and nothing done, when there is no shelf for them.
        """
        number = self.shelf_id(shelf)
        if number == NO_ROW:
            return False
        index = self._indexes[number]
        parent_rows = []
        for row, key, parent in zip(rows, keys, parents, strict=True):
            assert key not in index, "a block became visible twice"
            index[key] = row
            self.key[row] = key
            parent_rows.append(index.get(parent, NO_ROW) if parent != key else NO_ROW)
        if self._runs is not None:
            self._runs.add(rows, keys, parents)
        at = np.array(rows, np.int64)
        self.shelf[at] = number
        self.blocks += len(rows)
        pool = self.pool.item(rows[0]) if rows else 0
        self.policy.insert(at, np.array(parent_rows, np.int64), self.extent[at], pools=pool)
        if NO_ROW in parent_rows:
            for row, parent, parent_row in zip(rows, parents, parent_rows, strict=True):
                if parent_row == NO_ROW and parent != NO_PARENT:
                    self._orphan(row, number, parent)
        if self._orphans:
            for row, key in zip(rows, keys, strict=True):
                self._adopt(row, number, key)
        return True

    def hide(self, rows: list[int], *, is_evicted: bool = False) -> None:
        """Make blocks invisible; their rows stay taken. `is_evicted`: the policy has removed them itself."""
        if not is_evicted:
            children, parents = self.policy.remove(np.array(rows, np.int64))
            for child, parent in zip(children.tolist(), parents.tolist(), strict=True):
                key = self.key[parent]
                assert key is not None
                self._orphan(child, int(self.shelf[child]), key)
        for row, number in zip(rows, self.shelf[rows].tolist(), strict=True):
            key = self.key[row]
            assert key is not None
            del self._indexes[number][key]
            self.key[row] = None
            if row in self._orphan_of:
                self._forget_orphan(row)
        if self._runs is not None:
            self._runs.remove(rows)
        self.shelf[rows] = NO_ROW
        self.blocks -= len(rows)

    def free_rows(self, rows: list[int]) -> None:
        """Give taken, invisible rows back."""
        at = np.array(rows, np.int64)
        assert (self.shelf[at] == NO_ROW).all()
        self.held[at] = 0
        self.extent[at] = 0
        self._free_rows += rows

    def load(
        self,
        shelves: dict[int, Shelf],
        reserved_rows: list[int],
        rows: Rows,
        shelf: npt.NDArray[np.int32],
        keys: list[Key],
        parent_rows: Rows,
        parents: list[Key],
        is_next: Callable[[Rows, Rows], npt.NDArray[np.bool_]],
        extents: tuple[Rows, Rows, Rows],
        clocks: Rows,
        pools: npt.NDArray[np.int16] | None = None,
    ) -> None:
        """Fill an empty table with blocks that a medium has kept, and take rows that it needs for itself.

        Everything is parallel to `rows`, which ascend, but for `parents`: the parents' keys where `parent_rows`
        has NO_ROW, in order. `is_next(rows, parent_rows)` says which pairs may be linked. `extents`: offset, extent
        and frame_bytes. `pools`: None for pool 0.
        """
        assert not self.key and not self._shelves
        self._load_shelves(shelves)
        high = max(int(rows[-1]) + 1 if len(rows) else 0, reserved_rows[-1] + 1 if reserved_rows else 0)
        while len(self.held) < high:
            self._grow()
        self.offset[rows], self.extent[rows], self.frame_bytes[rows] = extents
        self.shelf[rows] = shelf
        self.pool[rows] = 0 if pools is None else pools
        self.held[reserved_rows] = 1
        self._load_keys(shelves, rows, shelf, keys, high)
        for i, parent in zip(np.flatnonzero(parent_rows == NO_ROW).tolist(), parents, strict=True):
            if parent != NO_PARENT:
                found = self._indexes[shelf[i]].get(parent, NO_ROW)
                if found == NO_ROW:
                    self._orphan(int(rows[i]), int(shelf[i]), parent)
                elif is_next(rows[i : i + 1], np.array([found])).all():
                    parent_rows[i] = found
        self.policy.insert(rows, parent_rows, extents[1], clocks, 0 if pools is None else pools)
        is_free = np.ones(high, np.bool_)
        is_free[rows] = is_free[reserved_rows] = False
        self._free_rows = np.flatnonzero(is_free)[::-1].tolist()
        self.blocks = len(rows)

    def _load_keys(
        self, shelves: dict[int, Shelf], rows: Rows, shelf: npt.NDArray[np.int32], keys: list[Key], high: int
    ) -> None:
        by_row = np.full(high, None, np.object_)
        by_row[rows] = keys
        self.key = by_row.tolist()
        by_shelf = np.argsort(shelf, kind="stable")
        numbers = np.array(sorted(shelves), np.int64)
        bounds = np.searchsorted(shelf[by_shelf], [numbers, numbers + 1]).T.tolist()
        for number, (first, end) in zip(numbers.tolist(), bounds, strict=True):
            its_rows = rows[by_shelf[first:end]]
            self._indexes[number] = dict(zip(by_row[its_rows].tolist(), its_rows.tolist(), strict=True))

    def _load_shelves(self, shelves: dict[int, Shelf]) -> None:
        for number in range(max(shelves, default=-1) + 1):
            # A number whose record was lost: empty, and thereby the next to be given out again.
            lost = Shelf(Digest(bytes(32)), Digest(bytes(32)), Digest(number.to_bytes(32, "little")), Part())
            shelf = shelves.get(number, lost)
            self._tenant_shelves[shelf.tenant] += 1
            self._shelf_ids[shelf] = number
            self._shelves.append(shelf)
            self._indexes.append({})

    def of(self, namespace: Digest | None, tenant: Digest | None, prefix: Key | None = None) -> list[int]:
        """The rows of this namespace and this tenant (None: of any), or only those of `prefix` and what follows it."""
        wanted = [known for shelf, known in self._shelf_ids.items() if is_cleared(shelf, namespace, tenant)]
        if prefix is None:
            return [row for known in wanted for row in self._indexes[known].values()]
        first = [self._indexes[known][prefix] for known in wanted if prefix in self._indexes[known]]
        first += [row for known in wanted for row in self._orphans.get((known, prefix), ())]
        return self._descendants(first) if first else []

    def _descendants(self, first: list[int]) -> list[int]:
        """These rows, and those of all blocks that are known to follow them."""
        rows = self.visible
        nobody = self.rows  # stands above those without a parent, and is never meant
        above = np.full(nobody + 1, nobody)
        parents = self.policy.parents(rows)
        above[rows] = np.where(parents == NO_ROW, nobody, parents)
        is_meant = np.zeros(nobody + 1, np.bool_)
        is_meant[first] = True
        # Each round looks twice as far up as the one before: a chain of 4,096 blocks takes 12 of them.
        for _ in range(nobody.bit_length()):
            is_meant |= is_meant[above]
            above = above[above]
            if (above == nobody).all():
                break
        return np.flatnonzero(is_meant).tolist()

    def _orphan(self, row: int, shelf: int, parent: Key) -> None:
        self._orphans.setdefault((shelf, parent), {})[row] = None
        self._orphan_of[row] = (shelf, parent)

    def _adopt(self, row: int, shelf: int, key: Key) -> None:
        if children := self._orphans.pop((shelf, key), None):
            self.policy.link([*children], row)
            for child in children:
                del self._orphan_of[child]

    def _forget_orphan(self, row: int) -> None:
        place = self._orphan_of.pop(row)
        siblings = self._orphans[place]
        del siblings[row]
        if not siblings:
            del self._orphans[place]

    def _grow(self) -> None:
        more = len(self.held)
        self.offset = np.concatenate((self.offset, np.zeros(more, np.int64)))
        self.extent = np.concatenate((self.extent, np.zeros(more, np.int64)))
        self.frame_bytes = np.concatenate((self.frame_bytes, np.zeros(more, np.int64)))
        self.shelf = np.concatenate((self.shelf, np.full(more, NO_ROW, np.int32)))
        self.pool = np.concatenate((self.pool, np.zeros(more, np.int16)))
        self.held = np.concatenate((self.held, np.zeros(more, np.int32)))
