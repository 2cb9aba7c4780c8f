"""Prompts that every machine has: real text, or random tokens; and an order in which measurements take turns."""

import random
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics
from typing import TypeVar

import torch

from penstock.models.text.tokenizer import Tokenizer

T = TypeVar("T")


def text_tokens(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """The first tokens of a text that every Python has: the help topics of the language itself."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    repeats = -(-num_tokens // len(token_ids))
    return (token_ids * repeats)[:num_tokens]


def random_tokens(vocab_size: int, num_tokens: int) -> list[int]:
    """The same tokens every time, for a model to which no text means anything."""
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()
    return tokens


def shuffled_rounds(items: Sequence[T], num_rounds: int, seed: int) -> Iterator[list[T]]:
    """All items once in every round, each round in an order of its own, the same for the same seed."""
    for index in range(num_rounds):
        order = list(items)
        random.Random(f"{seed}/{index}").shuffle(order)
        yield order
