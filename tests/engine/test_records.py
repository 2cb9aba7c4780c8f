"""What is told of requests, chunks and steps: counts, times and reasons, by hand."""

from typing import Any, cast

import pytest

from penstock.engine import batcher, constraint, fingerprint, llm, profile, reuse, sampler, schema_limits
from penstock.engine.events import (
    ChunkRecord,
    GenerationRequest,
    PromptProgress,
    Usage,
    auto_reason,
    usual_size,
)
from penstock.engine.job import Job
from penstock.engine.sampler import SamplingParams
from penstock.engine.sampling import Choice
from penstock.engine.status import (
    CacheStatus,
    RequestStatus,
    RequestSummary,
    ReuseStatus,
    SpanRecord,
    StepRecord,
)
from penstock.errors import SettingError
from penstock.plan import RequestView, SpanKind
from penstock.plan.sizing import SizeRule


def chunk(start: int, end: int, rule: SizeRule = "default") -> ChunkRecord:
    return ChunkRecord(start, end, start, rule, None, 1.0, None)


def test_what_a_step_did() -> None:
    spans = (
        SpanRecord("a", SpanKind.DECODE, 90, 91),
        SpanRecord("b", SpanKind.CHUNK, 10, 13),
        SpanRecord("c", SpanKind.REPLAY, 20, 24),
    )
    step = StepRecord(3, 1.0, 0.5, spans, num_held_decodes=0)
    assert (step.num_chunk_tokens, step.num_decodes, step.preempted) == (7, 1, ())
    assert step.stalls_decodes
    assert StepRecord(3, 1.0, 0.5, spans[1:], num_held_decodes=1).stalls_decodes
    assert not StepRecord(3, 1.0, 0.5, spans[:1], num_held_decodes=2).stalls_decodes
    assert not StepRecord(3, 1.0, 0.5, spans[1:], num_held_decodes=0).stalls_decodes
    assert StepRecord(3, 1.0, 0.5, spans[1:], num_held_decodes=1).stalls_decodes


def test_why_chunks_were_as_long() -> None:
    records = [chunk(0, 100), chunk(100, 164, "latency"), chunk(164, 900, "end"), chunk(900, 950, "halved")]
    assert [len(record) for record in records] == [100, 64, 736, 50]
    assert (usual_size(records, 7), usual_size(records[2:], 7)) == (100, 7)
    assert auto_reason(records, "none") == "auto: 64 to 100 tokens, the default, by the latency target"
    assert auto_reason(records[:1], "none") == "auto: the default"
    assert auto_reason(records[2:], "none") == "none"
    assert (records[0].measured_bytes, records[0].num_decodes, records[0].because) == (None, 0, "")


def test_what_is_not_said_is_none_of_it() -> None:
    assert Usage(3, 4) == Usage(3, 4, 0)
    assert Usage(3, 4).total_tokens == 7
    assert CacheStatus(1, 2, 3, 4, 5) == CacheStatus(1, 2, 3, 4, 5, 0, 0)
    assert ReuseStatus() == ReuseStatus(False, 0, 0, 0, 0, 0, 0, 0, None, None, 0, 0, 0, 0)
    assert RequestStatus("a", "prompt", 1, 2, 3, 4, 5.0, None, 6).num_prompt_cached == 0
    request = GenerationRequest([1], 2)
    assert (request.stop, request.num_logprobs, request.ignore_eos, request.cache_salt) == (
        (),
        None,
        False,
        "",
    )
    assert request.sampling == SamplingParams(0.0, 0, 1.0, 0.0, 1.0, None, 0.0, 0.0, {})


def job(num_prompt: int = 100, max_tokens: int = 3, **more: Any) -> Job:
    request = GenerationRequest(range(num_prompt), max_tokens, **more)
    made = Job("a", request, cast(Any, None), None, frozenset({7}), None, lambda event: None)
    made._arrived_s = 10.0
    return made


def test_a_prompt_that_is_read_tells_how_far_it_is() -> None:
    made = job()
    assert (made.progress.num_chunks, made.progress.chunks_done) == (1, 0)
    told = made.skip(30)
    assert isinstance(told, PromptProgress)
    assert (told.progress.num_done, told.progress.num_cached, made.num_cached) == (30, 30, 30)
    assert made.skip(30) is None
    assert made.start(20.0)
    assert not made.start(21.0)
    told = made.read(chunk(30, 50), None, 22.0)
    assert isinstance(told, PromptProgress)
    progress = told.progress
    assert (progress.num_done, progress.chunks_done, progress.num_chunks) == (50, 1, 1 + 3)
    assert progress.elapsed_s == 2.0
    assert progress.eta_s == pytest.approx(5.0)
    assert made.status(RequestView("prompt", 100, 100, 50, 0), 25.0) == RequestStatus(
        "a", "prompt", 100, 50, 0, 3, 15.0, progress.eta_s, 0, 30
    )
    # Preempted, it reads ten tokens once more, at the pace of before; the wait for that is on no clock.
    made.pause()
    again = made.status(RequestView("waiting", 100, 100, 40, 1), 25.0)
    assert (again.num_prompt_done, again.num_preemptions) == (40, 1)
    assert again.prompt_eta_s == pytest.approx(5.0 + 10 / (20 / 2.0))
    assert not made.start(100.0)
    assert made.read(chunk(40, 50), None, 101.0) is None
    assert made.read(chunk(50, 100), None, 106.0) is not None
    assert made.progress.elapsed_s == 2.0 + 5.0
    assert made.status(RequestView("decode", 100, 101, 100, 1), 110.0).prompt_eta_s is None
    assert made.progress.num_chunks == 2


def test_chunks_to_come_are_taken_to_be_as_long_as_the_last() -> None:
    made = job()
    made.start(0.0)
    made.read(chunk(0, 10), None, 1.0)
    assert made.progress.num_chunks == 1 + 9
    made.read(chunk(10, 40), None, 3.0)
    assert made.progress.num_chunks == 2 + 2
    cached = job()
    cached.skip(100)
    assert cached.progress.num_chunks == 0


def test_cuts_on_the_grid_are_told_from_others() -> None:
    made = job(150)
    made.read(chunk(0, 128), None, 1.0)
    assert made.lies_on(64)
    assert not made.lies_on(100)
    made.read(chunk(128, 150), None, 2.0)
    assert made.lies_on(64)  # the prompt's end is where it is
    made.read(chunk(0, 64), 60, 3.0)
    assert not made.lies_on(64)


def test_an_answer_ends_with_its_last_token_or_the_models_end() -> None:
    made = job()
    made.start(12.0)
    assert made.gap_s(13.0) == 3.0
    assert made.may_go_on
    assert [made.ends_with(token) for token in (5, 7)] == [False, True]
    _, reason = made.take(Choice(5, None), 15.0)
    assert (reason, made.num_generated, made.gap_s(15.5)) == (None, 1, 0.5)
    assert made.take(Choice(6, None), 16.0)[1] is None
    assert made.has_last_token  # the third
    assert made.take(Choice(5, None), 18.0)[1] == "length"
    ended = made.end("length", 20.0)
    assert (ended.queue_s, ended.prefill_s, ended.decode_s) == (2.0, 3.0, 3.0)
    assert ended.usage == Usage(100, 3, 0)
    assert made.summary("length", 20.0) == RequestSummary("a", "length", 100, 3, 5.0, 10.0)
    assert job().take(Choice(7, None), 1.0)[1] == "stop"
    assert job(ignore_eos=True).take(Choice(7, None), 1.0)[1] is None
    never = job()
    assert never.summary("cancelled", 20.0).first_token_s is None
    assert (never.end("cancelled", 20.0).queue_s, never.end("cancelled", 20.0).prefill_s) == (10.0, 0.0)
    never.wants_cancel = True
    assert not never.may_go_on


def test_which_requests_need_all_logits() -> None:
    assert not job().needs_logits
    assert job(num_logprobs=0).needs_logits


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("temperature", (0, 1e-6, 100.0), (5e-7, -1, float("inf"), 10**400)),
        ("top_k", (0, 1, 2**31 - 1), (-1, 2**31, True, 1.0)),
        ("top_p", (1e-9, 1), (0, 1.0001)),
        ("min_p", (0, 0.999), (-0.001, 1)),
        ("repetition_penalty", (1e-9, 50), (0, 1e-308, 1e-320, 1e300, float("inf"))),
        ("seed", (None, 0, 2**63 - 1), (-1, 2**63)),
        ("presence_penalty", (-2, 2), (-2.001, 2.001)),
        ("frequency_penalty", (-2, 2), (-2.001, 2.001)),
        (
            "logit_bias",
            ({0: -100}, {2**31 - 1: 100}),
            ({0: -100.1}, {0: 100.1}, {-1: 0}, {2**31: 0}, {True: 0}),
        ),
    ],
)
def test_the_bounds_of_sampling(name: str, accepted: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    for value in accepted:
        SamplingParams(**{name: value})
    for value in refused:
        with pytest.raises(SettingError, match=name):
            SamplingParams(**{name: value})
    SamplingParams(logit_bias={9: 1.0}).check_vocab(10)
    with pytest.raises(SettingError, match="0 to 8"):
        SamplingParams(logit_bias={9: 1.0}).check_vocab(9)


def test_limits_that_users_meet_are_what_they_were() -> None:
    assert (llm.DEFAULT_MAX_TOKENS, sampler.MAX_PENALTY, sampler.MAX_BIAS) == (512, 2.0, 100.0)
    assert (batcher.STEPS_SHOWN, batcher.ENDED_EXPLAINED) == (240, 64)
    assert (reuse.SNAPSHOT_TOKENS, reuse.MAX_SNAPSHOTS, reuse.PIECE_BYTES, reuse.MOST_FOUND) == (
        1024,
        16,
        64 << 20,
        512,
    )
    assert (schema_limits.MAX_BYTES, schema_limits.MAX_PROPERTIES) == (65_536, 1000)
    assert (schema_limits.MAX_PATTERN_PROPERTIES, schema_limits.MAX_JOINED_PATTERNS) == (64, 8)
    assert (constraint.NUM_KEPT, profile._SCHEMA, profile._MOST_FILE_BYTES) == (16, 1, 16 << 20)
    assert (fingerprint._VERSION, fingerprint._MOST_MEMOS, fingerprint._MOST_MEMO_BYTES) == (1, 1000, 1 << 20)
