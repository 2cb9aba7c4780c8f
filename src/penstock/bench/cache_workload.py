"""What is asked of the prefix cache: one prompt, read in every way that there is to come to its first token."""

from dataclasses import dataclass
from enum import StrEnum

from penstock.cache import BLOCK_TOKENS
from penstock.errors import ContextLengthError, SettingError
from penstock.plan.config import DEFAULT_CHUNK_SIZE

# What the benchmark is called on the command line and in the results.
CACHE = "cache"
DEFAULT_REPEATS = 5
QUICK_REPEATS = 3
QUICK_TOKENS = 2000
# Tokens of each answer, which must be the same whatever came from the cache.
ANSWER_TOKENS = 8


class Way(StrEnum):
    """How a prompt comes to its first token, from the slowest to the soonest."""

    COLD = "cold"  # all of it is read, and nothing kept
    WRITING = "writing"  # all of it is read, and kept in memory and on disk
    RESUMED = "resumed"  # half of it was read by a process that was killed, and is on disk
    DISK = "disk"  # all of it is on disk, and nothing in memory
    MEMORY = "memory"  # all of it is in memory

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    Way.COLD: "cold, nothing kept",
    Way.WRITING: "cold, written to disk",
    Way.RESUMED: "resumed after a kill",
    Way.DISK: "from disk, new process",
    Way.MEMORY: "from memory",
}


@dataclass(frozen=True)
class CacheWorkload:
    """Numbers of tokens."""

    prompt_tokens: int = 8000
    chunk: int = DEFAULT_CHUNK_SIZE
    answer_tokens: int = ANSWER_TOKENS

    def __post_init__(self) -> None:
        if self.prompt_tokens <= self.chunk:
            raise SettingError(
                f"--prompt-tokens {self.prompt_tokens} is not accepted with chunks of {self.chunk}: give more tokens "
                "than a chunk has, or a smaller --chunk, so that a process can be killed between two chunks"
            )

    @property
    def shareable_tokens(self) -> int:
        """Those that can come from the cache: whole blocks, and never the last token, whose logits are wanted."""
        return (self.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def remembered_tokens(self, *, has_state: bool) -> int:
        """Those that memory gives: where the prompt ends with a block, all but the last token, unless there is a
        state, which cannot go back by one."""
        ends_with_block = self.prompt_tokens % BLOCK_TOKENS == 0 and not has_state
        return self.prompt_tokens - 1 if ends_with_block else self.shareable_tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @property
    def warm_up_tokens(self) -> int:
        """A whole chunk, and one of a block: what is read after a hit."""
        return self.chunk + BLOCK_TOKENS

    def require_context(self, context_length: int) -> None:
        if self.total_tokens > context_length:
            raise ContextLengthError(
                f"a prompt of {self.prompt_tokens} tokens and {self.answer_tokens} generated after it do not fit "
                f"into the model's context of {context_length} tokens: give fewer --prompt-tokens"
            )
