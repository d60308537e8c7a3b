# SPDX-License-Identifier: Apache-2.0
"""Many keys as one run of bytes: it behaves as the list of them, and is never taken for anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import Rejected
from kvtide.keys import KEY_BYTES, Key, Keys
from kvtide.testing import blocks

KEYS = blocks.chain_keys("run", 5)


def both(keys: list[Key]) -> list[Keys]:
    """The same keys as they arrive from a wire, and as somebody had them in a list."""
    return [Keys(b"".join(keys)), Keys.of(keys)]


@given(st.integers(0, 20), st.one_of(st.none(), st.integers(-25, 25)), st.one_of(st.none(), st.integers(-25, 25)))
def test_a_slice_holds_what_the_slice_of_a_list_holds(count: int, start: int | None, end: int | None) -> None:
    names = blocks.chain_keys("slice", count)
    for keys in both(names):
        cut = keys[start:end]
        assert isinstance(cut, Keys)
        assert list(cut) == names[start:end]
        assert len(cut) == len(names[start:end])
        assert cut.joined == b"".join(names[start:end])


@given(st.integers(0, 8), st.integers(-10, 10), st.booleans())
def test_an_index_gives_what_the_index_of_a_list_gives(count: int, index: int, is_split: bool) -> None:
    names = blocks.chain_keys("index", count)
    for keys in both(names):
        if is_split:
            list(keys)
        if -count <= index < count:
            assert keys[index] == names[index]
            assert type(keys[index]) is bytes
        else:
            with pytest.raises(IndexError):
                keys[index]


def test_keys_can_be_walked_again_and_again() -> None:
    for keys in both(KEYS):
        assert list(keys) == list(keys) == KEYS
        assert list(reversed(keys)) == KEYS[::-1]


def test_a_run_knows_which_keys_are_in_it() -> None:
    for keys in both(KEYS):
        assert KEYS[3] in keys
        assert Key(bytes(KEY_BYTES)) not in keys
        assert (keys.index(KEYS[2]), keys.count(KEYS[2])) == (2, 1)


def test_runs_of_equal_keys_are_equal_however_they_were_made() -> None:
    joined, listed = both(KEYS)
    list(joined)  # what was asked of one before makes no difference
    assert joined == listed
    assert hash(joined) == hash(listed)
    assert {joined: 1}[listed] == 1


def test_runs_of_other_keys_are_not_equal() -> None:
    keys = Keys.of(KEYS)
    assert keys != Keys.of(KEYS[:-1])
    assert keys != Keys.of(KEYS[::-1])
    assert keys != Keys(b"")


def test_a_run_is_not_equal_to_a_list_or_to_its_bytes() -> None:
    keys = Keys.of(KEYS)
    assert keys != KEYS
    assert keys != b"".join(KEYS)
    assert keys != None  # noqa: E711 - what __eq__ says of strangers is the point


@pytest.mark.parametrize("size", [1, KEY_BYTES - 1, KEY_BYTES + 1, 10 * KEY_BYTES - 1])
def test_bytes_that_are_no_whole_number_of_keys_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="no whole number"):
        Keys(bytes(size))


def test_a_list_with_a_key_too_short_is_refused() -> None:
    keys = Keys.of([*KEYS, Key(b"short")])
    with pytest.raises(Rejected, match="bytes of length 32"):
        keys.joined  # noqa: B018 # it is made when it is asked for


def test_a_run_of_keys_stays_itself() -> None:
    keys = Keys.of(KEYS)
    assert Keys.of(keys) is keys


def test_an_empty_run_is_empty() -> None:
    for keys in both([]):
        assert (len(keys), list(keys), bool(keys), keys[:3].joined) == (0, [], False, b"")
        with pytest.raises(IndexError):
            keys[0]


@pytest.mark.parametrize("step", [-1, 2, 3])
def test_picking_keys_one_by_one_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="runs"):
        Keys.of(KEYS)[::step]


def test_a_list_that_grows_afterwards_does_not_grow_the_run() -> None:
    names = list(KEYS)
    keys = Keys.of(names)
    names.append(KEYS[0])
    assert list(keys) == KEYS
