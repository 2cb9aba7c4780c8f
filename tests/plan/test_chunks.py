import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.plan import (
    ChunkedPrefillConfig,
    PrefillChunk,
    Span,
    TokenView,
    create_prefill_chunks,
    create_prefill_chunks_at,
    num_prefill_chunks,
    prefill_chunk_span,
)
from tests.plan.strategies import configs, prompts


def ranges(chunks: Sequence[PrefillChunk]) -> list[tuple[int, int]]:
    return [(chunk.start_pos, chunk.end_pos) for chunk in chunks]


@given(prompts, configs())
def test_chunks_cover_the_prompt_in_order(prompt: list[int], config: ChunkedPrefillConfig) -> None:
    chunks = create_prefill_chunks(prompt, config)
    assert {p for start, end in ranges(chunks) for p in range(start, end)} == set(range(len(prompt)))
    assert [chunk.chunk_index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True] * bool(chunks)
    for chunk in chunks:
        assert len(chunk) == len(chunk.tokens) == len(chunk.span) > 0
        assert chunk.span == Span(chunk.start_pos, chunk.end_pos)
        assert chunk.tokens == prompt[chunk.start_pos : chunk.end_pos]
    if chunks:
        assert chunks[0].start_pos == 0
        assert chunks[-1].end_pos == len(prompt)


@given(prompts, configs())
def test_overlap_law(prompt: list[int], config: ChunkedPrefillConfig) -> None:
    chunks = create_prefill_chunks(prompt, config)
    for before, after in itertools.pairwise(chunks):
        assert after.start_pos == before.end_pos - config.overlap
        assert before.start_pos < after.start_pos
        assert before.end_pos < after.end_pos
        assert len(before) == config.chunk_size
    if config.chunk_size:
        assert all(len(chunk) <= config.chunk_size for chunk in chunks)
    else:
        assert len(chunks) == bool(prompt)


@given(prompts, configs())
def test_without_overlap_no_token_comes_twice(prompt: list[int], config: ChunkedPrefillConfig) -> None:
    chunks = create_prefill_chunks(prompt, config.with_overlap(0))
    assert list(itertools.chain.from_iterable(chunk.tokens for chunk in chunks)) == prompt


@given(st.integers(0, 300), configs())
def test_closed_forms_agree_with_the_chunks(num_tokens: int, config: ChunkedPrefillConfig) -> None:
    chunks = create_prefill_chunks(range(num_tokens), config)
    assert num_prefill_chunks(num_tokens, config) == len(chunks)
    assert [prefill_chunk_span(k, num_tokens, config) for k in range(len(chunks))] == [c.span for c in chunks]
    with pytest.raises(SettingError, match="chunk_index"):
        prefill_chunk_span(len(chunks), num_tokens, config)


@pytest.mark.parametrize(
    ("num_tokens", "chunk_size", "overlap", "expected"),
    [
        (0, 4, 0, []),
        (0, 0, 0, []),
        (1, 4, 3, [(0, 1)]),
        (10, 0, 0, [(0, 10)]),
        (10, 10, 9, [(0, 10)]),
        (10, 4, 0, [(0, 4), (4, 8), (8, 10)]),
        (8, 4, 0, [(0, 4), (4, 8)]),
        (8, 4, 2, [(0, 4), (2, 6), (4, 8)]),
        (9, 4, 2, [(0, 4), (2, 6), (4, 8), (6, 9)]),
        (5, 4, 3, [(0, 4), (1, 5)]),
    ],
)
def test_examples(num_tokens: int, chunk_size: int, overlap: int, expected: list[tuple[int, int]]) -> None:
    config = ChunkedPrefillConfig(chunk_size=chunk_size, overlap=overlap)
    assert ranges(create_prefill_chunks(range(num_tokens), config)) == expected


def test_tokens_are_views_of_the_one_prompt() -> None:
    prompt = list(range(1000))
    chunks = create_prefill_chunks(TokenView(prompt), ChunkedPrefillConfig(chunk_size=100))
    for chunk in chunks:
        assert isinstance(chunk.tokens, TokenView)
        assert chunk.tokens._tokens is prompt


@given(prompts, st.data())
def test_uneven_schedules_cover_the_prompt(prompt: list[int], data: st.DataObject) -> None:
    inner = data.draw(st.sets(st.integers(1, max(1, len(prompt) - 1)), max_size=8))
    ends = sorted({end for end in inner if end < len(prompt)} | {len(prompt)}) if prompt else []
    chunks = create_prefill_chunks_at(prompt, ends)
    assert [chunk.end_pos for chunk in chunks] == ends
    assert list(itertools.chain.from_iterable(chunk.tokens for chunk in chunks)) == prompt
    assert [chunk.is_last for chunk in chunks] == [end == len(prompt) for end in ends]


@given(prompts, configs())
def test_an_even_schedule_gives_the_same_chunks(prompt: list[int], config: ChunkedPrefillConfig) -> None:
    chunks = create_prefill_chunks(prompt, config.with_overlap(0))
    assert create_prefill_chunks_at(prompt, (chunk.end_pos for chunk in chunks)) == chunks


@pytest.mark.parametrize(
    ("ends", "setting", "value"),
    [
        ([], "ends[-1]", 0),
        ([3, 9], "ends[-1]", 9),
        ([3, 11], "ends[1]", 11),
        ([3, 3, 10], "ends[1]", 3),
        ([5, 3, 10], "ends[1]", 3),
        ([0, 10], "ends[0]", 0),
        ([-1, 10], "ends[0]", -1),
        ([5.0, 10], "ends[0]", 5.0),
        ([True, 10], "ends[0]", True),
    ],
)
def test_bad_schedules_are_refused(ends: Any, setting: str, value: object) -> None:
    with pytest.raises(SettingError) as caught:
        create_prefill_chunks_at(range(10), ends)
    assert (caught.value.setting, caught.value.value) == (setting, value)


def test_an_empty_prompt_has_no_end() -> None:
    assert create_prefill_chunks_at([], []) == ()
    with pytest.raises(SettingError, match=r"ends\[0\]=0"):
        create_prefill_chunks_at([], [0])


@pytest.mark.parametrize("num_tokens", [-1, 1.0, True, "3"])
def test_a_count_must_be_a_count(num_tokens: Any) -> None:
    with pytest.raises(SettingError, match="num_tokens"):
        num_prefill_chunks(num_tokens, ChunkedPrefillConfig())


def test_a_chunk_holds_the_tokens_of_its_range() -> None:
    with pytest.raises(SettingError, match="give 3"):
        PrefillChunk([1, 2], start_pos=4, end_pos=7, chunk_index=0, is_last=True)
    with pytest.raises(SettingError, match="end=4"):
        PrefillChunk([], start_pos=4, end_pos=4, chunk_index=0, is_last=True)


def test_chunks_are_equal_by_value_and_can_be_keys() -> None:
    first, second = (create_prefill_chunks([1, 2, 3], ChunkedPrefillConfig(chunk_size=2)) for _ in range(2))
    assert first == second
    assert set(first) == set(second)
    assert first[0] != create_prefill_chunks([1, 9, 3], ChunkedPrefillConfig(chunk_size=2))[0]
    assert "tokens" not in repr(first[0])
