"""Rows that are sampled together get what each would get alone."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.sampler import Sampler, SamplingParams
from penstock.engine.sampling import Choice, PlainRow, sample_rows
from penstock.errors import ModelError, SettingError
from penstock.kernels.device import DeviceKind
from tests.engine.test_alone_served import SAMPLING

VOCAB = 40


@dataclass
class Watched:
    """A row that keeps what it was asked to choose from."""

    sampler: Sampler
    needs_logits: bool
    seen: list[Tensor] = field(default_factory=list)

    def choose(self, logits: Tensor) -> Choice:
        self.seen.append(logits)
        return Choice(self.sampler.sample(logits, [1, 2]), None)


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1e-6, 0.7, 3.0]),
    top_k=st.integers(0, 50),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 0.99),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    seed=st.integers(0, 2**40),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=2),
)


def alone(row: Tensor, params: SamplingParams, tokens: list[int]) -> int | str:
    try:
        return Sampler(params).sample(row, tokens)
    except ModelError as error:
        return str(error)


def told(choice: Choice | Exception) -> int | str:
    return choice.token if isinstance(choice, Choice) else str(choice)


@given(
    st.lists(params, min_size=1, max_size=6),
    st.integers(0, 2**30),
    st.lists(st.integers(0, VOCAB - 1), max_size=9),
    st.integers(1, 5),
    st.sampled_from([None, math.nan, math.inf, -math.inf]),
)
def test_together_is_alone(
    rows: list[SamplingParams], seed: int, tokens: list[int], step: int, odd: float | None
) -> None:
    """Ties are frequent, and a row may have nothing to choose."""
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)).mul(step).round()
    if odd is not None:
        logits[seed % len(rows), :: 1 if odd == -math.inf else 7] = odd
    choices = sample_rows(logits, [PlainRow(Sampler(each), tokens) for each in rows])
    expected = [alone(row, each, tokens) for row, each in zip(logits, rows, strict=True)]
    assert [told(choice) for choice in choices] == expected


def test_rows_that_need_them_are_given_their_logits() -> None:
    logits = torch.randn(4, VOCAB)
    rows = [Watched(Sampler(SamplingParams()), needs_logits) for needs_logits in (False, True, False, True)]
    tokens = [told(choice) for choice in sample_rows(logits, rows)]
    assert tokens == logits.argmax(dim=-1).tolist()
    assert [len(row.seen) for row in rows] == [0, 1, 0, 1]
    assert torch.equal(rows[3].seen[0], logits[3])


def test_greedy_rows_come_to_the_host_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[int, ...]] = []
    to_host = Tensor.cpu

    def counted(tensor: Tensor) -> Tensor:
        copies.append(tuple(tensor.shape))
        return to_host(tensor)

    monkeypatch.setattr(Tensor, "cpu", counted)
    sample_rows(torch.randn(16, VOCAB), [PlainRow(Sampler(SamplingParams()))] * 16)
    assert copies == [(2, 16)]


def test_an_error_is_one_row_s() -> None:
    logits = torch.randn(3, VOCAB)
    logits[1] = math.nan
    wrong = SamplingParams(logit_bias={VOCAB: 1.0})
    rows = [PlainRow(Sampler(each)) for each in (SamplingParams(), SamplingParams(), wrong)]
    first, second, third = sample_rows(logits, rows)
    assert isinstance(first, Choice)
    assert isinstance(second, ModelError)
    assert "no token to choose" in str(second)
    assert isinstance(third, SettingError)


def test_one_alone() -> None:
    logits = torch.randn(1, VOCAB)
    settings = SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.2)
    (choice,) = sample_rows(logits, [PlainRow(Sampler(settings), [3, 4])])
    assert choice == Choice(Sampler(settings).sample(logits[0], [3, 4]), None)
    (failed,) = sample_rows(torch.full((1, VOCAB), math.nan), [PlainRow(Sampler(SamplingParams()))])
    assert isinstance(failed, ModelError)


class TestDrawnOnTheDevice:
    """The form that is the device's, here on a processor: other sums, so for some numbers another token, but none of
    these."""

    @pytest.fixture(autouse=True)
    def draws_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DeviceKind, "draws", True)

    def test_a_seed_gives_the_same_tokens(self) -> None:
        numbers = random.Random(0)

        def settings() -> SamplingParams:
            choices: dict[str, list[Any]] = {
                "temperature": [0.0, 1e-6, 0.3, 1.0, 8.0],
                "top_k": [0, 0, 1, 3, 20, VOCAB, 1000],
                "top_p": [1.0, 1.0, 0.1, 0.8, 0.99, 1e-9],
                "min_p": [0.0, 0.0, 0.01, 0.3],
                "seed": [numbers.randrange(2**40)],
            }
            return SamplingParams(**{name: numbers.choice(values) for name, values in choices.items()})

        for turn in range(100):
            rows = [settings() for _ in range(7)]
            logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(turn)) * 3
            samplers = [Sampler(each) for each in rows]
            others = [Sampler(each) for each in rows]
            for _ in range(3):  # each draw takes a number, and one only
                choices = sample_rows(logits, [PlainRow(sampler) for sampler in samplers])
                expected = [other.sample(row, []) for other, row in zip(others, logits, strict=True)]
                assert [told(choice) for choice in choices] == expected

    @pytest.mark.parametrize("name", SAMPLING)
    def test_every_parameter_means_the_same(self, name: str) -> None:
        """One that nothing does on the device is no less in force there: its rows are chosen on the host."""
        logits = torch.randn(20, 256, generator=torch.Generator().manual_seed(4)) * 3
        for value in SAMPLING[name]:
            rows = [SamplingParams(**{"temperature": 1.0, "seed": seed, name: value}) for seed in range(20)]
            choices = sample_rows(logits, [PlainRow(Sampler(each), [65, 70]) for each in rows])
            expected = [alone(row, each, [65, 70]) for row, each in zip(logits, rows, strict=True)]
            assert [told(choice) for choice in choices] == expected

    @pytest.mark.parametrize("top_p", [1.0, 0.5])
    @pytest.mark.parametrize(
        "row", [[math.nan] * VOCAB, [-math.inf] * VOCAB, [0.0] * (VOCAB - 1) + [math.inf]]
    )
    def test_a_row_without_a_token_is_its_own_error(self, row: list[float], top_p: float) -> None:
        rows = [PlainRow(Sampler(SamplingParams(temperature=1.0, top_p=top_p, top_k=3))) for _ in range(2)]
        good, bad = sample_rows(torch.tensor([[1.0] * VOCAB, row]), rows)
        assert isinstance(good, Choice)
        assert isinstance(bad, ModelError)

    @given(
        st.integers(0, 2**30),
        st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        st.sampled_from([1e-6, 0.7, 100.0]),
        st.integers(0, 50),
        st.floats(1e-6, 1),
        st.floats(0, 0.99),
    )
    def test_a_forbidden_token_is_never_drawn(
        self, seed: int, allowed: set[int], temperature: float, top_k: int, top_p: float, min_p: float
    ) -> None:
        logits = torch.full((1, VOCAB), -math.inf)
        places = sorted(allowed)
        logits[0, places] = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))[places] * 20
        sampler = Sampler(SamplingParams(temperature, top_k, top_p, min_p, seed=seed))
        (choice,) = sample_rows(logits, [PlainRow(sampler)])
        assert isinstance(choice, Choice)
        assert choice.token in allowed
