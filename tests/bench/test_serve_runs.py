"""Turns of a real service on a tiny model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.bench.serve_results import Arrival
from penstock.bench.serve_runs import Watch, run_burst, run_stall
from penstock.bench.serve_workload import Prompts, Variant, Workload
from penstock.engine.events import GenerationRequest
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.errors import ContextLengthError
from penstock.measure.growth import MeasurementError
from tests.bench.punctual import make_punctual
from tests.byte_models import model_of_bytes
from tests.oracle import random_prompt

WORK = Workload(
    streams=2, stream_prompt=8, stream_tokens=400, long_prompt=500, long_tokens=3, stall_chunk=64, requests=3
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(tmp_path_factory.mktemp("home")))
        folder: Path = model_of_bytes("llama", tmp_path_factory.mktemp("models") / "tiny")
        yield LLM(folder, dtype="float32", chunk=64)


def prompts_of(work: Workload) -> Prompts:
    text = random_prompt(work.long_prompt + work.streams * work.stream_prompt)
    streams = [
        text[work.long_prompt + index * work.stream_prompt :][: work.stream_prompt] for index in (0, 1)
    ]
    return Prompts(text[: work.long_prompt], tuple(streams), tuple(text[index:][:40] for index in range(3)))


@pytest.mark.parametrize("variant", list(Variant))
def test_the_prompt_arrives_while_streams_run(
    llm: LLM, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_punctual(monkeypatch, WORK.streams)
    schedule = variant.schedule(WORK.stall_chunk, 3)
    with Service(llm, ServiceConfig(schedule, cache_tokens=4096)) as service:
        run = run_stall(service, variant, 2, prompts_of(WORK), WORK)
        service.check_integrity()
    assert (run.variant, run.round_index, run.num_tokens) == (variant, 2, WORK.stall_total)
    assert [len(stamps) for stamps in run.stream_stamps] == [400, 400]
    # Four tokens of each came before it, and most after it.
    assert all(stamps[3] <= 0.0 < stamps[300] for stamps in run.stream_stamps)
    during = [sum(0.0 < stamp < run.first_token_s for stamp in stamps) for stamps in run.stream_stamps]
    num_chunks = -(-WORK.long_prompt // WORK.stall_chunk)
    if variant not in (Variant.UNCHUNKED, Variant.PREFILL_FIRST):
        assert min(during) >= num_chunks - 1


def test_requests_give_the_same_tokens_however_they_come(llm: LLM) -> None:
    schedule = Variant.MIXED.schedule(64, 3)
    with Service(llm, ServiceConfig(schedule, cache_tokens=1024, strict=True)) as service:
        prompts = prompts_of(WORK).requests
        at_once, in_turn = (run_burst(service, arrival, 0, prompts, 20) for arrival in Arrival)
    assert at_once.strict
    assert at_once.token_ids == in_turn.token_ids
    assert [len(tokens) for tokens in at_once.token_ids] == [20] * 3
    for run in (at_once, in_turn):
        assert 0 < run.decode_step_s < run.seconds


def test_what_is_refused_is_raised(llm: LLM) -> None:
    with (
        Service(llm, ServiceConfig(Variant.MIXED.schedule(64, 1), cache_tokens=64)) as service,
        pytest.raises(ContextLengthError),
    ):
        run_burst(service, Arrival.AT_ONCE, 0, [random_prompt(100)], 2)


def test_a_request_that_ends_before_its_time_fails_the_run(llm: LLM) -> None:
    watch = Watch()
    with Service(llm, ServiceConfig(Variant.MIXED.schedule(64, 1), cache_tokens=4096)) as service:
        cancelled = service.submit(GenerationRequest(random_prompt(64), 2000, ignore_eos=True), watch)
        assert watch.settled.wait(60)
        service.cancel(cancelled)
        assert watch.ended.wait(60)
    assert watch.error == "it ended with 'cancelled'"


def test_a_stream_that_ends_before_the_prompt_comes_fails_the_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the prompt came only when the streams had ended."""
    monkeypatch.setattr("penstock.bench.serve_runs.SETTLE_TOKENS", WORK.stream_tokens + 1)
    with (
        Service(llm, ServiceConfig(Variant.MIXED.schedule(64, 3), cache_tokens=4096)) as service,
        pytest.raises(MeasurementError, match="--stream-tokens"),
    ):
        run_stall(service, Variant.MIXED, 0, prompts_of(WORK), WORK)
