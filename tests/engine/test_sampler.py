"""Samplers: what may be drawn, how often, and that settings are checked."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.engine.sampler import Sampler, SamplingParams
from penstock.errors import ModelError, SettingError

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


penalties = st.floats(-2, 2)
histories = st.lists(st.integers(0, 11), max_size=30)
biases = st.dictionaries(st.integers(0, 11), st.floats(-100, 100), max_size=5)


def random_logits(seed: int, size: int = 12) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 2**30),
    previous=histories,
    num_prompt=st.integers(0, 30),
    presence=penalties,
    frequency=penalties,
    repetition=st.floats(0.5, 2),
    bias=biases,
)
def test_greedy_takes_the_largest_after_bias_and_penalties(
    seed: int,
    previous: list[int],
    num_prompt: int,
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
) -> None:
    logits = random_logits(seed)
    params = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    counts = Counter(previous[num_prompt:])
    expected = []
    for token, logit in enumerate(logits.double().tolist()):
        value = logit + bias.get(token, 0)
        if token in previous:
            value = value / repetition if value > 0 else value * repetition
        expected.append(value - presence * (counts[token] > 0) - frequency * counts[token])
    before = logits.clone()
    token = Sampler(params).sample(logits, previous, num_prompt)
    assert expected[token] == pytest.approx(max(expected), abs=1e-4)
    assert torch.equal(before, logits)


def test_only_generated_tokens_are_present_or_frequent() -> None:
    logits = torch.tensor([1.0, 0.5, 0.0])
    for params in (SamplingParams(presence_penalty=0.6), SamplingParams(frequency_penalty=0.6)):
        assert Sampler(params).sample(logits, [0, 0, 0], 3) == 0
        assert Sampler(params).sample(logits, [1, 1, 0], 2) == 1
        assert Sampler(params).sample(logits, [0]) == 1
        growing = Sampler(params)
        assert [growing.sample(logits, [2, 0, 1, 2][:length], 1) for length in (1, 2, 3, 4)] == [0, 1, 0, 0]
    # Twice generated counts twice for frequency, once for presence.
    assert Sampler(SamplingParams(presence_penalty=0.4)).sample(logits, [0, 0]) == 0
    assert Sampler(SamplingParams(frequency_penalty=0.4)).sample(logits, [0, 0]) == 1


def test_bias_moves_frequencies_by_its_exponential() -> None:
    draws = drawn(SamplingParams(temperature=1.0, seed=3, logit_bias={5: -3.0, 4: 2.0}), 4000)
    expected = (LOGITS + torch.tensor([0, 0, 0, 0, 2.0, -3.0])).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        assert abs(draws.count(token) / 4000 - probability) < 4 * math.sqrt(0.25 / 4000)


@given(
    seed=st.integers(0, 2**30),
    allowed=st.sets(st.integers(0, 39), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 1e-6, 0.7, 100.0]),
    top_k=st.integers(0, 50),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 0.99),
    presence=penalties,
    bias=st.dictionaries(st.integers(0, 39), st.floats(-100, 100), max_size=5),
    previous=st.lists(st.integers(0, 39), max_size=9),
)
def test_a_forbidden_token_is_never_drawn(
    seed: int,
    allowed: set[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    presence: float,
    bias: dict[int, float],
    previous: list[int],
) -> None:
    logits = torch.full((40,), -math.inf)
    places = sorted(allowed)
    logits[places] = random_logits(seed, 40)[places] * 20
    params = SamplingParams(
        temperature, top_k, top_p, min_p, 1.3, seed, presence_penalty=presence, logit_bias=bias
    )
    sampler = Sampler(params)
    assert {sampler.sample(logits, previous, 2) for _ in range(5)} <= allowed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "row", [[-math.inf] * 3, [0.0, math.nan, 1.0], [math.nan, -math.inf, 0.0], [0.0, math.inf, 1.0]]
)
def test_a_row_without_a_token_to_draw_is_an_error(row: list[float], temperature: float) -> None:
    with pytest.raises(ModelError, match="no token to choose"):
        Sampler(SamplingParams(temperature)).sample(torch.tensor(row), [])


TOKENS = st.integers(0, len(LOGITS) - 1)


@given(
    prompt=st.lists(TOKENS, max_size=3),
    answer=st.lists(TOKENS, max_size=4),
    ends=st.sets(TOKENS, max_size=2),
    stops=st.sets(TOKENS, max_size=2),
    forbids=st.fixed_dictionaries(
        {},
        optional={
            "min_tokens": st.integers(1, 6),
            "allowed_token_ids": st.sets(TOKENS, min_size=1).map(tuple),
            "bad_sequences": st.lists(
                st.lists(TOKENS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
            ),
        },
    ),
)
def test_the_likeliest_token_is_taken_of_those_that_may_come(
    prompt: list[int], answer: list[int], ends: set[int], stops: set[int], forbids: dict[str, Any]
) -> None:
    params = SamplingParams(stop_token_ids=tuple(stops), **forbids)

    def may_come(token: int) -> bool:
        after = (*answer, token)
        is_early = len(answer) < params.min_tokens and token in ends | stops
        is_allowed = token in (params.allowed_token_ids or range(len(LOGITS)))
        return (
            is_allowed and not is_early and not any(after[-len(bad) :] == bad for bad in params.bad_sequences)
        )

    sampler = Sampler(params, ends)
    permitted = [*filter(may_come, range(len(LOGITS)))]
    if permitted:
        assert sampler.sample(LOGITS, [*prompt, *answer], len(prompt)) == max(
            permitted, key=LOGITS.__getitem__
        )
        return
    with pytest.raises(SettingError) as caught:
        sampler.sample(LOGITS, [*prompt, *answer], len(prompt))
    assert caught.value.setting == ("allowed_token_ids" if params.allowed_token_ids else "bad_words")


def test_the_bias_is_a_copy_of_its_own() -> None:
    bias = {1: 100.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = -100.0
    assert Sampler(params).sample(LOGITS, []) == 1
    with pytest.raises(TypeError):
        params.logit_bias[1] = 0.0  # type: ignore[index]
    assert hash(params) == hash(SamplingParams(logit_bias={1: 100.0}))
    assert params == SamplingParams(logit_bias={1: 100.0})


@given(token=st.integers(0, 2**31 - 1), vocab_size=st.integers(1, 2**31 - 1))
@example(token=6, vocab_size=6)
@example(token=5, vocab_size=6)
def test_a_bias_outside_the_vocabulary_is_refused(token: int, vocab_size: int) -> None:
    params = SamplingParams(logit_bias={token: 1.0})
    if token < vocab_size:
        params.check_vocab(vocab_size)
    else:
        with pytest.raises(SettingError, match=f"logit_bias={{{token}: "):
            params.check_vocab(vocab_size)
    if token >= LOGITS.shape[0]:
        with pytest.raises(SettingError, match="logit_bias"):
            Sampler(params).sample(LOGITS, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "1"),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: None}),
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
