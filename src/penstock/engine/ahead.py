"""Decodes that were launched before the step before them was settled: the device computes while the host does books.

Nothing depends on it. Where the next step is not the one that was expected, what was launched is forgotten: it wrote
keys and values behind the end of each sequence, where whatever comes next writes again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.cache import TokenRange
from penstock.engine.batch import SpanInput
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


def launch_ahead(
    inputs: Sequence[SpanInput], forward: Callable[[Sequence[SpanInput]], Tensor | None]
) -> Ahead | None:
    """Launch a pass over decodes; None where it cannot be."""
    try:
        logits = forward(inputs)
    except Exception:  # if it is more than a moment's, the step itself meets it
        return None
    assert logits is not None  # of a decode they are always wanted
    return Ahead(tuple(inputs), tuple(item.blocks.locate(0, item.span.end) for item in inputs), logits)


def next_decode(item: SpanInput, token: int) -> SpanInput | None:
    """The decode of a token that was sampled after a span; None where the sequence has no room for it yet."""
    start = item.span.end
    if start + 1 > item.blocks.capacity_tokens:
        return None
    return SpanInput(Span(start, start + 1), (token,), item.blocks, is_prompt=False, wants_logits=True)
