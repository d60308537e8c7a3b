# SPDX-License-Identifier: Apache-2.0
"""The data file: frames at page-aligned offsets, moved in as few and as large calls as possible.

Frames that lie side by side go in one vectored call. The frames' own memory is used where it is aligned
(slots of the arena are); a ragged end goes through a page of staging, unaligned memory through a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtide.layout import Memory
from kvtide.memory.arena import round_up
from kvtide.tiers.disk.files import ALIGNMENT, RawFile, Staging

RUN_BYTES_MAX = 4 << 20  # beyond this a larger call is no faster, and several run in parallel
_RUN_FRAMES_MAX = 256  # two parts each stay below the kernel's limit of 1,024


@dataclass(frozen=True, slots=True)
class Piece:
    """One frame of a batch: where it stands in the caller's lists, in the file, and in memory."""

    at: int
    row: int
    offset: int
    memory: Memory

    @property
    def end(self) -> int:
        return self.offset + round_up(len(self.memory))


def runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group pieces that lie side by side in the file into runs for one call each."""
    grouped: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        run = grouped[-1] if grouped else []
        fits = run and run[-1].end == piece.offset and piece.end - run[0].offset <= RUN_BYTES_MAX
        if fits and len(run) < _RUN_FRAMES_MAX:
            run.append(piece)
        else:
            grouped.append([piece])
    return grouped


class DataFile:
    """Any number of threads may read and write different runs at once."""

    def __init__(self, path: Path, open_file: Callable[[Path], RawFile]) -> None:
        self._file = open_file(path)
        self._staging = Staging()

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def grow(self, size_bytes: int) -> None:
        """Reserve room on the device up to that size; raises OSError when it has none."""
        self._file.allocate(self.size_bytes, size_bytes - self.size_bytes)

    def truncate(self, size_bytes: int) -> None:
        self._file.truncate(size_bytes)

    def write(self, run: list[Piece]) -> None:
        parts: list[Memory] = []
        for body, ragged, page in self._split(run):
            if len(body):  # an empty part of unaligned memory is refused by some kernels
                parts.append(body)
            if page is not None:
                np.copyto(page[: len(ragged)], ragged)
                page[len(ragged) :] = 0  # what another tenant's frame left here must not reach the medium
                parts.append(page)
        self._file.write(parts, run[0].offset)

    def read(self, run: list[Piece]) -> int:
        """Fill the run's memory. Returns how many of its pieces were there in full; fewer: the file is short."""
        split = self._split(run)
        parts = [part for body, _, page in split for part in (body, page) if part is not None and len(part)]
        got_to = run[0].offset + self._file.read(parts, run[0].offset)
        for _, ragged, page in split:
            if page is not None:
                np.copyto(ragged, page[: len(ragged)])
        return sum(piece.end <= got_to for piece in run)

    def _split(self, run: list[Piece]) -> list[tuple[Memory, Memory, Memory | None]]:
        """Of each piece: what the device can use as it is, the rest, and the staging that stands in for the rest."""
        cuts = [_direct_bytes(piece.memory) for piece in run]
        sizes = [round_up(len(piece.memory) - cut) for piece, cut in zip(run, cuts, strict=True)]
        staging = self._staging.of(sum(sizes)) if any(sizes) else None
        split: list[tuple[Memory, Memory, Memory | None]] = []
        at = 0
        for piece, cut, size in zip(run, cuts, sizes, strict=True):
            page = staging[at : at + size] if staging is not None and size else None
            split.append((piece.memory[:cut], piece.memory[cut:], page))
            at += size
        return split

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def _direct_bytes(memory: Memory) -> int:
    address: int = memory.__array_interface__["data"][0]  # a tenth of the time of .ctypes.data
    return len(memory) // ALIGNMENT * ALIGNMENT if address % ALIGNMENT == 0 else 0
