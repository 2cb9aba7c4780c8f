"""A hit is a miss: what comes from the cache, in memory or on disk, changes nothing of an answer."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cache import BLOCK_TOKENS
from penstock.cache.store.block_store import BlockStore
from penstock.models.decoder import Decoder
from penstock.plan.policy import ScheduleConfig
from tests.engine.batching import RecordingJob, Sharing, Wish, new_batcher, serve_with
from tests.engine.test_batched_alone import NAMES, check_is_alone, model_of, schedules
from tests.oracle import random_prompt

# Texts that prompts begin with: the second shares some of the first.
FIRST = tuple(random_prompt(400, seed=1))
STEMS = (FIRST, FIRST[:200] + tuple(random_prompt(200, seed=2)))
DISK_BYTES = 1 << 30


@st.composite
def wishes(draw: st.DrawFn) -> list[Wish]:
    some = []
    for index in range(draw(st.integers(1, 4))):
        stem = draw(st.sampled_from(STEMS))
        shared = draw(st.one_of(st.integers(0, 300), st.sampled_from((63, 64, 65, 128, 192, 256))))
        own = tuple(random_prompt(draw(st.integers(1, 80)), seed=1000 + index))
        arrives = draw(st.integers(0, 8))
        cancelled = draw(st.one_of(st.none(), st.none(), st.integers(arrives, arrives + 20)))
        some.append(Wish(stem[:shared] + own, draw(st.integers(1, 8)), arrives, cancelled))
    return some


def open_store(model: Decoder, folder: Path) -> BlockStore:
    return BlockStore(folder, b"the model", model.cache_spec, max_bytes=DISK_BYTES, about={})


def check_all(model: Decoder, wishes: Sequence[Wish], jobs: Sequence[RecordingJob], *, strict: bool) -> None:
    for wish, job in zip(wishes, jobs, strict=True):
        check_is_alone(model, wish, job, strict=strict)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    strict=st.booleans(),
    episodes=st.lists(wishes(), min_size=1, max_size=3),
    schedule=schedules(),
    num_blocks=st.sampled_from((7, 8, 12, 64)),
    has_disk=st.booleans(),
    restarts=st.booleans(),
    goes_on=st.booleans(),
)
def test_a_hit_is_a_miss(
    name: str,
    strict: bool,
    episodes: list[list[Wish]],
    schedule: ScheduleConfig,
    num_blocks: int,
    has_disk: bool,
    restarts: bool,
    goes_on: bool,
) -> None:
    model = model_of(name, torch.float32)
    with TemporaryDirectory() as folder:
        store = open_store(model, Path(folder)) if has_disk else None
        sharing = Sharing(store, max_snapshots=3)
        batcher = new_batcher(model, schedule, 64 * num_blocks, strict=strict, sharing=sharing)
        for episode in episodes:
            jobs = serve_with(batcher, episode)
            check_all(model, episode, jobs, strict=strict)
            if goes_on and strict:  # the next turn of a conversation, with the answer in its prompt
                turns = [
                    Wish((*job.tokens, *random_prompt(30, seed=7)), 3)
                    for job in jobs
                    if len(job.tokens) + 33 <= 64 * num_blocks
                ]
                check_all(model, turns, serve_with(batcher, turns), strict=strict)
            if restarts:
                if store is not None:
                    store.close()
                    store = open_store(model, Path(folder))
                    sharing = Sharing(store, max_snapshots=3)
                batcher = new_batcher(model, schedule, 64 * num_blocks, strict=strict, sharing=sharing)
        if store is not None:
            store.close()


SCHEDULE = ScheduleConfig(chunk_size=128)


@pytest.mark.parametrize("name", NAMES)
def test_the_second_time_only_the_last_block_is_read(name: str) -> None:
    model = model_of(name, torch.float32)
    batcher = new_batcher(model, SCHEDULE, 64 * 64, strict=False, sharing=Sharing())
    prompt = Wish(FIRST, 2)  # six blocks and 16 tokens
    (cold,) = serve_with(batcher, [prompt])
    (warm,) = serve_with(batcher, [prompt])
    assert (cold.num_cached, warm.num_cached) == (0, 384)
    assert torch.equal(cold.logits[0], warm.logits[0])
    assert [chunk.start for chunk in warm.chunks] == [384]


@pytest.mark.parametrize("name", NAMES)
def test_a_cancelled_prompt_goes_on_where_it_was(name: str) -> None:
    model = model_of(name, torch.float32)
    batcher = new_batcher(model, SCHEDULE, 64 * 64, strict=False, sharing=Sharing())
    serve_with(batcher, [Wish(FIRST, 2, cancelled=2)])  # after two chunks of 128
    (again,) = serve_with(batcher, [Wish(FIRST, 2)])
    assert again.num_cached == 256


@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_come_together_are_read_once(name: str) -> None:
    model = model_of(name, torch.float32)
    batcher = new_batcher(model, SCHEDULE, 64 * 64, strict=False, sharing=Sharing())
    together = [Wish((*FIRST[:320], index), 2) for index in range(4)]
    jobs = serve_with(batcher, together)
    check_all(model, together, jobs, strict=False)
    assert [job.num_cached for job in jobs] == [0, 320, 320, 320]
    assert batcher.status().cache.blocks_idle == 5


def test_long_requests_share_nothing_with_short_ones_where_their_keys_differ() -> None:
    model = model_of("phi3, longrope", torch.float32)
    batcher = new_batcher(model, SCHEDULE, 64 * 64, strict=False, sharing=Sharing())
    short, long = Wish(FIRST[:100], 4), Wish(FIRST[:100], 40)
    for wish, num_cached in ((short, 0), (long, 0), (short, 64), (long, 64)):
        jobs = serve_with(batcher, [wish])
        assert jobs[0].num_cached == num_cached
        check_all(model, [wish], jobs, strict=False)


def test_blocks_are_shared_and_not_copied() -> None:
    model = model_of("llama", torch.float32)
    batcher = new_batcher(model, SCHEDULE, 64 * 12, strict=False, sharing=Sharing())
    serve_with(batcher, [Wish((*FIRST[:384], 5), 1)])
    # Each alone has seven blocks; together they have six in common, and there are twelve.
    jobs = serve_with(batcher, [Wish((*FIRST[:384], index), 2) for index in range(5)])
    assert [job.num_cached for job in jobs] == [384] * 5
    assert not any(job.num_preemptions for job in jobs)


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_what_decoding_left_is_not_reused_under_strict(strict: bool) -> None:
    model = model_of("llama", torch.float32)
    batcher = new_batcher(model, SCHEDULE, 64 * 64, strict=strict, sharing=Sharing())
    (job,) = serve_with(batcher, [Wish(FIRST[:128], 80)])
    (turn,) = serve_with(batcher, [Wish((*job.tokens, 1, 2, 3), 1)])
    assert turn.num_cached == (128 if strict else 192)


@pytest.mark.parametrize("name", NAMES)
def test_another_process_goes_on_from_the_disk(name: str, tmp_path: Path) -> None:
    model = model_of(name, torch.float32)
    store = open_store(model, tmp_path)
    batcher = new_batcher(model, SCHEDULE, 64 * 64, strict=False, sharing=Sharing(store))
    (cold,) = serve_with(batcher, [Wish(FIRST, 2)])
    store.close()
    store = open_store(model, tmp_path)
    batcher = new_batcher(model, SCHEDULE, 64 * 64, strict=False, sharing=Sharing(store))
    (warm,) = serve_with(batcher, [Wish(FIRST, 2)])
    assert warm.num_cached == 384
    assert torch.equal(cold.logits[0], warm.logits[0])
    status = batcher.status().reuse
    assert (status.disk_tokens, status.memory_tokens, status.missed_tokens) == (384, 0, 16)
    store.close()


def test_what_is_on_disk_is_copied_in_parts_while_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama", torch.float32)
    store = open_store(model, tmp_path)
    serve_with(new_batcher(model, SCHEDULE, 64 * 64, strict=False, sharing=Sharing(store)), [Wish(FIRST, 2)])
    store.flush()
    monkeypatch.setattr(
        "penstock.engine.reuse.PIECE_BYTES", 2 * BLOCK_TOKENS * model.cache_spec.kv.bytes_per_token
    )
    batcher = new_batcher(model, SCHEDULE, 64 * 64, strict=False, sharing=Sharing(store))
    together = [Wish((7,) * 30, 20), Wish(FIRST, 2, arrives=1)]
    other, warm = serve_with(batcher, together)
    assert warm.num_cached == 384
    check_all(model, together, [other, warm], strict=False)
    store.close()


def test_without_memory_for_a_copy_nothing_but_the_copy_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> torch.Tensor:
        raise MemoryError("as the test wants it")

    monkeypatch.setattr("penstock.engine.reuse.copy_out", fail)
    model = model_of("llama", torch.float32)
    store = open_store(model, tmp_path)
    batcher = new_batcher(model, SCHEDULE, 64 * 64, strict=False, sharing=Sharing(store))
    jobs = serve_with(batcher, [Wish(FIRST, 2)])
    check_all(model, [Wish(FIRST, 2)], jobs, strict=False)
    store.close()
    assert store.stats().num_written == 0


def test_what_others_hold_needs_no_room_to_be_admitted() -> None:
    model = model_of("llama", torch.float32)
    batcher = new_batcher(model, SCHEDULE, 64 * 12, strict=False, sharing=Sharing())
    # The first answers for a while; the others come in the middle of its steps, and all fit beside it.
    wishes = [
        Wish((*FIRST[:384], 1), 40),
        *(Wish((*FIRST[:384], index), 3, arrives=8) for index in (2, 3, 4)),
    ]
    jobs = serve_with(batcher, wishes)
    assert [job.num_cached for job in jobs] == [0, 384, 384, 384]
    assert not any(job.num_preemptions for job in jobs)
    check_all(model, wishes, jobs, strict=False)


def test_a_block_that_is_half_read_is_taken_whole() -> None:
    model = model_of("llama", torch.float32)
    batcher = new_batcher(model, ScheduleConfig(chunk_size=100), 64 * 64, strict=False, sharing=Sharing())
    serve_with(batcher, [Wish(FIRST, 1, cancelled=2)])  # it stands at 200, in a block's middle
    (job,) = serve_with(batcher, [Wish(FIRST, 1)])
    assert job.num_cached == 192
    check_all(model, [Wish(FIRST, 1)], [job], strict=False)


def test_what_memory_gave_up_is_looked_for_on_disk_again(tmp_path: Path) -> None:
    model = model_of("llama", torch.float32)
    store = open_store(model, tmp_path)
    batcher = new_batcher(model, SCHEDULE, 64 * 8, strict=False, sharing=Sharing(store))
    serve_with(batcher, [Wish(FIRST, 1)])
    store.flush()
    # It is in memory when it comes, and gone when it begins: the one before it needs all of the cache.
    other = tuple(random_prompt(450, seed=9))
    _, late = serve_with(batcher, [Wish(other, 20), Wish(FIRST, 1)])
    assert late.num_cached == 384
    check_all(model, [Wish(FIRST, 1)], [late], strict=False)
    store.close()


@pytest.mark.parametrize("num_blocks", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_of_a_prompt_that_ends_with_a_block_only_the_last_token_is_read(name: str, num_blocks: int) -> None:
    model = model_of(name, torch.float32)
    batcher = new_batcher(model, SCHEDULE, 64 * 16, strict=False, sharing=Sharing())
    wish = Wish(FIRST[: 64 * num_blocks], 3)
    serve_with(batcher, [wish])
    jobs = serve_with(batcher, [wish, wish])
    goes_on_anywhere = batcher.space.keeps_prefix
    known = 64 * num_blocks - 1 if goes_on_anywhere else 64 * (num_blocks - 1)
    assert [job.num_cached for job in jobs] == [known, known]
    check_all(model, [wish, wish], jobs, strict=False)
