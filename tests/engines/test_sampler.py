# SPDX-License-Identifier: Apache-2.0
"""Which token comes next."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtide.engines.transformers.generation import Sampling
from kvtide.engines.transformers.sampler import Sampler
from kvtide.errors import Rejected

CPU = torch.device("cpu")
# Few different ones, so that the likeliest is often not alone.
logits_lists = st.lists(st.integers(-6, 6).map(float) | st.floats(-30, 30, width=32), min_size=1, max_size=40)


def sampler(**sampling: Any) -> Sampler:
    chosen = Sampling(**sampling)
    chosen.check()
    return Sampler(chosen, CPU)


@given(logits_lists, st.sampled_from([torch.float32, torch.bfloat16]))
def test_without_temperature_the_likeliest_comes(logits: list[float], dtype: torch.dtype) -> None:
    numbers = torch.tensor(logits, dtype=dtype)
    expected = int(numbers.argmax())
    assert sampler(temperature=0.0).choose(numbers) == expected
    assert sampler(temperature=0.0, top_p=0.3, top_k=5, seed=1).choose(numbers) == expected


@given(
    logits_lists,
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 5e-324}, {"top_k": 1, "top_p": 0.5}]),
    st.sampled_from([1.0, 0.1, 100.0]),
    st.integers(0, 5),
)
def test_of_one_choice_the_likeliest_comes_also_of_equals(
    logits: list[float], dtype: torch.dtype, narrow: dict[str, Any], temperature: float, seed: int
) -> None:
    numbers = torch.tensor(logits, dtype=dtype)
    assert sampler(temperature=temperature, seed=seed, **narrow).choose(numbers) == int(numbers.argmax())


@given(logits_lists, st.sampled_from([1e-5, 1e-30, 1e-45, 5e-324]), st.integers(0, 5))
def test_however_cold_there_is_a_next_token(logits: list[float], temperature: float, seed: int) -> None:
    numbers = torch.tensor(logits)
    token = sampler(temperature=temperature, seed=seed).choose(numbers)
    assert logits[token] >= max(logits) - 1e-3


@given(
    logits_lists,
    st.floats(0.1, 5),
    st.floats(0.01, 1),
    st.integers(0, 45),
    st.integers(-(2**70), 2**70),
)
def test_what_is_chosen_is_within_top_p_and_top_k(
    logits: list[float], temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    numbers = torch.tensor(logits)
    token = sampler(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed).choose(numbers)
    above = [each for each in logits if each > logits[token]]
    if top_k:
        assert len(above) < top_k
        kept = sorted(logits, reverse=True)[:top_k]
    else:
        kept = logits
    largest = max(kept)
    weights = [math.exp((each - largest) / temperature) for each in kept]
    before = sum(math.exp((each - largest) / temperature) for each in above)
    assert before / sum(weights) < top_p + 1e-5


@given(logits_lists, st.integers(0, 2**40))
def test_a_seed_gives_the_same_tokens_again(logits: list[float], seed: int) -> None:
    numbers = torch.tensor(logits)
    one, other = (sampler(temperature=1.0, seed=seed) for _ in range(2))
    assert [one.choose(numbers) for _ in range(10)] == [other.choose(numbers) for _ in range(10)]


def test_without_a_seed_tokens_differ() -> None:
    numbers = torch.zeros(1000)
    assert len({tuple(each.choose(numbers) for _ in range(4)) for each in [sampler(temperature=1.0)] * 3}) == 3


def test_choosing_does_not_change_the_logits() -> None:
    numbers = torch.randn(50)
    before = numbers.clone()
    sampler(temperature=0.7, top_k=5, top_p=0.5, seed=1).choose(numbers)
    assert torch.equal(numbers, before)


@pytest.mark.parametrize(
    ("narrow", "kept"),
    [({}, [0, 1, 2, 3]), ({"top_p": 0.75}, [0, 1]), ({"top_k": 3}, [0, 1, 2]), ({"top_k": 3, "top_p": 0.8}, [0, 1])],
)
def test_tokens_come_as_often_as_is_their_share(narrow: dict[str, Any], kept: list[int]) -> None:
    shares = [0.45, 0.31, 0.15, 0.09]
    numbers = torch.tensor(shares).log() * 2.0
    chosen = sampler(temperature=2.0, seed=7, **narrow)
    counts = Counter(chosen.choose(numbers) for _ in range(4000))
    assert {*counts} == {*kept}
    for token in kept:
        expected = shares[token] / sum(shares[each] for each in kept)
        assert abs(counts[token] / 4000 - expected) < 0.05


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": 100.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -1},
    ],
    ids=str,
)
def test_numbers_that_cannot_be_meant_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match=f"{next(iter(wrong))} is .*: (ask|give) "):
        Sampling(**wrong).check()


def test_every_token_may_be_chosen_where_nothing_narrows() -> None:
    chosen = sampler(temperature=1.0, seed=3)
    assert {chosen.choose(torch.zeros(20)) for _ in range(1000)} == {*range(20)}
