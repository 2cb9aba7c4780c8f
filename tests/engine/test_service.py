"""A service: its thread, its streams, and requests that are cancelled, fail, or come too late."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine import service as service_module
from penstock.engine.events import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    JsonFormat,
    PromptProgress,
    TokenGenerated,
)
from penstock.engine.llm import LLM
from penstock.engine.sampler import SamplingParams
from penstock.engine.service import Service, ServiceConfig, _resolve_schedule
from penstock.engine.status import RequestSummary, StepRecord
from penstock.engine.streams import EventStream
from penstock.errors import (
    ContextLengthError,
    MemoryExhaustedError,
    PromptError,
    QueueFullError,
    RequestFailedError,
    ServiceClosedError,
    SettingError,
)
from penstock.plan.policy import ScheduleConfig, SchedulePolicy
from penstock.plan.sizing import SizeRules
from tests.byte_models import model_of_bytes
from tests.engine.listening import PATIENCE_S, Listening, Pausing
from tests.oracle import random_prompt


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("models") / request.param
    return LLM(model_of_bytes(request.param, folder), dtype="float32", chunk=128)


@pytest.fixture
def service(llm: LLM) -> Iterator[Service]:
    with Service(
        llm, ServiceConfig(ScheduleConfig(chunk_size=128, max_running=4, max_waiting=8), 2048)
    ) as service:
        yield service
        wait_for(lambda: not service.status().requests)
        service.check_integrity()
        assert service.status().cache.blocks_used == 0
        assert service.status().cache.slots_used == 0
        assert service.is_healthy


def wait_for(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def request_of(length: int, max_tokens: int, seed: int = 0, **more: object) -> GenerationRequest:
    return GenerationRequest(random_prompt(length, 256, seed), max_tokens, **more)  # type: ignore[arg-type]


def test_many_at_once_answer_as_generate_does(llm: LLM, service: Service) -> None:
    requests = [request_of(length, 12, seed=length) for length in (1, 40, 300, 150, 64, 200)]
    listeners = [Listening() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        service.submit(request, listener)
    for request, listener in zip(requests, listeners, strict=True):
        end = listener.end
        alone = llm.generate(request.token_ids, max_tokens=12)
        assert isinstance(end, Finished)
        assert tuple(listener.tokens) == alone.token_ids
        text = "".join(
            event.text for event in listener.events if isinstance(event, TokenGenerated | Finished)
        )
        assert text == alone.text
        assert end.usage == alone.usage
        assert end.queue_s >= 0
        assert end.prefill_s > 0
        assert end.decode_s > 0


def test_progress_comes_chunk_by_chunk_and_ends_with_the_prompt(service: Service) -> None:
    events = service.run(request_of(500, 2))
    done = [event.progress.num_done for event in events if isinstance(event, PromptProgress)]
    assert done == [128, 256, 384, 500]
    kinds = [type(event) for event in events]
    assert kinds == [PromptProgress] * 4 + [TokenGenerated] * 2 + [Finished]


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(llm: LLM, service: Service) -> None:
    prompt = random_prompt(30, 256)
    text = llm.generate(prompt, max_tokens=40).text
    stop = text[5:8]
    whole = llm.generate(prompt, max_tokens=40, stop=[stop])
    events = service.run(GenerationRequest(prompt, 40, stop=(stop,)))
    assert (
        "".join(event.text for event in events if isinstance(event, TokenGenerated | Finished)) == whole.text
    )
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.reason == "stop"


def test_a_seed_draws_the_same_tokens_whatever_runs_beside(service: Service) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    alone = Listening()
    service.submit(request_of(50, 20, sampling=sampling), alone)
    assert isinstance(alone.end, Finished)
    listeners = [Listening() for _ in range(4)]
    for index, listener in enumerate(listeners):
        service.submit(request_of(50 if index == 2 else 90, 20, sampling=sampling), listener)
    assert all(isinstance(listener.end, Finished) for listener in listeners)
    assert listeners[2].tokens == alone.tokens


def test_logprobs_are_of_the_chosen_token_and_the_most_likely(service: Service) -> None:
    events = service.run(request_of(40, 5, num_logprobs=3))
    tokens = [event for event in events if isinstance(event, TokenGenerated)]
    assert len(tokens) == 5
    for event in tokens:
        assert event.logprobs is not None
        ranked = event.logprobs.most_likely
        assert len(ranked) == 3
        assert ranked[0].token == event.token
        assert ranked[0].logprob == event.logprobs.logprob


@pytest.mark.parametrize("moment", ["waiting", "prompt", "decode"])
def test_cancel_frees_everything_and_touches_nobody_else(llm: LLM, service: Service, moment: str) -> None:
    pausing = Pausing(5 if moment == "decode" else 1)
    other, listener = (pausing, Listening()) if moment == "waiting" else (Listening(), pausing)
    service.submit(request_of(60, 60, seed=1), other)
    if moment == "waiting":
        pausing.wait()
        for _ in range(3):
            service.submit(request_of(60, 60, seed=2), Listening())
    request_id = service.submit(request_of(1500 if moment == "prompt" else 60, 300), listener)
    pausing.wait()
    assert len(listener.tokens) == (4 if moment == "decode" else 0)
    service.cancel(request_id)
    pausing.go_on()
    end = listener.end
    assert isinstance(end, Finished)
    assert end.reason == "cancelled"
    assert request_id not in {request.id for request in service.status().requests}
    service.check_integrity()
    assert isinstance(other.end, Finished)
    assert tuple(other.tokens) == llm.generate(random_prompt(60, 256, 1), max_tokens=60).token_ids
    service.cancel(request_id)  # it has ended: nothing happens


def test_what_cannot_run_is_refused_at_once(service: Service) -> None:
    refused: list[tuple[GenerationRequest, type[Exception], str]] = [
        (GenerationRequest([], 5), PromptError, "empty"),
        (GenerationRequest([1], -1), SettingError, "max_tokens"),
        (GenerationRequest([999], 5), PromptError, "vocabulary"),
        (GenerationRequest([1] * 5999, 5), ContextLengthError, "6000"),
        (GenerationRequest([1] * 2040, 50), ContextLengthError, "2049"),
        (GenerationRequest([1], 5, stop=("",)), SettingError, "stop"),
        (GenerationRequest([1], 5, num_logprobs=-1), SettingError, "num_logprobs"),
        (GenerationRequest([1], 5, SamplingParams(logit_bias={5000: 1.0})), SettingError, "logit_bias"),
        (
            GenerationRequest([1], 5, json_format=JsonFormat({"type": "nonsense"})),
            SettingError,
            "json_format",
        ),
    ]
    for request, kind, part in refused:
        with pytest.raises(kind, match=part):
            service.submit(request, Listening())
    assert not service.status().requests


def test_the_queue_has_an_end(service: Service) -> None:
    first = Pausing()
    ids = [service.submit(request_of(300, 300), first)]
    first.wait()
    ids += [service.submit(request_of(300, 300), Listening()) for _ in range(7)]

    def submit_more() -> None:
        for _ in range(8):
            ids.append(service.submit(request_of(300, 300), Listening()))

    with pytest.raises(QueueFullError, match="wait"):
        submit_more()
    assert len(ids) == 4 + 8  # those that there are places for, and those that may wait
    for request_id in ids:
        service.cancel(request_id)
    first.go_on()


def test_a_failing_request_fails_alone(llm: LLM, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    poison, forward = 77, llm.model.forward

    def fail_on_poison(batch: object, caches: object, **overlap: object) -> torch.Tensor | None:
        if (batch.token_ids == poison).any():  # type: ignore[attr-defined]
            raise RuntimeError("poison")
        return forward(batch, caches, **overlap)  # type: ignore[arg-type]

    clean = [token for token in random_prompt(400, 256) if token != poison]
    alone = llm.generate(clean[:100], max_tokens=8).token_ids
    assert poison not in alone
    monkeypatch.setattr(llm.model, "forward", fail_on_poison)
    good, bad, later = Listening(), Listening(), Listening()
    service.submit(GenerationRequest(clean[:100], 8), good)
    service.submit(GenerationRequest([*clean[:50], poison], 8), bad)
    service.submit(GenerationRequest(clean[:100], 8), later)
    end = bad.end
    assert isinstance(end, Failed)
    assert isinstance(end.error, RequestFailedError)
    assert "poison" in str(end.error)
    for listener in (good, later):
        assert isinstance(listener.end, Finished)
        assert tuple(listener.tokens) == alone


def test_out_of_memory_makes_chunks_smaller_and_no_request_fails(
    llm: LLM, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = llm.model.forward

    def small_only(batch: object, caches: object, **overlap: object) -> torch.Tensor | None:
        if batch.num_tokens > 70:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("too large")
        return forward(batch, caches, **overlap)  # type: ignore[arg-type]

    alone = llm.generate(random_prompt(300, 256), max_tokens=4).token_ids
    monkeypatch.setattr(llm.model, "forward", small_only)
    listener = Listening()
    service.submit(request_of(300, 4), listener)
    assert isinstance(listener.end, Finished)
    assert tuple(listener.tokens) == alone


def test_no_memory_at_all_is_the_requests_error(
    llm: LLM, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(batch: object, caches: object, **overlap: object) -> torch.Tensor | None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "forward", fail)
        end = service.run(request_of(10, 4))[-1]
    assert isinstance(end, Failed)
    assert isinstance(end.error, MemoryExhaustedError)
    assert isinstance(service.run(request_of(10, 4))[-1], Finished)


def test_a_listener_that_raises_ends_its_own_request_only(service: Service) -> None:
    def broken(event: Event) -> None:
        raise OSError("gone")

    other = Listening()
    service.submit(request_of(200, 200), broken)
    service.submit(request_of(50, 5), other)
    assert isinstance(other.end, Finished)
    wait_for(lambda: not service.status().requests)


def test_streams_of_coroutines(llm: LLM, service: Service) -> None:
    async def consume(seed: int) -> list[int]:
        async with EventStream(service) as stream:
            stream.submit([request_of(80, 10, seed)])
            return [event.token async for _, event in stream if isinstance(event, TokenGenerated)]

    async def leave_early() -> str:
        async with EventStream(service) as stream:
            stream.submit([request_of(80, 500)])
            async for _, event in stream:
                if isinstance(event, TokenGenerated):
                    break
            return stream.ids[0]

    async def all_of_them() -> None:
        *answers, request_id = await asyncio.gather(consume(1), consume(2), consume(3), leave_early())
        for seed, answer in enumerate(answers, start=1):
            prompt = random_prompt(80, 256, seed)
            assert tuple(answer) == llm.generate(prompt, max_tokens=10).token_ids
        wait_for(lambda: request_id not in {request.id for request in service.status().requests})

    asyncio.run(all_of_them())


def test_closing_lets_what_runs_finish_and_takes_nothing_new(llm: LLM) -> None:
    service = Service(llm, ServiceConfig(cache_tokens=2048))
    listener = Listening()
    service.submit(request_of(100, 30), listener)
    wait_for(lambda: listener.events)
    closer = threading.Thread(target=service.close, args=(PATIENCE_S,))
    closer.start()
    wait_for(lambda: service.is_closing)
    with pytest.raises(ServiceClosedError):
        service.submit(request_of(10, 1), Listening())
    end = listener.end
    assert isinstance(end, Finished)
    assert end.reason == "length"
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert service.is_healthy


def test_closing_cancels_what_has_no_time_left(llm: LLM) -> None:
    service = Service(llm, ServiceConfig(cache_tokens=4096))
    listener = Pausing(4)
    service.submit(request_of(100, 3000), listener)
    listener.wait()
    closer = threading.Thread(target=service.close, args=(0.05,))
    closer.start()
    wait_for(lambda: service.is_closing)
    listener.go_on()
    closer.join(PATIENCE_S)
    end = listener.end
    assert isinstance(end, Finished)
    assert end.reason == "cancelled"
    assert not service._thread.is_alive()


def test_a_dead_engine_leaves_nobody_waiting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(llm, ServiceConfig(cache_tokens=2048))

    def die() -> None:
        raise RuntimeError("as the test wants it")

    monkeypatch.setattr(service._batcher, "begin", die)
    end = service.run(request_of(10, 5))[-1]
    assert isinstance(end, Failed)
    assert not service.is_healthy
    with pytest.raises(ServiceClosedError):
        service.submit(request_of(10, 5), Listening())
    service.close()


def test_observers_see_every_step_token_and_end(llm: LLM) -> None:
    class Watching:
        def __init__(self) -> None:
            self.steps: list[StepRecord] = []
            self.gaps: list[tuple[str, float, bool]] = []
            self.ends: list[RequestSummary] = []

        def on_step(self, record: StepRecord) -> None:
            self.steps.append(record)
            raise ValueError("an observer's own trouble")

        def on_token(self, request_id: str, gap_s: float, *, is_first: bool) -> None:
            self.gaps.append((request_id, gap_s, is_first))

        def on_shrink(self) -> None: ...

        def on_end(self, summary: RequestSummary) -> None:
            self.ends.append(summary)

    watching = Watching()
    with Service(llm, ServiceConfig(cache_tokens=2048), observers=[watching]) as service:
        service.run(request_of(300, 7))
        wait_for(lambda: len(service.status().steps) == len(watching.steps) == 9)
    spans = [(span.start, span.end) for record in watching.steps for span in record.spans]
    assert spans == [(0, 128), (128, 256), (256, 300), *((end - 1, end) for end in range(301, 307))]
    assert [is_first for _, _, is_first in watching.gaps] == [True] + [False] * 6
    (summary,) = watching.ends
    assert (summary.outcome, summary.num_prompt_tokens, summary.num_generated) == ("length", 300, 7)
    assert summary.first_token_s == watching.gaps[0][1]


def test_an_overlap_is_refused(tmp_path: Path) -> None:
    llm = LLM(model_of_bytes("llama", tmp_path / "model"), dtype="float32", chunk=128, overlap=64)
    with pytest.raises(SettingError, match="overlap"):
        Service(llm)


class Gpu:
    """What a service asks a device with memory of its own."""

    has_own_memory = True

    def free_bytes(self) -> None:
        return None

    def use(self) -> None: ...

    def release(self) -> None: ...


@pytest.mark.parametrize("max_running", [1, 32, 200])
def test_decodes_come_on_top_of_a_chunk_unless_a_step_is_bounded(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, max_running: int
) -> None:
    """A chunk that made room for them would leave the grid on which attention runs: on a GPU, too."""
    schedule = ScheduleConfig(chunk_size=128, max_running=max_running)
    monkeypatch.setattr(LLM, "device_kind", Gpu())
    found = _resolve_schedule(schedule, llm)
    assert found.step_tokens is None
    assert found.chunk_budget(max_running - 1) == 128
    asked = replace(schedule, step_tokens=500)
    assert _resolve_schedule(asked, llm).step_tokens == 500


@pytest.mark.parametrize(
    ("chunk_size", "step_tokens", "measured"), [(128, None, 128), (128, 64, 64), (0, None, 6000)]
)
def test_on_a_gpu_a_step_is_measured_as_long_as_it_may_be(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, chunk_size: int, step_tokens: int | None, measured: int
) -> None:
    """A layer's past of the longest sequence comes on top."""
    schedule = ScheduleConfig(chunk_size=chunk_size, step_tokens=step_tokens, max_running=5)
    assert service_module._step_bytes(llm, schedule) == 0
    asked = []

    def measure(model: object, canon: object, num_tokens: int, num_decodes: int) -> int:
        asked.append((num_tokens, num_decodes))
        return 1000

    monkeypatch.setattr(LLM, "device_kind", Gpu())
    monkeypatch.setattr(service_module, "measured_step_bytes", measure)
    kv = llm.model.cache_spec.kv
    past = llm.context_length * 2 * kv.num_kv_heads * kv.head_dim * kv.dtype.itemsize
    assert service_module._step_bytes(llm, schedule) == 1000 + past
    assert asked == [(measured, 5)]


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_gaps_of_decodes_are_bounded_but_where_prompts_go_first(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, policy: SchedulePolicy
) -> None:
    monkeypatch.setattr(LLM, "size_rules", lambda self, free_bytes: SizeRules(decode_gap_s=0.25))
    monkeypatch.setattr(
        service_module, "check_schedule", lambda size, schedule: None
    )  # its own chunks are not
    schedule = ScheduleConfig(policy=policy, auto_chunk=True)
    with Service(llm, ServiceConfig(schedule, 2048)) as service:
        gap_s = None if policy is SchedulePolicy.PREFILL_FIRST else 0.25
        assert service.rules.decode_gap_s == gap_s
        assert service.rules.fixed is None
    with Service(llm, ServiceConfig(replace(schedule, auto_chunk=False, grid=64), 2048)) as service:
        assert service.rules == SizeRules(fixed=512, grid=64)


def test_loading_takes_some_time(llm: LLM) -> None:
    assert 0 < llm.load_s < 600


@pytest.mark.parametrize("reuse", [False, True])
def test_a_service_has_room_for_those_who_run_and_what_is_kept(llm: LLM, reuse: bool) -> None:
    config = ServiceConfig(ScheduleConfig(chunk_size=128, max_running=3), 1000, reuse=reuse, max_snapshots=5)
    with Service(llm, config) as service:
        cache = service.status().cache
        assert cache.blocks_total == 16
        assert service.max_request_tokens == 1025
        assert cache.slots_total == ((6 + 5 * reuse) if llm.model.has_state else 0)
        assert service.status().reuse.is_on == reuse


def test_a_request_alone_has_room_for_itself_and_what_is_kept(llm: LLM) -> None:
    alone = llm._spaces.take([1] * 64, 65).space
    assert alone.blocks.num_blocks == 2
    kept = llm._spaces._with_reuse(129).space
    assert kept.blocks.num_blocks == 3
    if alone.slots is not None:
        assert kept.slots is not None
        assert (alone.slots.num_slots, kept.slots.num_slots) == (2, 2 + 2 * 16)


@pytest.mark.parametrize(
    ("asked", "free", "is_strict", "num_cached"),
    [
        (None, 4, True, 192),
        (True, 4, True, 128),
        (False, 4, False, 192),
        (None, 2, False, 192),
        (None, 0, False, 192),
    ],
)
def test_strict_is_the_default_where_it_costs_nothing(
    asked: bool | None, free: int, is_strict: bool, num_cached: int, tmp_path: Path
) -> None:
    """What an answer left is read anew only where strict answers were asked for."""
    llm = LLM(model_of_bytes("llama", tmp_path / "llama"), dtype="float32", chunk=128)
    llm.canon = replace(llm.canon, free_decodes=free, few_rows=0)
    config = ServiceConfig(ScheduleConfig(chunk_size=128, max_running=4), 2048, asked)
    with Service(llm, config) as service:
        assert service.config.strict is is_strict
        if asked is None and not is_strict:
            assert service.strict_reason.startswith("more than 2 answers" if free else "several answers")
        prompt = random_prompt(128)
        service.submit(GenerationRequest(prompt, 80, ignore_eos=True), first := Listening())
        assert isinstance(first.end, Finished)
        service.submit(GenerationRequest([*prompt, *first.tokens, 1, 2], 1), turn := Listening())
        assert isinstance(end := turn.end, Finished)
        assert end.usage.cached_tokens == num_cached
