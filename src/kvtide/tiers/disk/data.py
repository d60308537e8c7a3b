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

from kvtide.frame import Memory
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
        staging = self._staging.of(sum(_staged_bytes(piece.memory) for piece in run))
        for piece in run:
            body, staged = _split(piece.memory)
            page, staging = staging[: round_up(len(staged))], staging[round_up(len(staged)) :]
            np.copyto(page[: len(staged)], staged)
            page[len(staged) :] = 0  # what another tenant's frame left here must not reach the medium
            parts += [part for part in (body, page) if len(part)]
        self._file.write(parts, run[0].offset)

    def read(self, run: list[Piece]) -> int:
        """Fill the run's memory. Returns how many of its pieces were there in full; fewer: the file is short."""
        parts: list[Memory] = []
        copies: list[tuple[Memory, Memory]] = []
        staging = self._staging.of(sum(_staged_bytes(piece.memory) for piece in run))
        for piece in run:
            body, staged = _split(piece.memory)
            page, staging = staging[: round_up(len(staged))], staging[round_up(len(staged)) :]
            copies.append((staged, page))
            parts += [part for part in (body, page) if len(part)]
        got_to = run[0].offset + self._file.read(parts, run[0].offset)
        for staged, page in copies:
            np.copyto(staged, page[: len(staged)])
        return sum(piece.end <= got_to for piece in run)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def _split(memory: Memory) -> tuple[Memory, Memory]:
    """What the device can use as it is, and what must go through staging."""
    direct = len(memory) // ALIGNMENT * ALIGNMENT if memory.ctypes.data % ALIGNMENT == 0 else 0
    return memory[:direct], memory[direct:]


def _staged_bytes(memory: Memory) -> int:
    return round_up(len(_split(memory)[1]))
