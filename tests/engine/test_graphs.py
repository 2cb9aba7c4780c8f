"""Decodes that are recorded, on a processor: what a graph is told of a pass. Triton's interpreter runs the kernels,
and a graph that runs again is the same code again, on the same tensors."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.cache import BLOCK_TOKENS, BlockPool, Extent, SequenceBlocks, SequenceCache
from penstock.engine.graphs import decode as decode_graphs
from penstock.engine.graphs import passes as graphs
from penstock.engine.preparations import preparations
from penstock.engine.step import SpanInput, build_batch
from penstock.models.decoder import Decoder
from penstock.models.hf.folder import HfFolder
from penstock.models.loading import load_decoder
from penstock.plan.grids import RowLaw
from penstock.plan.policy import ScheduleConfig
from penstock.plan.step import Span
from tests.engine import batching
from tests.engine.batching import RecordingJob, Wish, serve
from tests.kernels.triton_interpreter import interpreted_kernels
from tests.oracle import make_oracle, random_prompt

TILE = 64
SCHEDULE = ScheduleConfig(chunk_size=64, max_running=3)
# Sequences that begin a block while they decode, come while others decode, and end one after the other.
WISHES = [
    Wish(tuple(random_prompt(62, seed=1)), 5),
    Wish(tuple(random_prompt(5, seed=2)), 6),
    Wish(tuple(random_prompt(3, seed=3)), 4, arrives=3),
]


class Replayed:
    """Stands for a graph: runs what was recorded, and leaves what it gives where the first run left it."""

    def __init__(self, work: Callable[[], Tensor], logits: Tensor) -> None:
        self._work, self._logits = work, logits
        self.num_runs = 0

    def replay(self) -> None:
        self.num_runs += 1
        self._logits.copy_(self._work())


class Rerecorder:
    """Stands for a recorder."""

    made: ClassVar[list[Replayed]] = []

    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, work: Callable[[], Tensor]) -> tuple[Replayed, Tensor]:
        logits = work()
        self.made.append(Replayed(work, logits))
        return self.made[-1], logits


@pytest.fixture(scope="module")
def model() -> Iterator[Decoder]:
    """One layer sees everything, the other a window."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    oracle = make_oracle("gemma3_text", sliding_window=20, **sizes)
    with interpreted_kernels(TILE) as kernels:
        yield load_decoder(HfFolder(oracle.folder), kernels, torch.float32, torch.device("cpu"))


@pytest.fixture
def recorded(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """The graphs that are made from now on."""
    made: list[Replayed] = []
    monkeypatch.setattr(batching, "canon_of", lambda model: RowLaw(TILE))  # a probe would take a minute here
    monkeypatch.setattr(graphs, "Recorder", Rerecorder)
    monkeypatch.setattr(graphs, "GRAPH_ROWS", 0)  # decodes alone
    monkeypatch.setattr(Rerecorder, "made", made)
    monkeypatch.setattr(model, "recorded", graphs.PassGraphs(model))
    return made


def launched(model: Decoder, wishes: Sequence[Wish]) -> list[RecordingJob]:
    """Without graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "canon_of", lambda model: RowLaw(TILE))
        patch.setattr(model, "recorded", None)
        patch.setattr(model.kernels, "can_capture", False)
        return serve(model, wishes, SCHEDULE)


@pytest.fixture(scope="module")
def expected(model: Decoder) -> list[RecordingJob]:
    return launched(model, WISHES)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_recorded_is_launched(
    model: Decoder, expected: list[RecordingJob], recorded: list[Replayed], looks_ahead: bool
) -> None:
    ours = serve(model, WISHES, SCHEDULE, looks_ahead=looks_ahead)
    for job, other in zip(ours, expected, strict=True):
        assert job.generated == other.generated
        for one, another in zip(job.logits, other.logits, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-5)
    assert sum(graph.num_runs for graph in recorded) >= 4


@pytest.mark.parametrize(
    "law", [RowLaw(TILE, few_rows=64), RowLaw(TILE, row_floor=5), RowLaw(TILE, row_floor=20)]
)
def test_strict_decodes_are_recorded_too(
    model: Decoder,
    expected: list[RecordingJob],
    recorded: list[Replayed],
    monkeypatch: pytest.MonkeyPatch,
    law: RowLaw,
) -> None:
    """As they are, or with the rows that they are padded to."""
    monkeypatch.setattr(batching, "canon_of", lambda model: law)
    monkeypatch.setattr(model.kernels, "law", law)
    monkeypatch.setattr(graphs, "MOST_DECODE_ROWS", 16)
    for job, other in zip(serve(model, WISHES, SCHEDULE, strict=True), expected, strict=True):
        assert job.generated == other.generated
        for one, another in zip(job.logits, other.logits, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-5)
    num_runs = sum(graph.num_runs for graph in recorded)
    assert num_runs >= 4 if law.row_floor <= graphs.MOST_DECODE_ROWS else num_runs == 0


def test_a_pass_that_was_prepared_is_staged_once(
    model: Decoder, recorded: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[object] = []
    stage = decode_graphs.DecodeLayout.of

    def counted(self: decode_graphs.DecodeLayout, batch: object) -> object:
        staged.append(batch)
        return stage(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_graphs.DecodeLayout, "of", counted)
    serve(model, WISHES[:1], SCHEDULE, looks_ahead=True)
    # One token comes with the prompt. Those that follow the second pass are that, a token further each time.
    assert sum(graph.num_runs for graph in recorded) == 4
    assert len({id(batch) for batch in staged}) == len(staged) == 2


@pytest.mark.parametrize("seed", range(5))
def test_what_a_following_pass_is_told_is_what_it_would_be_if_it_were_built(seed: int) -> None:
    """With blocks here and there, of sequences that begin one at different times, and blocks that are gone."""
    chance = random.Random(seed)
    pools = [BlockPool(60), BlockPool(60)]
    for pool in pools:
        blocks = [*range(0, 60, chance.choice([2, 3]))]
        (whole,) = pool.allocate(60)
        pool.release([Extent(block, block + 1) for block in blocks])
        assert whole == Extent(0, 60)
    caches = [SequenceCache(pools, windows=[0, 100]) for _ in range(3)]
    for cache in caches:
        num_tokens = chance.randint(1, 200)
        cache.reserve(0, [num_tokens])
        cache.commit(num_tokens)
        cache.slide()
    layout = decode_graphs.DecodeLayout(4, 2, 5)

    def told() -> tuple[NDArray[np.int64], list[tuple[SequenceBlocks, ...]]]:
        inputs = []
        for cache in caches:
            start = cache.num_tokens
            cache.reserve(start, [start + 1])
            span = Span(start, start + 1)
            inputs.append(SpanInput(span, (0,), cache.kv_groups, is_prompt=False, wants_logits=True))
            cache.commit(start + 1)
        return layout.of(build_batch(inputs, canon=RowLaw(TILE))), [item.kv_groups for item in inputs]

    first, blocks_of_rows = told()
    nothing = torch.empty(0)
    following = decode_graphs.FollowingDecodes(layout, first, blocks_of_rows, 1000, lambda *told: nothing)
    num_passes = 0
    while max(cache.num_tokens for cache in caches) < 5 * BLOCK_TOKENS:
        for cache in caches:
            cache.make_room(cache.num_tokens + 1)
        assert following.advance()
        num_passes += 1
        expected, _ = told()
        np.testing.assert_array_equal(following.told, expected)
    assert num_passes > BLOCK_TOKENS
    assert not following.advance()  # the table has no place for another block


class ReplayedPiece:
    """Stands for a graph of a piece: runs it again from what the piece before left, and leaves what it gives where
    the first run left it."""

    def __init__(self, work: Callable[..., Any], pending: list[Any]) -> None:
        self._work, self._pending = work, pending
        self.given = self._again()
        self.num_runs = 0

    def _again(self) -> Any:
        return self._work(list(self._pending)) if self._pending else self._work()

    def replay(self) -> None:
        self.num_runs += 1
        given = self._again()
        for kept, new in zip((self.given.x, *self.given.rows), (given.x, *given.rows), strict=True):
            kept.copy_(new)


class PieceRecorder:
    made: ClassVar[list[ReplayedPiece]] = []

    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, work: Any) -> tuple[ReplayedPiece, Any]:
        is_next = isinstance(work, partial)
        pending = work.args[0] if is_next else []
        piece = ReplayedPiece(work.func if is_next else work, list(pending))
        pending.clear()
        self.made.append(piece)
        return piece, piece.given


def test_what_the_first_requests_need_is_recorded_before_they_come(
    model: Decoder, expected: list[RecordingJob], recorded: list[Replayed]
) -> None:
    """For every number of rows that may decode, and nothing is left of it in the cache."""
    batcher = batching.new_batcher(model, SCHEDULE, 64 * BLOCK_TOKENS, strict=False, looks_ahead=True)
    for _ in preparations(model, RowLaw(TILE), batcher.space, SCHEDULE, strict=False):
        batcher.check_integrity()
    num_recorded = len(recorded)
    buckets = {min(size, 64) for size in graphs.DECODE_BLOCKS}
    assert num_recorded == len(buckets) * len([1, 2, 4])
    ours = batching.serve_with(batcher, WISHES)
    assert [job.generated for job in ours] == [job.generated for job in expected]
    assert len(recorded) == num_recorded
    assert sum(graph.num_runs for graph in recorded) >= 4


def test_chunks_are_recorded_before_they_come_alone_and_beside_decodes(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "canon_of", lambda model: RowLaw(TILE))
    monkeypatch.setattr(graphs, "Recorder", PieceRecorder)
    monkeypatch.setattr(graphs, "is_decode", lambda batch: False)
    monkeypatch.setattr(PieceRecorder, "made", [])
    recorded = graphs.PassGraphs(model)
    monkeypatch.setattr(model, "recorded", recorded)
    schedule = ScheduleConfig(chunk_size=64, max_running=12)
    batcher = batching.new_batcher(model, schedule, 64 * BLOCK_TOKENS, strict=False)
    for _ in preparations(model, RowLaw(TILE), batcher.space, schedule, strict=False):
        batcher.check_integrity()
    of_cache = recorded._over(batcher.space.tensors)
    assert {layout.num_rows for layout in of_cache._chunks} == {64, 72, 80}  # type: ignore[attr-defined]
    assert all(of_cache._chunks.values())
    # Where the cache has no room for them, they come when they come.
    small = batching.new_batcher(model, schedule, 2 * BLOCK_TOKENS, strict=False)
    for _ in preparations(model, RowLaw(TILE), small.space, schedule, strict=False):
        small.check_integrity()
    assert len(recorded._over(small.space.tensors)._chunks) <= 1


def test_chunks_in_recorded_pieces_are_launched_ones(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "canon_of", lambda model: RowLaw(TILE))
    monkeypatch.setattr(graphs, "Recorder", PieceRecorder)
    monkeypatch.setattr(graphs, "is_decode", lambda batch: False)
    monkeypatch.setattr(PieceRecorder, "made", [])
    wishes = [Wish(tuple(random_prompt(61 + 2 * 64, seed=4)), 2)]
    theirs = launched(model, wishes)
    monkeypatch.setattr(model, "recorded", graphs.PassGraphs(model))
    for job, other in zip(serve(model, wishes, SCHEDULE), theirs, strict=True):
        assert job.generated == other.generated
        for one, another in zip(job.logits, other.logits, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-5)
    # The first chunk of a length is launched; the two that follow it, padding included, run as pieces, one a layer.
    assert [piece.num_runs for piece in PieceRecorder.made] == [2] * len(model.layers)
