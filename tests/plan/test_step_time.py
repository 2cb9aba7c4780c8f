"""The model of step times recovers what steps cost, from few and noisy samples."""

import time
from dataclasses import asdict
from itertools import cycle, islice
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.plan.step_shape import StepShape
from penstock.plan.step_time import MOST_KINDS, StepTimeCoefficients, StepTimeModel, solve_non_negative

# About what SmolLM2 costs on two cores.
CPU = StepTimeCoefficients(0.012, 8e-4, 9e-8, 4e-3, 1.5e-6)


def random_step(random: Random) -> StepShape:
    """A chunk, decodes, or both."""
    num_tokens = random.choice([0, 32, 64, 100, 256, 512, 1024])
    num_decodes = random.choice([0, 1, 2, 4, 8] if num_tokens else [1, 2, 4, 8])
    decode_pasts = sum(random.randrange(1, 4000) for _ in range(num_decodes))
    return StepShape.of_chunk(
        num_tokens, random.randrange(8000), num_decodes=num_decodes, decode_pasts=decode_pasts
    )


def measured(random: Random, true: StepTimeCoefficients, step: StepShape, outliers: float = 0.1) -> float:
    noise = random.gauss(1, 0.04)
    return true.seconds(step) * max(noise, 0.5) * (10 if random.random() < outliers else 1)


def trained(true: StepTimeCoefficients, num_steps: int = 200, seed: int = 0) -> StepTimeModel:
    random, model = Random(seed), StepTimeModel()
    for _ in range(num_steps):
        step = random_step(random)
        model.record(step, measured(random, true, step))
    return model


def worst_error(model: StepTimeModel, true: StepTimeCoefficients, steps: list[StepShape]) -> float:
    return max(abs((model.predict(step) or 0.0) / true.seconds(step) - 1) for step in steps)


@settings(max_examples=15, deadline=None)
@given(
    st.builds(
        StepTimeCoefficients,
        st.floats(1e-3, 0.1),
        st.floats(1e-5, 2e-3),
        st.floats(1e-9, 2e-7),
        st.floats(1e-4, 1e-2),
        st.floats(1e-8, 1e-5),
    ),
    st.integers(0, 1000),
)
def test_planted_coefficients_are_found_though_one_sample_in_ten_is_ten_times_too_long(
    true: StepTimeCoefficients, seed: int
) -> None:
    model = trained(true, seed=seed)
    random = Random(seed + 1)
    steps = [random_step(random) for _ in range(200)]
    errors = sorted(abs((model.predict(step) or 0.0) / true.seconds(step) - 1) for step in steps)
    assert errors[len(errors) // 2] < 0.06
    assert errors[len(errors) * 19 // 20] < 0.35  # the rest are shapes that hardly any sample speaks of


def test_without_noise_they_are_found_exactly() -> None:
    random, model = Random(3), StepTimeModel()
    for _ in range(300):
        step = random_step(random)
        model.record(step, CPU.seconds(step))
    found = asdict(model.coefficients)
    for name, value in asdict(CPU).items():
        assert found[name] == pytest.approx(value, rel=0.02), name


steps = st.builds(
    StepShape,
    num_prompt_tokens=st.integers(0, 10**5),
    token_pasts=st.integers(0, 10**10),
    num_decodes=st.integers(0, 500),
    decode_pasts=st.integers(0, 10**7),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(steps, st.floats(0, 1e6)), max_size=40), st.lists(steps, min_size=1, max_size=5))
def test_a_prediction_is_never_negative_and_longer_for_more(
    samples: list[tuple[StepShape, float]], asked: list[StepShape]
) -> None:
    model = StepTimeModel()
    for step, seconds in samples:
        model.record(step, seconds)
    for step in asked:
        predicted = model.predict(step)
        more = model.predict(StepShape(step.num_prompt_tokens + 1, step.token_pasts, 0, step.num_decodes + 1))
        if not any(sample.num_rows for sample, _ in samples):
            assert predicted is more is None
            continue
        assert predicted is not None
        assert predicted >= 0
        fewer = StepShape(step.num_prompt_tokens, step.token_pasts, 0, step.num_decodes)
        assert more is not None
        assert more >= (model.predict(fewer) or 0.0)
    assert all(value >= 0 for value in asdict(model.coefficients).values())


def test_nothing_is_known_before_the_first_record() -> None:
    assert StepTimeModel().predict(StepShape(1)) is None
    assert StepTimeModel().num_records == 0
    model = StepTimeModel()
    for seconds in (float("nan"), float("inf"), -1.0):
        model.record(StepShape(10), seconds)
    model.record(StepShape(0), 1.0)  # an empty step says nothing
    assert model.predict(StepShape(1)) is None
    model.record(StepShape(10), 0.5)
    assert model.predict(StepShape(10)) == pytest.approx(0.5, rel=1e-3)


def test_a_machine_that_becomes_twice_as_slow_is_followed_within_some_tens_of_steps() -> None:
    """As in service: a prompt after the other is read beside four streams."""
    random = Random(5)
    slow = StepTimeCoefficients(*(2 * value for value in asdict(CPU).values()))
    prompt = [
        StepShape.of_chunk(256, past, num_decodes=4, decode_pasts=4 * 500) for past in range(0, 4096, 256)
    ]
    model = StepTimeModel()
    for step in islice(cycle(prompt), 200):
        model.record(step, measured(random, CPU, step, outliers=0))
    assert worst_error(model, CPU, prompt) < 0.1
    for step in islice(cycle(prompt), 48):
        model.record(step, measured(random, slow, step, outliers=0))
    assert worst_error(model, slow, prompt) < 0.15


def test_a_thousand_steps_of_one_kind_ruin_no_prediction_of_another() -> None:
    model = trained(CPU)
    chunk = StepShape.of_chunk(512, 2000, num_decodes=4, decode_pasts=2000)
    before = model.predict(chunk)
    assert before == pytest.approx(CPU.seconds(chunk), rel=0.1)
    random, decode = Random(8), StepShape(0, num_decodes=4, decode_pasts=2000)
    for _ in range(1000):
        # Decodes alone run faster than the line through all would have it.
        model.record(decode, 0.7 * measured(random, CPU, decode, outliers=0))
    assert model.predict(chunk) == pytest.approx(CPU.seconds(chunk), rel=0.15)
    assert model.predict(decode) == pytest.approx(0.7 * CPU.seconds(decode), rel=0.25)


def test_a_profile_holds_until_samples_say_otherwise() -> None:
    model = StepTimeModel(CPU)
    assert model.coefficients == CPU
    chunk, decode = StepShape.of_chunk(300, 4000), StepShape(0, num_decodes=2, decode_pasts=900)
    assert model.predict(chunk) == pytest.approx(CPU.seconds(chunk))
    for _ in range(50):
        model.record(chunk, 3 * CPU.seconds(chunk))
    assert model.predict(chunk) == pytest.approx(3 * CPU.seconds(chunk), rel=0.01)
    # Nothing was said of what a decode costs, over a chunk's constant.
    assert model.coefficients.per_decode == CPU.per_decode
    assert (model.predict(decode) or 0.0) >= CPU.seconds(decode) * 0.99


def test_what_is_kept_is_bounded_and_a_record_is_cheap() -> None:
    random, model = Random(2), StepTimeModel()
    per_record_s = []
    for _ in range(20):
        shapes = [random_step(random) for _ in range(100)]
        started = time.thread_time()
        for step in shapes:
            model.record(step, CPU.seconds(step) * random.uniform(0.9, 1.1))
            model.predict(step)
        per_record_s.append((time.thread_time() - started) / 100)
    # It is about a tenth of that on an idle machine. The least: what else takes time comes now and then.
    assert min(per_record_s[10:]) < 1e-3
    assert len(model._kinds) <= MOST_KINDS


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), "1", True, None])
def test_coefficients_are_checked(value: Any) -> None:
    with pytest.raises(SettingError, match="per_token="):
        StepTimeCoefficients(per_token=value)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_non_negative_least_squares_has_the_marks_of_the_best_answer(size: int, seed: int) -> None:
    """No unknown is negative; where one is above 0 the slope is 0, and where it is 0 the slope points up."""
    random = Random(seed)
    rows = [[random.gauss(0, 1) for _ in range(size)] for _ in range(size + 2)]
    matrix = [
        [sum(row[i] * row[j] for row in rows) + 0.01 * (i == j) for j in range(size)] for i in range(size)
    ]
    vector = [random.gauss(0, 1) for _ in range(size)]
    found = solve_non_negative(matrix, vector)
    for i in range(size):
        slope = sum(matrix[i][j] * found[j] for j in range(size)) - vector[i]
        assert found[i] >= 0
        assert slope > -1e-7
        assert found[i] == 0 or abs(slope) < 1e-7
