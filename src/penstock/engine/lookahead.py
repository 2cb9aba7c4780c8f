"""Decodes that are made ready while the step before them is computed, and launched before it is settled: the device
computes while the host does books.

Nothing depends on it. Where the next step is not the one that was expected, what was launched is forgotten: it wrote
keys and values behind the end of each sequence, where whatever comes next writes again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.cache import Extent
from penstock.cache.space import CacheSpace
from penstock.engine.batch import SpanInput
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder
from penstock.plan.request import Span


@dataclass(frozen=True)
class Ahead:
    """A pass over decodes of these tokens, and where all that they see lay when it was launched."""

    inputs: tuple[SpanInput, ...]
    tokens: tuple[int, ...]
    extents: tuple[tuple[Extent, ...], ...]
    logits: Tensor

    def is_of(self, inputs: Sequence[SpanInput]) -> bool:
        """Whether it is the pass that these inputs want."""
        return len(inputs) == len(self.inputs) and all(
            item.blocks is own.blocks
            and item.span == own.span
            and not item.is_prompt
            and item.token_ids[0] == token
            and item.blocks.extents == extents
            for item, own, token, extents in zip(inputs, self.inputs, self.tokens, self.extents, strict=True)
        )


@dataclass(frozen=True)
class Expected:
    """A pass over decodes of tokens that are not chosen yet."""

    inputs: tuple[SpanInput, ...]
    extents: tuple[tuple[Extent, ...], ...]
    batch: ForwardBatch

    def launch(self, tokens: Sequence[int], forward: Callable[[ForwardBatch], Tensor | None]) -> Ahead | None:
        """With the tokens that were chosen; None where it cannot be."""
        self.batch.token_ids[: len(tokens)] = tokens
        try:
            logits = forward(self.batch)
        except Exception:  # if it is more than a moment's, the step itself meets it
            return None
        assert logits is not None  # of a decode they are always wanted
        return Ahead(self.inputs, tuple(tokens), self.extents, logits)


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
    return Expected(tuple(following), tuple(item.blocks.extents for item in following), batch)


class LookAhead:
    """What is under way of the step after one of decodes, over one cache. A model with recurrent state has no slot to
    write to by then: nothing is expected of it. Whoever has this is not held by it."""

    def __init__(self, model: Decoder, space: CacheSpace, *, is_wanted: bool) -> None:
        self._model = model
        self._tensors = space.tensors
        self._is_on = is_wanted and space.slots is None
        self._expected: Expected | None = None
        self._ahead: Ahead | None = None

    def expect_after(
        self, inputs: Sequence[SpanInput], build: Callable[[Sequence[SpanInput]], ForwardBatch]
    ) -> None:
        """Make ready what follows these, while they are computed."""

        def prepare(following: Sequence[SpanInput]) -> ForwardBatch:
            batch = build(following)
            self._model.prepare(batch, self._tensors)
            return batch

        self._expected = expect(inputs, prepare) if self._is_on else None

    def launch(self, tokens: Sequence[int], forward: Callable[[ForwardBatch], Tensor | None]) -> None:
        """What is expected, with the tokens that were chosen."""
        expected, self._expected = self._expected, None
        if expected is not None:
            self._ahead = expected.launch(tokens, forward)

    def take(self, inputs: Sequence[SpanInput]) -> Tensor | None:
        """The logits of these, where they are what was launched; all that was expected is forgotten in any case."""
        ahead, self._ahead, self._expected = self._ahead, None, None
        return ahead.logits if ahead is not None and ahead.is_of(inputs) else None
