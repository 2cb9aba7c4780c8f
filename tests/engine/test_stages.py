"""A model in stages has the bits of one process, for any number of them."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.cache import TokenRange
from penstock.cache.space import CacheSpace
from penstock.engine.capacity import cache_tokens_elsewhere, cache_tokens_that_fit
from penstock.engine.events import Generation, GenerationRequest
from penstock.engine.llm import LLM
from penstock.engine.run import Run
from penstock.engine.service import ServiceConfig
from penstock.engine.stages import pipeline
from penstock.engine.stages.header import HeaderError, HeaderLimits, read_header, write_header
from penstock.engine.stages.workers import LocalWorker, Ranks
from penstock.engine.step import build_batch
from penstock.errors import MemoryExhaustedError, SettingError, StageLostError
from penstock.layers.forward_batch import ForwardBatch
from penstock.measure.stages import run_digest, tokens_at_once, verify_stages
from penstock.models.decoder import Decoder
from penstock.plan import ChunkedPrefillConfig, EngineSettings, ScheduleConfig, Span
from penstock.plan.stage_settings import resolve_stages
from tests.byte_models import byte_backend
from tests.engine.hybrids import Tape
from tests.engine.stages.threads import ThreadWorker, workers_as_threads
from tests.engine.test_batched_alone import model_of
from tests.oracle import canon_of, make_oracle, random_prompt

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "qwen3_5_text": {},
    "qwen3_moe": {"num_hidden_layers": 4, "mlp_only_layers": (1,)},
    "mistral": {"num_hidden_layers": 4, "sliding_window": 100},
}
# The first layers see everything, the last a window: a stage may have none of either.
TWO_GROUPS = {
    "qwen2": {
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 65,
        "max_window_layers": 2,
    }
}
# Layers with keys and values beside states, or with neither; a limit that is infinite, which no message can say.
MIXED: dict[str, dict[str, Any]] = {"falcon_h1": {"num_hidden_layers": 4}, "nemotron_h": {}, "bamba": {}}
PROMPT = random_prompt(300)


@cache
def folder_of(family: str) -> Path:
    folder = make_oracle(family, vocab_size=256, **(FAMILIES | TWO_GROUPS | MIXED)[family]).folder
    byte_backend().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with workers_as_threads():
        yield


def staged(family: str, stages: int, **settings: Any) -> LLM:
    return LLM(folder_of(family), stages=stages, device="cpu", **{"dtype": "bfloat16", **settings})


@pytest.mark.parametrize("family", FAMILIES | TWO_GROUPS | MIXED)
def test_one_hash_for_any_number_of_stages(family: str) -> None:
    found = set()
    for stages in (1, 2, 3, 4):
        with staged(family, stages) as llm:
            found |= {run_digest(llm, PROMPT, chunk) for chunk in (64, 100, 256, 0)}
    assert len(found) == 1


def test_what_lies_behind_a_window_is_given_back_while_steps_are_in_flight() -> None:
    prompt, found = random_prompt(900), set()
    for stages in (1, 3):
        with staged("mistral", stages) as llm:
            run = Run(llm.model, prompt, config=ChunkedPrefillConfig(64), canon=llm.canon, stages=llm.stages)
            (pool,) = run.space.windows
            assert pool.num_blocks * 64 < len(prompt)
            found.add(run_digest(llm, prompt, 64))
    assert len(found) == 1


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_quantised_weights_in_stages(weights: str) -> None:
    if model_of("llama", torch.float32).kernels.quantised is None:
        pytest.skip("needs quantised weights")
    found = set()
    for settings in ({}, {"layers": "1,3"}, {"layers": [3, 1]}):
        stages = 2 if settings else 1
        with staged("llama", stages, weights=weights, **settings) as llm:
            found.add(run_digest(llm, PROMPT, 64))
    assert len(found) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_at_once_have_the_same_text(family: str) -> None:
    """With prefix hits, also of a prompt that ends with a block; and so little room that some are preempted."""
    begin = random_prompt(256, vocab_size=256)
    requests = [
        GenerationRequest((*begin, *random_prompt(num, vocab_size=256, seed=num)), 32, ignore_eos=True)
        for num in (3, 50, 64, 64, 20)
    ]
    schedule = ScheduleConfig(chunk_size=128, grid=64)
    for blocks in (64, 9):
        found = []
        for stages in (1, 2, 3):
            with staged(family, stages, chunk=128) as llm:
                config = ServiceConfig(schedule, cache_tokens=64 * blocks, strict=True)
                found.append(tokens_at_once(llm, requests, config))
        assert found[0] == found[1] == found[2]


def test_a_step_that_fails_on_a_worker_is_undone_and_run_again() -> None:
    """Memory that runs out halves the chunk; anything else fails the one request at fault."""
    with staged("llama", 2, chunk=128) as llm, staged("llama", 1, chunk=128) as alone:
        expected = alone.generate(PROMPT, max_tokens=4).token_ids
        forward, num_calls = Decoder.forward, 0

        def fail_twice(self: Decoder, *parts: Any) -> torch.Tensor | None:
            nonlocal num_calls
            if self.first_layer == 0:
                num_calls += 1
                if num_calls in (2, 5):
                    raise torch.OutOfMemoryError("injected")
            return forward(self, *parts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "forward", fail_twice)
            result = llm.generate(PROMPT, max_tokens=4)
        assert result.token_ids == expected
        assert "memory" in result.prefill.reason
        with pytest.MonkeyPatch.context() as patch:
            num_calls = 1
            patch.setattr(Decoder, "forward", fail_twice)
            patch.setattr(torch, "OutOfMemoryError", RuntimeError)
            with pytest.raises(RuntimeError, match="stage 0: RuntimeError: injected"):
                llm.generate(PROMPT, max_tokens=4)
        assert llm.generate(PROMPT, max_tokens=4).token_ids == expected


def test_a_worker_that_is_gone_ends_the_generation_and_is_replaced() -> None:
    with staged("llama", 3, chunk=64, stage_timeout=5) as llm:
        stages = llm.stages
        assert stages is not None
        expected = llm.generate(PROMPT, max_tokens=4).token_ids
        generation = stages.generation
        ThreadWorker.opened[0].kill()
        assert llm.generate(PROMPT, max_tokens=4).token_ids == expected
        assert stages.lost is None
        assert stages.generation > generation
    with pytest.raises(StageLostError):
        llm.generate(PROMPT, max_tokens=4)


def test_the_driver_s_layers_are_run_beside_its_books_and_never_after_they_were_undone() -> None:
    """Nothing of a step that is undone is written to the cache once that is over."""
    forward, begun, goes_on = Decoder.forward, threading.Event(), threading.Event()
    threads: list[str] = []

    def slow(self: Decoder, *parts: Any) -> torch.Tensor | None:
        if self.first_layer:
            threads.append(threading.current_thread().name)
            if len(threads) == 2:
                begun.set()
                assert goes_on.wait(10)
        return forward(self, *parts)

    with staged("llama", 2, chunk=64) as llm, ThreadPoolExecutor(1) as pool:
        expected = llm.generate(PROMPT, max_tokens=4).token_ids
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "forward", slow)
            run = Run(llm.model, PROMPT, config=ChunkedPrefillConfig(64), canon=llm.canon, stages=llm.stages)
            run.step()
            assert begun.wait(10)  # the step after it, while nobody waits for that
            cancelled = pool.submit(run.cancel)
            with pytest.raises(TimeoutError):
                cancelled.result(0.1)
            goes_on.set()
            cancelled.result(10)
        assert llm.generate(PROMPT, max_tokens=4).token_ids == expected
    assert threads == ["stage-receive"] * 2


def test_a_stage_that_is_lost_while_the_driver_computes_is_brought_back_after_it() -> None:
    forward, begun, goes_on = Decoder.forward, threading.Event(), threading.Event()

    def slow(self: Decoder, *parts: Any) -> torch.Tensor | None:
        if self.first_layer and not begun.is_set():
            begun.set()
            assert goes_on.wait(10)
        return forward(self, *parts)

    with staged("llama", 2, chunk=64) as llm, ThreadPoolExecutor(1) as pool:
        stages = llm.stages
        assert stages is not None
        expected, generation = llm.generate(PROMPT, max_tokens=4).token_ids, stages.generation
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "forward", slow)
            answer = pool.submit(llm.generate, PROMPT, max_tokens=4)
            assert begun.wait(10)
            ThreadWorker.opened[0].kill()
            while stages.lost is None:
                time.sleep(0.01)
            time.sleep(0.1)
            assert stages.generation == generation
            goes_on.set()
            assert answer.result(30).token_ids == expected
        assert stages.generation == generation + 1


def test_every_step_s_time_is_told_in_the_end() -> None:
    with staged("llama", 3, chunk=64) as llm:
        assert llm.stages is not None
        llm.generate(PROMPT, max_tokens=8)
        deadline = time.monotonic() + 5
        while len({each.num_steps for each in llm.stages.status()}) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        number = llm.stages.status()[0].num_steps
        assert number >= 5 + 7
        assert all(seconds is not None for seconds in llm.stages.step_times(number))


def batch() -> ForwardBatch:
    model = model_of("qwen3_5", torch.float32)
    space = CacheSpace.for_tokens(model, 64 * 64, num_slots=8)
    reading, decoding = (Tape(model, random_prompt(length), space=space) for length in (70, 5))
    decoding.run(5)
    decoding.tokens.append(3)
    items = [reading.reserve(Span(0, 70), is_prompt=True), decoding.reserve(Span(5, 6), is_prompt=False)]
    return build_batch([replace(items[0], wants_logits=False), items[1]], canon=canon_of(model))


LIMITS = HeaderLimits(vocab_size=211, max_position=4096, num_places=(64 * 64,), num_slots=8)


def test_a_header_is_the_batch() -> None:
    written = batch()
    read = read_header(write_header(written), LIMITS)
    assert write_header(read) == write_header(written)
    assert (read.num_tokens, read.num_logits, read.is_canonical) == (71, 1, True)
    assert np.array_equal(read.token_ids, written.token_ids)
    assert read.states == written.states
    assert [list(span.places) for span in read.last_layer.spans] == [[TokenRange(0, 6)]]


def test_other_headers_are_refused() -> None:
    data = bytearray(write_header(batch()))
    for length in range(0, len(data), 40):
        with pytest.raises(HeaderError):
            read_header(data[:length], LIMITS)
    with pytest.raises(HeaderError):
        read_header(data + bytes(8), LIMITS)
    for limits in (
        replace(LIMITS, vocab_size=3),
        replace(LIMITS, max_position=60),
        replace(LIMITS, num_places=(64,)),
        replace(LIMITS, num_places=(64 * 64, 64 * 64)),
        replace(LIMITS, num_slots=1),
    ):
        with pytest.raises(HeaderError):
            read_header(data, limits)
    numbers = np.frombuffer(data, dtype=np.int64)
    for index in range(len(numbers)):
        for value in (-2, 1 << 40):
            changed = numbers.copy()
            changed[index] = value
            try:
                read_header(changed.tobytes(), LIMITS)
            except HeaderError:
                continue
            # Nothing that a kernel would take for a place.
            assert index < 0 or value > 0, (index, value)


@pytest.mark.parametrize(
    ("stages", "layers"),
    [
        (0, None),
        ("two", None),
        (True, None),
        ("", None),
        ("host", None),
        (2, "1,2,3"),
        (2, "1,x"),
        (2, "0,4"),
    ],
)
def test_other_stages_are_refused(stages: Any, layers: Any) -> None:
    with pytest.raises(SettingError):
        resolve_stages(stages, layers)
    with pytest.raises(SettingError) as error:
        resolve_stages("10.0.0.1:7070")
    assert error.value.needs == ("token_file",)
    with pytest.raises(SettingError):
        resolve_stages(2, timeout_s=0)


def test_one_stage_is_none() -> None:
    assert resolve_stages() is None
    assert resolve_stages(1) is None
    assert resolve_stages("1") is None


@pytest.mark.parametrize("differs", [False, True])
def test_verify_compares_stages(differs: bool) -> None:
    """And notices a stage that hands on other bits."""
    forward = Decoder.forward

    def change(self: Decoder, *parts: Any) -> torch.Tensor | None:
        out = forward(self, *parts)
        return out if out is None or self.is_whole or self.first_layer else out + out * 2**-7

    with pytest.MonkeyPatch.context() as patch:
        if differs:
            patch.setattr(Decoder, "forward", change)
        results = verify_stages(
            lambda settings: LLM(folder_of("llama"), settings=settings),
            EngineSettings.resolve(device="cpu", threads=1),
            (1, 2),
            lambda llm: PROMPT,
        )
    assert results.passed != differs
    assert len(results.hashes) == 8
    assert ("BITS DIFFER" in results.render()) == differs


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("family", FAMILIES | TWO_GROUPS)
def test_each_stage_keeps_its_part_on_disk(family: str, stages: int, tmp_path: Path) -> None:
    """What all stages have is not read again, to the same bits; where one has lost a file, what is before it."""

    def generate() -> Generation:
        with staged(family, stages, chunk=128, cache_dir=tmp_path) as llm:
            return llm.generate(PROMPT, max_tokens=8, ignore_eos=True)

    with staged(family, 1, chunk=128) as llm:
        alone = llm.generate(PROMPT, max_tokens=8, ignore_eos=True)
    first, second = generate(), generate()
    assert alone.token_ids == first.token_ids == second.token_ids
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 256)
    lost = [file for file in tmp_path.rglob("00000002-*") if not file.name.endswith(".state.safetensors")]
    assert len(lost) == stages
    lost[0].unlink()
    third = generate()
    assert third.token_ids == alone.token_ids
    # What goes on after two blocks is there as well, but windows, which are kept where the prompt ends.
    assert third.usage.cached_tokens == (0 if family in ("mistral", "qwen2") else 128)


def test_a_stage_of_two_holds_half_of_weights_and_cache() -> None:
    """Embedding and head aside; and what fits of a cache is what fits all stages."""
    with staged("llama", 1) as whole, staged("llama", 2) as llm:
        assert llm.stages is not None
        (first,) = llm.stages.stages
        config = whole.model.config
        vocabulary = 2 * config.vocab_size * config.hidden_size
        most = 0.55 * (whole.model.num_weight_bytes - 2 * vocabulary)
        assert first.weight_bytes - vocabulary <= most
        assert llm.model.num_weight_bytes - vocabulary <= most
        spec = whole.model.cache_spec
        assert (
            first.cache.bytes_per_token == llm.model.cache_spec.bytes_per_token == spec.bytes_per_token // 2
        )
        arguments = (4, 1 << 60, torch.device("cpu"))
        together = cache_tokens_that_fit(llm.model.cache_spec, *arguments, beside=[first])
        assert together == pytest.approx(cache_tokens_that_fit(spec, *arguments), rel=0.2)
        tight = [first, replace(first, free_bytes=2 * 100 * 64 * first.cache.bytes_per_token)]
        assert cache_tokens_elsewhere(tight, 4, 1 << 60) == 6400
        with pytest.raises(MemoryExhaustedError):
            cache_tokens_elsewhere([replace(first, free_bytes=64)], 4, 1 << 60)


def test_workers_are_processes_that_end_with_the_model() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "LocalWorker", LocalWorker)
        with staged("llama", 2, chunk=64) as llm:
            assert llm.stages is not None
            (worker,) = llm.stages.places
            assert isinstance(worker, LocalWorker)
            pid = worker.pid
            assert pid is not None
            os.kill(pid, 0)
            found = llm.generate(PROMPT, max_tokens=4).token_ids
            receivers = [thread for thread in threading.enumerate() if thread.name == "stage-receive"]
            assert receivers
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        # One that frees what it has of torch while Python ends would abort this process.
        assert not receivers[-1].is_alive()
    with staged("llama", 1, chunk=64) as llm:
        assert llm.generate(PROMPT, max_tokens=4).token_ids == found


def test_a_stage_is_busy_and_waits_for_no_longer_than_a_request_takes() -> None:
    began_s = time.perf_counter()
    with staged("llama", 2, chunk=64) as llm:
        assert llm.stages is not None
        llm.generate(PROMPT, max_tokens=4)
        times = [(each.busy_s, each.waited_s) for each in llm.stages.status()]
    elapsed_s = time.perf_counter() - began_s
    assert len(times) == 2
    assert all(0 < busy_s <= elapsed_s - waited_s for busy_s, waited_s in times)


def test_why_torchrun_s_store_cannot_be_reached_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*place: object, **options: object) -> None:
        raise RuntimeError("nobody listens there\nand a trace of C++")

    monkeypatch.setattr(torch.distributed, "TCPStore", refuse)
    ranks = Ranks(1, 2, "127.0.0.1", 1, "")
    with pytest.raises(StageLostError) as error:
        ranks.workers(b"")
    assert error.value.reason == "torchrun's store: nobody listens there"


@pytest.mark.parametrize(("rank", "stages", "needs"), [("1", 2, ("token_file",)), ("2", 2, ())])
def test_ranks_of_torchrun_must_fit(rank: str, stages: int, needs: tuple[str, ...], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 2)
    token.chmod(0o600)
    variables = {"RANK": rank, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with pytest.raises(SettingError) as error:
            staged("llama", stages, token_file=None if needs else token)
    assert (error.value.setting, tuple(error.value.needs)) == ("stages", needs)
