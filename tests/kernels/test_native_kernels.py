"""The native kernels: the reference's results, and bits that depend on nothing but a row and its own sequence."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.cache import TokenRange
from penstock.cache.tensors import KV
from penstock.errors import SettingError
from penstock.kernels.experts import Router, route
from penstock.kernels.interface import select_kernels
from penstock.kernels.native import build as native_build
from penstock.kernels.native.build import NativeUnavailableError, native_library
from penstock.kernels.native.experts import NativeExperts
from penstock.kernels.native.kernels import NativeKernels
from penstock.kernels.quantised import Q4_1, Q8_0, QuantisedWeight, quantise
from penstock.kernels.reference.kernels import TorchKernels
from penstock.kernels.spans import AttendedSpan, AttentionWork, HeadLayout, Scoring, WrittenPlaces
from penstock.plan.model import ExpertsConfig
from penstock.plan.settings import KERNELS_VARIABLE
from tests.kernels.parity import ROUTERS, ExpertRows, Subject, check_experts, check_experts_alone
from tests.kernels.test_torch_kernels import plain_attention

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
REFERENCE = TorchKernels()


@pytest.fixture(scope="module")
def native() -> NativeKernels:
    try:
        return NativeKernels()
    except NativeUnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the native kernels cannot be had: {error}")


def scattered(num_tokens: int, cuts: Sequence[int], total: int) -> list[TokenRange]:
    """Places for a sequence that lies in pieces, the later before the earlier, in a cache of `total` tokens."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < num_tokens}), num_tokens]
    places: list[TokenRange] = []
    end = total
    for first, after in pairwise(edges):
        places.append(TokenRange(end - (after - first), end))
        end -= after - first + 1
    return places


def cache_of(keys: Tensor, values: Tensor, places: Sequence[TokenRange], total: int) -> KV:
    """A cache with the sequence at its places, and with others' tokens around it."""
    kv = KV(*(torch.randn(total, *keys.shape[1:]).to(keys.dtype) * 100 for _ in range(2)))
    kv.write(places, keys, values)
    return kv


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4, 8, 20]),
    head_dim=st.sampled_from([16, 32, 64, 80, 96, 128, 256]),
    position=st.integers(0, 700),
    count=st.integers(1, 150),
    cuts=st.lists(st.integers(1, 800), max_size=3),
    seed=st.integers(0, 1000),
)
def test_attention_to_a_sequence_in_any_places(
    native: NativeKernels,
    dtype: torch.dtype,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    position: int,
    count: int,
    cuts: list[int],
    seed: int,
) -> None:
    assert native.can_attend(dtype, head_dim)
    torch.manual_seed(seed)
    end = position + count
    keys, values = torch.randn(2, end, num_kv_heads, head_dim).to(dtype)
    queries = torch.randn(count + 3, num_kv_heads * group, head_dim).to(dtype)
    places = scattered(end, cuts, 1000)
    span = AttendedSpan(0, count, position, places, is_prompt=True)
    kv = cache_of(keys, values, places, 1000)
    ours = native.attend(queries, AttentionWork((span,)), kv, Scoring(0.2))
    exact = plain_attention(queries[:count], keys, values, position, 0.2).flatten(1)
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    assert torch.allclose(ours[:count].double(), exact, atol=tolerance)
    assert not ours[count:].any()


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    group=st.sampled_from([1, 3, 8]),
    num_tokens=st.integers(2, 900),
    chunk_cuts=st.lists(st.integers(1, 899), max_size=4),
    place_cuts=st.lists(st.integers(1, 899), max_size=3),
    num_threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_chunks_places_neighbours_or_threads(
    native: NativeKernels,
    dtype: torch.dtype,
    group: int,
    num_tokens: int,
    chunk_cuts: list[int],
    place_cuts: list[int],
    num_threads: int,
    seed: int,
) -> None:
    """A decode has the bits of the same token in a chunk, too."""
    torch.manual_seed(seed)
    keys, values = torch.randn(2, num_tokens, 2, 64).to(dtype)
    queries = torch.randn(num_tokens, 2 * group, 64).to(dtype)
    whole_span = AttendedSpan(0, num_tokens, 0, [TokenRange(0, num_tokens)], is_prompt=True)
    whole = native.attend(queries, AttentionWork((whole_span,)), KV(keys, values), Scoring(0.125))

    places = scattered(num_tokens, place_cuts, 2000)
    kv = cache_of(keys, values, places, 2000)
    edges = [0, *sorted({cut for cut in chunk_cuts if cut < num_tokens}), num_tokens]
    spans = tuple(
        AttendedSpan(first, end, first, reached(places, end), is_prompt=end - first > 1)
        for first, end in pairwise(edges)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = native.attend(queries, AttentionWork(spans), kv, Scoring(0.125))
        alone = [
            native.attend(
                queries[span.start : span.end].clone(),
                AttentionWork((AttendedSpan(0, span.end - span.start, span.start, span.places, True),)),
                kv,
                Scoring(0.125),
            )
            for span in spans
        ]
        last = AttendedSpan(0, 1, num_tokens - 1, places, is_prompt=False)
        decode = native.attend(queries[-1:].clone(), AttentionWork((last,)), kv, Scoring(0.125))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, whole)
    assert torch.equal(torch.cat(alone), whole)
    assert torch.equal(decode[0], whole[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 9])
def test_a_decode_has_the_bits_of_a_chunk_at_any_head_size(
    native: NativeKernels, dtype: torch.dtype, head_dim: int, group: int
) -> None:
    """Up to 8 queries of a KV head are computed by other code than more."""
    for num_tokens in (1, 2, 17, 63, 64, 65, 256, 257, 330):
        torch.manual_seed(num_tokens)
        keys, values = torch.randn(2, num_tokens, 2, head_dim).mul(2).to(dtype)
        queries = torch.randn(num_tokens, 2 * group, head_dim).to(dtype)
        places = [TokenRange(0, num_tokens)]
        whole = AttentionWork((AttendedSpan(0, num_tokens, 0, places, is_prompt=True),))
        last = AttentionWork((AttendedSpan(0, 1, num_tokens - 1, places, is_prompt=False),))
        kv, scale = KV(keys, values), head_dim**-0.5
        decode = native.attend(queries[-1:].clone(), last, kv, Scoring(scale))
        assert torch.equal(decode[0], native.attend(queries, whole, kv, Scoring(scale))[-1])


def test_many_decodes_with_a_long_past(native: NativeKernels) -> None:
    """So many that what their segments gave is added up in several turns."""
    num_tokens, num_spans = 1100, 70
    torch.manual_seed(0)
    keys, values = torch.randn(2, num_tokens, 8, 256).bfloat16()
    queries = torch.randn(num_spans, 8, 256).bfloat16()
    ends = [num_tokens - 5 * i for i in range(num_spans)]
    spans = [
        AttendedSpan(i, i + 1, end - 1, [TokenRange(0, end)], is_prompt=False) for i, end in enumerate(ends)
    ]
    together = native.attend(queries, AttentionWork(tuple(spans)), KV(keys, values), Scoring(0.0625))
    for i in (0, 1, num_spans - 1):
        alone = AttendedSpan(0, 1, ends[i] - 1, [TokenRange(0, ends[i])], is_prompt=False)
        own = native.attend(
            queries[i : i + 1].clone(), AttentionWork((alone,)), KV(keys, values), Scoring(0.0625)
        )
        assert torch.equal(own[0], together[i])
    many = queries[:1].repeat(20, 1, 1)
    chunk = AttendedSpan(0, 20, num_tokens - 20, [TokenRange(0, num_tokens)], is_prompt=True)
    of_chunk = native.attend(many, AttentionWork((chunk,)), KV(keys, values), Scoring(0.0625))
    assert torch.equal(of_chunk[-1], together[0])


def reached(places: Sequence[TokenRange], end: int) -> list[TokenRange]:
    found: list[TokenRange] = []
    for place in places:
        count = min(len(place), end)
        if count:
            found.append(TokenRange(place.start, place.start + count))
        end -= count
    return found


def test_scores_of_any_size(native: NativeKernels) -> None:
    """Weights are relative to the largest score: neither huge scores nor tiny ones give anything but numbers."""
    torch.manual_seed(0)
    for factor in (1e-20, 1.0, 1e3, 1e15):
        keys, values = torch.randn(2, 300, 1, 64)
        queries = torch.randn(5, 2, 64) * factor
        span = AttendedSpan(0, 5, 295, [TokenRange(0, 300)], is_prompt=True)
        ours = native.attend(queries, AttentionWork((span,)), KV(keys, values), Scoring(1.0))
        exact = plain_attention(queries, keys, values, 295, 1.0).flatten(1)
        assert torch.allclose(ours.double(), exact, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 15, 16, 50, 576])
@pytest.mark.parametrize("is_float32", [False, True])
def test_norms(native: NativeKernels, dtype: torch.dtype, size: int, is_float32: bool) -> None:
    x, delta = torch.randn(2, 7, size).to(dtype)
    weight = torch.rand(size).to(torch.float32 if is_float32 else dtype)
    total, normed = native.add_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert close(normed, REFERENCE.rms_norm(total, weight, 1e-5))
    assert torch.equal(native.rms_norm(total, weight, 1e-5), normed)
    heads = torch.randn(4, 5, 3 * size).to(dtype)[
        :, 1:4, size : 2 * size
    ]  # neither rows nor heads side by side
    assert close(native.rms_norm(heads, weight, 1e-5), REFERENCE.rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 17, 64, 1536])
def test_activation(native: NativeKernels, dtype: torch.dtype, width: int) -> None:
    gate_up = (torch.randn(300, 2 * width) * 10).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = -200.0, 200.0
    ours = native.silu_and_mul(gate_up)
    assert close(ours, REFERENCE.silu_and_mul(gate_up))
    for num_rows in (1, 7, 299):
        assert torch.equal(native.silu_and_mul(gate_up[-num_rows:]), ours[-num_rows:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [None, "own", "float32"])
@pytest.mark.parametrize("rotary_dim", [64, 32, 6])
@pytest.mark.parametrize("num_gates", [0, 4])
def test_heads_on_their_way_to_the_cache(
    native: NativeKernels, dtype: torch.dtype, norm: str | None, rotary_dim: int, num_gates: int
) -> None:
    query_norm = key_norm = None
    if norm is not None:
        query_norm, key_norm = torch.rand(2, 64).to(dtype if norm == "own" else torch.float32)
    layout = HeadLayout(4, 2, 64, query_norm, key_norm, 1e-6)
    projected = torch.randn(40, (4 + 2 + 2 + num_gates) * 64).to(dtype)
    cos, sin = torch.randn(2, 40, rotary_dim).to(dtype)
    places = WrittenPlaces([TokenRange(70, 90), TokenRange(3, 18)])  # and five rows of padding
    found = []
    for kernels in (native, REFERENCE):
        kv = KV(torch.zeros(100, 2, 64, dtype=dtype), torch.zeros(100, 2, 64, dtype=dtype))
        queries = kernels.place_heads(projected, layout, cos, sin, kv, places)
        found.append((queries, kv.keys, kv.values))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs) if norm is None else close(ours, theirs)
    queries, keys, values = found[0]
    moved = KV(torch.zeros_like(keys), torch.zeros_like(values))
    some = native.place_heads(
        projected[20:35],
        layout,
        cos[20:35],
        sin[20:35],
        moved,
        WrittenPlaces([TokenRange(0, 15)]),
    )
    assert torch.equal(some, queries[20:35])
    assert torch.equal(moved.keys[:15], keys[3:18])
    assert torch.equal(moved.values[:15], values[3:18])


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Equal up to a last bit or two."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    relative = 0.02 if ours.dtype == torch.bfloat16 else 2e-6
    return torch.allclose(ours.float(), theirs.float(), rtol=relative, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_has_the_references_bits(native: NativeKernels, dtype: torch.dtype) -> None:
    projected, tables = torch.randn(9, 8, 40).to(dtype), torch.randn(2, 9, 40).to(dtype)
    for x in (projected, projected[:, 1:6], projected[:, ::2]):
        for size in (40, 24):
            cos, sin = (table[:, :size].contiguous() for table in tables)
            assert torch.equal(native.rotate(x, cos, sin), REFERENCE.rotate(x, cos, sin))


@pytest.mark.parametrize("router", ROUTERS)
def test_experts(native: NativeKernels, router: str) -> None:
    if native.quantised is None:
        pytest.skip("this processor has no products of bfloat16")
    subject, config = Subject(native, torch.bfloat16), ROUTERS[router]
    check_experts(ExpertRows(subject, config, 1))
    rows = ExpertRows(subject, config, 300)
    check_experts(rows)
    check_experts_alone(rows, (1, 7, 100))


@pytest.mark.parametrize("router", ROUTERS)
def test_rows_go_to_the_experts_of_the_reference(native: NativeKernels, router: str) -> None:
    if native.quantised is None:
        pytest.skip("this processor has no products of bfloat16")
    rows = ExpertRows(Subject(native, torch.bfloat16), ROUTERS[router], 300)
    experts, num_experts = rows.experts, rows.config.num_experts
    assert isinstance(experts, NativeExperts)
    weights, chosen = experts.route(rows.scores)
    exact, wanted = route(rows.scores[:, :num_experts].double(), rows.router)
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights.double(), exact, rtol=3e-6, atol=1e-9)


def test_quantised_experts_are_those_one_by_one(native: NativeKernels) -> None:
    """Many rows, and a few in the way that is fastest for them, in any number of experts at a time."""
    if native.quantised is None:
        pytest.skip("this processor has no products of bfloat16")
    config = ExpertsConfig(1, 6, 64, num_active=2)
    generator = torch.Generator().manual_seed(0)
    weights: list[list[QuantisedWeight]] = [[], []]
    for index, (form, shape) in enumerate(((Q4_1, (128, 96)), (Q8_0, (96, 64)))):
        for _ in range(config.num_experts):
            weight = native.quantised.zeros(form, *shape)
            values = torch.randn(shape, generator=generator)
            native.quantised.place(weight, torch.arange(shape[0]), quantise(values, form))
            weights[index].append(weight)
    experts = native.quantised_experts(Router(config), weights[0], weights[1])
    assert isinstance(experts, NativeExperts)
    for num_rows, is_canonical in ((1, False), (3, False), (3, True), (1100, True)):
        x = torch.randn(num_rows, 96, generator=generator).bfloat16()
        scores = torch.randn(num_rows, config.num_experts, generator=generator).bfloat16()
        shares, chosen = experts.route(scores)
        total = torch.zeros(num_rows, 96)
        for expert, (gate_up, down) in enumerate(zip(*weights, strict=True)):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            inner = native.silu_and_mul(native.linear(x[rows], gate_up, is_canonical=is_canonical))
            own = native.linear(inner, down, is_canonical=is_canonical)
            total.index_add_(0, rows, own * shares[rows, slots, None])
        assert torch.equal(experts.run(x, scores, None, is_canonical=is_canonical), total.bfloat16())


def test_head_sizes_without_code_are_computed_by_torch(native: NativeKernels) -> None:
    assert not native.can_attend(torch.float32, 24)
    keys, values = torch.randn(2, 40, 2, 24)
    queries = torch.randn(40, 4, 24)
    span = AttendedSpan(0, 40, 0, [TokenRange(0, 40)], is_prompt=True, tile_size=512)
    ours = native.attend(queries, AttentionWork((span,)), KV(keys, values), Scoring(0.2))
    assert torch.equal(
        ours, REFERENCE.attend(queries, AttentionWork((span,)), KV(keys, values), Scoring(0.2))
    )


def test_the_choice_is_explicit(native: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    for choice, name in (("torch", "torch"), ("native", "native"), ("auto", "native")):
        monkeypatch.setenv(KERNELS_VARIABLE, choice)
        assert select_kernels(CPU).name == name
    monkeypatch.setenv(KERNELS_VARIABLE, "fast")
    with pytest.raises(
        SettingError, match="PENSTOCK_KERNELS='fast' is not accepted: give auto, native or torch"
    ):
        select_kernels(CPU)


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("processor_flags", lambda: frozenset({"avx2"}), "no fma, f16c"),
        ("_FLAGS", ("-no-such-flag",), "compiling them with"),
        ("_COMPILERS", (), "no C\\+\\+ compiler"),
    ],
)
def test_where_they_cannot_be_had_torch_computes(
    attribute: str, value: object, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they were asked for: then it is an error that says why."""
    monkeypatch.setattr(native_build, "SOURCES", tmp_path)  # whatever is remembered, is not of this checkout
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native_build, attribute, value)
    native_library.cache_clear()
    try:
        monkeypatch.setenv(KERNELS_VARIABLE, "auto")
        assert select_kernels(CPU).name == "torch"
        monkeypatch.setenv(KERNELS_VARIABLE, "native")
        with pytest.raises(SettingError, match=reason):
            select_kernels(CPU)
    finally:
        native_library.cache_clear()


@pytest.mark.parametrize(
    ("num_out", "num_in"),
    [(96, 64), (33, 1024), (100, 130), (300, 1026), (48, 1536), (64, 4096), (520, 72), (16, 512)],
)
def test_plain_weights_have_onednns_bits(native: NativeKernels, num_out: int, num_in: int) -> None:
    torch.manual_seed(num_in)
    weight = torch.randn(num_out, num_in).mul_(num_in**-0.5).bfloat16()
    packed, by_onednn = native.pack(weight), REFERENCE.pack(weight)
    if not isinstance(packed, QuantisedWeight):
        pytest.skip("oneDNN multiplies bfloat16 here")
    for num_rows in (1, 2, 3, 17, 64, 200):
        for bias in (None, torch.randn(num_out).bfloat16()):
            x = torch.randn(num_rows, num_in).bfloat16()
            # A row alone is summed as one of several: oneDNN has another order for it.
            expected = REFERENCE.linear(x.expand(2, -1) if num_rows == 1 else x, by_onednn, bias)[:num_rows]
            for is_canonical in (False, True):
                ours = native.linear(x, packed, bias, is_canonical=is_canonical)
                assert torch.equal(ours, expected)
                alone = native.linear(x[:1], packed, bias, is_canonical=is_canonical)
                assert torch.equal(alone, expected[:1])


def test_a_weight_with_an_odd_number_of_inputs_is_onednns(native: NativeKernels) -> None:
    weight, x = torch.randn(40, 33).bfloat16(), torch.randn(5, 33).bfloat16()
    assert torch.equal(native.linear(x, native.pack(weight)), REFERENCE.linear(x, REFERENCE.pack(weight)))
