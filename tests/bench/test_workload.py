"""Which systems run which lengths, how often, on which text."""

import pytest

from penstock.bench.systems import SystemName
from penstock.bench.timing import Pass
from penstock.bench.workload import DECODING, estimate_s, plan_memory, plan_timings
from penstock.models.config import ModelConfig

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


def test_long_prompts_run_less() -> None:
    short, long = plan_timings([512, 8000])
    assert (short.systems, short.num_rounds) == (tuple(SystemName), 5)
    assert long.num_rounds == 3
    assert set(long.systems) < set(SystemName)
    # Every comparison with transformers is made at every length.
    assert {SystemName.PENSTOCK, SystemName.TRANSFORMERS, SystemName.TRANSFORMERS_CHUNKED} <= set(
        long.systems
    )


def test_unless_asked_otherwise() -> None:
    assert [case.num_rounds for case in plan_timings([512, 8000], repeats=7)] == [7, 7]
    (long,) = plan_timings([8000], full=True)
    assert (long.systems, long.num_rounds) == (tuple(SystemName), 5)


def test_what_decodes_runs_everywhere() -> None:
    for case in plan_timings([64, 8000]):
        assert set(DECODING) <= set(case.systems)


def test_memory_of_what_has_a_bar_is_measured_several_times() -> None:
    cases = plan_memory([512, 8000], repeats=3)
    assert [case.num_rounds for case in cases if case.systems == (SystemName.PENSTOCK,)] == [3, 3]
    assert [case.num_rounds for case in cases if case.systems != (SystemName.PENSTOCK,)] == [1] * 4


def test_the_estimate_is_exact_for_what_was_measured() -> None:
    warm_up = {name: Pass(name, 0, 512, (1, 2, 3), 2.0, 1.0) for name in SystemName}
    (case,) = plan_timings([512], repeats=3)
    assert estimate_s(CONFIG, warm_up, [case], [], decode_tokens=4) == pytest.approx(3 * (5 * 2.0 + 2 * 2.0))


def test_the_estimate_grows_faster_than_the_prompt() -> None:
    warm_up = {name: Pass(name, 0, 512, (1,), 2.0, None) for name in SystemName}

    def seconds(length: int) -> float:
        return estimate_s(CONFIG, warm_up, plan_timings([length], repeats=1, full=True), [], 0)

    assert seconds(4000) > 2.05 * seconds(2000)
