from collections.abc import Iterable, Iterator
from itertools import pairwise, repeat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError, PromptError, SettingError
from penstock.plan import (
    ChunkedPrefillConfig,
    ChunkOrderError,
    ChunkSizer,
    ModelShape,
    Prefill,
    PrefillChunk,
    PrefillPriority,
    PrefillScheduler,
    SizeDecision,
    SizeQuestion,
    SizeRules,
    Span,
    StartDecode,
    StepShape,
    YieldToDecode,
    create_prefill_chunks,
    create_prefill_chunks_at,
    peak_memory_estimate,
)
from tests.plan.strategies import configs, prompts

nonempty_prompts = prompts.filter(bool)
waiting_counts = st.lists(st.integers(0, 3), min_size=1, max_size=30)
SHAPE = ModelShape(2, 16, 32, 4, 2, 8, 100)


def run(scheduler: PrefillScheduler, waiting: Iterable[int]) -> Iterator[tuple[int, str | PrefillChunk]]:
    """Drive to the end: what was waiting at each question, and the answer, with every chunk completed."""
    for decodes_waiting in waiting:
        match scheduler.next_action(decodes_waiting):
            case Prefill(chunk):
                scheduler.complete(chunk)
                yield decodes_waiting, chunk
            case YieldToDecode():
                yield decodes_waiting, "yield"
            case StartDecode():
                return


def forever(counts: list[int]) -> Iterator[int]:
    while True:
        yield from counts


def trace(
    priority: PrefillPriority, num_chunks: int, waiting: Iterable[int], max_decode_steps: int = 8
) -> str:
    config = ChunkedPrefillConfig(1, 0, priority, max_decode_steps)
    answers = (answer for _, answer in run(PrefillScheduler(range(num_chunks), config), waiting))
    return "".join("d" if answer == "yield" else "C" for answer in answers)


@given(nonempty_prompts, configs(), waiting_counts)
def test_any_run_ends_with_every_chunk_run_once_in_order(
    prompt: list[int], config: ChunkedPrefillConfig, waiting: list[int]
) -> None:
    scheduler = PrefillScheduler(prompt, config)
    chunks = [answer for _, answer in run(scheduler, forever(waiting)) if answer != "yield"]
    assert tuple(chunks) == create_prefill_chunks(prompt, config)
    assert len(chunks) == scheduler.total_chunks
    assert scheduler.is_complete()
    assert scheduler.decode_available()
    assert scheduler.next_action(5) == scheduler.next_action(0) == StartDecode()


@given(nonempty_prompts, configs(), waiting_counts)
def test_yields_follow_the_priority(
    prompt: list[int], config: ChunkedPrefillConfig, waiting: list[int]
) -> None:
    yields, num_chunks_run = 0, 0
    for decodes_waiting, answer in run(PrefillScheduler(prompt, config), forever(waiting)):
        allowed = {
            PrefillPriority.PREFILL_FIRST: 0,
            PrefillPriority.INTERLEAVED: min(1, num_chunks_run),
            PrefillPriority.DECODE_PRIORITY: config.max_decode_steps,
        }[config.priority]
        if answer == "yield":
            assert decodes_waiting > 0
            yields += 1
            assert yields <= allowed
        else:
            assert decodes_waiting == 0 or yields == allowed
            yields, num_chunks_run = 0, num_chunks_run + 1


@pytest.mark.parametrize("priority", PrefillPriority)
def test_chunk_ends_cut_in_place_of_the_configured_size(priority: PrefillPriority) -> None:
    scheduler = PrefillScheduler(
        range(10), ChunkedPrefillConfig(chunk_size=4, overlap=1, priority=priority), chunk_ends=[1, 8, 10]
    )
    assert scheduler.total_chunks == 3
    chunks = [answer for _, answer in run(scheduler, repeat(1)) if answer != "yield"]
    assert tuple(chunks) == create_prefill_chunks_at(range(10), [1, 8, 10])
    assert scheduler.progress() == 1.0
    with pytest.raises(SettingError, match="give 10, the prompt's end"):
        PrefillScheduler(range(10), ChunkedPrefillConfig(), chunk_ends=[9])


def test_the_three_priorities_differ() -> None:
    traces = {
        priority.value: trace(priority, 3, repeat(1), max_decode_steps=3) for priority in PrefillPriority
    }
    assert traces == {
        "prefill-first": "CCC",
        "interleaved": "CdCdC",
        "decode-priority": "dddCdddCdddC",
    }


@pytest.mark.parametrize("priority", PrefillPriority)
def test_nobody_waiting_means_no_yield(priority: PrefillPriority) -> None:
    assert trace(priority, 5, repeat(0)) == "CCCCC"


def test_decode_priority_counts_since_the_last_chunk() -> None:
    # Two decode steps, nobody waits for a moment: a chunk runs, and the count begins anew.
    assert trace(PrefillPriority.DECODE_PRIORITY, 2, [1, 1, 0, 1, 1, 1, 1], max_decode_steps=3) == "ddCdddC"


def test_interleaved_owes_no_decode_that_was_not_waiting() -> None:
    assert trace(PrefillPriority.INTERLEAVED, 4, [2, 0, 1, 1, 0]) == "CCdCC"


@given(nonempty_prompts, configs(), waiting_counts)
def test_progress_moves_on_completion_only(
    prompt: list[int], config: ChunkedPrefillConfig, waiting: list[int]
) -> None:
    scheduler = PrefillScheduler(prompt, config)
    finished: set[int] = set()
    for decodes_waiting in forever(waiting):
        before = scheduler.progress()
        action = scheduler.next_action(decodes_waiting)
        assert scheduler.progress() == before
        if isinstance(action, Prefill):
            assert not scheduler.is_complete()
            assert not scheduler.decode_available()
            scheduler.complete(action.chunk)
            finished.update(range(action.chunk.start_pos, action.chunk.end_pos))
            assert scheduler.progress() == len(finished) / len(prompt) > before
        if isinstance(action, StartDecode):
            break
    assert scheduler.progress() == 1.0


@given(nonempty_prompts, configs(), waiting_counts, st.data())
def test_an_abandoned_chunk_leaves_no_trace(
    prompt: list[int], config: ChunkedPrefillConfig, waiting: list[int], data: st.DataObject
) -> None:
    """Two schedulers are asked the same; one of them sees steps fail. Their answers agree throughout."""
    steady, shaken = PrefillScheduler(prompt, config), PrefillScheduler(prompt, config)
    for decodes_waiting in forever(waiting):
        expected = steady.next_action(decodes_waiting)
        for _ in range(data.draw(st.integers(0, 2)) if isinstance(expected, Prefill) else 0):
            failed = shaken.next_action(decodes_waiting)
            assert isinstance(failed, Prefill)
            shaken.abandon(failed.chunk)
            assert shaken.progress() == steady.progress()
        assert shaken.next_action(decodes_waiting) == expected
        if isinstance(expected, StartDecode):
            break
        if isinstance(expected, Prefill):
            steady.complete(expected.chunk)
            shaken.complete(expected.chunk)


def issue(scheduler: PrefillScheduler) -> PrefillChunk:
    action = scheduler.next_action()
    assert isinstance(action, Prefill)
    return action.chunk


@pytest.mark.parametrize("priority", PrefillPriority)
def test_one_chunk_at_a_time(priority: PrefillPriority) -> None:
    scheduler = PrefillScheduler(range(4), ChunkedPrefillConfig(chunk_size=2, priority=priority))
    scheduler.complete(issue(scheduler))
    chunk = issue(scheduler)
    for decodes_waiting in (0, 1):
        with pytest.raises(ChunkOrderError, match="chunk 1 is issued: complete or abandon"):
            scheduler.next_action(decodes_waiting)
    scheduler.complete(chunk)
    assert scheduler.next_action() == StartDecode()


def test_only_the_issued_chunk_can_be_completed_or_abandoned() -> None:
    config = ChunkedPrefillConfig(chunk_size=2)
    scheduler = PrefillScheduler(range(4), config)
    first, second = create_prefill_chunks(range(4), config)
    stranger = create_prefill_chunks([7, 7, 7, 7], config)[0]
    for settle in (scheduler.complete, scheduler.abandon):
        with pytest.raises(ChunkOrderError, match=r"chunk 0 \[0, 2\) cannot be .*no chunk is issued"):
            settle(first)
    assert issue(scheduler) == first
    for settle in (scheduler.complete, scheduler.abandon):
        for wrong in (second, stranger):
            with pytest.raises(ChunkOrderError, match="chunk 0 is"):
                settle(wrong)
    assert scheduler.progress() == 0.0
    scheduler.complete(first)
    for settle in (scheduler.complete, scheduler.abandon):
        with pytest.raises(PenstockError, match="no chunk is issued"):
            settle(first)
    assert scheduler.progress() == 0.5
    assert issue(scheduler) == second


def test_an_empty_prompt_has_no_action() -> None:
    scheduler = PrefillScheduler([], ChunkedPrefillConfig())
    with pytest.raises(PromptError, match="empty"):
        scheduler.next_action()
    assert scheduler.total_chunks == 0
    assert scheduler.is_complete()
    assert scheduler.progress() == 1.0
    assert not scheduler.decode_available()
    assert scheduler.memory_savings(SHAPE) == 0.0


@pytest.mark.parametrize("decodes_waiting", [-1, 1.0, True, None, "1"])
def test_decodes_waiting_is_a_count(decodes_waiting: Any) -> None:
    scheduler = PrefillScheduler([1], ChunkedPrefillConfig())
    with pytest.raises(SettingError, match="decodes_waiting"):
        scheduler.next_action(decodes_waiting)


def test_memory_savings_are_those_of_the_estimate() -> None:
    config = ChunkedPrefillConfig(chunk_size=10, overlap=2)
    scheduler = PrefillScheduler(range(1000), config)
    savings = scheduler.memory_savings(SHAPE, dtype_bytes=4, kv_dtype_bytes=1, fused_attention=False)
    estimate = peak_memory_estimate(
        SHAPE, 1000, config, dtype_bytes=4, kv_dtype_bytes=1, fused_attention=False
    )
    assert savings == estimate.savings_ratio
    assert 0.9 < savings < 1
    assert 0 < scheduler.memory_savings(SHAPE) < savings


@given(
    num_tokens=st.integers(1, 300),
    chunk_size=st.integers(1, 80),
    overlap=st.integers(0, 79),
    shrinks=st.lists(st.booleans(), max_size=40),
)
def test_shrinking_still_covers_the_prompt(
    num_tokens: int, chunk_size: int, overlap: int, shrinks: list[bool]
) -> None:
    config = ChunkedPrefillConfig(chunk_size, min(overlap, chunk_size - 1))
    scheduler = PrefillScheduler(range(num_tokens), config)
    finished = 0
    while not scheduler.is_complete():
        action = scheduler.next_action()
        assert isinstance(action, Prefill)
        chunk = action.chunk
        assert chunk.start_pos <= finished < chunk.end_pos
        if shrinks and shrinks.pop():
            if len(chunk) == 1:
                with pytest.raises(ChunkOrderError, match="cannot be halved"):
                    scheduler.shrink(chunk)
                scheduler.abandon(chunk)
                continue
            scheduler.shrink(chunk)
            again = scheduler.next_action()
            assert isinstance(again, Prefill)
            assert again.chunk.start_pos == finished
            assert len(again.chunk) <= -(-len(chunk) // 2)
            scheduler.abandon(again.chunk)
            continue
        scheduler.complete(chunk)
        finished = chunk.end_pos
    assert finished == num_tokens


def sizes_after_shrinks(size: int, grid: int) -> list[int]:
    """The sizes of the first chunk, each of which fails but the last."""
    scheduler = PrefillScheduler(range(10_000), ChunkedPrefillConfig(size), grid=grid)
    sizes = []
    while True:
        chunk = issue(scheduler)
        sizes.append(len(chunk))
        if len(chunk) == 1:
            return sizes
        scheduler.shrink(chunk)


@pytest.mark.parametrize(
    ("grid", "sizes"),
    [
        (64, [512, 256, 128, 64, 32, 16, 8, 4, 2, 1]),
        (64, [192, 128, 64, 32, 16, 8, 4, 2, 1]),
        (64, [100, 64, 32, 16, 8, 4, 2, 1]),
        (64, [65, 64, 32, 16, 8, 4, 2, 1]),
        (64, [50, 25, 13, 7, 4, 2, 1]),
        (1, [192, 96, 48, 24, 12, 6, 3, 2, 1]),
    ],
)
def test_halving_keeps_to_the_grid_down_to_one_step_of_it(grid: int, sizes: list[int]) -> None:
    assert sizes_after_shrinks(sizes[0], grid) == sizes


@settings(max_examples=20)
@given(size=st.integers(2, 1000), grid=st.integers(1, 200))
def test_every_shrink_is_shorter_and_on_the_grid_while_longer_than_it(size: int, grid: int) -> None:
    sizes = sizes_after_shrinks(size, grid)
    for before, after in pairwise(sizes):
        half = -(-before // 2)
        assert after < before
        assert half <= after < half + grid
        assert after % grid == 0 if before > grid else after == half


@given(
    num_tokens=st.integers(1, 1500),
    chunk=st.integers(1, 10),
    overlap=st.integers(0, 9),
    grid=st.sampled_from([16, 64]),
    shrinks=st.lists(st.booleans(), max_size=40),
)
def test_cuts_stay_on_the_grid_however_often_memory_runs_out(
    num_tokens: int, chunk: int, overlap: int, grid: int, shrinks: list[bool]
) -> None:
    config = ChunkedPrefillConfig(chunk * grid, min(overlap, chunk - 1) * grid)
    scheduler = PrefillScheduler(range(num_tokens), config, grid=grid)
    assert scheduler.lies_on(grid)
    finished = 0
    while not scheduler.is_complete():
        issued = issue(scheduler)
        if shrinks and shrinks.pop() and len(issued) > grid:
            scheduler.shrink(issued)
        else:
            scheduler.complete(issued)
            finished = issued.end_pos
        assert finished % grid == 0 or finished == num_tokens
        assert scheduler.lies_on(grid)
    assert finished == num_tokens


@given(prompts, configs(), st.integers(1, 20))
def test_lying_on_a_grid_is_that_of_every_chunk(
    prompt: list[int], config: ChunkedPrefillConfig, grid: int
) -> None:
    chunks = create_prefill_chunks(prompt, config)
    cuts = {chunk.start_pos for chunk in chunks} | {chunk.end_pos for chunk in chunks if not chunk.is_last}
    assert PrefillScheduler(prompt, config).lies_on(grid) == all(cut % grid == 0 for cut in cuts)


def test_a_shrink_below_the_grid_leaves_it() -> None:
    scheduler = PrefillScheduler(range(200), ChunkedPrefillConfig(64), grid=64)
    scheduler.complete(issue(scheduler))
    scheduler.shrink(issue(scheduler))
    assert [chunk.end_pos for chunk in scheduler._chunks] == [64, 96, 128, 160, 192, 200]
    assert not scheduler.lies_on(64)


def test_a_whole_prompt_is_shrunk_on_the_grid() -> None:
    scheduler = PrefillScheduler(range(1000), ChunkedPrefillConfig(0), grid=64)
    scheduler.shrink(issue(scheduler))
    assert len(issue(scheduler)) == 512
    assert scheduler.lies_on(64)


@pytest.mark.parametrize("grid", [0, -64, 64.0, True])
def test_the_grid_is_a_count(grid: Any) -> None:
    with pytest.raises(SettingError, match="grid="):
        PrefillScheduler([1], ChunkedPrefillConfig(), grid=grid)


def test_cuts_that_were_made_are_not_forgotten_when_memory_runs_out() -> None:
    """Chunks of 128 that overlap by 32: the first leaves off at 96 for the next, which does not come to it."""
    scheduler = PrefillScheduler(range(600), ChunkedPrefillConfig(128, 32), grid=64)
    first = scheduler.next_action()
    assert isinstance(first, Prefill)
    assert scheduler.next_start(first.chunk) == 96
    scheduler.complete(first.chunk)
    second = scheduler.next_action()
    assert isinstance(second, Prefill)
    scheduler.shrink(second.chunk)
    assert not scheduler.lies_on(64)
    third = scheduler.next_action()
    assert isinstance(third, Prefill)
    assert scheduler.next_start(third.chunk) == third.chunk.end_pos


def test_memory_that_runs_out_in_the_first_chunk_puts_the_rest_on_the_grid() -> None:
    scheduler = PrefillScheduler(range(600), ChunkedPrefillConfig(128, 32), grid=64)
    first = scheduler.next_action()
    assert isinstance(first, Prefill)
    assert not scheduler.lies_on(64)
    scheduler.shrink(first.chunk)
    assert scheduler.lies_on(64)


# With a sizer.


class Asked(ChunkSizer):
    """Sizes of 100, or whatever is configured; keeps what it is asked and told."""

    def __init__(self, fixed: int | None = None) -> None:
        super().__init__(SizeRules(fixed=fixed, default=100), step_bytes=lambda step: 7 * step.num_rows)
        self.questions: list[SizeQuestion] = []
        self.steps: list[tuple[StepShape, float]] = []

    def decide(self, question: SizeQuestion) -> SizeDecision:
        self.questions.append(question)
        return super().decide(question)

    def record(self, step: StepShape, seconds: float) -> None:
        self.steps.append((step, seconds))


def issued(scheduler: PrefillScheduler, decodes_waiting: int = 0) -> Prefill:
    action = scheduler.next_action(decodes_waiting)
    assert isinstance(action, Prefill)
    return action


def test_a_sizer_is_asked_of_each_chunk_and_told_how_long_it_took() -> None:
    sizer = Asked()
    scheduler = PrefillScheduler(range(290), ChunkedPrefillConfig(), sizer=sizer, start=60)
    assert scheduler.total_chunks == 3
    assert scheduler.progress() == 60 / 290
    sizer.questions.clear()
    first = issued(scheduler, 2)
    assert scheduler.total_chunks == 3
    scheduler.complete(first.chunk, 1.5)
    second = issued(scheduler)
    assert scheduler.total_chunks == 3
    scheduler.shrink(second.chunk)
    third = issued(scheduler)
    scheduler.complete(third.chunk)
    scheduler.timed(third.chunk, 0.5)
    fourth = issued(scheduler)
    assert [action.chunk.span for action in (first, second, third, fourth)] == [
        Span(60, 160),
        Span(160, 260),
        Span(160, 210),
        Span(210, 260),
    ]
    assert sizer.questions == [
        SizeQuestion(60, 230, num_held=2, keeps_itl=True),
        SizeQuestion(160, 130, keeps_itl=True, waited_s=1.5),
        SizeQuestion(160, 130, keeps_itl=True, waited_s=1.5, most=50),
        SizeQuestion(210, 80, keeps_itl=True, waited_s=2.0, most=50),
    ]
    assert sizer.steps == [
        (StepShape.of_chunk(100, 60), 1.5),
        (StepShape.of_chunk(50, 160), 0.5),
    ]


def test_chunks_that_are_cut_beforehand_have_reasons_too() -> None:
    def reasons(scheduler: PrefillScheduler) -> list[tuple[str, int | None]]:
        found: list[tuple[str, int | None]] = []
        while not scheduler.is_complete():
            action = issued(scheduler)
            assert action.decision is not None
            assert action.decision.size == len(action.chunk)
            found.append((action.decision.rule, action.decision.predicted_bytes))
            scheduler.complete(action.chunk)
        return found

    def fixed(num_tokens: int) -> PrefillScheduler:
        return PrefillScheduler(range(num_tokens), ChunkedPrefillConfig(64), sizer=Asked(64))

    assert reasons(fixed(150)) == [("fixed", 448), ("fixed", 448), ("end", 154)]
    assert reasons(fixed(50)) == [("fixed", 350)]
    halved = fixed(100)
    halved.shrink(issued(halved).chunk)
    assert reasons(halved) == [("halved", 224), ("halved", 224), ("halved", 224), ("halved", 28)]
    assert issued(PrefillScheduler(range(150), ChunkedPrefillConfig(64))).decision is None


@pytest.mark.parametrize(
    ("start", "is_accepted"), [(0, True), (1, True), (149, True), (150, False), (151, False), (-1, False)]
)
def test_a_prompt_goes_on_from_before_its_last_token(start: int, is_accepted: bool) -> None:
    if is_accepted:
        chunks = [
            chunk
            for _, chunk in run(
                PrefillScheduler(range(150), ChunkedPrefillConfig(64), start=start), repeat(0)
            )
        ]
        spans = [chunk.span for chunk in chunks if isinstance(chunk, PrefillChunk)]
        assert spans == [Span(begin, min(begin + 64, 150)) for begin in range(start, 150, 64)]
        assert [chunk.chunk_index for chunk in chunks if isinstance(chunk, PrefillChunk)] == list(
            range(len(spans))
        )
        whole = PrefillScheduler(range(150), ChunkedPrefillConfig(0), start=start)
        assert issued(whole).chunk.span == Span(start, 150)
    else:
        with pytest.raises(ValueError, match="start"):
            PrefillScheduler(range(150), ChunkedPrefillConfig(64), start=start)


def test_a_start_has_neither_overlap_nor_chunks_of_ones_own() -> None:
    for config, ends in ((ChunkedPrefillConfig(64, 8), None), (ChunkedPrefillConfig(64), [150])):
        PrefillScheduler(range(150), config, chunk_ends=ends)
        with pytest.raises(ValueError, match="without overlap"):
            PrefillScheduler(range(150), config, chunk_ends=ends, start=10)
