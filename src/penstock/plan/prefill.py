"""What to do next with one prompt: run a chunk, let others decode, or start decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import PenstockError, PromptError
from penstock.plan.checks import check_int
from penstock.plan.chunks import (
    ChunkedPrefillConfig,
    PrefillChunk,
    PrefillPriority,
    create_prefill_chunks,
    create_prefill_chunks_at,
    cut_chunk,
)
from penstock.plan.memory import peak_memory_estimate
from penstock.plan.model import ModelConfig
from penstock.plan.policy import half_of
from penstock.plan.sizing import ChunkSizer, SizeDecision, SizeQuestion
from penstock.plan.step import StepShape


class ChunkOrderError(PenstockError, RuntimeError):
    """A chunk completed, abandoned or asked for out of turn."""


@dataclass(frozen=True)
class Prefill:
    """Run this chunk, then report it with `complete`, or with `abandon` if its step failed. `decision` says why it is
    as long as it is, and what was expected of it, where there is a sizer to tell."""

    chunk: PrefillChunk
    decision: SizeDecision | None = None


@dataclass(frozen=True)
class YieldToDecode:
    """Run one decode step of the requests that wait, then ask again."""


@dataclass(frozen=True)
class StartDecode:
    """The prompt is complete: sample its first token."""


PrefillAction = Prefill | YieldToDecode | StartDecode


class PrefillScheduler:
    """Issues the chunks of one prompt in order, one at a time.

    A step is a transaction: an issued chunk counts for nothing until `complete`, and `abandon` leaves all as
    it was before the chunk was issued. Until one of them is called, asking for another action is an error.

    With no decodes waiting no priority yields. With some, prefill-first never yields; interleaved yields once
    between two chunks; decode-priority yields before each chunk as long as decodes wait, but no more than
    `max_decode_steps` times since the chunk before, so that the prompt never starves.

    Chunks are as long as the configuration says, or as a sizer with automatic sizes says of one after the other, from
    what it has learned by then. A target between tokens then bounds every chunk: others may wait for it.
    """

    def __init__(
        self,
        prompt_tokens: Sequence[int],
        config: ChunkedPrefillConfig,
        *,
        chunk_ends: Sequence[int] | None = None,
        grid: int = 1,
        sizer: ChunkSizer | None = None,
        start: int = 0,
    ) -> None:
        """`chunk_ends`, where given, cuts the prompt in place of the configured chunk size and overlap, and of any
        sizer. `grid` is what chunks that are shrunk keep to; the configured size stays as it is. The first `start`
        tokens are in the cache already; chunks begin after them."""
        self.config = config
        self._grid = check_int("grid", grid, 1)
        self._prompt = prompt_tokens
        self._num_tokens = len(prompt_tokens)
        self._sizer = sizer
        self._is_sized = sizer is not None and sizer.rules.is_auto and chunk_ends is None
        # Those that were run, and those that are planned: all of them, or none but the next where each is sized.
        self._chunks: list[PrefillChunk] = []
        self._num_complete = 0
        self._start = check_int("start", start, 0)
        if start and (start >= self._num_tokens or config.overlap or chunk_ends is not None):
            raise ValueError(
                f"a prompt of {self._num_tokens} tokens cannot go on from token {start}: accepted is a start before "
                "its last token, without overlap or chunks of one's own"
            )
        if start and not self._is_sized:
            self._chunks += self._cut_rest(config.chunk_size or self._num_tokens)
        elif chunk_ends is not None:
            self._chunks += create_prefill_chunks_at(prompt_tokens, chunk_ends)
        elif not self._is_sized:
            self._chunks += create_prefill_chunks(prompt_tokens, config)
        self._overlap = config.overlap
        self._most: int | None = None  # tokens of a chunk, once memory ran out
        self._decision: SizeDecision | None = None  # of the next chunk
        self._elapsed_s = 0.0
        self._issued: PrefillChunk | None = None
        self._yields = 0  # YieldToDecode answers since the last chunk that was completed
        self._cuts: set[int] = {start}  # where finished chunks began, ended, and left off for the next

    @property
    def total_chunks(self) -> int:
        """Chunks that were run and that are left; where each is sized, as things stand now."""
        if not self._is_sized or self.is_complete():
            return len(self._chunks)
        if self._num_complete == len(self._chunks):
            end, size = self._num_finished_tokens(), self._decide(self._num_finished_tokens(), 0).size
        else:
            end, size = self._chunks[-1].end_pos, len(self._chunks[-1])
        return len(self._chunks) + -(-(self._num_tokens - end) // size)

    def next_action(self, decodes_waiting: int = 0) -> PrefillAction:
        """What to do now, given how many other requests have a decode step waiting."""
        check_int("decodes_waiting", decodes_waiting, 0)
        if self._num_tokens == 0:
            raise PromptError("the prompt is empty: give at least one token, there is nothing to sample from")
        if self._issued is not None:
            raise ChunkOrderError(
                f"chunk {self._issued.chunk_index} is issued: complete or abandon it before the next action"
            )
        if self.is_complete():
            return StartDecode()
        if decodes_waiting > 0 and self._yields < self._max_yields():
            self._yields += 1
            return YieldToDecode()
        if self._num_complete == len(self._chunks):
            self._plan_next(decodes_waiting)
        self._issued = self._chunks[self._num_complete]
        return Prefill(self._issued, self._decision or self._explain(self._issued))

    def complete(self, chunk: PrefillChunk, seconds: float | None = None) -> None:
        """Mark the issued chunk as done. The sizer learns from the seconds that its step took; where these are known
        later, by `timed`."""
        self._check_issued(chunk, "completed")
        self._issued = self._decision = None
        if seconds is not None:
            self.timed(chunk, seconds)
        self._cuts |= {chunk.start_pos, chunk.end_pos, self.next_start(chunk)}
        self._num_complete += 1
        self._yields = 0

    def timed(self, chunk: PrefillChunk, seconds: float) -> None:
        """The step of a chunk that is done took so long."""
        self._elapsed_s += seconds
        if self._sizer is not None:
            self._sizer.record(_step_of(chunk), seconds)

    def abandon(self, chunk: PrefillChunk) -> None:
        """Put the issued chunk back, as if it had never been issued. It is the next to be issued again."""
        self._check_issued(chunk, "abandoned")
        self._issued = None

    def shrink(self, chunk: PrefillChunk) -> None:
        """Put the issued chunk back and cut what is left of the prompt into chunks of half its size at most, without
        overlap. A chunk longer than the grid gives a multiple of the grid. A chunk of one token cannot be halved:
        that is an error."""
        self._check_issued(chunk, "shrunk")
        if len(chunk) == 1:
            raise ChunkOrderError(f"chunk {chunk.chunk_index} has one token and cannot be halved")
        self._issued = self._decision = None
        self._most = size = half_of(len(chunk), self._grid)
        self._overlap = 0
        del self._chunks[self._num_complete :]
        if not self._is_sized:
            self._chunks += self._cut_rest(size)

    def next_start(self, chunk: PrefillChunk) -> int:
        """Where the chunk after this one begins: before its end, if they overlap. The prompt's end after the last."""
        if chunk.is_last:
            return chunk.end_pos
        if self._is_sized:  # a chunk no longer than the overlap is not run twice
            return chunk.end_pos - (self._overlap if len(chunk) > self._overlap else 0)
        return self._chunks[chunk.chunk_index + 1].start_pos

    def lies_on(self, grid: int) -> bool:
        """Whether every chunk that was run, and every one that is left, begins and ends on a grid of so many tokens,
        but for the prompt's end."""
        planned = {end for chunk in self._chunks for end in (chunk.start_pos, chunk.end_pos)}
        return all(cut % grid == 0 for cut in (planned | self._cuts) - {self._num_tokens})

    def is_complete(self) -> bool:
        """Whether no chunk is left to run. True of an empty prompt."""
        return self._num_finished_tokens() == self._num_tokens

    def decode_available(self) -> bool:
        """Whether the prompt's own decoding may start. Never true of an empty prompt."""
        return self.is_complete() and self._num_tokens > 0

    def progress(self) -> float:
        """Finished tokens over all tokens; an overlap counts once. 1.0 for an empty prompt."""
        if self.is_complete():
            return 1.0
        return self._num_finished_tokens() / self._num_tokens

    def memory_savings(
        self,
        shape: ModelConfig,
        *,
        dtype_bytes: int = 2,
        kv_dtype_bytes: int | None = None,
        fused_attention: bool = True,
        logits_dtype_bytes: int = 4,
    ) -> float:
        """The share of peak memory that the configured chunks, not `chunk_ends`, save on this prompt."""
        return peak_memory_estimate(
            shape,
            self._num_tokens,
            self.config,
            dtype_bytes=dtype_bytes,
            kv_dtype_bytes=kv_dtype_bytes,
            fused_attention=fused_attention,
            logits_dtype_bytes=logits_dtype_bytes,
        ).savings_ratio

    def _cut_rest(self, size: int) -> list[PrefillChunk]:
        """What is left of the prompt, in chunks of one size."""
        start = self._num_finished_tokens()
        ends = [*range(start + size, self._num_tokens, size), self._num_tokens]
        return [
            cut_chunk(self._prompt, begin, end, len(self._chunks) + index)
            for index, (begin, end) in enumerate(pairwise([start, *ends]))
        ]

    def _plan_next(self, decodes_waiting: int) -> None:
        """Have the sizer say how long the next chunk is."""
        finished = self._num_finished_tokens()
        start = self.next_start(self._chunks[-1]) if self._chunks else self._start
        self._decision = self._decide(start, decodes_waiting)
        if start + self._decision.size <= finished:  # it is too short to run anything twice
            start = finished
            self._decision = self._decide(start, decodes_waiting)
        chunk = cut_chunk(self._prompt, start, start + self._decision.size, len(self._chunks))
        self._chunks.append(chunk)

    def _decide(self, start: int, decodes_waiting: int) -> SizeDecision:
        assert self._sizer is not None
        return self._sizer.decide(
            SizeQuestion(
                past=start,
                num_left=self._num_tokens - start,
                num_held=decodes_waiting,
                keeps_itl=True,
                waited_s=self._elapsed_s,
                most=self._most,
            )
        )

    def _explain(self, chunk: PrefillChunk) -> SizeDecision | None:
        """Why a chunk that was cut beforehand is as long as it is."""
        if self._sizer is None:
            return None
        step, is_halved = _step_of(chunk), self._most is not None
        return SizeDecision(
            len(chunk),
            "halved" if is_halved else "end" if chunk.is_last and self.total_chunks > 1 else "fixed",
            self._sizer.predict_s(step),
            self._sizer.predict_bytes(step),
        )

    def _max_yields(self) -> int:
        """How many decode steps in a row may pass before the next chunk."""
        match self.config.priority:
            case PrefillPriority.PREFILL_FIRST:
                return 0
            case PrefillPriority.INTERLEAVED:
                return 1 if self._num_complete > 0 else 0
            case PrefillPriority.DECODE_PRIORITY:
                return self.config.max_decode_steps

    def _num_finished_tokens(self) -> int:
        # Chunks finish in order and each ends after the one before.
        return self._chunks[self._num_complete - 1].end_pos if self._num_complete else self._start

    def _check_issued(self, chunk: PrefillChunk, verb: str) -> None:
        if chunk == self._issued:
            return
        issued = "no chunk is issued" if self._issued is None else f"chunk {self._issued.chunk_index} is"
        raise ChunkOrderError(
            f"chunk {chunk.chunk_index} [{chunk.start_pos}, {chunk.end_pos}) cannot be {verb}: "
            f"it is not the issued one, {issued}"
        )


def _step_of(chunk: PrefillChunk) -> StepShape:
    return StepShape.of_chunk(len(chunk), chunk.start_pos, is_last=chunk.is_last)
