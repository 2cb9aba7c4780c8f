"""Samplers: what may be drawn, how often, and that settings are checked."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.sampler import Sampler, SamplingParams
from penstock.errors import SettingError

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, 3.0])


def drawn(params: SamplingParams, count: int = 400) -> list[int]:
    sampler = Sampler(params)
    return [sampler.sample(LOGITS, []) for _ in range(count)]


def test_greedy_is_the_largest_and_the_default() -> None:
    assert set(drawn(SamplingParams(), 5)) == {5}


def test_temperature_sets_the_frequencies() -> None:
    draws = drawn(SamplingParams(temperature=0.7, seed=1), 4000)
    expected = (LOGITS / 0.7).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        assert abs(draws.count(token) / 4000 - probability) < 4 * math.sqrt(0.25 / 4000)


@pytest.mark.parametrize(("top_k", "allowed"), [(1, {5}), (2, {5, 0}), (3, {5, 0, 1}), (6, set(range(6)))])
def test_top_k(top_k: int, allowed: set[int]) -> None:
    assert set(drawn(SamplingParams(temperature=5.0, top_k=top_k, seed=0))) == allowed


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    probabilities = (LOGITS / 2.0).softmax(-1)
    top_two = float(probabilities[5] + probabilities[0])
    assert set(drawn(SamplingParams(temperature=2.0, top_p=top_two - 1e-4, seed=0))) == {5, 0}
    assert set(drawn(SamplingParams(temperature=2.0, top_p=top_two + 1e-4, seed=0))) == {5, 0, 1}
    assert set(drawn(SamplingParams(temperature=2.0, top_p=1e-9, seed=0))) == {5}


def test_min_p_is_relative_to_the_largest() -> None:
    # exp(-1), exp(-2), ... of the largest, at temperature 1.
    assert set(drawn(SamplingParams(temperature=1.0, min_p=math.exp(-1.5), seed=0))) == {5, 0}


def test_repetition_penalty_moves_both_signs_down() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=4.0))
    assert sampler.sample(LOGITS, [5]) == 0
    assert sampler.sample(torch.tensor([-1.0, -1.5]), [0]) == 1
    before = LOGITS.clone()
    sampler.sample(LOGITS, [0, 1, 2])
    assert torch.equal(before, LOGITS)


@given(
    temperature=st.floats(1e-6, 100),
    top_k=st.integers(0, 50),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 0.99),
    penalty=st.floats(0.1, 10),
    seed=st.integers(0, 2**40),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_any_settings_give_a_token_and_a_seed_repeats_it(
    temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, seed: int, scale: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p, min_p, penalty, seed)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * scale
    tokens = [Sampler(params).sample(logits, [1, 2, 3]) for _ in range(2)]
    assert tokens[0] == tokens[1]
    assert 0 <= tokens[0] < 40


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("temperature", 1e-50),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.0),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 0.5),
    ],
)
def test_bad_settings_name_themselves(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=name):
        SamplingParams(**{name: value})
