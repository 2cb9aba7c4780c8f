"""Where passes are recorded over a cache, requests that follow on each other take the same one."""

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM
from penstock.cache import BLOCK_TOKENS, Extent
from penstock.cache.space import CacheSpace
from penstock.engine.cache_choice import RequestSpace, RequestSpaces
from penstock.engine.reuse import Reuse
from penstock.engine.run import TextStream
from tests.byte_models import CONTEXT, model_of_bytes
from tests.oracle import load_model, make_oracle, random_prompt

GRID = 512
PROMPT = random_prompt(300, 256, 7)
NUM_KNOWN = 4 * BLOCK_TOKENS

Load = Callable[..., LLM]


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    cached_tokens: int
    logits: Tensor

    def is_as(self, other: "Answer") -> bool:
        return self.token_ids == other.token_ids and torch.equal(self.logits, other.logits)


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture
def load(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LLM]:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path_factory.getbasetemp() / "recorded-home"))
    monkeypatch.setattr("penstock.engine.cache_choice._RECORDED_GRID", GRID)

    def load(*, records: bool, **options: Any) -> LLM:
        llm = LLM(folder, dtype="float32", chunk=64, threads=1, **options)
        monkeypatch.setattr(llm.model.kernels, "can_capture", records)
        return llm

    return load


@pytest.fixture
def cold(load: Load) -> LLM:
    """Every request in a cache of its own."""
    return load(records=False)


@pytest.fixture(params=[False, True], ids=["alone", "with a store"])
def recording(request: pytest.FixtureRequest, load: Load, tmp_path: Path) -> LLM:
    return load(records=True, **({"cache_dir": tmp_path} if request.param else {}))


@pytest.fixture
def storing(load: Load, tmp_path: Path) -> LLM:
    return load(records=True, cache_dir=tmp_path)


def answer(stream: TextStream) -> Answer:
    """What came of it, once it has been read to its end."""
    for _ in stream:
        pass
    run = stream._run
    assert run.logits is not None
    return Answer(tuple(run.generated), run.num_cached, run.logits)


def ask(llm: LLM, prompt: Sequence[int], max_tokens: int = 8) -> Answer:
    return answer(llm.stream(prompt, max_tokens=max_tokens))


def recorded(llm: LLM) -> RequestSpace:
    found = llm._spaces.recorded
    assert found is not None
    return found


def reuse_of(llm: LLM) -> Reuse:
    found = recorded(llm).reuse
    assert found is not None
    return found


def test_a_cache_is_taken_again(cold: LLM, recording: LLM) -> None:
    spaces: list[RequestSpace] = []
    for length in (100, 30, 90):
        prompt = random_prompt(length, 256, length)
        assert ask(recording, prompt).is_as(ask(cold, prompt))
        spaces.append(recorded(recording))
    assert all(space is spaces[0] for space in spaces)
    assert cold._spaces.recorded is None


def test_without_recording_a_store_s_requests_have_new_caches(load: Load, tmp_path: Path) -> None:
    with load(records=False, cache_dir=tmp_path) as llm:
        streams = [llm.stream(PROMPT, max_tokens=8) for _ in range(2)]
    assert streams[0]._run.space is not streams[1]._run.space
    assert {stream._run.space.blocks.num_blocks for stream in streams} == {-(-308 // BLOCK_TOKENS)}
    assert llm._spaces.recorded is None


def test_what_is_known_stays_known(cold: LLM, storing: LLM) -> None:
    expected = ask(cold, PROMPT)
    answers = [ask(storing, PROMPT) for _ in range(3)]
    assert [found.cached_tokens for found in answers] == [0, NUM_KNOWN, NUM_KNOWN]
    assert all(found.is_as(expected) for found in answers)
    assert reuse_of(storing).status().memory_tokens == 2 * NUM_KNOWN


def test_one_that_is_too_small_is_let_go_of_first(recording: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[CacheSpace]] = []
    for_tokens = CacheSpace.for_tokens

    def watched(*args: Any, **options: Any) -> CacheSpace:
        gc.collect()
        assert not any(space() for space in made)
        space = for_tokens(*args, **options)
        made.append(weakref.ref(space))
        return space

    monkeypatch.setattr(CacheSpace, "for_tokens", watched)
    sizes = []
    for length in (100, GRID - 8, GRID - 7, 100, CONTEXT - 8, 100):
        ask(recording, random_prompt(length, 256, length))
        sizes.append(recorded(recording).space.blocks.num_blocks * BLOCK_TOKENS)
    # No more than the context, in whole blocks.
    most = -(-CONTEXT // BLOCK_TOKENS) * BLOCK_TOKENS
    assert sizes == [GRID, GRID, 2 * GRID, 2 * GRID, most, most]
    assert len(made) == 3


def test_streams_at_the_same_time_have_caches_of_their_own(cold: LLM, recording: LLM) -> None:
    prompts = [random_prompt(100, 256, seed) for seed in (1, 2)]
    streams = [recording.stream(prompt, max_tokens=8) for prompt in prompts]
    for pieces in zip(*streams, strict=False):
        assert len(pieces) == 2
    for stream, prompt in zip(streams, prompts, strict=True):
        assert answer(stream).is_as(ask(cold, prompt))
    assert streams[0]._run.space is not streams[1]._run.space
    # The next one takes the second's.
    assert recording.stream(prompts[0], max_tokens=8)._run.space is streams[1]._run.space


def test_a_refused_request_leaves_a_cache_for_the_next(recording: LLM) -> None:
    first = recording.stream(PROMPT, max_tokens=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(recording.activations), "check", _refuse)
        with pytest.raises(InterruptedError):
            recording.stream(PROMPT, max_tokens=8)
    left = recorded(recording)
    assert left.space is not first._run.space
    assert recording.stream(PROMPT, max_tokens=8)._run.space is left.space


def test_a_stream_that_was_dropped_takes_its_cache_along(cold: LLM, storing: LLM) -> None:
    ask(storing, PROMPT)
    dropped = storing.stream(PROMPT, max_tokens=8)
    space, short = dropped._run.space, PROMPT[:100]
    del dropped
    gc.collect()
    assert space.has_room(108, 2)  # beside what it had found, and nobody will give back
    assert ask(storing, short).is_as(ask(cold, short))
    assert recorded(storing).space is not space


def test_a_request_in_the_kept_cache_does_not_free_another_s(load: Load) -> None:
    llm = load(records=True, reuse_tokens=64)
    first = llm.stream(random_prompt(100, 256, 1), max_tokens=8)
    ask(llm, random_prompt(50, 256, 2))
    second = llm.stream(random_prompt(100, 256, 3), max_tokens=8)
    assert first._run.space is not second._run.space


def test_who_says_how_much_is_kept_keeps_no_more_beside_a_store(load: Load, tmp_path: Path) -> None:
    with load(records=True, cache_dir=tmp_path, reuse_tokens=64) as llm:
        ask(llm, PROMPT)
    assert llm._spaces.recorded is None


def test_hit_and_miss_have_the_same_bits_and_lie_in_one_place(cold: LLM, storing: LLM) -> None:
    """Prompts that begin alike or do not, that end anywhere, are left half way, or run beside another: each has the
    bits of a cold engine, and lies where it would lie in a cache of its own."""
    draw = random.Random(0)
    texts = [random_prompt(GRID, 256, index) for index in range(2)]
    for _ in range(24):
        start = draw.choice(texts)[: draw.choice((64, 128, 200, 256, 320, 384, 400))]
        prompt = start + random_prompt(draw.choice((0, 1, 64, 90)), 256, draw.randrange(10**6))
        kept = storing._spaces.recorded
        stream = storing.stream(prompt, max_tokens=8)
        run = stream._run
        if kept is not None:
            assert run.space is kept.space
        chance = draw.random()
        if chance < 0.2:
            for _ in range(draw.randrange(3)):
                run.step()
        elif chance < 0.3:
            next(stream)
            other = random_prompt(100, 256, draw.randrange(10**6))
            assert ask(storing, other).is_as(ask(cold, other))
        else:
            while run.finish_reason is None:
                run.step()
                assert run.finish_reason or _lies_in_one_place(run.cache.blocks.extents)
            assert answer(stream).is_as(ask(cold, prompt))
        stream.close()
        _check_integrity(storing)


def _lies_in_one_place(extents: Sequence[Extent]) -> bool:
    return len(extents) == 1 and extents[0].start == 0


def _check_integrity(llm: LLM) -> None:
    space = recorded(llm).space
    space.blocks.check_integrity()
    reuse_of(llm).index.check_integrity()
    if space.slots is not None:
        space.slots.check_integrity()


def _refuse(*args: object) -> None:
    raise InterruptedError


@pytest.mark.parametrize("num_kept", [0, 3])
def test_layers_with_a_window_have_blocks_for_one_request_and_what_is_kept(
    num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they need does not grow with the cache."""
    monkeypatch.setattr("penstock.engine.cache_choice.kept_windows", lambda spec, most: num_kept)
    model = load_model(make_oracle("mistral", sliding_window=129, num_hidden_layers=2).folder)
    spaces = RequestSpaces(
        model,
        num_slots=0,
        step_tokens=2 * BLOCK_TOKENS,
        reuse_tokens=64 * BLOCK_TOKENS if num_kept else 0,
        store=None,
        fingerprint=b"",
    )
    (pool,) = spaces.take(PROMPT, 3700).space.windows
    # A window of 128 tokens before a token, the block that is filled and one more; then what steps in flight write.
    assert pool.num_blocks == (2 + 2) + 2 + 2 * num_kept
