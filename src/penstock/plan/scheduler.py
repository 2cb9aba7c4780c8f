"""What to do next with one prompt: run a chunk, let others decode, or start decoding."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import PenstockError, PromptError
from penstock.plan.checks import check_int
from penstock.plan.chunks import PrefillChunk, create_prefill_chunks, create_prefill_chunks_at
from penstock.plan.config import ChunkedPrefillConfig, PrefillPriority
from penstock.plan.memory import peak_memory_estimate
from penstock.plan.shape import ModelShape


class ChunkOrderError(PenstockError, RuntimeError):
    """A chunk completed, abandoned or asked for out of turn."""


@dataclass(frozen=True)
class Prefill:
    """Run this chunk, then report it with `complete`, or with `abandon` if its step failed."""

    chunk: PrefillChunk


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
    """

    def __init__(
        self,
        prompt_tokens: Sequence[int],
        config: ChunkedPrefillConfig,
        *,
        chunk_ends: Sequence[int] | None = None,
        grid: int = 1,
    ) -> None:
        """`chunk_ends`, where given, cuts the prompt in place of the configured chunk size and overlap. `grid` is
        what chunks that are shrunk keep to; the configured size stays as it is."""
        self.config = config
        self._grid = check_int("grid", grid, 1)
        self._prompt = prompt_tokens
        self._num_tokens = len(prompt_tokens)
        self._chunks = (
            create_prefill_chunks(prompt_tokens, config)
            if chunk_ends is None
            else create_prefill_chunks_at(prompt_tokens, chunk_ends)
        )
        self._num_complete = 0
        self._issued: PrefillChunk | None = None
        self._yields = 0  # YieldToDecode answers since the last chunk that was completed
        self._cuts: set[int] = set()  # where finished chunks began, ended, and left off for the next

    @property
    def total_chunks(self) -> int:
        return len(self._chunks)

    def next_action(self, decodes_waiting: int = 0) -> PrefillAction:
        """What to do now, given how many other requests have a decode step waiting."""
        check_int("decodes_waiting", decodes_waiting, 0)
        if not self._chunks:
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
        self._issued = self._chunks[self._num_complete]
        return Prefill(self._issued)

    def complete(self, chunk: PrefillChunk) -> None:
        """Mark the issued chunk as done."""
        self._check_issued(chunk, "completed")
        self._issued = None
        self._cuts |= {chunk.start_pos, chunk.end_pos, self.next_start(chunk)}
        self._num_complete += 1
        self._yields = 0

    def abandon(self, chunk: PrefillChunk) -> None:
        """Put the issued chunk back, as if it had never been issued. It is the next to be issued again."""
        self._check_issued(chunk, "abandoned")
        self._issued = None

    def shrink(self, chunk: PrefillChunk) -> None:
        """Put the issued chunk back and cut what is left of the prompt into chunks of half its size, without
        overlap. A chunk longer than the grid gives a multiple of the grid. A chunk of one token cannot be halved:
        that is an error."""
        self._check_issued(chunk, "shrunk")
        if len(chunk) == 1:
            raise ChunkOrderError(f"chunk {chunk.chunk_index} has one token and cannot be halved")
        self._issued = None
        size = _half(len(chunk), self._grid)
        done = [finished.end_pos for finished in self._chunks[: self._num_complete]]
        start = done[-1] if done else 0
        ends = [*done, *range(start + size, self._num_tokens, size), self._num_tokens]
        self._chunks = create_prefill_chunks_at(self._prompt, ends)

    def next_start(self, chunk: PrefillChunk) -> int:
        """Where the chunk after this one begins: before its end, if they overlap. The prompt's end after the last."""
        return chunk.end_pos if chunk.is_last else self._chunks[chunk.chunk_index + 1].start_pos

    def lies_on(self, grid: int) -> bool:
        """Whether every chunk that was run, and every one that is left, begins and ends on a grid of so many tokens,
        but for the prompt's end."""
        planned = {end for chunk in self._chunks for end in (chunk.start_pos, chunk.end_pos)}
        return all(cut % grid == 0 for cut in (planned | self._cuts) - {self._num_tokens})

    def is_complete(self) -> bool:
        """Whether no chunk is left to run. True of an empty prompt."""
        return self._num_complete == len(self._chunks)

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
        shape: ModelShape,
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
        return self._chunks[self._num_complete - 1].end_pos if self._num_complete else 0

    def _check_issued(self, chunk: PrefillChunk, verb: str) -> None:
        if chunk == self._issued:
            return
        issued = "no chunk is issued" if self._issued is None else f"chunk {self._issued.chunk_index} is"
        raise ChunkOrderError(
            f"chunk {chunk.chunk_index} [{chunk.start_pos}, {chunk.end_pos}) cannot be {verb}: "
            f"it is not the issued one, {issued}"
        )


def _half(num_tokens: int, grid: int) -> int:
    """Half of a chunk, rounded up; up to the grid where the chunk is longer than that, which is still shorter."""
    half = -(-num_tokens // 2)
    return half if num_tokens <= grid else -(-half // grid) * grid
