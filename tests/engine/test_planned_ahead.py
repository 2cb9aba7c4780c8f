"""Steps that are planned while the one before them samples: used where each request goes on, and planned anew where
not."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.engine.batcher import Batcher
from penstock.engine.events import Finished, TokenGenerated
from penstock.engine.sampler import SamplingParams
from penstock.engine.sampling import Sampling
from penstock.engine.step import Launched, Step, StepOutcome
from penstock.errors import QueueFullError
from penstock.models.decoder import Decoder
from penstock.plan.policy import ScheduleConfig
from tests.engine.batching import RecordingJob, Sharing, Wish, new_batcher, new_job, serve, serve_with
from tests.oracle import load_model, make_oracle, random_prompt

SCHEDULE = ScheduleConfig(chunk_size=64, max_running=4)


@pytest.fixture
def model() -> Decoder:
    return load_model(make_oracle("llama").folder)


def ahead_of(model: Decoder, schedule: ScheduleConfig, cache_tokens: int, **kwargs: Any) -> Batcher:
    return new_batcher(
        model, schedule, cache_tokens, strict=True, looks_ahead=True, plans_ahead=True, **kwargs
    )


class Said:
    """What was launched: as it was ready, or laid out then; and what was withdrawn."""

    def __init__(self, batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ready: list[Step] = []
        self.anew: list[Step] = []
        self.num_withdrawn = self.num_split = 0
        launch, launch_ready = batcher._runner.launch, batcher._runner.launch_ready
        withdraw, catch_up = batcher._withdraw_newest, batcher._catch_up

        def launched(step: Step) -> Launched:
            self.anew.append(step)
            return launch(step)

        def launched_ready(step: Step, *given: Any) -> Launched:
            self.ready.append(step)
            return launch_ready(step, *given)

        def withdrawn() -> None:
            self.num_withdrawn += 1
            withdraw()

        def caught_up(begun: Any) -> None:
            self.num_split += 1
            catch_up(begun)

        monkeypatch.setattr(batcher._runner, "launch", launched)
        monkeypatch.setattr(batcher._runner, "launch_ready", launched_ready)
        monkeypatch.setattr(batcher, "_withdraw_newest", withdrawn)
        monkeypatch.setattr(batcher, "_catch_up", caught_up)


def with_ends(model: Decoder, wishes: list[Wish], chance: random.Random) -> list[Wish]:
    """Some end by a token, which nobody knows before."""
    alone = [replace(wish, arrives=0, cancelled=None) for wish in wishes]
    plain = serve(model, alone, SCHEDULE, cache_tokens=8192, strict=True)
    return [
        replace(wish, sampling=SamplingParams(stop_token_ids=(chance.choice(job.generated),)))
        if job.generated and chance.random() < 0.6
        else wish
        for wish, job in zip(wishes, plain, strict=True)
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("on_host", [True, False])
def test_answers_are_those_of_steps_that_wait(
    family: str, seed: int, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes, ends, is cancelled or preempted meanwhile, and where steps fail or the cache is lost."""
    chance = random.Random(seed)
    model = load_model(make_oracle(family).folder)
    wishes = [
        Wish(
            tuple(random_prompt(chance.randint(1, 200), seed=100 * seed + index)),
            chance.randint(1, 60),
            arrives=chance.choice([0, 0, 5, 20, 40]),
            cancelled=chance.randint(10, 70) if chance.random() < 0.2 else None,
        )
        for index in range(6)
    ]
    wishes = with_ends(model, wishes, chance)
    schedule = replace(SCHEDULE, max_running=chance.choice([2, 3, 8]))
    cache_tokens = chance.choice([384, 1024, 4096])
    disturbed = {"fails": chance.sample(range(70), 3), "rewinds": chance.sample(range(70), 2)}
    plain = serve(model, wishes, schedule, cache_tokens=cache_tokens, strict=True)
    monkeypatch.setattr(RecordingJob, "needs_logits", on_host)
    batcher = ahead_of(model, schedule, cache_tokens, sharing=Sharing() if seed % 2 else None)
    said = Said(batcher, monkeypatch)
    ours = serve_with(batcher, wishes, **disturbed)
    for job, other, wish in zip(ours, plain, wishes, strict=True):
        same = job.generated == other.generated[: len(job.generated)] if wish.cancelled else None
        assert job.generated == other.generated or same
        assert job.outcome == other.outcome or wish.cancelled
        told = [event.token for event in job.events if isinstance(event, TokenGenerated)]
        assert told == job.generated
    assert said.ready


def read_beside(model: Decoder, batcher: Batcher, **kwargs: Any) -> tuple[list[RecordingJob], RecordingJob]:
    """Two that decode, and one whose long prompt is read beside them."""
    sampling = kwargs.get("sampling", SamplingParams())
    wishes = [Wish(tuple(random_prompt(20 + index, seed=index)), 40, sampling=sampling) for index in range(2)]
    jobs = [new_job(batcher, str(index), wish) for index, wish in enumerate(wishes)]
    for job in jobs:
        batcher.add(job)
    while not all(job.num_generated for job in jobs):
        batcher.step()
    reader = new_job(batcher, "reader", Wish(tuple(random_prompt(1000, seed=9)), 4))
    batcher.add(reader)
    batcher.step()
    return jobs, reader


def test_a_mixed_step_is_ready_before_the_tokens_of_the_one_before_are_known(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = ahead_of(model, SCHEDULE, 4096)
    jobs, reader = read_beside(model, batcher)
    said = Said(batcher, monkeypatch)
    order: list[str] = []
    sample = RecordingJob.choose
    begin = batcher.begin

    def chosen(self: RecordingJob, logits: torch.Tensor) -> Any:
        order.append("chosen")
        return sample(self, logits)

    def begun(*given: Any) -> Step | None:
        order.append("begun")
        return begin(*given)

    monkeypatch.setattr(RecordingJob, "choose", chosen)
    monkeypatch.setattr(batcher, "begin", begun)
    for _ in range(6):
        record = batcher.step()
        assert record is not None
        assert (record.num_decodes, record.num_chunk_tokens) == (2, 64)
        assert batcher.num_in_flight == 1
        batcher.check_integrity()
        status = batcher.status()
        assert [each.num_generated for each in status.requests[:2]] == [job.num_generated for job in jobs]
        assert [each.phase for each in status.requests] == ["decode", "decode", "prompt"]
    assert order == 6 * ["begun", "chosen", "chosen"]
    assert len(said.ready) == 6
    assert not said.anew
    assert not said.num_withdrawn
    batcher.cancel_all()
    while batcher.has_work:
        batcher.step()
    batcher.check_integrity()
    while batcher.notices:
        batcher.notices.popleft().tell()
    assert reader.outcome == "cancelled"


def test_who_ends_in_the_step_before_is_told_at_once_and_runs_in_vain(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds is free when the step ends that was launched with it."""
    alone = serve(model, [Wish(tuple(random_prompt(20, seed=0)), 40)], SCHEDULE, strict=True)[0]
    last = alone.generated[12]
    num_told = alone.generated.index(last) + 1
    batcher = ahead_of(model, SCHEDULE, 4096)
    jobs, reader = read_beside(model, batcher, sampling=SamplingParams(stop_token_ids=(last,)))
    said = Said(batcher, monkeypatch)
    ended = jobs[0]
    while not any(isinstance(event, Finished) for event in ended.events):
        batcher.step()
        while batcher.notices:
            batcher.notices.popleft().tell()
        batcher.check_integrity()
    assert ended.generated == alone.generated[:num_told]
    assert not said.num_withdrawn
    assert ended.cache.num_in_flight == 1
    assert batcher.num_in_flight == 1
    status = batcher.status()
    assert ended.id not in {each.id for each in status.requests}
    assert status.num_running == 2
    batcher.cancel(ended.id)  # which changes nothing
    batcher.step()
    assert ended.cache.blocks.num_blocks == 0
    batcher.check_integrity()
    while batcher.has_work:
        batcher.step()
    assert ended.generated == alone.generated[:num_told]
    assert len(reader.generated) == 4


def test_decodes_that_go_on_are_one_step_ahead_of_an_end(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is known, by its length, and one that is not: no pass is launched anew."""
    wishes = [Wish(tuple(random_prompt(20 + index, seed=index)), 30 + 9 * index) for index in range(4)]
    plain = serve(model, wishes, SCHEDULE, strict=True)
    stop = plain[1].generated[20]
    wishes[1] = replace(wishes[1], sampling=SamplingParams(stop_token_ids=(stop,)))
    plain = serve(model, wishes, SCHEDULE, strict=True)
    monkeypatch.setattr(RecordingJob, "needs_logits", False)
    batcher = ahead_of(model, SCHEDULE, 4096)
    said = Said(batcher, monkeypatch)
    ours = serve_with(batcher, wishes)
    assert [job.generated for job in ours] == [job.generated for job in plain]
    assert [job.outcome for job in ours] == [job.outcome for job in plain]
    assert plain[1].outcome == "stop"
    assert said.num_split == 4
    assert not said.num_withdrawn
    assert len(said.anew) == 1  # the first


def test_who_arrives_meanwhile_is_in_the_next_step(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned without it is planned anew, unless it could not come in."""
    for max_running, num_withdrawn in ((4, 1), (3, 0)):
        batcher = ahead_of(model, replace(SCHEDULE, max_running=max_running), 4096)
        read_beside(model, batcher)
        said = Said(batcher, monkeypatch)
        late = new_job(batcher, "late", Wish(tuple(random_prompt(10, seed=77)), 4))
        finish = batcher._runner.finish

        def finished(*given: Any, finish: Any = finish, batcher: Batcher = batcher, late: Any = late) -> Any:
            outcome = finish(*given)
            batcher.add(late)
            monkeypatch.setattr(batcher._runner, "finish", finish)
            return outcome

        monkeypatch.setattr(batcher._runner, "finish", finished)
        batcher.step()
        record = batcher.step()
        assert record is not None
        assert said.num_withdrawn == num_withdrawn
        assert ("late" in {span.request_id for span in record.spans}) == bool(num_withdrawn)
        while batcher.has_work:
            batcher.step()
            batcher.check_integrity()


def test_what_the_device_has_chosen_is_not_waited_for(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is on its way before the host knows a token; not before the last layers are, so that who comes
    by then is in it."""
    monkeypatch.setattr(RecordingJob, "needs_logits", False)
    batcher = ahead_of(model, SCHEDULE, 4096)
    order: list[str] = []
    arriving = [new_job(batcher, "late", Wish(tuple(random_prompt(10, seed=77)), 4))]

    def waits() -> None:
        order.append("waited")
        if len(order) > 8 and arriving:
            batcher.add(arriving.pop())

    monkeypatch.setattr(type(batcher._runner._device), "marker", lambda self: waits)
    jobs, reader = read_beside(model, batcher)
    order.clear()
    launch, choices = batcher._runner.launch_ready, Sampling.choices

    def launched(*given: Any) -> Launched:
        order.append("launched")
        return launch(*given)

    def chosen(self: Sampling) -> Any:
        order.append("chosen")
        return choices(self)

    monkeypatch.setattr(batcher._runner, "launch_ready", launched)
    monkeypatch.setattr(Sampling, "choices", chosen)
    said = Said(batcher, monkeypatch)
    for _ in range(6):
        batcher.step()
        batcher.check_integrity()
    assert order[:15] == 5 * ["waited", "launched", "chosen"]
    assert said.num_withdrawn == 1
    while batcher.has_work:
        batcher.step()
        batcher.check_integrity()
    alone = [Wish(tuple(random_prompt(20 + index, seed=index)), 40) for index in range(2)]
    assert [job.generated for job in jobs] == [job.generated for job in serve(model, alone, SCHEDULE)]
    assert len(reader.generated) == 4


def test_a_row_without_a_token_fails_alone(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is launched by then, and what it was given for the row is nobody's."""
    monkeypatch.setattr(RecordingJob, "needs_logits", False)
    batcher = ahead_of(model, SCHEDULE, 4096, sharing=Sharing())
    jobs, reader = read_beside(model, batcher)
    choices = Sampling.choices

    def one_fails(self: Sampling) -> Any:
        monkeypatch.setattr(Sampling, "choices", choices)
        return [ValueError("as the test wants it"), *choices(self)[1:]]

    monkeypatch.setattr(Sampling, "choices", one_fails)
    while batcher.has_work:
        batcher.step()
        batcher.check_integrity()
    while batcher.notices:
        batcher.notices.popleft().tell()
    assert [job.outcome for job in (*jobs, reader)] == ["Failed", "length", "length"]
    assert [len(job.generated) for job in (jobs[1], reader)] == [40, 4]


def test_where_no_token_could_be_chosen_the_next_step_is_planned_anew(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = ahead_of(model, SCHEDULE, 4096)
    jobs, reader = read_beside(model, batcher)
    said = Said(batcher, monkeypatch)
    choose = RecordingJob.choose

    def fails(self: RecordingJob, logits: torch.Tensor) -> Any:
        if self is jobs[0]:
            raise ValueError("as the test wants it")
        return choose(self, logits)

    monkeypatch.setattr(RecordingJob, "choose", fails)
    batcher.step()
    assert said.num_withdrawn == 1
    assert batcher.num_in_flight == 0
    batcher.check_integrity()
    monkeypatch.setattr(RecordingJob, "choose", choose)
    while batcher.has_work:
        batcher.step()
    while batcher.notices:
        batcher.notices.popleft().tell()
    assert [job.outcome for job in (*jobs, reader)] == ["Failed", "length", "length"]


def test_a_step_that_fails_takes_the_one_with_it_that_waits_for_its_tokens(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = ahead_of(model, SCHEDULE, 4096)
    jobs, reader = read_beside(model, batcher)
    expected = [
        job.generated
        for job in serve(model, [Wish(tuple(random_prompt(20 + i, seed=i)), 40) for i in range(2)], SCHEDULE)
    ]
    finish, before = batcher._runner.finish, [len(job.tokens) for job in jobs]

    def fails(step: Step, launched: Launched, *given: Any) -> StepOutcome:
        finish(step, launched, *given)
        monkeypatch.setattr(batcher._runner, "finish", finish)
        return StepOutcome(error=RuntimeError("as the test wants it"))

    monkeypatch.setattr(batcher._runner, "finish", fails)
    assert batcher.step() is None
    assert not batcher.num_in_flight
    assert [len(job.tokens) for job in jobs] == before
    batcher.check_integrity()
    while batcher.has_work:
        batcher.step()
    assert [job.generated for job in jobs] == expected
    assert len(reader.generated) == 4


def test_who_was_told_its_end_takes_no_place_in_the_queue(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = serve(model, [Wish(tuple(random_prompt(20, seed=0)), 40)], SCHEDULE, strict=True)
    sampling = SamplingParams(stop_token_ids=(alone.generated[12],))
    batcher = ahead_of(model, replace(SCHEDULE, max_running=3, max_waiting=1), 4096)
    jobs, _ = read_beside(model, batcher, sampling=sampling)
    while jobs[0].ending is None:
        batcher.step()
    late = [new_job(batcher, f"late {index}", Wish((5, 6, 7), 3)) for index in range(3)]
    for job in late[:2]:
        batcher.add(job)
    with pytest.raises(QueueFullError):
        batcher.add(late[2])
    while batcher.has_work:
        batcher.step()
    assert [len(job.generated) for job in late] == [3, 3, 0]


def test_who_is_cancelled_is_told_when_the_step_at_hand_is_settled(model: Decoder) -> None:
    batcher = ahead_of(model, SCHEDULE, 4096)
    jobs, _ = read_beside(model, batcher)
    batcher.cancel(jobs[0].id)
    batcher.step()
    assert jobs[0].ending == "cancelled"
    while batcher.has_work:
        batcher.step()
        batcher.check_integrity()


@pytest.mark.parametrize("on_host", [True, False])
def test_what_has_no_memory_beside_another_step_is_launched_after_it(
    model: Decoder, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody ends for it, and no chunk becomes smaller."""
    monkeypatch.setattr(RecordingJob, "needs_logits", on_host)
    batcher = ahead_of(model, SCHEDULE, 4096)
    jobs, reader = read_beside(model, batcher)
    error = torch.OutOfMemoryError("as the test wants it")
    monkeypatch.setattr(batcher._runner, "launch_ready", lambda *given: Launched(error=error))
    while batcher.has_work:
        batcher.step()
        batcher.check_integrity()
    assert batcher.num_shrinks == 0
    assert [len(job.generated) for job in (*jobs, reader)] == [40, 40, 4]


def test_after_a_prompt_and_where_a_token_is_held_the_next_step_is_planned(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the same decodes cannot follow, something else is ready."""
    monkeypatch.setattr(RecordingJob, "needs_logits", False)
    monkeypatch.setattr(RecordingJob, "_is_held", True)
    batcher = ahead_of(model, SCHEDULE, 4096)
    said = Said(batcher, monkeypatch)
    serve_with(batcher, [Wish(tuple(random_prompt(20 + index, seed=index)), 30) for index in range(2)])
    assert len(said.anew) == 1
    assert len(said.ready) > 28
