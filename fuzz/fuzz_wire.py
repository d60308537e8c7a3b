# SPDX-License-Identifier: Apache-2.0
"""Fuzz the wire: whatever bytes arrive, they are a message or a ProtocolError, and never anything else.

    python fuzz/fuzz_wire.py [SECONDS] [--seed N] [--plain]

With atheris (a fuzzer that sees which lines an input reaches) if it is installed. Without it, or with `--plain`, the
files of the corpus are changed at random, from a seed that is printed. An input that fails is kept in build/fuzz.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec

try:
    import atheris  # type: ignore[import-not-found, unused-ignore] # an optional tool, not made for every machine
except ImportError:
    atheris = None

with atheris.instrument_imports() if atheris else contextlib.nullcontext():
    from kvtide import wire
    from kvtide.errors import ProtocolError

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
SCRATCH = HERE.parent / "build" / "fuzz"
_INPUT_BYTES_MAX = 1 << 16
_DECODERS: tuple[Callable[[memoryview], msgspec.Struct], ...] = (
    wire.decode_hello,
    wire.decode_welcome,
    wire.decode_request,
    wire.decode_answer,
)
# Where bounds and lengths of MessagePack are.
_INTERESTING = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdc\x10\x01",
    b"\xc6\xff\xff\xff\xff",
    b"\xc5\xff\xff",
    b"\xc4\x20",
    b"\xdb\x00\x10\x00\x00",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xcf\x40\x00\x00\x00\x00\x00\x00\x00",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\xce\xff\xff\xff\xff",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",
    b"\xc0",
    b"\xc1",
    b"\xff",
    b"\x90",
    b"\x80",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x00",
    b"\x01\x00\x10\x00",
)


def one_input(data: bytes) -> None:
    """As a body of each kind, and as a stream that is read in pieces. Raises for whatever must not happen."""
    for decode in _DECODERS:
        try:
            message = decode(memoryview(data))
        except ProtocolError:
            continue
        # What was read is within its bounds, so it can be said again.
        again = decode(memoryview(wire.encode(message))[wire.LENGTH_BYTES :])
        assert again == message, "a message changed on its way"
        _unpack(message)
    _stream(data)


def _unpack(message: msgspec.Struct) -> None:
    """What stands in runs of bytes inside of messages."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, bytes):
            for unpack in (wire.unpack_keys, wire.unpack_numbers, wire.unpack_outcomes):
                with contextlib.suppress(ProtocolError):
                    unpack(value)


def _stream(data: bytes) -> None:
    """However a stream is cut, the same messages come out of it before it is refused."""
    whole, is_whole_refused = _messages(data, len(data) or 1)
    for size in (1, 3, 7) if len(data) < 512 else (data[0] + 1,):
        pieces, is_refused = _messages(data, size)
        assert is_refused == is_whole_refused, "it depends on the pieces whether a stream is refused"
        assert pieces[: len(whole)] == whole if is_refused else pieces == whole, "other messages in pieces"


def _messages(data: bytes, size: int) -> tuple[list[bytes], bool]:
    inbox = wire.Inbox(wire.HELLO_BYTES_MAX)
    messages: list[bytes] = []
    try:
        for at in range(0, len(data), size):
            messages += [bytes(body) for body in inbox.feed(data[at : at + size])]
    except ProtocolError:
        return messages, True
    assert all(1 <= len(body) <= wire.HELLO_BYTES_MAX for body in messages)
    return messages, False


def corpus() -> list[bytes]:
    return [path.read_bytes() for path in sorted(CORPUS.iterdir())]


def mutated(draw: random.Random, seeds: list[bytes]) -> bytes:
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(7)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = draw.randrange(256)
        elif kind == 2:
            data[at:at] = draw.randbytes(draw.randint(1, 8))
        elif kind == 3:
            del data[at : at + draw.randint(1, 16)]
        elif kind == 4:
            word = draw.choice(_INTERESTING)
            data[at : at + draw.choice((0, 1, len(word)))] = word
        elif kind == 5:
            other = draw.choice(seeds)
            start = draw.randrange(len(other) + 1)
            data[at:at] = other[start : start + draw.randint(1, 200)]
        else:
            data[at:at] = data[at : at + draw.randint(1, 64)] * draw.choice((1, 2, 50))
    return bytes(data[:_INPUT_BYTES_MAX])


def mutate(seconds: float, seed: int) -> int:
    """Change files of the corpus at random and try each. Returns how many were tried."""
    draw, seeds = random.Random(seed), corpus()
    for data in seeds:
        one_input(data)
    end_s = time.monotonic() + seconds
    tried = len(seeds)
    while time.monotonic() < end_s:
        data = mutated(draw, seeds)
        try:
            one_input(data)
        except BaseException:
            SCRATCH.mkdir(parents=True, exist_ok=True)
            kept = SCRATCH / f"failed-{sha256(data).hexdigest()[:16]}"
            kept.write_bytes(data)
            print(f"fuzz: input {tried} of seed {seed} failed; it is in {kept}", file=sys.stderr)
            raise
        tried += 1
    return tried


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seconds", nargs="?", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--plain", action="store_true", help="without atheris, even if it is installed")
    args = parser.parse_args()
    if atheris and not args.plain:
        SCRATCH.mkdir(parents=True, exist_ok=True)
        seed = [] if args.seed is None else [f"-seed={args.seed}"]
        # New inputs are kept in the first folder: the committed corpus does not change by itself.
        atheris.Setup([sys.argv[0], f"-max_total_time={args.seconds:.0f}", *seed, str(SCRATCH), str(CORPUS)], one_input)
        atheris.Fuzz()
        return 0
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    print(f"fuzz: changing {len(corpus())} files at random for {args.seconds:g} s, seed {seed}", flush=True)
    print(f"fuzz: {mutate(args.seconds, seed):,} inputs, nothing but messages and ProtocolError")
    return 0


if __name__ == "__main__":
    sys.exit(main())
