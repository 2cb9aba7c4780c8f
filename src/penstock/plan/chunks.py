"""How a prompt is cut into chunks, which are views of it, and who goes first when others are waiting to decode."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import eq
from typing import Self, overload

from penstock.errors import SettingError
from penstock.plan.checks import check_int, check_member
from penstock.plan.grids import DEFAULT_CHUNK_SIZE
from penstock.plan.step import Span


class PrefillPriority(StrEnum):
    """Who runs next when a prompt has chunks left and other requests have a decode step waiting."""

    PREFILL_FIRST = "prefill-first"
    INTERLEAVED = "interleaved"
    DECODE_PRIORITY = "decode-priority"

    @classmethod
    def parse(cls, name: object) -> Self:
        """The member of this name, such as `decode-priority` or `decode_priority`."""
        return check_member("priority", name, cls)


@dataclass(frozen=True)
class ChunkedPrefillConfig:
    """Chunking of one prompt. `chunk_size=0` runs the whole prompt in one chunk.

    Each chunk after the first begins `overlap` tokens before the end of the one before. `priority` may be
    given by name. `max_decode_steps` bounds the decode steps that decode-priority puts before a chunk.
    """

    chunk_size: int = DEFAULT_CHUNK_SIZE
    overlap: int = 0
    priority: PrefillPriority = PrefillPriority.PREFILL_FIRST
    max_decode_steps: int = 8

    def __post_init__(self) -> None:
        check_int("chunk_size", self.chunk_size, 0)
        check_int("overlap", self.overlap, 0)
        check_int("max_decode_steps", self.max_decode_steps, 1)
        object.__setattr__(self, "priority", PrefillPriority.parse(self.priority))
        if self.chunk_size == 0 and self.overlap > 0:
            raise SettingError(
                "overlap",
                self.overlap,
                contradicts={"chunk_size": 0},
                because="the whole prompt is one chunk",
            )
        if self.overlap >= self.chunk_size > 0:
            raise SettingError(
                "overlap",
                self.overlap,
                f"an overlap from 0 to {self.chunk_size - 1}",
                beside={"chunk_size": self.chunk_size},
            )

    @property
    def num_state_slots(self) -> int:
        """The recurrent states that one sequence holds during a step: the one it reads and the one it writes, so that
        it can fail without a trace. Where chunks overlap, both are kept where the next chunk begins, too."""
        return 4 if self.overlap else 2

    def with_overlap(self, overlap: int) -> Self:
        """The same configuration with another overlap."""
        return replace(self, overlap=overlap)

    def with_priority(self, priority: PrefillPriority | str) -> Self:
        """The same configuration with another priority."""
        return replace(self, priority=PrefillPriority.parse(priority))


_SHOWN = 4  # tokens of a view


class TokenView(Sequence[int]):
    """Read-only view of `tokens[start:end]`. The tokens must not change while a view of them is in use.

    A slice of a view is a view of the same tokens, not of the view. A view equals any sequence of equal ones.
    """

    __slots__ = ("_positions", "_tokens")
    _tokens: Sequence[int]
    _positions: range

    def __init__(self, tokens: Sequence[int], start: int = 0, end: int | None = None) -> None:
        num_tokens = len(tokens)
        end = num_tokens if end is None else check_int("end", end, 0)
        if not check_int("start", start, 0) <= end <= num_tokens:
            raise SettingError(
                "start",
                start,
                f"0 <= start <= end <= {num_tokens}",
                where=f"for {num_tokens} tokens",
                beside={"end": end},
            )
        if isinstance(tokens, TokenView):
            self._tokens, self._positions = tokens._tokens, tokens._positions[start:end]
        else:
            self._tokens, self._positions = tokens, range(start, end)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> int | Self:
        if not isinstance(index, slice):
            return self._tokens[self._positions[index]]
        view = self.__class__.__new__(self.__class__)
        view._tokens = self._tokens
        view._positions = self._positions[index]
        return view

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[int]:
        return map(self._tokens.__getitem__, self._positions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    # The tokens may be a list, and a view equals lists, which have no hash.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:_SHOWN]))
        return f"TokenView([{shown}{', ...' if len(self) > _SHOWN else ''}], len={len(self)})"


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The part [start_pos, end_pos) of a prompt, run in one step. `tokens` is a view, not a copy."""

    tokens: Sequence[int] = field(repr=False, hash=False)
    start_pos: int
    end_pos: int
    chunk_index: int
    is_last: bool

    def __post_init__(self) -> None:
        check_int("chunk_index", self.chunk_index, 0)
        if len(self.tokens) != len(self.span):
            raise SettingError(
                "tokens",
                ...,
                f"{len(self.span)} tokens, not {len(self.tokens)}",
                where=f"for the chunk [{self.start_pos}, {self.end_pos})",
            )

    def __len__(self) -> int:
        return self.end_pos - self.start_pos

    @property
    def span(self) -> Span:
        return Span(self.start_pos, self.end_pos)


def num_prefill_chunks(num_tokens: int, config: ChunkedPrefillConfig) -> int:
    """How many chunks a prompt of `num_tokens` tokens is cut into."""
    check_int("num_tokens", num_tokens, 0)
    if num_tokens == 0:
        return 0
    if config.chunk_size == 0 or num_tokens <= config.chunk_size:
        return 1
    # The first chunk takes chunk_size tokens, each later one adds at most a stride.
    stride = config.chunk_size - config.overlap
    return 1 + -(-(num_tokens - config.chunk_size) // stride)


def prefill_chunk_span(chunk_index: int, num_tokens: int, config: ChunkedPrefillConfig) -> Span:
    """The range of chunk `chunk_index` in a prompt of `num_tokens` tokens."""
    num_chunks = num_prefill_chunks(num_tokens, config)
    if check_int("chunk_index", chunk_index, 0) >= num_chunks:
        raise SettingError("chunk_index", chunk_index, f"0 to {num_chunks - 1}")
    size = config.chunk_size or num_tokens
    start = chunk_index * (size - config.overlap)
    return Span(start, min(start + size, num_tokens))


def create_prefill_chunks(
    prompt_tokens: Sequence[int], config: ChunkedPrefillConfig
) -> tuple[PrefillChunk, ...]:
    """Cut a prompt of n tokens into chunks that cover [0, n), in order. An empty prompt gives none."""
    num_tokens = len(prompt_tokens)
    num_chunks = num_prefill_chunks(num_tokens, config)
    return _cut(prompt_tokens, (prefill_chunk_span(index, num_tokens, config) for index in range(num_chunks)))


def create_prefill_chunks_at(prompt_tokens: Sequence[int], ends: Iterable[int]) -> tuple[PrefillChunk, ...]:
    """Cut a prompt of n tokens at the given ends: strictly increasing from above 0, the last of them n."""
    num_tokens = len(prompt_tokens)
    spans: list[Span] = []
    start = 0
    for index, end in enumerate(ends):
        if not start < check_int(f"ends[{index}]", end, 1) <= num_tokens:
            raise SettingError(
                f"ends[{index}]",
                end,
                f"ends that strictly increase, from above 0 to {num_tokens}",
                where=f"for {num_tokens} tokens",
                because=f"the one before is {start}",
            )
        spans.append(Span(start, end))
        start = end
    if start != num_tokens:
        raise SettingError("ends[-1]", start, f"{num_tokens}, the prompt's end")
    return _cut(prompt_tokens, spans)


def _cut(prompt_tokens: Sequence[int], spans: Iterable[Span]) -> tuple[PrefillChunk, ...]:
    return tuple(cut_chunk(prompt_tokens, span.start, span.end, index) for index, span in enumerate(spans))


def cut_chunk(prompt_tokens: Sequence[int], start: int, end: int, chunk_index: int) -> PrefillChunk:
    """The chunk [start, end) of a prompt."""
    return PrefillChunk(
        tokens=TokenView(prompt_tokens, start, end),
        start_pos=start,
        end_pos=end,
        chunk_index=chunk_index,
        is_last=end == len(prompt_tokens),
    )
