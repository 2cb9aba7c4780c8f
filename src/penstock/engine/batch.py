"""From spans to a forward batch: the only place that sees both plans and tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from penstock.cache import SequenceBlocks, StateStep, TokenRange
from penstock.kernels.spans import AttendedSpan, AttentionWork, StateRows, StateWork, WrittenPlaces
from penstock.layers.forward_batch import ForwardBatch
from penstock.plan.grids import JOINED_TOKENS, RowLaw
from penstock.plan.request import Span


@dataclass(frozen=True)
class SpanInput:
    """A span of one sequence, its tokens, and the blocks that have room for them."""

    span: Span
    token_ids: Sequence[int]
    blocks: SequenceBlocks
    is_prompt: bool  # prompt tokens run on the tile grid; a decode is a token that sees all before it
    wants_logits: bool  # of its last token
    state: StateStep | None = None  # where the model has recurrent layers


def build_batch(inputs: Sequence[SpanInput], *, canon: RowLaw, strict: bool = False) -> ForwardBatch:
    """Lay the spans out as rows, one after the other, and pad them where a prompt is among them; or always, if
    `strict`: then the bits of a decode do not depend on what runs beside it either."""
    num_tokens = 0
    places: list[TokenRange] = []
    spans: list[AttendedSpan] = []
    logit_rows: list[int] = []
    last_spans: list[AttendedSpan] = []
    states: list[StateRows] = []
    for item in inputs:
        assert len(item.token_ids) == len(item.span), "a span has all of its tokens"
        row_of_start = num_tokens
        num_tokens += len(item.span)
        places.extend(item.blocks.locate(item.span.start, item.span.end))
        states += _state_rows(item, row_of_start)
        span = AttendedSpan(
            start=row_of_start,
            end=num_tokens,
            position=item.span.start,
            places=item.blocks.locate(0, item.span.end),
            is_prompt=item.is_prompt,
            tile_size=canon.tile_size,
            origin=item.span.start,
            is_joined=strict or item.span.end <= JOINED_TOKENS,
        )
        spans.append(span)
        if item.wants_logits:
            row = len(logit_rows)
            logit_rows.append(num_tokens - 1)
            is_alike = span.start == row and len(item.span) == 1  # a decode among decodes
            last_spans.append(
                span if is_alike else replace(span, start=row, end=row + 1, position=item.span.end - 1)
            )

    num_rows, num_logits = num_tokens, len(logit_rows)
    is_canonical = strict or any(item.is_prompt for item in inputs)
    if is_canonical:
        num_rows = canon.padded_rows(num_tokens)
        if num_logits:
            logit_rows += [0] * (canon.padded_rows(num_logits) - num_logits)
    token_ids, positions = np.zeros((2, num_rows), dtype=np.int64)
    token_ids[:num_tokens] = np.fromiter(
        chain.from_iterable(item.token_ids for item in inputs), np.int64, num_tokens
    )
    positions[:num_tokens] = _positions(spans)
    work = AttentionWork(tuple(spans))
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        end_position=max(item.span.end for item in inputs),
        num_tokens=num_tokens,
        places=WrittenPlaces(places),
        all_layers=work,
        last_layer=work if last_spans == spans else AttentionWork(tuple(last_spans)),
        logit_rows=np.array(logit_rows, dtype=np.int64),
        num_logits=num_logits,
        is_canonical=is_canonical,
        states=StateWork(tuple(states)),
    )


def _positions(spans: Sequence[AttendedSpan]) -> NDArray[np.int64]:
    """Of each row, in its sequence."""
    firsts = np.array([span.position - span.start for span in spans], dtype=np.int64)
    lengths = [span.end - span.start for span in spans]
    rows = np.arange(spans[-1].end, dtype=np.int64)
    return rows + np.repeat(firsts, lengths)


def _state_rows(item: SpanInput, row_of_start: int) -> list[StateRows]:
    """A span is cut where a state is to be kept."""
    if item.state is None:
        return []
    rows: list[StateRows] = []
    start, read = row_of_start, item.state.read
    for write in item.state.writes:
        end = row_of_start + write.end - item.span.start
        rows.append(StateRows(start, end, read, write.slot, item.is_prompt))
        start, read = end, write.slot
    return rows
