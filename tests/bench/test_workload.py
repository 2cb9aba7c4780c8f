"""Which systems run which lengths, how often, on which text."""

import pytest

from penstock.bench.suites import SUITES, Suite, SuiteName
from penstock.bench.systems import SystemName
from penstock.bench.timing import Pass
from penstock.bench.workload import DECODING, estimate_s, plan_memory, plan_timings
from penstock.measure.prompts import random_tokens
from penstock.plan.model import ModelConfig

CONFIG = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=8192,
    norm_eps=1e-5,
    tied_head=True,
)


PREFILL, HYBRID = SUITES[SuiteName.PREFILL], SUITES[SuiteName.HYBRID]


def test_long_prompts_run_less() -> None:
    short, long = plan_timings(PREFILL, [512, 8000])
    assert short.rounds == dict.fromkeys(PREFILL.systems, 5)
    assert set(long.rounds.values()) == {3}
    assert set(long.rounds) < set(PREFILL.systems)
    # Every comparison with transformers is made at every length.
    assert {SystemName.PENSTOCK, SystemName.TRANSFORMERS, SystemName.TRANSFORMERS_CHUNKED} <= set(long.rounds)


def test_token_by_token_is_run_less_and_not_at_all_for_long() -> None:
    short, long = plan_timings(HYBRID, HYBRID.lengths)
    tokenwise = SystemName.PENSTOCK_TOKENWISE
    assert short.rounds == {**dict.fromkeys(HYBRID.systems, 5), tokenwise: 3}
    assert tokenwise not in long.rounds
    assert tokenwise not in PREFILL.systems


@pytest.mark.parametrize("suite", [PREFILL, HYBRID])
def test_unless_asked_otherwise(suite: Suite) -> None:
    assert [set(case.rounds.values()) for case in plan_timings(suite, [512, 8000], repeats=7)] == [{7}, {7}]
    (short,) = plan_timings(suite, [512])
    (long,) = plan_timings(suite, [8000], full=True)
    assert long.rounds == short.rounds


@pytest.mark.parametrize("suite", [PREFILL, HYBRID])
def test_what_decodes_runs_everywhere(suite: Suite) -> None:
    for case in plan_timings(suite, [64, 8000]):
        assert set(DECODING) <= set(case.rounds)


@pytest.mark.parametrize("suite", [PREFILL, HYBRID])
def test_memory_of_what_has_a_bar_is_measured_several_times(suite: Suite) -> None:
    cases = plan_memory(suite, [512, 8000], repeats=3)
    assert [case.prompt_tokens for case in cases] == [512, 8000]
    for case in cases:
        assert tuple(case.rounds) == suite.memory_systems
        assert all(count == (3 if name is SystemName.PENSTOCK else 1) for name, count in case.rounds.items())


def test_the_estimate_is_exact_for_what_was_measured() -> None:
    warm_up = {name: Pass(name, 0, 512, (1, 2, 3), 2.0, 1.0) for name in SystemName}
    (case,) = plan_timings(PREFILL, [512], repeats=3)
    assert estimate_s(CONFIG, warm_up, [case], [], decode_tokens=4) == pytest.approx(3 * (5 * 2.0 + 2 * 2.0))


def test_random_tokens_are_the_same_every_time() -> None:
    tokens = random_tokens(50, 1000)
    assert tokens == random_tokens(50, 1000)
    assert tokens[:10] == random_tokens(50, 10)
    assert set(tokens) == set(range(50))


def test_the_estimate_grows_faster_than_the_prompt() -> None:
    warm_up = {name: Pass(name, 0, 512, (1,), 2.0, None) for name in SystemName}

    def seconds(length: int) -> float:
        return estimate_s(CONFIG, warm_up, plan_timings(PREFILL, [length], repeats=1, full=True), [], 0)

    assert seconds(4000) > 2.05 * seconds(2000)
