"""Row laws: how many rows a product has; and that native code has the grids that are stated."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.plan import grids
from penstock.plan.grids import GPU_ROW_GRID, RowLaw

ON_GPU = RowLaw(tile_size=1024, row_floor=64, row_grid=GPU_ROW_GRID)
many_rows = st.integers(1, 40).map(lambda blocks: 64 * blocks)


@st.composite
def laws(draw: st.DrawFn) -> RowLaw:
    return RowLaw(
        512,
        draw(st.integers(1, 64)),
        draw(st.sampled_from([0, 64, 128])),
        draw(st.sampled_from([8, 64])),
        tuple(draw(st.sets(many_rows, max_size=4))),
        draw(st.sampled_from([0, 32])),
    )


@given(laws(), st.integers(1, 5000))
def test_rows_are_padded_to_numbers_that_keep_their_bits(law: RowLaw, num_rows: int) -> None:
    padded = law.padded_rows(num_rows)
    assert padded >= max(num_rows, law.row_floor)
    assert padded not in law.avoided_rows
    assert not law.row_slab or padded % law.row_slab == 0 or padded == law.row_floor
    assert law.padded_rows(num_rows + 1) >= padded
    if not law.expert_slab:
        floor = law.row_slab or law.row_floor
        assert law.padded_expert_rows(num_rows) == replace(law, row_floor=floor).padded_rows(num_rows)
    elif not law.avoided_rows:
        assert law.padded_expert_rows(num_rows) == max(32, -(-num_rows // 32) * 32)


def test_few_rows_are_not_padded() -> None:
    law = RowLaw(512)
    assert [law.padded_rows(rows) for rows in (1, 7, 16, 17, 24, 25)] == [1, 7, 16, 24, 24, 32]


@given(laws(), st.sampled_from([1, 16, 64]), st.integers(1, 300))
def test_rows_that_are_few_need_no_padding(law: RowLaw, few_rows: int, num_rows: int) -> None:
    few = replace(law, few_rows=few_rows)
    assert few.padded_rows(num_rows) == (num_rows if num_rows <= few_rows else law.padded_rows(num_rows))
    # A pass with a prompt has as many rows as any other of few, so that all of them are recorded as one.
    assert few.prompt_rows(num_rows) == max(few.padded_rows(num_rows), few_rows)


def test_as_many_decodes_are_free_as_a_pass_has() -> None:
    law = RowLaw(512, free_decodes=8)
    assert [law.frees(count) for count in (1, 8, 9)] == [True, True, False]
    assert not RowLaw(512).frees(1)
    assert RowLaw(512, few_rows=64).frees(100)


def test_rows_are_padded_past_what_is_avoided() -> None:
    law = replace(ON_GPU, avoided_rows=(128, 576, 640))
    counts = [law.padded_rows(rows) for rows in (1, 65, 513, 641, 2560, 2561, 3073)]
    assert counts == [64, 192, 704, 704, 2560, 3072, 3584]
    # Only numbers that were tried are run: beyond the last of the fine grid comes the next of the coarse one.
    assert replace(ON_GPU, avoided_rows=(2560,)).padded_rows(2550) == 3072


def test_parts_are_whole_powers_of_two_where_that_may_be() -> None:
    law = replace(ON_GPU, row_floor=192)

    def sizes(num_rows: int, law: RowLaw = law) -> list[int]:
        return [slab.stop - slab.start for slab in law.slabs(num_rows, 2560)]

    assert sizes(32_768) == [2048] * 16
    assert sizes(3072) == [2048, 1024]
    assert sizes(3072, replace(law, avoided_rows=(1024,))) == [1536, 1536]
    assert sizes(3072, replace(law, row_floor=1100)) == [1536, 1536]


@given(
    st.integers(1, 500).map(lambda blocks: 64 * blocks),
    many_rows,
    st.sets(many_rows, max_size=8),
    st.integers(1, 300),
)
def test_parts_are_of_numbers_that_may_be(num_rows: int, most: int, avoided: set[int], floor: int) -> None:
    slabs = replace(ON_GPU, row_floor=floor, avoided_rows=tuple(avoided)).slabs(num_rows, most)
    sizes = [slab.stop - slab.start for slab in slabs]
    assert not avoided & {*sizes}
    assert all(floor <= size <= most for size in sizes)
    if slabs:
        assert [row for slab in slabs for row in range(num_rows)[slab]] == list(range(num_rows))
    elif not avoided and floor <= 64:
        pytest.fail("there are such parts")


def test_native_code_states_the_same() -> None:
    header = (Path(penstock.__file__).parent / "kernels/native/attention.h").read_text()
    stated = dict(re.findall(r"^constexpr int (BLOCK|SEGMENT) = (\d+);", header, re.MULTILINE))
    assert stated == {"BLOCK": str(grids.NATIVE_BLOCK), "SEGMENT": str(grids.NATIVE_SEGMENT)}


def test_sizes_that_bits_and_files_depend_on_are_what_they_were() -> None:
    """A cache on disk, the bits of a prompt and what memory was measured to be: all of them change with these."""
    assert {name: value for name, value in vars(grids).items() if name.isupper()} == {
        "BLOCK_TOKENS": 64,
        "EXPERT_PLACES": 2048,
        "ROUNDED_ROWS": 512,
        "ROUNDED_BYTES": 1.25,
        "STATE_GRID": 64,
        "VECTOR_BYTES": 64,
        "SHARE_GRID": 64,
        "DEFAULT_CHUNK_SIZE": 512,
        "GPU_CHUNK_SIZE": 2048,
        "LANES": 64,
        "ROTARY_PAGE": 1024,
        "JOINED_TOKENS": 1024,
        "FEW_ROWS": 16,
        "ROW_GRID": 8,
        "GPU_ROW_GRID": 64,
        "COARSER": 8,
        "FINE_ROWS": 2560,
        "FEED_ROWS": 2560,
        "GRAPH_ROWS": 2560,
        "HEAD_ROWS": 8,
        "GPU_HEAD_ROWS": 32,
        "GPU_FEW_ROWS": 64,
        "TILE": 512,
        "SQUARE": 256,
        "QUERY_GRID": 64,
        "NORM_ROWS": 256,
        "ELEMENTS_PER_THREAD": 2048,
        "MOST_STATE_BLOCKS": 8,
        "NATIVE_BLOCK": 64,
        "NATIVE_SEGMENT": 256,
        "GPU_TILE": 1024,
        "SPLITS": 64,
        "HEADS_AND_PARTS": 32,
        "QUERY_BUCKETS": (64, 128, 256, 512),
        "LONG_PAST": 4096,
        "PIECE_TOKENS": 4096,
    }
