# SPDX-License-Identifier: Apache-2.0
"""What a client and the service say: every message comes back as it was, and every bound of it holds."""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from kvtide import wire
from kvtide.errors import ProtocolError
from kvtide.keys import KEY_BYTES, SHELF_BYTES, Part
from kvtide.outcome import Outcome
from kvtide.testing import blocks

DIGEST = bytes(range(KEY_BYTES))
SHELF = blocks.shelf(part=Part(rank=1, ranks=2)).pack()
KEYS = b"".join(blocks.chain_keys("wire", 3))
SIZES = wire.pack_numbers(np.array([4096, 8192, 1 << 40]))
PIECE = wire.Piece(7, 1, 2, SIZES, SIZES[:8], 0)

REQUESTS: list[wire.Request] = [
    wire.OpenScope(1, DIGEST, DIGEST),
    wire.OpenScope(2**32 - 1, DIGEST, DIGEST, "prompts"),
    wire.Find(1, (SHELF, SHELF), KEYS),
    wire.MatchAndLease(1, (SHELF,), KEYS, 5, 2, 0.25),
    wire.Fetch(1, SHELF, KEYS, SIZES, b"\0\1\1", 3, 0.0, 1e9),
    wire.Prefetch(1, SHELF, KEYS, SIZES, b"\0\1\1"),
    wire.Return((1, 2, 2**62 - 1)),
    wire.Reserve(1, SHELF, KEYS, 2, 4, 16, 1024, 3, DIGEST),
    wire.Publish(1, 9),
    wire.Publish(1, 9, np.array([0, 2], "<u4").tobytes()),
    wire.Clear(1),
    wire.Clear(1, DIGEST, DIGEST),
    wire.AskStats(1),
    wire.ReportPrefill(DIGEST, 4096, 1.5),
    wire.Bye(),
    wire.Return((1, 2), 3),
    wire.Keep(3, (1, 2)),
]
ANSWERS: list[wire.Answer] = [
    wire.Refused(0, "denied", "no"),
    wire.ScopeOpened(1, DIGEST, DIGEST),
    wire.Found(1, 3, (SIZES,), (b"\0\0\1",)),
    wire.PiecesLeased(1, 3, 0, (PIECE, PIECE)),
    wire.PieceFetched(1, PIECE),
    wire.Counted(1, 2**62 - 1),
    wire.Reserved(1, 3, 0, b"\1\0\1", SIZES[:16]),
    wire.Published(1, b"\0\0\0"),
    wire.Stats(1, b"{}"),
]
WELCOMES: list[wire.Welcome | wire.Refused] = [
    wire.Welcome(
        1,
        "0.1",
        3,
        "search",
        "engine",
        (wire.ArenaInfo(1 << 30, True), wire.ArenaInfo(4096, False)),
        1,
        2,
        3.5,
        7,
        ("dram", "disk"),
    ),
    wire.Refused(0, "busy", "later"),
]
HELLOS = [wire.Hello(1, "0.1"), wire.Hello(1, "0.1", "token", "search")]
EVERY: list[tuple[Callable[[memoryview], Struct], Struct]] = [
    *((wire.decode_request, message) for message in REQUESTS),
    *((wire.decode_answer, message) for message in ANSWERS),
    *((wire.decode_welcome, message) for message in WELCOMES),
    *((wire.decode_hello, message) for message in HELLOS),
]


def body_of(message: Struct) -> bytes:
    return wire.encode(message)[wire.LENGTH_BYTES :]


def packed(value: object) -> memoryview:
    return memoryview(msgspec.msgpack.encode(value))


def fields_of(message: Struct) -> list[Any]:
    """The array that travels, with the number of the message first."""
    fields = msgspec.msgpack.decode(body_of(message))
    assert isinstance(fields, list)
    return fields


def name_of(case: tuple[object, Struct]) -> str:
    return type(case[1]).__name__


# Messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY, ids=name_of)
def test_a_message_comes_back_as_it_was(case: tuple[Callable[[memoryview], Struct], Struct]) -> None:
    decode, message = case
    encoded = wire.encode(message)
    (body,) = wire.Inbox(wire.MESSAGE_BYTES_MAX).feed(encoded)
    assert decode(body) == message


def test_every_message_of_the_protocol_is_among_the_examples() -> None:
    known = {each for each in vars(wire).values() if isinstance(each, type) and issubclass(each, Struct)}
    assert {type(message) for _, message in EVERY} == known - {Struct, wire.ArenaInfo, wire.Piece}


def test_no_two_messages_have_the_same_number() -> None:
    numbers = {type(message): fields_of(message)[0] for _, message in EVERY}
    assert len(set(numbers.values())) == len(numbers)


@pytest.mark.parametrize("case", EVERY, ids=name_of)
def test_a_message_without_its_last_needed_field_is_refused(case: tuple[Callable[..., Struct], Struct]) -> None:
    decode, message = case
    needed = [field for field in msgspec.structs.fields(message) if field.required]
    if not needed:
        assert type(message) is wire.Bye
        return
    with pytest.raises(ProtocolError, match="at least length"):
        decode(packed(fields_of(message)[: len(needed)]))


@pytest.mark.parametrize("case", EVERY, ids=name_of)
def test_fields_that_a_newer_version_adds_at_the_end_are_ignored(case: tuple[Callable[..., Struct], Struct]) -> None:
    decode, message = case
    fields = fields_of(message)
    assert decode(packed([*fields, "new", [1, {"x": None}], b"\0"])) == message


@pytest.mark.parametrize("case", EVERY, ids=name_of)
def test_a_field_of_another_type_is_refused(case: tuple[Callable[..., Struct], Struct]) -> None:
    decode, message = case
    for place in range(len(fields_of(message))):
        wrong = [*fields_of(message)]
        wrong[place] = {"a": "map"}  # no field is one
        with pytest.raises(ProtocolError, match="cannot be read"):
            decode(packed(wrong))


@pytest.mark.parametrize("number", [-1, 3, 9, 30, 99, 2**31, 2**63, "12", 12.0, None, [12], True])
def test_a_number_of_no_message_is_refused(number: object) -> None:
    for decode in (wire.decode_request, wire.decode_answer, wire.decode_welcome, wire.decode_hello):
        with pytest.raises(ProtocolError):
            decode(packed([number, 1, 1, 1, 1, 1]))


@pytest.mark.parametrize("message", ANSWERS[1:] + WELCOMES[:1] + HELLOS, ids=lambda message: type(message).__name__)
def test_an_answer_is_no_request(message: Struct) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_request(memoryview(body_of(message)))


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_is_no_answer_and_no_hello(message: Struct) -> None:
    for decode in (wire.decode_answer, wire.decode_welcome, wire.decode_hello):
        with pytest.raises(ProtocolError):
            decode(memoryview(body_of(message)))


@pytest.mark.parametrize("value", [1, "text", b"bytes", None, True, 1.5, {}, {"id": 1}, []])
def test_what_is_no_array_of_fields_is_refused(value: object) -> None:
    for decode in (wire.decode_request, wire.decode_answer, wire.decode_welcome, wire.decode_hello):
        with pytest.raises(ProtocolError):
            decode(packed(value))


def test_bytes_behind_a_message_are_refused() -> None:
    with pytest.raises(ProtocolError, match="trailing"):
        wire.decode_request(memoryview(body_of(wire.AskStats(1)) + b"\0"))


def test_a_message_cut_anywhere_is_refused() -> None:
    for _, message in EVERY:
        body = body_of(message)
        for end in range(len(body)):
            with pytest.raises(ProtocolError):
                wire.decode_request(memoryview(body)[:end])


# Bounds ------------------------------------------------------------------------------------------------------

ID_MAX, NUMBER_MAX = 2**32 - 1, 2**62 - 1
# message, field, the largest or longest that is allowed, and something just beyond it
BOUNDS: list[tuple[Struct, str, object, object]] = [
    (wire.AskStats(1), "id", ID_MAX, ID_MAX + 1),
    (wire.AskStats(1), "id", 0, -1),
    (REQUESTS[2], "shelves", [SHELF] * wire.SHELVES_MAX, [SHELF] * (wire.SHELVES_MAX + 1)),
    (REQUESTS[2], "shelves", [SHELF], [SHELF[:-1]]),
    (REQUESTS[2], "shelves", [SHELF], [SHELF + b"\0"]),
    (REQUESTS[2], "keys", bytes(wire.KEYS_MAX * KEY_BYTES), bytes(wire.KEYS_MAX * KEY_BYTES + 1)),
    (REQUESTS[3], "first_page", ID_MAX, ID_MAX + 1),
    (REQUESTS[3], "first_page", 0, -1),
    (REQUESTS[3], "pages_per_block", 1, 0),
    (REQUESTS[3], "pages_per_block", ID_MAX, ID_MAX + 1),
    (REQUESTS[3], "deadline_s", 1e9, math.nextafter(1e9, math.inf)),
    (REQUESTS[4], "shelf", SHELF, bytes(SHELF_BYTES + 1)),
    (REQUESTS[4], "frame_bytes", bytes(wire.KEYS_MAX * 8), bytes(wire.KEYS_MAX * 8 + 1)),
    (REQUESTS[4], "tiers", bytes(wire.KEYS_MAX), bytes(wire.KEYS_MAX + 1)),
    (REQUESTS[4], "pin_s", 0.0, -1e-9),
    (REQUESTS[5], "tiers", bytes(wire.KEYS_MAX), bytes(wire.KEYS_MAX + 1)),
    (REQUESTS[6], "leases", [1] * wire.LEASES_MAX, [1] * (wire.LEASES_MAX + 1)),
    (REQUESTS[6], "leases", [NUMBER_MAX], [NUMBER_MAX + 1]),
    (REQUESTS[6], "leases", [0], [-1]),
    (REQUESTS[7], "parent", DIGEST, DIGEST[:-1]),
    (REQUESTS[7], "layers", ID_MAX, ID_MAX + 1),
    (REQUESTS[7], "position", ID_MAX, ID_MAX + 1),
    (REQUESTS[7], "position", 0, -1),
    (REQUESTS[8], "lease", NUMBER_MAX, NUMBER_MAX + 1),
    (REQUESTS[9], "which", bytes(wire.KEYS_MAX * 4), bytes(wire.KEYS_MAX * 4 + 1)),
    (REQUESTS[11], "namespace", DIGEST, b""),
    (REQUESTS[11], "prefix", DIGEST, DIGEST + b"\0"),
    (REQUESTS[1], "group", "g" * 256, "g" * 257),
    (REQUESTS[13], "tokens", NUMBER_MAX, NUMBER_MAX + 1),
    (REQUESTS[13], "seconds", 0, math.nan),
    (REQUESTS[13], "seconds", 0.0, math.inf),
    (REQUESTS[13], "seconds", 5, -math.inf),
    (HELLOS[1], "token", "t" * 256, "t" * 257),
    (HELLOS[1], "tenant", "t" * 256, "t" * 257),
    (HELLOS[1], "software", "s" * 256, "s" * 257),
    (HELLOS[1], "version", ID_MAX, ID_MAX + 1),
    (ANSWERS[0], "message", "m" * 1024, "m" * 1025),
    (ANSWERS[0], "kind", "k" * 256, "k" * 257),
    (ANSWERS[2], "blocks", NUMBER_MAX, NUMBER_MAX + 1),
    (ANSWERS[2], "frame_bytes", [b""] * wire.SHELVES_MAX, [b""] * (wire.SHELVES_MAX + 1)),
    (ANSWERS[2], "tiers", [b""] * wire.SHELVES_MAX, [b""] * (wire.SHELVES_MAX + 1)),
    (ANSWERS[3], "pieces", [[0, 0, 0, b"", b"", 0]] * 64, [[0, 0, 0, b"", b"", 0]] * 65),
    (ANSWERS[3], "pieces", [[0, 0, 0, b"", b"", 0]], [[0, 0, 0, b"", b"", -1]]),
    (ANSWERS[6], "outcomes", bytes(wire.KEYS_MAX), bytes(wire.KEYS_MAX + 1)),
    (ANSWERS[8], "json", bytes(wire.MESSAGE_BYTES_MAX // 2), bytes(wire.MESSAGE_BYTES_MAX // 2 + 1)),
    (WELCOMES[0], "arenas", [[1, True]] * wire.ARENAS_MAX, [[1, True]] * (wire.ARENAS_MAX + 1)),
    (WELCOMES[0], "arenas", [[NUMBER_MAX, True]], [[NUMBER_MAX + 1, True]]),
    (WELCOMES[0], "tiers", ["dram"] * wire.TIERS_MAX, ["dram"] * (wire.TIERS_MAX + 1)),
    (WELCOMES[0], "tiers", ["x" * 256], ["x" * 257]),
    (WELCOMES[0], "arenas", [[1, False]], [[1, 0]]),
    (WELCOMES[0], "fetch_s", 1e9, 2e9),
]


@pytest.mark.parametrize(
    ("message", "field", "allowed", "beyond"), BOUNDS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_field_is_allowed_up_to_its_bound(message: Struct, field: str, allowed: object, beyond: object) -> None:
    decode = next(decode for decode, each in EVERY if each == message)
    place = 1 + [each.name for each in msgspec.structs.fields(message)].index(field)
    fields = fields_of(message)
    assert decode(packed([*fields[:place], allowed, *fields[place + 1 :]]))
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode(packed([*fields[:place], beyond, *fields[place + 1 :]]))


@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff"])
def test_an_array_that_promises_more_than_follows_is_refused_before_memory_is_taken_for_it(head: bytes) -> None:
    for body in (head, head + b"\x14", b"\x92\x14" + head, b"\x93\x0c\x01" + head, b"\x93\x1a\x01" + head):
        for decode in (wire.decode_request, wire.decode_answer, wire.decode_welcome, wire.decode_hello):
            with pytest.raises(ProtocolError):
                decode(memoryview(body))


@pytest.mark.parametrize("head", [b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\1"])
def test_bytes_text_and_extensions_that_promise_more_than_follows_are_refused(head: bytes) -> None:
    for body in (head, b"\x93\x00\x01" + head, b"\x94\x0c\x01\x90" + head, b"\x93\x1a\x01" + head):
        for decode in (wire.decode_request, wire.decode_hello):
            with pytest.raises(ProtocolError):
                decode(memoryview(body))


@pytest.mark.parametrize("nest", [b"\x91", b"\x81\x01"])
def test_arrays_in_arrays_without_an_end_are_refused(nest: bytes) -> None:
    deep = nest * 400_000
    for body in (deep, b"\x93\x14\x90" + deep, b"\x92\x14" + deep):
        with pytest.raises(ProtocolError):
            wire.decode_request(memoryview(body))


def test_text_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(ProtocolError, match="utf-8"):
        wire.decode_hello(memoryview(b"\x93\x00\x01\xa2\xed\xa0"))


def test_a_refused_message_never_quotes_what_it_held() -> None:
    secret = "token-that-must-not-be-in-a-log"
    for value in ([0, 1, "0.1", [secret]], [0, 1, "0.1", secret * 20], [0, secret], [secret], {secret: secret}):
        with pytest.raises(ProtocolError) as caught:
            wire.decode_hello(packed(value))
        assert secret not in str(caught.value)


def test_a_message_over_the_bound_is_not_sent() -> None:
    fits = wire.Stats(1, bytes(wire.MESSAGE_BYTES_MAX - 8))
    assert len(wire.encode(fits)) == wire.LENGTH_BYTES + wire.MESSAGE_BYTES_MAX
    with pytest.raises(ProtocolError, match="over the bound"):
        wire.encode(wire.Stats(1, bytes(wire.MESSAGE_BYTES_MAX - 7)))


# The inbox ---------------------------------------------------------------------------------------------------


def lengths(draw_max: int) -> st.SearchStrategy[list[bytes]]:
    return st.lists(st.binary(min_size=1, max_size=draw_max), max_size=8)


@given(lengths(40), st.data())
def test_any_split_of_a_stream_gives_the_same_messages(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    inbox = wire.Inbox()
    got = []
    for start, end in itertools.pairwise([0, *cuts, len(stream)]):
        if start < end:
            got += [bytes(message) for message in inbox.feed(stream[start:end])]
    assert got == bodies
    assert not inbox.is_within_message


@given(lengths(30))
def test_a_stream_byte_by_byte_gives_the_same_messages(bodies: list[bytes]) -> None:
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    inbox = wire.Inbox()
    assert [bytes(message) for at in range(len(stream)) for message in inbox.feed(stream[at : at + 1])] == bodies


@pytest.mark.parametrize("bytes_max", [1, 4096, 1 << 20])
def test_a_message_at_the_bound_is_taken_and_one_beyond_is_not(bytes_max: int) -> None:
    body = bytes(bytes_max)
    assert wire.Inbox(bytes_max).feed(struct.pack("<I", bytes_max) + body) == [body]
    for size in (0, bytes_max + 1, 2**32 - 1):
        with pytest.raises(ProtocolError, match="are allowed"):
            wire.Inbox(bytes_max).feed(struct.pack("<I", size) + body[:8])


def test_a_length_out_of_bounds_is_refused_before_anything_of_the_message_has_come() -> None:
    inbox = wire.Inbox()
    assert inbox.feed(b"\xff\xff\xff") == []
    with pytest.raises(ProtocolError):
        inbox.feed(b"\xff")


def test_a_whole_message_before_a_bad_length_is_not_given_out() -> None:
    with pytest.raises(ProtocolError):
        wire.Inbox().feed(struct.pack("<I", 1) + b"a" + struct.pack("<I", 0))


def test_an_inbox_knows_whether_it_is_within_a_message() -> None:
    inbox = wire.Inbox()
    assert not inbox.is_within_message
    inbox.feed(b"\x02")
    assert inbox.is_within_message
    inbox.feed(b"\0\0\0x")
    assert inbox.is_within_message
    assert inbox.feed(b"y") == [b"xy"]
    assert not inbox.is_within_message


def test_a_bound_raised_between_two_reads_holds_for_what_comes_then() -> None:
    inbox = wire.Inbox()
    large = struct.pack("<I", 5000) + bytes(5000)
    assert inbox.feed(wire.encode(HELLOS[0]) + large[:3]) == [body_of(HELLOS[0])]
    inbox.bytes_max = wire.MESSAGE_BYTES_MAX
    assert inbox.feed(large[3:]) == [bytes(5000)]


def test_messages_stay_what_they_were_when_more_is_read() -> None:
    inbox = wire.Inbox()
    (first,) = inbox.feed(b"\1\0\0\0a\1\0")
    (second,) = inbox.feed(b"\0\0b")
    inbox.feed(b"\1\0\0\0c")
    assert (bytes(first), bytes(second)) == (b"a", b"b")


def test_an_inbox_keeps_no_more_than_one_message_and_one_read() -> None:
    inbox = wire.Inbox(wire.MESSAGE_BYTES_MAX)
    message = struct.pack("<I", wire.MESSAGE_BYTES_MAX) + bytes(wire.MESSAGE_BYTES_MAX)
    read = 200_000
    tracemalloc.start()
    try:
        for at in range(0, 20 * read, read):  # never two whole ones at once, never a clean end
            for body in inbox.feed((message * 3)[at % len(message) :][:read]):
                assert len(body) == wire.MESSAGE_BYTES_MAX
            kept, _ = tracemalloc.get_traced_memory()
            assert kept < 5 * wire.MESSAGE_BYTES_MAX
    finally:
        tracemalloc.stop()


# Runs of keys, numbers, outcomes -----------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
def test_numbers_come_back_as_they_were(numbers: list[int]) -> None:
    data = wire.pack_numbers(np.array(numbers, np.int64))
    assert len(data) == 8 * len(numbers)
    assert wire.unpack_numbers(data).tolist() == numbers


def test_every_second_number_is_packed_as_what_it_is() -> None:
    assert wire.unpack_numbers(wire.pack_numbers(np.arange(10)[::2])).tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("size", [1, 7, 9, 8001])
def test_numbers_that_do_not_end_whole_are_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        wire.unpack_numbers(bytes(size))


@pytest.mark.parametrize("size", [1, 31, 33, 32 * 5 - 1])
def test_keys_that_do_not_end_whole_are_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        wire.unpack_keys(bytes(size))


def test_keys_come_back_as_they_were() -> None:
    assert list(wire.unpack_keys(KEYS)) == blocks.chain_keys("wire", 3)
    assert len(wire.unpack_keys(b"")) == 0


def test_every_outcome_has_a_code_of_its_own_and_comes_back() -> None:
    outcomes = list(Outcome)
    codes = wire.pack_outcomes(outcomes)
    assert len(set(codes)) == len(outcomes)
    assert wire.unpack_outcomes(codes) == outcomes
    assert [wire.unpack_outcome(wire.outcome_code(outcome)) for outcome in outcomes] == outcomes
    assert wire.unpack_outcomes(b"") == []


def test_codes_of_outcomes_are_format_and_do_not_change() -> None:
    names = ["hit", "miss", "pending", "rejected", "throttled", "corrupt", "timeout", "error"]
    assert [wire.unpack_outcome(code).value for code in range(len(names))] == names


@pytest.mark.parametrize("code", [len(Outcome), 255, 2**32 - 1])
def test_a_code_of_no_outcome_is_refused(code: int) -> None:
    with pytest.raises(ProtocolError):
        wire.unpack_outcome(code)
    with pytest.raises(ProtocolError):
        wire.unpack_outcomes(bytes([0, min(code, 255), 0]))


# The fuzzer --------------------------------------------------------------------------------------------------

FUZZ = Path(__file__).parent.parent / "fuzz"


def test_the_corpus_of_the_fuzzer_has_every_message() -> None:
    known = {type(message) for _, message in EVERY}
    seen = set()
    for path in (FUZZ / "corpus").iterdir():
        for decode in (wire.decode_request, wire.decode_answer, wire.decode_welcome, wire.decode_hello):
            with contextlib.suppress(ProtocolError):
                seen.add(type(decode(memoryview(path.read_bytes()))))
    assert seen == known


def test_the_fuzzer_finds_nothing_in_two_seconds() -> None:
    command = [sys.executable, str(FUZZ / "fuzz_wire.py"), "2", "--plain"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "nothing but messages" in run.stdout


def test_the_fuzzer_keeps_an_input_that_fails_and_tells_its_seed(tmp_path: Path) -> None:
    """Of a wire that takes what it must not: as a copy of the fuzzer sees it."""
    (tmp_path / "fuzz" / "corpus").mkdir(parents=True)
    (tmp_path / "fuzz" / "corpus" / "one").write_bytes(body_of(wire.AskStats(1)))
    broken = (
        (FUZZ / "fuzz_wire.py").read_text().replace("except ProtocolError:\n            continue", "except OSError: 0")
    )
    (tmp_path / "fuzz" / "fuzz_wire.py").write_text(broken)
    code = "import fuzz_wire as f; f._DECODERS = (f.wire.decode_request,); f.mutate(5, 7)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "fuzz",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode != 0
    assert "of seed 7 failed" in run.stderr
    assert len(list((tmp_path / "build" / "fuzz").iterdir())) == 1
