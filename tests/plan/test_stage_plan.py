"""A plan of stages adds up to the model, takes the fastest chunk that fits, and says when machines bring nothing."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import MemoryExhaustedError, SettingError
from penstock.plan import StepTimeCoefficients, Workspace
from penstock.plan.memory import WeightBits, kv_token_bytes, weight_bytes
from penstock.plan.model import DeltaNetConfig, ModelConfig
from penstock.plan.pipeline import Link, Machine
from penstock.plan.stage_plan import StagePlan, StageQuestion, make_stage_plan
from penstock.plan.units import format_rate, parse_rate

EIGHT_B = ModelConfig(36, 4096, 12_288, 32, 8, 128, 151_936)
H200 = StepTimeCoefficients(1.5e-3, 2.23e-5, 9.5e-10, 5.1e-3, 5e-8)
GIB = 1 << 30


def plan(num_stages: int, prompt_tokens: int = 32_768, gbits: float | None = 10, **more: Any) -> StagePlan:
    link = None if gbits is None else Link(gbits * 1e9 / 8)
    machines = more.pop("machines", (Machine(),) * num_stages)
    question = StageQuestion(EIGHT_B, prompt_tokens, machines, Workspace("cuda"), link, coefficients=H200)
    return make_stage_plan(replace(question, **more))


def test_stages_hold_the_model() -> None:
    made = plan(4, bits=WeightBits(8, 8, is_tied=True))
    once = 151_936 * 4096
    total = sum(stage.weights_bytes for stage in made.stages)
    assert 0 <= total - once - weight_bytes(EIGHT_B, 2, WeightBits(8, 8, is_tied=True)) < 100
    assert sum(stage.kv_cache_bytes for stage in made.stages) == 32_768 * kv_token_bytes(EIGHT_B, 2)
    assert [stage.end - stage.start for stage in made.stages] == [8, 9, 9, 10]
    assert any("--layers 8,9,9,10, is for one prompt" in note for note in made.notes)
    unknown = plan(4, coefficients=None)
    assert [stage.end - stage.start for stage in unknown.stages] == [9] * 4
    assert not any("--layers" in note for note in unknown.notes)
    assert made.stages[0].weights_bytes > made.stages[1].weights_bytes < made.stages[-1].weights_bytes
    assert plan(4, num_decodes=3).stages[1].kv_cache_bytes == 4 * made.stages[1].kv_cache_bytes


def test_states_of_steps_in_flight_are_counted() -> None:
    net = DeltaNetConfig(18, 16, 32, 128, 128, 4, layers=tuple(range(0, 36, 2)))
    hybrid = replace(EIGHT_B, delta_net=net)
    one, two = plan(1, config=hybrid), plan(2, config=hybrid)
    assert sum(stage.recurrent_bytes for stage in two.stages) == 2 * one.stages[0].recurrent_bytes > 0
    assert plan(2, 1000, config=hybrid, chunk=100).chunk == 128


def test_the_clock_says_what_machines_bring() -> None:
    slow, fast = plan(8, gbits=1), plan(8, gbits=100)
    assert [row.num_stages for row in fast.times] == [1, 2, 4, 8]
    assert [round(row.speed_up, 1) for row in slow.times] == pytest.approx([1, 0.6, 0.6, 0.6], abs=0.11)
    assert all(row.is_link_bound for row in slow.times[1:])
    assert fast.times[3].speed_up > 5.5
    assert not fast.times[3].is_link_bound
    assert any("slower than the fastest machine alone: a link of 1 Gb/s binds" in note for note in slow.notes)
    assert not any("slower" in note for note in fast.notes)
    assert any("at most 6.9x" in note for note in fast.notes)
    assert fast.chunk == fast.times[-1].chunk
    assert 0 < fast.times[-1].busy < 1 == fast.times[0].busy


def test_fewer_stages_that_are_as_good_are_named() -> None:
    assert any("2 stages are as good" in note for note in plan(8, gbits=2).notes)
    assert not any("as good" in note for note in plan(4).notes)


def test_one_answer_gains_nothing_and_many_do() -> None:
    one, many = plan(4).decodes
    assert one.num_streams == 1
    assert one.token_s > one.alone_s
    assert many.token_s < many.alone_s / 1.5
    assert any("one answer gains nothing" in note for note in plan(4).notes)
    unknown = plan(4, coefficients=None)
    assert (unknown.decodes, unknown.times) == ((), ())


def test_unequal_machines() -> None:
    halves = (Machine(speed=1.0), Machine(speed=0.5))
    made = plan(2, machines=halves)
    assert [stage.end - stage.start for stage in made.stages] == [24, 12]
    assert [row.num_stages for row in made.times] == [1, 2]
    assert 1.3 < made.times[1].speed_up < 1.5


def test_memory_settles_the_cut_and_the_chunk() -> None:
    little = (Machine(7 * GIB), Machine(20 * GIB))
    made = plan(2, machines=little, coefficients=None)
    assert made.stages[0].end < 18
    assert all(stage.fits for stage in made.stages)
    with pytest.raises(MemoryExhaustedError, match="no cut into 2 stages fits"):
        plan(2, machines=(Machine(GIB), Machine(20 * GIB)))
    fixed = plan(2, machines=little, layers=(20, 16))
    assert [stage.fits for stage in fixed.stages] == [False, True]
    # A chunk that would be faster does not fit where a smaller one does.
    roomy = plan(2, coefficients=None, chunk=None)
    assert roomy.chunk == 512
    tight = tuple(Machine(stage.total_bytes + (1 << 20)) for stage in plan(2, chunk=128).stages)
    assert plan(2, machines=tight, coefficients=None, layers=(18, 18)).chunk == 128


@pytest.mark.parametrize(("chunk", "expected"), [(None, 100), (0, 100), (7, 7), (5000, 100)])
def test_a_short_prompt_is_one_chunk(chunk: int | None, expected: int) -> None:
    assert plan(2, prompt_tokens=100, chunk=chunk).chunk == expected


def test_a_prompt_beyond_the_context_is_refused() -> None:
    with pytest.raises(SettingError, match="the model's context is 1048576 tokens"):
        plan(2, prompt_tokens=(1 << 20) + 1)


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "shown"),
    [
        ("10Gb/s", 1.25e9, "10 Gb/s"),
        ("1Gbit/s", 1.25e8, "1 Gb/s"),
        ("4Mb/s", 5e5, "4 Mb/s"),
        ("4 Mbps", 5e5, "4 Mb/s"),
        ("1.2GB/s", 1.2e9, "9.6 Gb/s"),
        ("512KiB/s", 524_288, "4.19 Mb/s"),
        ("100kb/s", 12_500, "100 kb/s"),
        ("999.9Mb/s", 999.9e6 / 8, "1 Gb/s"),
        ("8b/s", 1, "8 b/s"),
        ("2Tb/s", 2.5e11, "2 Tb/s"),
    ],
)
def test_rates_are_bits_or_bytes(text: str, bytes_per_s: float, shown: str) -> None:
    assert parse_rate(text) == pytest.approx(bytes_per_s)
    assert format_rate(parse_rate(text)) == shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10G", "bits or bytes a second\\?; give 10Gb/s or 10GB/s"),
        ("10", "give 10b/s or 10B/s"),
        ("10Gb", "give 10Gb/s"),
        ("fast", "such as 10Gb/s"),
        ("0Gb/s", "nothing would arrive"),
        ("-1Gb/s", "such as 10Gb/s"),
        ("1ib/s", "such as 10Gb/s"),
        ("1Gb/m", "such as 10Gb/s"),
        (10, "such as 10Gb/s"),
    ],
)
def test_a_rate_that_is_none_is_refused(text: object, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        parse_rate(text)
