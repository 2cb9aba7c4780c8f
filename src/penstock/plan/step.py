"""What a step runs: spans of requests, and their sum, as far as its time and its memory go."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from penstock.errors import SettingError
from penstock.plan.checks import check_int
from penstock.plan.grids import HEAD_ROWS, ROW_GRID, TILE, RowLaw


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range [start, end) of a request's tokens, never empty. A decode is a span of length 1."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if type(self.start) is type(self.end) is int and 0 <= self.start < self.end:
            return  # as nearly always, and there are many
        check_int("start", self.start, 0)
        check_int("end", self.end, 0)
        if self.end <= self.start:
            raise SettingError("end", self.end, "an end above the start", beside={"start": self.start})

    def __len__(self) -> int:
        return self.end - self.start


RequestId = str


class SpanKind(StrEnum):
    """What a span is. A replay is tokens that were generated once, and lost from the cache since: they run as decodes
    do, several at once, so that they leave the bits that they left the first time."""

    CHUNK = "chunk"
    REPLAY = "replay"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """A span of one request. `samples` says that its last token is the request's last: the next one is sampled.
    `resumes_at` is where the request's next chunk begins, if that is before the span's end."""

    request_id: RequestId
    span: Span
    kind: SpanKind
    samples: bool
    resumes_at: int | None = None


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request that gives cache space up: it keeps its first `num_kept` tokens there, and waits to go on. One that
    waits already may have to give up more."""

    request_id: RequestId
    num_kept: int
    was_running: bool = True


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do in one step, never nothing: first the preemptions, which make room for the spans."""

    spans: tuple[PlannedSpan, ...]
    preemptions: tuple[Preemption, ...] = ()
    num_held_decodes: int = 0  # running requests that have a token to decode, and are not in this step

    @property
    def num_tokens(self) -> int:
        return sum(len(planned.span) for planned in self.spans)

    @property
    def samples(self) -> bool:
        """Whether a request's next token comes of it."""
        return any(planned.samples for planned in self.spans)

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens that are read, not generated: chunks and replays."""
        return sum(len(planned.span) for planned in self.spans if planned.kind is not SpanKind.DECODE)


KernelKind = Literal["torch", "native", "cuda"]


def pasts_of_chunk(num_tokens: int, past: int) -> int:
    """The tokens before each of a chunk's tokens, summed up: those before the chunk, and those in it."""
    return num_tokens * past + num_tokens * (num_tokens - 1) // 2


@dataclass(frozen=True, slots=True)
class StepShape:
    """The spans of one step, summed up. A chunk adds its tokens to `num_prompt_tokens`, and what each of them sees
    before it to `token_pasts` (see `pasts_of_chunk`)."""

    num_prompt_tokens: int
    token_pasts: int = 0
    longest_past: int = 0  # tokens before the chunk that has the most
    num_decodes: int = 0
    decode_pasts: int = 0  # tokens that the decodes see, all together
    num_logits: int = 0  # rows that the output head runs on

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_int(name, getattr(self, name), 0)

    @classmethod
    def of_chunk(
        cls, num_tokens: int, past: int, *, num_decodes: int = 0, decode_pasts: int = 0, is_last: bool = False
    ) -> "StepShape":
        """One chunk, and decodes beside it."""
        return cls(
            num_tokens,
            pasts_of_chunk(num_tokens, past),
            past,
            num_decodes,
            decode_pasts,
            num_logits=num_decodes + is_last,
        )

    @property
    def num_rows(self) -> int:
        return self.num_prompt_tokens + self.num_decodes


@dataclass(frozen=True, slots=True)
class Workspace:
    """What computes a step of a certain model: what its memory depends on besides sizes.

    The defaults are those of most models. Without `num_active_experts`, one expert may get every token.
    """

    kernels: KernelKind = "torch"
    tile_size: int = TILE  # of attention; 0: a chunk is its own tile
    num_threads: int = 2
    row_floor: int = 1
    row_slab: int = 0
    row_grid: int = ROW_GRID
    expert_slab: int = 0
    free_decodes: int = 0
    few_rows: int = 0
    head_rows: int = HEAD_ROWS  # that the output head has at a time
    feed_rows: int = 0  # the most that feed-forward blocks have at a time; 0: all
    head_norm: bool = False  # queries and keys are normed
    float32_norm: bool = False  # norms have their weights in float32
    rotary_dim: int = 0  # elements of each head that are rotated; 0: all
    num_active_experts: int = 0  # that a token is sent to; 0: not known
    # Rows of all experts that are run at a time, at least; 0: experts are run one by one.
    expert_places: int = 0
    joins_past: bool = False  # a past may lie in several places, and is copied together
    library_bytes: int = 0  # what libraries take for themselves on a GPU, and keep
    unpacked_bytes: int = 0  # the largest matrix that is made values for a product, or rows rounded for one
    rounds_rows: bool = False  # rows of experts, too
    avoided_rows: tuple[int, ...] = ()

    @property
    def law(self) -> RowLaw:
        return RowLaw(
            self.tile_size,
            self.row_floor,
            self.row_slab,
            self.row_grid,
            self.avoided_rows,
            self.expert_slab,
            self.free_decodes,
            self.few_rows,
        )
