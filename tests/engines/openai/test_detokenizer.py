# SPDX-License-Identifier: Apache-2.0
"""Text from tokens as they come is the text of all of them, and no piece of it is half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from kvtide.engines.openai.detokenizer import Detokenizer

Pieces = list[bytes]
Decode = Callable[[Sequence[int]], str]


def by_bytes(pieces: Pieces) -> Decode:
    """As byte-level tokenizers decode: token number n is `pieces[n]`."""

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")

    return decode


def with_spaces(words: Sequence[str]) -> Decode:
    """As sentencepiece does: the text's first space is not written."""

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    return decode


def streamed(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    return [*(detokenizer.add(token) for token in tokens), detokenizer.end()]


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, Pieces]:
    """A text, and its bytes cut anywhere."""
    text = draw(st.text(max_size=40))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)))) | {0, len(data)})
    return text, [data[start:end] for start, end in pairwise(cuts)]


@given(cut_texts())
@example(("naïve 😀👍🏽 日本", [bytes([each]) for each in "naïve 😀👍🏽 日本".encode()]))
@example(("\ufffd", [b"\xef", b"\xbf", b"\xbd"]))
def test_a_text_cut_anywhere_comes_back_and_no_piece_holds_half_a_character(cut: tuple[str, Pieces]) -> None:
    text, pieces = cut
    shown = streamed(Detokenizer(by_bytes(pieces)), range(len(pieces)))
    assert "".join(shown) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=60))
@example([b"\x80"] * 40)
@example([b"\xf0"] * 20 + [b"\xf0", b"\x9f", b"\x98", b"\x80"])
@example([b"\xff"] * 7 + [b"\xe2", b"\x82", b"\xac"])
def test_bytes_that_are_no_text_give_what_decoding_them_at_once_gives(pieces: Pieces) -> None:
    decode = by_bytes(pieces)
    assert "".join(streamed(Detokenizer(decode), range(len(pieces)))) == decode(range(len(pieces)))


@given(st.lists(st.binary(min_size=1, max_size=3), min_size=30, max_size=200))
def test_what_is_decoded_for_a_token_has_a_bound(pieces: Pieces) -> None:
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return by_bytes(pieces)(tokens)

    streamed(Detokenizer(decode), range(len(pieces)))
    assert longest <= 20


@given(st.lists(st.sampled_from(["▁Hello", "▁", "wor", "ld", "▁▁", ".", "▁a"]), min_size=1, max_size=30))
def test_spaces_are_those_of_the_whole_text(words: list[str]) -> None:
    decode = with_spaces(["▁Well", *words])
    answer = range(1, len(words) + 1)
    shown = "".join(streamed(Detokenizer(decode, [0]), answer))
    assert "Well" + shown == decode([0, *answer])


def test_the_first_word_of_an_answer_keeps_its_space() -> None:
    decode = with_spaces(["▁The", "▁sky"])
    assert streamed(Detokenizer(decode, [0]), [1]) == [" sky", ""]


def test_a_character_that_the_prompt_began_belongs_to_the_answer() -> None:
    decode = by_bytes([b"a\xe2\x82", b"\xac!"])
    assert streamed(Detokenizer(decode, [0]), [1]) == ["€!", ""]


def test_special_tokens_give_no_text_and_change_none() -> None:
    words = ["▁a", "", "▁b"]
    assert streamed(Detokenizer(with_spaces(words)), [0, *[1] * 50, 2]) == ["a", *[""] * 50, " b", ""]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    assert streamed(Detokenizer(by_bytes([b"a", b"\xe2"])), [0, 1]) == ["a", "", "\ufffd"]
