"""What is asked of latency targets: streams that decode while a long prompt arrives, and prompts that come alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import ContextLengthError, SettingError
from penstock.measure.prompts import text_tokens
from penstock.models.text.tokenizer import Tokenizer
from penstock.plan.sizing import SMALLEST_CHUNK

# What the benchmark is called on the command line and in the results.
TARGETS = "targets"
DEFAULT_REPEATS = 3
# A stream runs when it has produced so many tokens: enough to tell how long it waits when nothing is read.
SETTLE_TOKENS = 8
# Tokens that streams may produce beside those for each chunk: while the prompt is on its way, and when it is read.
_SPARE_TOKENS = 64


@dataclass(frozen=True, order=True)
class Sizing:
    """How chunks get their size: fixed, or automatic with a target; one of the two is given."""

    fixed: int | None = None  # tokens
    target_ms: int | None = None

    def __post_init__(self) -> None:
        if (self.fixed is None) == (self.target_ms is None):
            raise ValueError("a sizing has either a fixed chunk or a target")

    @property
    def label(self) -> str:
        return f"chunk {self.fixed:,}" if self.target_ms is None else f"auto, {self.target_ms:,} ms"


@dataclass(frozen=True)
class TargetWorkload:
    """Numbers of requests, of tokens and of milliseconds."""

    targets_ms: tuple[int, ...] = (100, 200, 400)
    fixed: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    streams: int = 4
    stream_prompt: int = 32
    prompt_tokens: int = 8000
    lone_lengths: tuple[int, ...] = (
        2048,
        8000,
    )  # of prompts that come when nothing else runs; none: not measured
    lone_chunks: tuple[int, ...] = (128, 256, 512, 1024, 2048)

    @property
    def sizings(self) -> list[Sizing]:
        """All of them, the automatic ones spread out among the fixed ones."""
        fixed = [Sizing(fixed=size) for size in self.fixed]
        autos = [Sizing(target_ms=target) for target in self.targets_ms]
        places = [
            *((index / max(len(fixed), 1), each) for index, each in enumerate(fixed)),
            *(((index + 0.5) / len(autos), each) for index, each in enumerate(autos)),
        ]
        return [each for _, each in sorted(places, key=lambda item: item[0])]

    @property
    def stream_tokens(self) -> int:
        """So many that no stream ends before the prompt is read, in chunks however small."""
        smallest = min((SMALLEST_CHUNK, *self.fixed))
        return SETTLE_TOKENS + -(-self.prompt_tokens // smallest) + _SPARE_TOKENS

    def require_grid(self, grid: int) -> None:
        odd = [size for size in self.fixed if size % grid]
        if odd:
            raise SettingError(
                f"--fixed {','.join(map(str, odd))} is not accepted: this model's chunks end on multiples of {grid}: "
                "give such sizes"
            )

    def require_context(self, context_length: int) -> None:
        longest = max(self.prompt_tokens, *self.lone_lengths, 0)
        if longest + 1 > context_length:
            raise ContextLengthError(
                f"a prompt of {longest} tokens and one after it do not fit into the model's context of "
                f"{context_length} tokens: give a smaller --prompt, and smaller --lone-lengths"
            )
        if self.stream_prompt + self.stream_tokens > context_length:
            raise ContextLengthError(
                f"streams of {self.stream_prompt} tokens and {self.stream_tokens} generated after them, to outlast a "
                f"prompt of {self.prompt_tokens} in the smallest chunks, do not fit into the model's context of "
                f"{context_length} tokens: give a smaller --prompt, or larger --fixed sizes"
            )


@dataclass(frozen=True)
class TargetPrompts:
    """Token ids; no two prompts are the same."""

    long: Sequence[int] = field(repr=False)
    streams: tuple[Sequence[int], ...] = field(repr=False)
    lone: Sequence[int] = field(repr=False)  # as long as the longest


def make_prompts(tokenizer: Tokenizer, workload: TargetWorkload) -> TargetPrompts:
    """Consecutive pieces of one text, and its beginning for prompts that come alone."""
    after, each = workload.prompt_tokens, workload.stream_prompt
    longest_lone = max(workload.lone_lengths, default=0)
    text = text_tokens(tokenizer, max(after + workload.streams * each, longest_lone))
    streams = tuple(text[after + index * each :][:each] for index in range(workload.streams))
    return TargetPrompts(text[:after], streams, text[:longest_lone])
