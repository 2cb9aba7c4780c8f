"""Windows, sinks, soft caps, and keys and values of different sizes, on a processor: what plain formulas give, and
bits that depend on a row's own sequence alone. Blocks behind a window are not looked at."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import BLOCK_TOKENS, TokenRange
from penstock.cache.tensors import KV
from penstock.kernels.interface import Kernels, select_kernels
from penstock.kernels.native.kernels import NativeKernels
from penstock.kernels.reference.kernels import TorchKernels
from penstock.kernels.spans import AttendedSpan, AttentionWork, Scoring
from tests.kernels.parity import (
    PLAIN,
    SCALE,
    Heads,
    Rows,
    Subject,
    check_attention,
    check_beside,
    check_cuts,
    in_one_place,
    random_kv,
    scattered,
)

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 32)
SCORINGS = HEADS.scorings(CPU)
NUM_TOKENS = 700

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
scorings = pytest.mark.parametrize("scoring", [name for name in SCORINGS if name != "plain"])


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "torch":
        return TorchKernels()
    found = select_kernels(CPU, "auto")
    if not isinstance(found, NativeKernels):
        pytest.skip("there are no native kernels here")
    return found


def batches() -> st.SearchStrategy[list[Rows]]:
    prompts = st.tuples(st.integers(0, NUM_TOKENS), st.integers(1, 90), st.just(True))
    decodes = st.tuples(st.integers(0, NUM_TOKENS), st.just(1), st.just(False))
    return st.lists(st.one_of(prompts, decodes), min_size=1, max_size=4).map(
        lambda drawn: [in_one_place(first, first + size, is_prompt=prompt) for first, size, prompt in drawn]
    )


@dtypes
@scorings
@settings(max_examples=6)
@given(batch=batches(), random=st.randoms(use_true_random=False))
def test_it_is_what_formulas_say_beside_anybody(
    kernels: Kernels, dtype: torch.dtype, scoring: str, batch: list[Rows], random: object
) -> None:
    order = list(range(sum(len(rows.blocks) for rows in batch)))
    random.shuffle(order)  # type: ignore[attr-defined]
    apart = list(scattered(batch, order))
    check_attention(Subject(kernels, dtype), HEADS, apart, scoring=SCORINGS[scoring])
    check_beside(Subject(kernels, dtype), HEADS, apart, 2, SCORINGS[scoring])


@dtypes
@scorings
@settings(max_examples=6)
@given(edges=st.lists(st.integers(1, NUM_TOKENS - 1), min_size=1, max_size=5, unique=True))
def test_a_chunk_has_the_bits_of_the_whole_with_no_numbers_behind_its_window(
    kernels: Kernels, dtype: torch.dtype, scoring: str, edges: list[int]
) -> None:
    cuts = [*pairwise((0, *sorted(edges), NUM_TOKENS)), (NUM_TOKENS - 1, NUM_TOKENS)]
    check_cuts(Subject(kernels, dtype), HEADS, NUM_TOKENS, cuts, SCORINGS[scoring])


@dtypes
@pytest.mark.parametrize("group", [1, 3, 8, 9])
@pytest.mark.parametrize("sizes", [(64, 64), (512, 512), (192, 128), (48, 32)], ids=str)
def test_heads_of_any_size(kernels: Kernels, dtype: torch.dtype, group: int, sizes: tuple[int, int]) -> None:
    heads = Heads(2 * group, 2, *sizes)
    every = heads.scorings(CPU)
    batch = [in_one_place(180, 230), in_one_place(300, 301, is_prompt=False)]
    for name in ("plain", "a window of several", "all"):
        check_attention(Subject(kernels, dtype), heads, batch, scoring=every[name])
        check_cuts(Subject(kernels, dtype), heads, 330, [(0, 150), (150, 170), (329, 330)], every[name])


@dtypes
@pytest.mark.parametrize("group", [1, 4, 9])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_decodes_have_a_chunks_bits_and_may_lack_what_is_behind_their_window(
    dtype: torch.dtype, group: int, num_threads: int
) -> None:
    """The native kernels': in any number of threads, with places that begin where the window does."""
    kernels = select_kernels(CPU, "auto")
    if not isinstance(kernels, NativeKernels):
        pytest.skip("there are no native kernels here")
    heads = Heads(2 * group, 2, 64)
    subject = Subject(kernels, dtype)
    kv = random_kv(subject, heads, -(-NUM_TOKENS // BLOCK_TOKENS))
    queries = subject.normal(NUM_TOKENS, heads.num_heads, heads.head_dim)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for scoring in heads.scorings(CPU).values():
            whole = AttendedSpan(0, NUM_TOKENS, 0, [TokenRange(0, NUM_TOKENS)], is_prompt=True)
            expected = kernels.attend(queries, AttentionWork((whole,)), kv, scoring)
            for position in (5, 63, 64, 256, 413, NUM_TOKENS - 1):
                gone = scoring.first_seen(position) // BLOCK_TOKENS * BLOCK_TOKENS
                held = KV(kv.keys[gone : position + 1].clone(), kv.values[gone : position + 1].clone())
                places = [TokenRange(0, position + 1 - gone)]
                span = AttendedSpan(0, 1, position, places, is_prompt=False, first_token=gone)
                ours = kernels.attend(queries[position, None].clone(), AttentionWork((span,)), held, scoring)
                assert torch.equal(ours[0], expected[position])
    finally:
        torch.set_num_threads(before)


def test_a_window_as_long_as_the_sequence_hides_nothing(kernels: Kernels) -> None:
    subject = Subject(kernels, torch.float32)
    check_attention(subject, HEADS, [in_one_place(0, 200)], scoring=Scoring(SCALE, window=200))
    assert Scoring(SCALE, window=200).first_seen(199) == 0
    assert PLAIN.first_seen(10_000) == 0
