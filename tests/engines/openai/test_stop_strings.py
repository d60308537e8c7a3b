# SPDX-License-Identifier: Apache-2.0
"""An answer is cut at the same place however its text was divided, and nothing of the stop string is shown."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtide.engines.openai.stop_strings import StopStrings

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """By definition: the text before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def shown(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    cutter = StopStrings(stops)
    text = "".join(cutter.add(piece) for piece in pieces)
    return text + cutter.end(), cutter.is_found


@given(text=TEXT, stops=STOPS, cuts=st.sets(st.integers(0, 30)))
@example(text="abcc", stops=["abcd", "c"], cuts=set())
@example(text="xab", stops=["ab", "b"], cuts={1, 2})
def test_any_division_of_the_text_is_cut_at_the_same_place(text: str, stops: list[str], cuts: set[int]) -> None:
    borders = [0, *sorted(each for each in cuts if each < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    assert shown(pieces, stops) == cut(text, stops)


@given(text=TEXT, stops=STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    cutter = StopStrings(stops)
    out = ""
    for end, letter in enumerate(text, 1):
        out += cutter.add(letter)
        if cutter.is_found:
            return
        held = text[:end].removeprefix(out)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_nothing_comes_after_a_stop_string() -> None:
    cutter = StopStrings(["END"])
    assert [cutter.add("so it E"), cutter.add("ND and on"), cutter.add("more"), cutter.end()] == ["so it ", "", "", ""]
    assert cutter.is_found


@pytest.mark.parametrize("stops", [[], ["never"]])
def test_without_a_stop_string_all_text_is_shown(stops: list[str]) -> None:
    assert shown(["a n", "ev", "e"], stops) == ("a neve", False)
