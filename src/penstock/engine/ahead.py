"""Decodes that are made ready while the step before them is computed, and launched before it is settled: the device
computes while the host does books.

Nothing depends on it. Where the next step is not the one that was expected, what was launched is forgotten: it wrote
keys and values behind the end of each sequence, where whatever comes next writes again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from penstock.cache import TokenRange
from penstock.engine.batch import SpanInput
from penstock.layers.batch import ForwardBatch
from penstock.plan.request import Span


@dataclass(frozen=True)
class Ahead:
    """A pass over decodes, and where all that they see lay when it was launched."""

    inputs: tuple[SpanInput, ...]
    places: tuple[list[TokenRange], ...]
    logits: Tensor

    def is_of(self, inputs: Sequence[SpanInput]) -> bool:
        """Whether it is the pass that these inputs want."""
        return len(inputs) == len(self.inputs) and all(
            item.blocks is own.blocks
            and item.span == own.span
            and not item.is_prompt
            and list(item.token_ids) == list(own.token_ids)
            and item.blocks.locate(0, item.span.end) == places
            for item, own, places in zip(inputs, self.inputs, self.places, strict=True)
        )


@dataclass(frozen=True)
class Expected:
    """A pass over decodes of tokens that are not chosen yet."""

    inputs: tuple[SpanInput, ...]
    places: tuple[list[TokenRange], ...]
    batch: ForwardBatch

    def launch(self, tokens: Sequence[int], forward: Callable[[ForwardBatch], Tensor | None]) -> Ahead | None:
        """With the tokens that were chosen; None where it cannot be."""
        self.batch.token_ids[: len(tokens)] = tokens
        try:
            logits = forward(self.batch)
        except Exception:  # if it is more than a moment's, the step itself meets it
            return None
        assert logits is not None  # of a decode they are always wanted
        inputs = zip(self.inputs, tokens, strict=True)
        return Ahead(tuple(replace(item, token_ids=(token,)) for item, token in inputs), self.places, logits)


def expect(
    inputs: Sequence[SpanInput], prepare: Callable[[Sequence[SpanInput]], ForwardBatch]
) -> Expected | None:
    """The pass that follows one over these decodes, made ready; None where one of them is none, or a sequence has no
    room for its next token yet."""
    following: list[SpanInput] = []
    for item in inputs:
        start = item.span.end
        if item.is_prompt or not item.wants_logits or start + 1 > item.blocks.capacity_tokens:
            return None
        following.append(
            SpanInput(Span(start, start + 1), (0,), item.blocks, is_prompt=False, wants_logits=True)
        )
    try:
        batch = prepare(following)
    except Exception:  # as above
        return None
    places = tuple(item.blocks.locate(0, item.span.end) for item in following)
    return Expected(tuple(following), places, batch)
