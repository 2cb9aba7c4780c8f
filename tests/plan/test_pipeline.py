"""Stages of a pipeline: cuts against brute force, the clock against closed forms and bounds."""

import subprocess
import sys
from itertools import combinations, pairwise
from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import MemoryExhaustedError, SettingError
from penstock.plan import ChunkedPrefillConfig, StepTimeCoefficients
from penstock.plan.memory import WeightBits, kv_token_bytes, state_slot_bytes, weight_bytes
from penstock.plan.model import DeltaNetConfig, ExpertsConfig, ModelConfig
from penstock.plan.pipeline import (
    Ends,
    Link,
    Machine,
    PartCosts,
    PipelineStep,
    Stage,
    coefficients_of_speed,
    cut_layers,
    decode_rate,
    least_seconds,
    link_speed,
    prompt_steps,
    run_pipeline,
    stages_of,
    work_of_pair,
    work_of_reading_in,
    work_of_token,
)

SMALL = ModelConfig(
    num_layers=6,
    hidden_size=32,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=500,
)
HYBRID = ModelConfig(
    num_layers=6,
    hidden_size=32,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=500,
    gated_attention=True,
    delta_net=DeltaNetConfig(4, 2, 4, 8, 8, 4, layers=(0, 1, 3, 4)),
    experts=ExpertsConfig(3, 8, 16, shared_intermediate_size=16, num_active=2, layers=(1, 3, 5)),
)
EIGHT_B = ModelConfig(36, 4096, 12_288, 32, 8, 128, 151_936)
# It on an H200, fitted to 8,192, 32,768 and 131,072 tokens.
H200 = StepTimeCoefficients(1.5e-3, 2.23e-5, 9.5e-10)
TOKEN_BYTES = 8192

seconds = st.floats(0.0, 10.0, allow_subnormal=False)
shares = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6)
links = st.builds(Link, st.floats(1.0, 1e6) | st.just(inf), st.floats(0.0, 2.0))
steps = st.lists(st.builds(PipelineStep, seconds, st.integers(0, 10_000)), min_size=1, max_size=12)


@st.composite
def cut_cases(draw: st.DrawFn) -> tuple[PartCosts, list[Machine]]:
    num_layers = draw(st.integers(1, 7))
    sizes = st.lists(st.integers(1, 20), min_size=num_layers, max_size=num_layers)
    works = st.lists(st.integers(1, 8), min_size=num_layers, max_size=num_layers)
    costs = PartCosts(
        tuple(draw(sizes)),
        tuple(map(float, draw(works))),
        draw(st.integers(0, 20)),
        draw(st.integers(0, 20)),
        float(draw(st.integers(0, 8))),
        draw(st.booleans()),
    )
    memory = st.none() | st.integers(1, 100)
    machine = st.builds(Machine, memory, st.sampled_from([0.5, 1.0, 2.0, 3.0]))
    return costs, draw(st.lists(machine, min_size=1, max_size=num_layers))


def every_cut(costs: PartCosts, machines: list[Machine]) -> list[tuple[Stage, ...]]:
    """All cuts that fit, earlier stages with fewer layers first."""
    found = []
    for inner in combinations(range(1, costs.num_layers), len(machines) - 1):
        layers = [end - start for start, end in pairwise((0, *inner, costs.num_layers))]
        stages = stages_of(costs, layers, machines)
        if all(stage.fits is not False for stage in stages):
            found.append(stages)
    return found


fractions = st.sampled_from([0.0, 0.01, 0.1, 0.5])


@given(cut_cases(), st.builds(Ends, fractions, fractions))
def test_a_cut_is_the_best_of_all(case: tuple[PartCosts, list[Machine]], ends: Ends) -> None:
    costs, machines = case
    possible = every_cut(costs, machines)
    if not possible:
        with pytest.raises(MemoryExhaustedError, match=f"no cut into {len(machines)} stages fits"):
            cut_layers(costs, machines, ends)
        return
    found = cut_layers(costs, machines, ends)
    assert [stage.machine for stage in found] == machines
    assert min(len(stage.layers) for stage in found) >= 1
    assert [layer for stage in found for layer in stage.layers] == list(range(costs.num_layers))

    speed = sum(machine.speed for machine in machines) / len(machines)

    def badness(stages: tuple[Stage, ...]) -> tuple[float, float]:
        """When the slowest stage is done, with the prompt's ends on the others; and how uneven it is."""
        before = [sum(costs.layer_work[: stage.start]) / costs.work / speed for stage in stages]
        after = [1 / speed - share for share in before[1:]] + [0.0]
        done = (
            stage.share + ends.first * first + ends.last * last
            for stage, first, last in zip(stages, before, after, strict=True)
        )
        return max(done), sum(stage.share**2 for stage in stages)

    slowest = min(badness(stages)[0] for stages in possible)
    assert isclose(badness(found)[0], slowest)
    even = [stages for stages in possible if isclose(badness(stages)[0], slowest)]
    best = min(badness(stages)[1] for stages in even)
    assert isclose(badness(found)[1], best)
    assert found == next(stages for stages in even if isclose(badness(stages)[1], best))


def test_a_lone_prompt_is_cut_by_the_clock() -> None:
    """The last layer of a chunk without logits is nearly nothing: of 36 layers 18 and 18 are 18 and 17. What the last
    chunk has before it on the second stage is more than a layer less on the first."""
    costs = PartCosts.of_model(EIGHT_B, past=16_384)
    steps, link = prompt_steps(H200, 32_768, 2048, TOKEN_BYTES), Link(100e9 / 8)
    alone = sum(step.seconds for step in steps)

    def speed_up(stages: tuple[Stage, ...]) -> float:
        return alone / run_pipeline(steps, [stage.share for stage in stages], link).seconds

    even, chosen = (cut_layers(costs, [Machine()] * 2, ends) for ends in (None, Ends.of(steps)))
    assert [len(stage.layers) for stage in even] == [18, 18]
    assert [len(stage.layers) for stage in chosen] == [17, 19]
    assert speed_up(even) < 1.8 < 1.85 < speed_up(chosen)


@given(cut_cases())
def test_shares_and_bytes_are_those_of_the_whole(case: tuple[PartCosts, list[Machine]]) -> None:
    costs, machines = case
    plain = [Machine() for _ in machines]
    stages = cut_layers(costs, plain)
    assert isclose(sum(stage.share for stage in stages), 1.0)
    vocabulary = costs.embedding_bytes + costs.head_bytes
    if len(stages) == 1 and costs.is_tied:
        vocabulary = costs.embedding_bytes
    assert sum(stage.held_bytes for stage in stages) == sum(costs.layer_bytes) + vocabulary


def test_layers_that_do_not_divide_lie_on_later_stages() -> None:
    costs = PartCosts((1,) * 36, (1.0,) * 36)
    for num_stages, expected in ((8, [4] * 4 + [5] * 4), (5, [7] * 4 + [8]), (36, [1] * 36)):
        assert [len(stage.layers) for stage in cut_layers(costs, [Machine()] * num_stages)] == expected


def test_the_head_counts_where_it_lies() -> None:
    """Work as much as two layers' on the last stage takes one of its layers away; memory does so on either end."""
    heavy = PartCosts((1,) * 8, (1.0,) * 8, head_work=2.0)
    assert [len(stage.layers) for stage in cut_layers(heavy, [Machine()] * 2)] == [5, 3]
    large = PartCosts((1,) * 8, (1.0,) * 8, embedding_bytes=3, head_bytes=2)
    small = [Machine(memory_bytes=5), Machine(), Machine(memory_bytes=4)]
    assert [len(stage.layers) for stage in cut_layers(large, small)] == [2, 4, 2]


@pytest.mark.parametrize("num_stages", [0, 7])
def test_no_stage_is_empty(num_stages: int) -> None:
    with pytest.raises(SettingError, match="give 1 to 6"):
        cut_layers(PartCosts.of_model(SMALL), [Machine()] * num_stages)


@pytest.mark.parametrize("layers", [(6, 0), (3, 4), (7, -1)])
def test_layers_that_are_given_are_all_layers(layers: tuple[int, ...]) -> None:
    costs = PartCosts.of_model(SMALL)
    with pytest.raises(SettingError, match="at least 1 that sum to the model's 6 layers"):
        stages_of(costs, layers, [Machine()] * 2)
    with pytest.raises(SettingError, match="3 numbers, one for each stage"):
        stages_of(costs, (3, 3), [Machine()] * 3)


@pytest.mark.parametrize("config", [SMALL, HYBRID])
@pytest.mark.parametrize("bits", [None, WeightBits(4.5, 8.5, is_tied=True), WeightBits(8, 8, is_tied=False)])
def test_parts_of_a_model_are_the_model(config: ModelConfig, bits: WeightBits | None) -> None:
    costs = PartCosts.of_model(config, bits=bits, cache_tokens=100, num_slots=3, past=50, head_share=0.5)
    (whole,) = cut_layers(costs, [Machine()])
    cache = 100 * kv_token_bytes(config, 2) + 3 * state_slot_bytes(config, 2)
    # Parts of bytes are rounded up once for each part.
    assert 0 <= whole.held_bytes - weight_bytes(config, 2, bits) - cache <= config.num_layers + 2
    last = config.of_layers(config.num_layers - 1, config.num_layers)
    half = (work_of_token(last) + 50 * work_of_pair(last) - work_of_reading_in(last)) / 2
    expected = work_of_token(config) + 50 * work_of_pair(config) - half + 0.5 * 500 * 32
    assert isclose(costs.work, expected)


def test_work_is_that_of_the_matrices_a_token_meets() -> None:
    """All matrices of a dense model; of a mixture those of the active experts."""
    per_layer = (32 + 2 * 16 + 32) * 32 + 3 * 96 * 32
    assert work_of_token(SMALL) == 6 * per_layer
    assert work_of_pair(SMALL) == 6 * 2 * 32
    assert work_of_reading_in(SMALL) == 6 * (32 + 2 * 16) * 32
    dense, mixed = HYBRID.of_layers(2, 3), HYBRID.of_layers(5, 6)
    attention = (2 * 32 + 2 * 16 + 32) * 32
    assert work_of_token(dense) == attention + 3 * 96 * 32
    assert work_of_token(mixed) == attention + (3 * (2 * 16 + 16) + 8) * 32
    net = HYBRID.of_layers(0, 1)
    assert work_of_token(net) == (64 + 2 * 32) * 32 + 3 * 4 * 8 * 8 + 3 * 96 * 32
    assert work_of_pair(net) == 0


@given(
    st.lists(st.floats(0.001, 5.0), min_size=1, max_size=20),
    st.integers(1, 6),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.1),
)
def test_the_clock_is_the_closed_form_where_that_is_exact(
    times: list[float], num_stages: int, overhead: float, delay: float
) -> None:
    """Equal shares, chunks that only grow, a link that does not bind."""
    times.sort()
    made = [PipelineStep(t) for t in times]
    clock = run_pipeline(made, [1 / num_stages] * num_stages, Link(delay_s=delay), overhead_s=overhead)
    hop = times[-1] / num_stages + overhead + delay
    expected = sum(times) / num_stages + len(times) * overhead + (num_stages - 1) * hop
    assert isclose(clock.seconds, expected, rel_tol=1e-9)
    assert not clock.is_link_bound


@given(st.integers(1, 30), st.integers(1, 8))
def test_equal_chunks_have_the_ideal_speed_up(num_chunks: int, num_stages: int) -> None:
    made = [PipelineStep(1.0)] * num_chunks
    clock = run_pipeline(made, [1 / num_stages] * num_stages, overhead_s=0.0)
    assert isclose(num_chunks / clock.seconds, num_chunks * num_stages / (num_chunks + num_stages - 1))


@given(st.integers(1, 20), st.integers(2, 5), st.floats(1.0, 1e3), st.floats(0.0, 1.0))
def test_a_link_that_binds_is_all_that_counts(
    num_chunks: int, num_stages: int, rate: float, delay: float
) -> None:
    """The first stage's first chunk, all messages over one link, the last of them over the others."""
    work = 0.5 / rate  # a message takes longer than any stage
    clock = run_pipeline(
        [PipelineStep(work, 1)] * num_chunks, [1 / num_stages] * num_stages, Link(rate, delay), overhead_s=0.0
    )
    expected = work + num_chunks / rate + (num_stages - 2) / rate + (num_stages - 1) * delay
    assert isclose(clock.seconds, expected, rel_tol=1e-9)
    assert clock.is_link_bound == (num_chunks / rate > num_chunks * work / num_stages)


@given(steps, shares, links, st.floats(0.0, 0.5))
def test_no_clock_is_faster_than_the_bounds(
    made: list[PipelineStep], parts: list[float], link: Link, overhead: float
) -> None:
    clock = run_pipeline(made, parts, link, overhead_s=overhead)
    least = least_seconds(made, parts, link, overhead_s=overhead)
    close = 1e-9 * least
    assert clock.seconds >= least - close
    assert clock.seconds >= max(clock.stage_busy_s) - close
    assert clock.seconds >= max(clock.link_busy_s, default=0.0) - close
    assert list(clock.end_s) == sorted(clock.end_s)
    # And no slower than one step at a time.
    alone = run_pipeline(made, parts, link, overhead_s=overhead, depth=1)
    assert clock.seconds <= alone.seconds + close
    hops = (len(parts) - 1) * (sum(map(link.busy_s, (s.hop_bytes for s in made))) + len(made) * link.delay_s)
    assert isclose(alone.seconds, sum(clock.stage_busy_s) + hops, rel_tol=1e-9, abs_tol=1e-12)


@given(steps, shares, links, st.integers(1, 8), st.floats(0.0, 1.0))
def test_more_in_flight_is_never_slower(
    made: list[PipelineStep], parts: list[float], link: Link, depth: int, back: float
) -> None:
    shallow = run_pipeline(made, parts, link, depth=depth, return_s=back)
    deep = run_pipeline(made, parts, link, depth=depth + 1, return_s=back)
    free = run_pipeline(made, parts, link)
    assert free.seconds <= deep.seconds <= shallow.seconds
    assert shallow.seconds <= free.seconds + 1e-9 or depth < len(made)


def test_links_are_stations_too() -> None:
    """Where messages take as long as stages, as many steps in flight as there are stages leave them idle."""
    made, parts, link = [PipelineStep(4.0, 1)] * 100, [0.25] * 4, Link(1.0)
    by_depth = {
        depth: run_pipeline(made, parts, link, overhead_s=0.0, depth=depth).seconds for depth in (4, 5, 7)
    }
    assert by_depth[4] > 1.6 * by_depth[7]
    assert by_depth[5] > 1.3 * by_depth[7]
    assert by_depth[7] == run_pipeline(made, parts, link, overhead_s=0.0).seconds


def test_nothing_takes_no_time() -> None:
    assert run_pipeline([], [1.0]).seconds == least_seconds([], [1.0]) == 0.0


@given(st.integers(1, 5000), st.integers(0, 600))
def test_steps_of_a_prompt_are_its_chunks(num_tokens: int, chunk: int) -> None:
    times = StepTimeCoefficients(1e-3, 1e-5, 1e-9)
    made = prompt_steps(times, num_tokens, chunk, 16)
    assert sum(step.hop_bytes for step in made) == 16 * num_tokens
    pairs = num_tokens * (num_tokens - 1) / 2
    expected = 1e-3 * len(made) + 1e-5 * num_tokens + 1e-9 * pairs
    assert isclose(sum(step.seconds for step in made), expected, rel_tol=1e-9)
    assert len(made) == -(-num_tokens // (ChunkedPrefillConfig(chunk).chunk_size or num_tokens))


@given(st.floats(1.0, 1e6), st.integers(1, 100_000))
def test_a_speed_is_that_of_a_whole_prompt(tokens_per_s: float, num_tokens: int) -> None:
    times = coefficients_of_speed(SMALL, tokens_per_s, num_tokens)
    (whole,) = prompt_steps(times, num_tokens, 0, 1)
    assert isclose(num_tokens / whole.seconds, tokens_per_s, rel_tol=1e-9)
    assert isclose(times.per_token / times.per_token_past, work_of_token(SMALL) / work_of_pair(SMALL))


def speed_up(num_tokens: int, num_stages: int, bits_per_s: float) -> float:
    costs = PartCosts((1,) * 36, (1.0,) * 36)
    stages = [stage.share for stage in cut_layers(costs, [Machine()] * num_stages)]
    alone = min(
        sum(step.seconds for step in prompt_steps(H200, num_tokens, chunk, TOKEN_BYTES))
        for chunk in (2048, 8192)
    )
    together = min(
        run_pipeline(prompt_steps(H200, num_tokens, chunk, TOKEN_BYTES), stages, Link(bits_per_s / 8)).seconds
        for chunk in (512, 1024, 2048)
    )
    return alone / together


def test_a_fast_machine_on_a_slow_link_gains_nothing() -> None:
    """An 8B on H200s reads 26,000 tokens/s of 8 KiB: 1.7 Gb/s."""
    assert speed_up(32_768, 2, 1e9) < 0.6
    assert 1.8 < speed_up(32_768, 2, 10e9) < 2
    assert 3.2 < speed_up(32_768, 4, 10e9) < 3.6
    assert 7 < speed_up(1 << 20, 8, 100e9) < 7.2  # of 36 layers the largest share of 8 is 5
    assert link_speed(Link(1e9 / 8), TOKEN_BYTES) < 32_768 / 1.25 < link_speed(Link(10e9 / 8), TOKEN_BYTES)


DECODES = StepTimeCoefficients(2e-3, 0.0, 0.0, 1e-3, 1e-7)


@given(st.integers(1, 6), st.integers(0, 5000), st.floats(0.0, 0.01), st.floats(1e3, 1e9))
def test_one_stream_gains_nothing(num_stages: int, past: int, delay: float, rate: float) -> None:
    parts, link = [1 / num_stages] * num_stages, Link(rate, delay)
    how = {"num_streams": 1, "past": past, "token_bytes": 100, "overhead_s": 1e-4}
    rate_ = decode_rate(DECODES, parts, link, **how)  # type: ignore[arg-type]
    alone = 3e-3 + past * 1e-7
    hops = (num_stages - 1) * (100 / rate + delay) + (num_stages > 1) * (delay + num_stages * 1e-4)
    assert isclose(rate_.token_s, alone + hops, rel_tol=1e-9)
    assert isclose(rate_.tokens_per_s, 1 / rate_.token_s)


def test_many_streams_fill_the_stages() -> None:
    """A step's constant is paid by each group, on its share of the layers."""
    how = {"num_streams": 8, "past": 0, "token_bytes": 100, "overhead_s": 0.0}
    one = decode_rate(DECODES, [1.0], Link(), **how)  # type: ignore[arg-type]
    two = decode_rate(DECODES, [0.5, 0.5], Link(), **how)  # type: ignore[arg-type]
    assert isclose(one.tokens_per_s, 8 / 10e-3)
    assert isclose(two.tokens_per_s, 8 / 6e-3)
    uneven = decode_rate(DECODES, [0.25, 0.75], Link(), **how)  # type: ignore[arg-type]
    assert isclose(uneven.tokens_per_s, 8 / 9e-3)
    slow = decode_rate(DECODES, [0.5, 0.5], Link(40_000.0), **how)  # type: ignore[arg-type]
    assert isclose(slow.token_s, 2 * 400 / 40_000)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Machine(speed=0.0), "speed=0.0 is not accepted: give a number above 0"),
        (lambda: Link(0.0), "link=0.0 is not accepted: give a rate above 0"),
        (lambda: Link(1.0, -1.0), "delay_s=-1.0 is not accepted"),
        (lambda: PartCosts((1,), (1.0, 2.0)), "layer_work"),
        (lambda: PartCosts((), ()), "layer_work"),
        (lambda: run_pipeline([], []), "shares=\\[\\] is not accepted"),
        (lambda: run_pipeline([], [1.0], depth=0), "depth=0 is not accepted"),
        (lambda: coefficients_of_speed(SMALL, 0.0, 10), "speed=0.0 is not accepted"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        make()  # type: ignore[operator]


def test_a_million_tokens_through_64_stages_take_under_a_second_without_torch() -> None:
    program = """
import sys, time
sys.modules["torch"] = None
from penstock.plan import StepTimeCoefficients
from penstock.plan.pipeline import *
times = StepTimeCoefficients(1.5e-3, 2.23e-5, 9.5e-10)
begun = time.process_time()
stages = cut_layers(PartCosts((1,) * 80, (1.0,) * 80), [Machine()] * 64)
steps = prompt_steps(times, 1 << 20, 512, 16384)
clock = run_pipeline(steps, [stage.share for stage in stages], Link(100e9 / 8))
print(time.process_time() - begun, len(steps), clock.seconds)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    took, num_steps, found = map(float, done.stdout.split())
    assert took < 1
    assert (num_steps, 12 < found < 20) == (2048, True)
