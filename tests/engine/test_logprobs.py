"""Log-probabilities: float64's, ranked, whatever the ties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.sampler import token_logprobs
from penstock.errors import SettingError


@given(
    vocab_size=st.integers(1, 300),
    count=st.integers(0, 320),
    seed=st.integers(0, 2**30),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    num_values=st.sampled_from([1, 3, 10_000]),  # few values: many ties
)
def test_as_in_float64_and_equal_ones_by_id(
    vocab_size: int, count: int, seed: int, scale: float, num_values: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(num_values, (vocab_size,), generator=generator) * (scale / num_values)
    token = seed % vocab_size
    expected = logits.double().log_softmax(-1).tolist()
    result = token_logprobs(logits, token, count)
    assert result.logprob == pytest.approx(expected[token], abs=1e-5)
    ranked = [each.token for each in result.most_likely]
    assert ranked == sorted(range(vocab_size), key=lambda each: (-float(logits[each]), each))[:count]
    for each in result.most_likely:
        assert each.logprob == pytest.approx(expected[each.token], abs=1e-5)
    if count >= vocab_size:
        assert math.fsum(math.exp(each.logprob) for each in result.most_likely) == pytest.approx(1, abs=1e-4)


def test_forbidden_tokens_have_no_probability() -> None:
    logits = torch.tensor([1.0, -math.inf, 2.0])
    result = token_logprobs(logits, 1, 2)
    assert result.logprob == -math.inf
    assert [each.token for each in result.most_likely] == [2, 0]


def test_half_precision_is_computed_in_float32() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = logits.double().log_softmax(-1)
    assert token_logprobs(logits, 7, 0).logprob == pytest.approx(float(expected[7]), abs=1e-5)


@pytest.mark.parametrize(("token", "count"), [(-1, 0), (3, 0), (0, -1)])
def test_what_is_outside_is_refused(token: int, count: int) -> None:
    with pytest.raises(SettingError, match="not accepted"):
        token_logprobs(torch.zeros(3), token, count)
