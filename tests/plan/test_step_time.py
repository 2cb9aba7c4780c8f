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
from penstock.plan.step import StepShape
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


def test_seconds_are_the_sum_of_what_a_step_has() -> None:
    costs = StepTimeCoefficients(1.0, 10.0, 100.0, 1000.0, 10_000.0)
    step = StepShape(2, token_pasts=3, longest_past=99, num_decodes=4, decode_pasts=5, num_logits=99)
    assert costs.seconds(step) == 1 + 2 * 10 + 3 * 100 + 4 * 1000 + 5 * 10_000
    assert StepTimeModel(costs).predict(step) == costs.seconds(step)
    assert StepTimeCoefficients().seconds(step) == 0


def test_what_was_recorded_is_told() -> None:
    model = StepTimeModel()
    assert (model.has_prior, model.num_records, model.most_prompt_tokens) == (False, 0, 0)
    for num_tokens in (7, 300, 20):
        model.record(StepShape(num_tokens), 0.0)
    assert (model.has_prior, model.num_records, model.most_prompt_tokens) == (False, 3, 300)
    assert 0 < (model.predict(StepShape(20)) or 0.0) < 2e-6  # no step takes no time at all
    assert StepTimeModel(StepTimeCoefficients(per_decode_past=1e-9)).has_prior
    assert not StepTimeModel(StepTimeCoefficients()).has_prior


def test_a_fit_waits_for_some_samples_but_not_for_one_that_surprises() -> None:
    """One kind of step, a little slower each time: the prediction follows every fourth time."""
    step, model = StepShape(100), StepTimeModel()
    seconds = [0.1 * 1.01**number for number in range(30)]
    predicted = []
    for time_s in seconds:
        model.record(step, time_s)
        predicted.append(model.predict(step))
    changes = [number for number in range(1, 30) if predicted[number] != predicted[number - 1]]
    assert changes == [*range(1, 8), *range(11, 30, 4)]
    assert predicted[0] == pytest.approx(seconds[0], rel=1e-3)
    # The middle of the last five; of four, the shorter of the two in the middle.
    assert predicted[3] == pytest.approx(seconds[1], rel=1e-3)
    assert predicted[11] == pytest.approx(seconds[9], rel=1e-3)
    for factor, follows in ((1.19, False), (1.22, True), (0.79, True), (0.81, False)):
        model = StepTimeModel()
        for _ in range(12):
            model.record(step, 0.1)
        before = model.predict(step)
        assert before is not None
        model.record(StepShape(101), 0.1 * factor)
        assert (model._num_unfitted, model._is_surprised) == (1, follows)
        model.predict(step)
        assert model._num_unfitted == (0 if follows else 1)
        assert not model._is_surprised


def test_kinds_are_powers_of_two_and_the_one_seen_longest_ago_is_forgotten() -> None:
    def num_kinds(*steps: StepShape) -> int:
        model = StepTimeModel()
        for step in steps:
            model.record(step, 1.0)
        return len(model._kinds)

    for few, many in ((63, 64), (127, 128)):
        assert num_kinds(StepShape(few), StepShape(many)) == 2
        assert num_kinds(StepShape(many), StepShape(2 * many - 1)) == 1
        for name, count in (("token_pasts", "num_prompt_tokens"), ("decode_pasts", "num_decodes")):
            for number in (1, 3):
                least, most, below, at, end = (
                    StepShape(**{"num_prompt_tokens": 0, count: number, name: number * 256 * size + more})
                    for size, more in ((0, 1), (1, -1), (many, -1), (many, 0), (2 * many, -1))
                )
                assert num_kinds(least, most) == 1
                assert num_kinds(below, at) == 2
                assert num_kinds(at, end) == 1
    assert num_kinds(StepShape(0, num_decodes=3), StepShape(0, num_decodes=4)) == 2
    model = StepTimeModel()
    steps = [StepShape(2**tokens, num_decodes=2**decodes) for tokens in range(13) for decodes in range(5)]
    assert len(steps) == MOST_KINDS + 1
    for step in steps:
        model.record(step, 1.0)
        model.record(steps[0], 1.0)  # which is always the one seen last
    assert len(model._kinds) == MOST_KINDS
    model.record(steps[1], 1.0)
    assert [kind.samples[0].features[3] for kind in model._kinds.values()][:2] == [8.0, 16.0]


def test_a_fixed_stream_is_learned_as_ever() -> None:
    """Of a machine that becomes slower, with outliers, kinds that are not seen for long, and a profile that is wrong:
    what profiles and targets were tuned with is what is predicted."""
    asked = [StepShape.of_chunk(500, 3000), StepShape(0, num_decodes=3, decode_pasts=2400)]
    found: list[list[float | None]] = []
    for prior in (None, StepTimeCoefficients(0.02, 1e-3, 0.0, 1e-3, 1e-6)):
        random, model = Random(12), StepTimeModel(prior)
        for number in range(2500):
            step = random_step(random)
            true = StepTimeCoefficients(*(value * (1 + number / 500) for value in asdict(CPU).values()))
            if number < 300 or step.num_prompt_tokens in (0, 64, 256):
                model.record(step, measured(random, true, step))
            if number in (0, 3, 9, 60, 299, 450, 699, 2499):
                found.append([model.predict(step) for step in asked])
    assert found == [[pytest.approx(value, rel=1e-6) for value in row] for row in LEARNED]


LEARNED = [
    [0.27431546, 0.091758685],
    [0.54267382, 0.013505679],
    [0.55709985, 0.020822201],
    [0.59320944, 0.031317771],
    [0.84704618, 0.042508049],
    [0.93362667, 0.04733864],
    [1.0816686, 0.057784582],
    [3.1171984, 0.15759001],
    [0.56724888, 0.041204778],
    [0.54273664, 0.013501771],
    [0.55714713, 0.020818403],
    [0.59327923, 0.031314018],
    [0.84711317, 0.042510064],
    [0.93367245, 0.047336637],
    [1.0817212, 0.057781592],
    [3.1172806, 0.15758887],
]


def least_squares(random: Random, size: int, num_rows: int) -> tuple[list[list[float]], list[float]]:
    """Columns that are nearly alike, so that most answers have a negative part."""
    shared = [random.gauss(0, 1) for _ in range(num_rows)]
    alike = random.choice([0.0, 0.5, 2.0])
    rows = [[random.gauss(0, 1) + alike * common for _ in range(size)] for common in shared]
    matrix = [
        [sum(row[i] * row[j] for row in rows) + 0.01 * (i == j) for j in range(size)] for i in range(size)
    ]
    return matrix, [random.gauss(0, 1) for _ in range(size)]


@pytest.mark.parametrize("size", range(1, 8))
def test_non_negative_least_squares_has_the_marks_of_the_best_answer(size: int) -> None:
    """No unknown is negative; where one is above 0 the slope is 0, and where it is 0 the slope points up."""
    random = Random(size)
    for _ in range(150):
        matrix, vector = least_squares(random, size, size + 2)
        found = solve_non_negative(matrix, vector)
        for i in range(size):
            slope = sum(matrix[i][j] * found[j] for j in range(size)) - vector[i]
            assert found[i] >= 0
            assert slope > -1e-7
            assert found[i] == 0 or abs(slope) < 1e-7


def test_an_unknown_that_gains_next_to_nothing_stays_out() -> None:
    identity = [[1.0, 0.0], [0.0, 1.0]]
    assert solve_non_negative(identity, [3.0, 4.0]) == [3.0, 4.0]
    assert solve_non_negative(identity, [3.0, 0.0]) == [3.0, 0.0]
    assert solve_non_negative(identity, [-3.0, 2e-12]) == [0.0, 2e-12]
    assert solve_non_negative(identity, [-3.0, 1e-12]) == [0.0, 0.0]
    assert solve_non_negative(identity, [-3.0, -4.0]) == [0.0, 0.0]


def test_the_old_name_makes_the_same_model() -> None:
    with pytest.warns(DeprecationWarning, match=r"is now StepTimeModel\(c\)"):
        model = StepTimeModel.from_coefficients(CPU)
    step = StepShape.of_chunk(512, 1000)
    assert model.predict(step) == StepTimeModel(CPU).predict(step)


def test_of_the_fastest_a_slower_step_changes_nothing_once_a_kind_is_full() -> None:
    model = StepTimeModel(of_fastest=True)
    step = StepShape.of_chunk(512, 0)
    for seconds in (1.0, 1.1, 1.2, 1.3, 1.4):
        model.record(step, seconds)
    before = model.num_records
    for seconds in (1.4, 9.0):
        model.record(step, seconds)
    assert model.num_records == before
    assert model.predict(step) == pytest.approx(1.2, rel=0.01)
    for _ in range(3):
        model.record(step, 0.5)
    assert model.num_records == before + 3
    assert model.predict(step) == pytest.approx(0.5, rel=0.01)
