# SPDX-License-Identifier: Apache-2.0
"""What a client and the node service say to each other on a Unix socket.

    offset  bytes  field
         0      4  length n of the message, little endian, 1 to MESSAGE_BYTES_MAX (HELLO_BYTES_MAX before Welcome)
         4      n  MessagePack: an array whose first item says which message it is

The client says Hello, the service answers Welcome, with the file descriptors of the arenas beside it, or
Refused. After that the client may send many requests before the first answer; each answer carries the id of its
request, and Refused answers anything. Only numbers travel here: payloads are copied to and from the arenas.

Keys, offsets and sizes travel as one run of bytes each, so that five hundred of them cost one object. Every
length has a bound, and a message that breaks one ends the conversation: nothing here trusts its peer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvtide.errors import ProtocolError
from kvtide.keys import KEY_BYTES, SHELF_BYTES, Keys
from kvtide.outcome import Outcome

VERSION: Final = 1
MESSAGE_BYTES_MAX: Final = 1 << 20
HELLO_BYTES_MAX: Final = 4096
KEYS_MAX: Final = 16_384  # of one message: with a size and a tier for each, well within MESSAGE_BYTES_MAX
SHELVES_MAX: Final = 64
LEASES_MAX: Final = 4096
ARENAS_MAX: Final = 64
TIERS_MAX: Final = 16
RECEIVE_BYTES: Final = 1 << 16  # at a time: what is larger is mapped and unmapped by malloc for each call

_LENGTH: Final = struct.Struct("<I")
LENGTH_BYTES: Final = _LENGTH.size

Id: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
Word: TypeAlias = Annotated[str, Meta(max_length=256)]
DigestBytes: TypeAlias = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
ShelfBytes: TypeAlias = Annotated[bytes, Meta(min_length=SHELF_BYTES, max_length=SHELF_BYTES)]
ShelvesBytes: TypeAlias = Annotated[tuple[ShelfBytes, ...], Meta(max_length=SHELVES_MAX)]
KeysBytes: TypeAlias = Annotated[bytes, Meta(max_length=KEYS_MAX * KEY_BYTES)]
SizesBytes: TypeAlias = Annotated[bytes, Meta(max_length=KEYS_MAX * 8)]
TiersBytes: TypeAlias = Annotated[bytes, Meta(max_length=KEYS_MAX)]
Numbers: TypeAlias = Annotated[tuple[Number, ...], Meta(max_length=LEASES_MAX)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]


class Hello(Struct, tag=0, array_like=True, frozen=True):
    """`token` and `tenant` are empty where the user id of the process says it all."""

    version: Id
    software: Word
    token: Word = ""
    tenant: Word = ""


class ArenaInfo(Struct, array_like=True, frozen=True):
    """One for each file descriptor beside Welcome, in their order."""

    size_bytes: Number
    is_writable: bool


class Welcome(Struct, tag=1, array_like=True, frozen=True):
    version: Id
    software: Word
    session: Number
    tenant: Word
    role: Word
    arenas: Annotated[tuple[ArenaInfo, ...], Meta(max_length=ARENAS_MAX)]
    request_bytes_max: Number
    requests_max: Number
    fetch_s: Seconds
    instance: Number  # of the service: another one after each start
    tiers: Annotated[tuple[Word, ...], Meta(max_length=TIERS_MAX)]  # their names, in the order of a match's numbers


class Refused(Struct, tag=2, array_like=True, frozen=True):
    """In place of the answer to a request, or (id 0) of Welcome. `kind` is the word of an error's class."""

    id: Id
    kind: Word
    message: Annotated[str, Meta(max_length=1024)]


class OpenScope(Struct, tag=10, array_like=True, frozen=True):
    """`group`: of a share group instead of the own tenant."""

    id: Id
    namespace: DigestBytes
    scope: DigestBytes
    group: Word = ""


class ScopeOpened(Struct, tag=11, array_like=True, frozen=True):
    id: Id
    tenant: DigestBytes
    root: DigestBytes


class Find(Struct, tag=12, array_like=True, frozen=True):
    id: Id
    shelves: ShelvesBytes
    keys: KeysBytes


class Found(Struct, tag=13, array_like=True, frozen=True):
    """Sizes (int64) and tiers (int8) of each shelf, for at least `blocks` blocks."""

    id: Id
    blocks: Number
    frame_bytes: Annotated[tuple[SizesBytes, ...], Meta(max_length=SHELVES_MAX)]
    tiers: Annotated[tuple[TiersBytes, ...], Meta(max_length=SHELVES_MAX)]


class MatchAndLease(Struct, tag=14, array_like=True, frozen=True):
    id: Id
    shelves: ShelvesBytes
    keys: KeysBytes
    first_page: Id
    pages_per_block: Annotated[int, Meta(ge=1, lt=1 << 32)]
    deadline_s: Seconds


class Piece(Struct, array_like=True, frozen=True):
    """Blocks under one lease: where their payloads begin in an arena, and how long each is. `lease` 0: none."""

    lease: Number
    arena: Id
    first_page: Id
    offsets: SizesBytes
    sizes: SizesBytes
    outcome: Id


class PiecesLeased(Struct, tag=15, array_like=True, frozen=True):
    id: Id
    matched_blocks: Number
    first_block: Number
    pieces: Annotated[tuple[Piece, ...], Meta(max_length=SHELVES_MAX)]


class Fetch(Struct, tag=16, array_like=True, frozen=True):
    """`pin_s` 0: a lease for reading."""

    id: Id
    shelf: ShelfBytes
    keys: KeysBytes
    frame_bytes: SizesBytes
    tiers: TiersBytes
    first_page: Id
    pin_s: Seconds
    deadline_s: Seconds


class PieceFetched(Struct, tag=17, array_like=True, frozen=True):
    id: Id
    piece: Piece


class Prefetch(Struct, tag=18, array_like=True, frozen=True):
    id: Id
    shelf: ShelfBytes
    keys: KeysBytes
    frame_bytes: SizesBytes
    tiers: TiersBytes


class Counted(Struct, tag=19, array_like=True, frozen=True):
    id: Id
    count: Number


class Return(Struct, tag=20, array_like=True, frozen=True):
    """Leases come back: what was read is copied, what was reserved stays unfilled. No answer.

    `session`: an earlier one of the same process, whose connection was lost; 0: this one.
    """

    leases: Numbers
    session: Number = 0


class Reserve(Struct, tag=21, array_like=True, frozen=True):
    id: Id
    shelf: ShelfBytes
    keys: KeysBytes
    layers: Id
    pages: Id
    page_tokens: Id
    page_bytes: Id
    position: Id
    parent: DigestBytes


class Reserved(Struct, tag=22, array_like=True, frozen=True):
    """An outcome (one byte) for each key; an offset for each that got a slot."""

    id: Id
    lease: Number
    arena: Id
    outcomes: TiersBytes
    offsets: SizesBytes


class Publish(Struct, tag=23, array_like=True, frozen=True):
    """`which`: places among the keys of the reservation (uint32); None: all."""

    id: Id
    lease: Number
    which: Annotated[bytes, Meta(max_length=KEYS_MAX * 4)] | None = None


class Published(Struct, tag=24, array_like=True, frozen=True):
    id: Id
    outcomes: TiersBytes


class Clear(Struct, tag=25, array_like=True, frozen=True):
    """Of the own tenant; None: any."""

    id: Id
    namespace: DigestBytes | None = None
    prefix: DigestBytes | None = None


class AskStats(Struct, tag=26, array_like=True, frozen=True):
    id: Id


class Stats(Struct, tag=27, array_like=True, frozen=True):
    """What the own tenant may know, as JSON."""

    id: Id
    json: Annotated[bytes, Meta(max_length=MESSAGE_BYTES_MAX // 2)]


class ReportPrefill(Struct, tag=28, array_like=True, frozen=True):
    """How long the engine took to compute so many tokens of a namespace. No answer."""

    namespace: DigestBytes
    tokens: Number
    seconds: Seconds


class Bye(Struct, tag=29, array_like=True, frozen=True):
    """The last word: nothing is being copied any more, and everything that was held comes back."""


class Keep(Struct, tag=30, array_like=True, frozen=True):
    """Of an earlier session of the same process, only these leases are still in use. No answer."""

    session: Number
    leases: Numbers


Request: TypeAlias = (
    OpenScope
    | Find
    | MatchAndLease
    | Fetch
    | Prefetch
    | Return
    | Reserve
    | Publish
    | Clear
    | AskStats
    | ReportPrefill
    | Bye
    | Keep
)
Answer: TypeAlias = Refused | ScopeOpened | Found | PiecesLeased | PieceFetched | Counted | Reserved | Published | Stats

_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_welcome_decoder: msgspec.msgpack.Decoder[Welcome | Refused] = msgspec.msgpack.Decoder(Welcome | Refused)
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

T = TypeVar("T")


def encode(message: Struct) -> bytes:
    """A message behind its length."""
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a message of {len(body):,} bytes is over the bound of {MESSAGE_BYTES_MAX:,}")
    return _LENGTH.pack(len(body)) + body


def decode_hello(body: memoryview) -> Hello:
    return _decode(_hello_decoder, body)


def decode_welcome(body: memoryview) -> Welcome | Refused:
    return _decode(_welcome_decoder, body)


def decode_request(body: memoryview) -> Request:
    return _decode(_request_decoder, body)


def decode_answer(body: memoryview) -> Answer:
    return _decode(_answer_decoder, body)


def _decode(decoder: msgspec.msgpack.Decoder[T], body: memoryview) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message that cannot be read: {error}") from error


class Inbox:
    """Cuts a stream of bytes into messages. Holds at most one incomplete message and what one read brought."""

    def __init__(self, bytes_max: int = HELLO_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._buffer = bytearray()
        self._needed = 0  # so many bytes are in the buffer when its first message is whole

    @property
    def is_within_message(self) -> bool:
        return bool(self._buffer)

    def feed(self, data: bytes | memoryview) -> list[memoryview]:
        """The messages that are complete now. Raises ProtocolError for a length out of bounds.

        `bytes_max` of the moment of the call holds for all of them.
        """
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:  # a large one in many pieces is put together once
                return []
            data = bytes(self._buffer)
        view = memoryview(data)
        messages: list[memoryview] = []
        at = 0
        needed = LENGTH_BYTES
        while len(view) - at >= LENGTH_BYTES:
            (size,) = _LENGTH.unpack_from(view, at)
            if not 0 < size <= self.bytes_max:
                raise ProtocolError(f"a message of {size:,} bytes: 1 to {self.bytes_max:,} are allowed")
            end = at + LENGTH_BYTES + size
            if end > len(view):
                needed = end - at
                break
            messages.append(view[at + LENGTH_BYTES : end])
            at = end
        self._buffer, self._needed = bytearray(view[at:]), needed
        return messages


def unpack_keys(joined: bytes) -> Keys:
    try:
        return Keys(joined)
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def pack_numbers(numbers: npt.NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(numbers, "<i8").tobytes()


def unpack_numbers(data: bytes) -> npt.NDArray[np.int64]:
    if len(data) % 8:
        raise ProtocolError("a run of numbers that does not end with a whole one")
    return np.frombuffer(data, "<i8")


_OUTCOMES: Final = tuple(Outcome)
_CODE_OF: Final = {outcome: code for code, outcome in enumerate(_OUTCOMES)}


def outcome_code(outcome: Outcome) -> int:
    return _CODE_OF[outcome]


def pack_outcomes(outcomes: Sequence[Outcome]) -> bytes:
    return bytes(map(_CODE_OF.__getitem__, outcomes))


def unpack_outcome(code: int) -> Outcome:
    if code >= len(_OUTCOMES):
        raise ProtocolError(f"outcome {code} is not known")
    return _OUTCOMES[code]


def unpack_outcomes(codes: bytes) -> list[Outcome]:
    if codes and max(codes) >= len(_OUTCOMES):
        raise ProtocolError(f"outcome {max(codes)} is not known")
    return [*map(_OUTCOMES.__getitem__, codes)]
