"""Strict decodes that need no padding: which pass of a step runs which of its tokens."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.step import Part, SpanInput, _joined, parts_of
from penstock.kernels.probe import ON_CPU, ProbeShapes, ProductShape, Random, few_rows, free_decodes
from penstock.kernels.reference.kernels import TorchKernels
from penstock.plan.step import Span

SPANS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 500), st.integers(1, 40), st.booleans()), min_size=1, max_size=12
)


def span_input(is_prompt: bool, start: int, length: int, wants_logits: bool) -> SpanInput:
    tokens = tuple(range(start, start + length))
    return SpanInput(Span(start, start + length), tokens, (), is_prompt=is_prompt, wants_logits=wants_logits)


@given(SPANS, st.integers(1, 16))
def test_every_token_runs_once_in_order_and_decodes_apart(spans: list[Any], most: int) -> None:
    inputs = [span_input(*span) for span in spans]
    parts = parts_of(inputs, most)
    ran: dict[int, list[int]] = {number: [] for number in range(len(inputs))}
    wanted = set()
    for index, part in enumerate(parts):
        kinds = {item.is_prompt for item in part.inputs}
        if not any(item.is_prompt for item in part.inputs):
            assert sum(len(item.span) for item in part.inputs) <= most
        assert len(kinds) == 1
        assert len(set(part.numbers)) == len(
            part.numbers
        )  # a token sees those before it: they are in other passes
        assert kinds == {False} or index == len(parts) - 1
        for number, item in zip(part.numbers, part.inputs, strict=True):
            assert list(item.token_ids) == list(range(item.span.start, item.span.end))
            ran[number] += item.token_ids
            if item.wants_logits:
                assert number not in wanted
                assert item.span.end == inputs[number].span.end
                wanted.add(number)
    assert ran == {number: list(item.token_ids) for number, item in enumerate(inputs)}
    assert wanted == {number for number, item in enumerate(inputs) if item.wants_logits}


@given(SPANS, st.integers(0, 16))
def test_logits_come_in_the_order_of_the_spans(spans: list[Any], most: int) -> None:
    inputs = [span_input(*span) for span in spans]
    parts = parts_of(inputs, most)
    assert most or parts == [Part(tuple(range(len(inputs))), tuple(inputs))]

    def logits(part: Part) -> Tensor | None:
        rows = [number for number, item in zip(part.numbers, part.inputs, strict=True) if item.wants_logits]
        return torch.tensor(rows)[:, None] if rows else None

    found = _joined(parts, [logits(part) for part in parts])
    expected = [number for number, item in enumerate(inputs) if item.wants_logits]
    assert ([] if found is None else found[:, 0].tolist()) == expected


class _Odd(TorchKernels):
    """Products whose bits depend on the number of rows, from one on."""

    def __init__(self, first_other: int, few_rows: int = 0) -> None:
        super().__init__()
        self._first_other = first_other
        self.few_rows = few_rows

    def linear(
        self, x: Tensor, weight: Any, bias: Tensor | None = None, *, is_canonical: bool = True
    ) -> Tensor:
        out = torch.stack([weight @ row for row in x])
        if bias is not None:
            out = out + bias
        return out + 1 if len(x) >= self._first_other else out


@pytest.mark.parametrize(
    ("first_other", "most"), [(2, 0), (4, 0), (5, 4), (9, 8), (18, 16), (21, 20), (99, 32)]
)
def test_so_many_decodes_need_no_padding_as_have_the_bits_of_one(first_other: int, most: int) -> None:
    product = ProductShape(8, 16, form="plain")
    shapes = ProbeShapes((product,), 1, 1, 8, 16, (8,), 8, ProductShape(24, 16, form="plain"))
    random = Random(torch.float32, torch.device("cpu"))
    assert free_decodes(_Odd(first_other), shapes, random) == most


@pytest.mark.parametrize("form", ["plain", "Q8_0"])
@pytest.mark.parametrize(("first_other", "is_free"), [(4096, True), (64, False), (17, False), (2, False)])
def test_few_rows_are_free_where_they_have_the_bits_of_many(
    form: str, first_other: int, is_free: bool
) -> None:
    product = ProductShape(8, 32, bias=True, form=form)
    shapes = ProbeShapes((product,), 1, 1, 8, 16, (8,), 8, ProductShape(24, 16, form="plain"))
    random = Random(torch.float32, torch.device("cpu"))
    found = few_rows(_Odd(first_other, few_rows=64), shapes, ON_CPU, random)
    assert found == (64 if is_free and form == "plain" else 0)
    assert few_rows(_Odd(4096), shapes, ON_CPU, random) == 0  # no kernels promise it
