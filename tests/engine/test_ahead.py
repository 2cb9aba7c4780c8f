"""Decodes that are launched before they are planned: used where they are what comes, and forgotten where not."""

import pytest

from penstock.cache.tensors import CacheTensors
from penstock.layers.batch import ForwardBatch
from penstock.models.decoder import Decoder
from penstock.plan.policy import ScheduleConfig
from tests.engine.batching import Wish, new_batcher, new_job, serve
from tests.oracle import load_model, make_oracle, random_prompt, run_prompt

WISHES = [Wish(tuple(random_prompt(66 + index, seed=index)), 40) for index in range(3)]
SCHEDULE = ScheduleConfig(chunk_size=128, max_running=4)


@pytest.fixture
def model() -> Decoder:
    return load_model(make_oracle("llama").folder)


def num_passes(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of rows of each pass."""
    passes: list[int] = []
    forward = type(model).forward

    def counted(self: Decoder, batch: ForwardBatch, caches: CacheTensors) -> object:
        passes.append(batch.num_tokens)
        return forward(self, batch, caches)

    monkeypatch.setattr(type(model), "forward", counted)
    return passes


def test_no_pass_is_run_twice(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = num_passes(model, monkeypatch)
    plain = serve(model, WISHES, SCHEDULE)
    without = list(passes)
    passes.clear()
    ahead = serve(model, WISHES, SCHEDULE, looks_ahead=True)
    assert [job.generated for job in ahead] == [job.generated for job in plain]
    assert passes == without


def test_it_is_launched_before_the_step_is_settled(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = num_passes(model, monkeypatch)
    batcher = new_batcher(model, SCHEDULE, 1024, strict=False, looks_ahead=True)
    batcher.add(new_job(batcher, "one", WISHES[0]))
    counts = []
    for _ in range(4):
        step = batcher.begin()
        assert step is not None
        outcome = batcher.run(step)
        counts.append(len(passes))
        batcher.settle(step, outcome)
    # The chunk gives the first token; from the first decode on there is one more under way.
    assert counts == [1, 3, 4, 5]


def test_alone_every_pass_is_run_once(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_prompt(model, list(WISHES[0].prompt), num_tokens=40, max_tokens=40)
    passes = num_passes(model, monkeypatch)
    monkeypatch.setattr(model.kernels, "can_capture", True)
    ahead = run_prompt(model, list(WISHES[0].prompt), num_tokens=40, max_tokens=40)
    assert ahead.generated == plain.generated
    assert passes == [len(WISHES[0].prompt), *[1] * 39]


def test_a_pass_that_nobody_wants_is_forgotten(model: Decoder) -> None:
    """One is cancelled, and another comes, after the next step was launched."""
    wishes = [
        Wish(WISHES[0].prompt, 30),
        Wish(WISHES[1].prompt, 30, cancelled=9),
        Wish(WISHES[2].prompt, 12, arrives=14),
        Wish(WISHES[0].prompt[:20], 3, arrives=20),
    ]
    ours = serve(model, wishes, SCHEDULE, looks_ahead=True)
    theirs = serve(model, wishes, SCHEDULE)
    assert [job.generated for job in ours] == [job.generated for job in theirs]
