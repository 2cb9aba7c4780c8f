"""The texts that the prefix cache is tried on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.bench.cache_workload import CacheWorkload
from penstock.measure.prompts import text_tokens
from penstock.models.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CachePrompts:
    """Token ids: a new prompt for every round, and one to warm up with. No two begin alike."""

    rounds: tuple[Sequence[int], ...] = field(repr=False)
    warm_up: Sequence[int] = field(repr=False)


def make_prompts(tokenizer: Tokenizer, workload: CacheWorkload, num_rounds: int) -> CachePrompts:
    """Consecutive pieces of one text."""
    each, after = workload.prompt_tokens, num_rounds * workload.prompt_tokens
    text = text_tokens(tokenizer, after + workload.warm_up_tokens)
    pieces = tuple(text[index * each :][:each] for index in range(num_rounds))
    return CachePrompts(pieces, text[after:])
