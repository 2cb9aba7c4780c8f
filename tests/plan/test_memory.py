from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.plan import (
    ChunkedPrefillConfig,
    DeltaNetShape,
    ExpertsShape,
    ModelShape,
    create_prefill_chunks,
    format_bytes,
    peak_memory_estimate,
)
from tests.plan.strategies import configs, hybrid_shapes, shapes

SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 5,
    "vocab_size": 50,
}
SHAPE = ModelShape(**SIZES)
num_tokens_counts = st.integers(0, 200)


def test_by_hand_fused() -> None:
    estimate = peak_memory_estimate(SHAPE, 10, ChunkedPrefillConfig(chunk_size=4))
    full, chunked = estimate.full, estimate.chunked
    assert full.kv_cache_bytes == chunked.kv_cache_bytes == 2 * 3 * 2 * 5 * 10 * 2 == 1200
    # 2 bytes x tokens x (2 x 8 hidden | 20 queries + 2 x 10 keys and values | 20 output | 3 x 20 MLP)
    assert (chunked.hidden_bytes, chunked.projection_bytes) == (128, 320)
    assert (chunked.attention_output_bytes, chunked.attention_scores_bytes) == (160, 0)
    assert (chunked.mlp_bytes, chunked.logits_bytes) == (480, 200)
    assert (full.hidden_bytes, full.projection_bytes) == (320, 800)
    assert (full.attention_output_bytes, full.attention_scores_bytes) == (400, 0)
    assert (full.mlp_bytes, full.logits_bytes) == (1200, 200)
    assert (chunked.attention_phase_bytes, chunked.mlp_phase_bytes) == (608, 608)
    assert (full.attention_phase_bytes, full.mlp_phase_bytes) == (1520, 1520)
    assert full.head_phase_bytes == chunked.head_phase_bytes == 2 * 8 + 4 * 50
    assert (estimate.full_bytes, estimate.chunked_bytes) == (1200 + 1520, 1200 + 608)
    assert estimate.num_chunks == 3
    assert estimate.savings_ratio == 1 - 1808 / 2720


def test_by_hand_unfused_with_a_short_last_chunk() -> None:
    # Chunks [0, 6) and [6, 10): scores 6 x 6 = 36 and 4 x 10 = 40. The last has the larger scores, the first
    # the larger sum, for 6 tokens against 4 weigh more than 36 scores against 40.
    config = ChunkedPrefillConfig(chunk_size=6)
    estimate = peak_memory_estimate(SHAPE, 10, config, dtype_bytes=4, kv_dtype_bytes=1, fused_attention=False)
    assert estimate.chunked.kv_cache_bytes == 2 * 3 * 2 * 5 * 10
    assert estimate.chunked.attention_scores_bytes == 4 * 4 * 40
    assert estimate.chunked.attention_phase_bytes == 4 * 6 * (16 + 40 + 20) + 4 * 4 * 36
    assert estimate.full.attention_scores_bytes == 4 * 4 * 100
    assert estimate.full.attention_phase_bytes == 4 * 10 * (16 + 40 + 20) + 4 * 4 * 100


def test_the_head_can_be_the_peak() -> None:
    shape = ModelShape(**{**SIZES, "vocab_size": 100_000})
    estimate = peak_memory_estimate(shape, 10, ChunkedPrefillConfig(chunk_size=1), logits_dtype_bytes=2)
    assert estimate.chunked_bytes == 1200 + 200_000 + 16
    assert estimate.full_bytes == estimate.chunked_bytes
    assert estimate.savings_ratio == 0.0


@given(shapes(), num_tokens_counts, configs(), st.booleans())
def test_the_worst_chunk_is_the_worst_of_all(
    shape: ModelShape, num_tokens: int, config: ChunkedPrefillConfig, fused: bool
) -> None:
    chunks = create_prefill_chunks(range(num_tokens), config)
    parts = peak_memory_estimate(shape, num_tokens, config, fused_attention=fused).chunked
    scores = [0 if fused else 2 * shape.num_heads * len(chunk) * chunk.end_pos for chunk in chunks]
    per_token = 2 * (2 * shape.hidden_size + 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim)
    attention = [len(chunk) * per_token + score for chunk, score in zip(chunks, scores, strict=True)]
    mlp = [2 * len(chunk) * (2 * shape.hidden_size + 3 * shape.intermediate_size) for chunk in chunks]
    assert parts.attention_scores_bytes == max(scores, default=0)
    assert parts.attention_phase_bytes == max(attention, default=0)
    assert parts.mlp_phase_bytes == max(mlp, default=0)
    assert parts.activation_bytes == max([*attention, *mlp, parts.head_phase_bytes])


@given(shapes() | hybrid_shapes(), num_tokens_counts, configs(), st.booleans())
def test_chunking_never_costs_memory(
    shape: ModelShape, num_tokens: int, config: ChunkedPrefillConfig, fused: bool
) -> None:
    estimate = peak_memory_estimate(shape, num_tokens, config, fused_attention=fused)
    if shape.delta_net is None or not config.overlap:  # an overlap keeps two more states
        assert estimate.chunked_bytes <= estimate.full_bytes
        assert 0 <= estimate.savings_ratio < 1
    assert (estimate.savings_ratio == 0) == (estimate.chunked_bytes == estimate.full_bytes)
    if config.chunk_size == 0 or config.chunk_size >= num_tokens:
        assert estimate.chunked == estimate.full
    unfused = peak_memory_estimate(shape, num_tokens, config, fused_attention=False)
    assert estimate.chunked_bytes <= unfused.chunked_bytes


@given(shapes() | hybrid_shapes(), num_tokens_counts, st.integers(1, 50), st.integers(1, 50), st.data())
def test_a_smaller_chunk_never_needs_more(
    shape: ModelShape, num_tokens: int, one: int, other: int, data: st.DataObject
) -> None:
    small, large = sorted((one, other))
    overlap = data.draw(st.integers(0, small - 1))
    estimates = [
        peak_memory_estimate(shape, num_tokens, ChunkedPrefillConfig(size, overlap))
        for size in (small, large)
    ]
    assert estimates[0].chunked_bytes <= estimates[1].chunked_bytes
    assert estimates[0].num_chunks >= estimates[1].num_chunks


@given(shapes() | hybrid_shapes(), st.integers(1, 50), st.integers(50, 200), st.integers(50, 200))
def test_activations_depend_on_the_chunk_and_not_on_the_prompt(
    shape: ModelShape, chunk_size: int, one: int, other: int
) -> None:
    config = ChunkedPrefillConfig(chunk_size=chunk_size)
    activations = [peak_memory_estimate(shape, n, config).chunked.activation_bytes for n in (one, other)]
    assert activations[0] == activations[1]


def test_nothing_needs_nothing() -> None:
    estimate = peak_memory_estimate(SHAPE, 0, ChunkedPrefillConfig())
    assert (estimate.full_bytes, estimate.chunked_bytes, estimate.num_chunks) == (0, 0, 0)
    assert estimate.savings_ratio == 0.0


def test_summary_is_one_line_with_the_numbers() -> None:
    shape = ModelShape(36, 4096, 12288, 32, 8, 128, 151_936)
    assert peak_memory_estimate(shape, 32_768, ChunkedPrefillConfig(chunk_size=2048)).summary() == (
        "32768 tokens in 16 chunks: 4.7 GiB at peak (4.5 GiB of it K/V cache), 7.2 GiB unchunked, 35.6% saved"
    )
    assert " in 1 chunk: " in peak_memory_estimate(SHAPE, 5, ChunkedPrefillConfig()).summary()


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", None])
def test_shape_refuses(field: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"{field}="):
        ModelShape(**{**SIZES, field: value})


def test_heads_come_in_whole_groups() -> None:
    with pytest.raises(SettingError, match="num_kv_heads=3 is not accepted with num_heads=4"):
        ModelShape(**{**SIZES, "num_kv_heads": 3})


@pytest.mark.parametrize("name", ["dtype_bytes", "kv_dtype_bytes", "logits_dtype_bytes"])
@pytest.mark.parametrize("value", [0, -2, 2.0, True, "2"])
def test_dtype_sizes_are_checked(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"{name}="):
        peak_memory_estimate(SHAPE, 10, ChunkedPrefillConfig(), **{name: value})


@pytest.mark.parametrize("prompt_tokens", [-1, 10.0, True, "10"])
def test_prompt_length_is_checked(prompt_tokens: Any) -> None:
    with pytest.raises(SettingError, match="prompt_tokens="):
        peak_memory_estimate(SHAPE, prompt_tokens, ChunkedPrefillConfig())


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (3_543_348_019, "3.3 GiB"),
        (2 * 1024**4, "2.0 TiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_bytes_in_binary_units(num_bytes: int, expected: str) -> None:
    assert format_bytes(num_bytes) == expected


NET = DeltaNetShape(
    num_layers=2, num_key_heads=2, num_value_heads=4, key_head_dim=3, value_head_dim=5, conv_kernel=4
)
EXPERTS = ExpertsShape(num_layers=3, num_experts=6, intermediate_size=7, shared_intermediate_size=9)


def test_delta_net_layers_by_hand() -> None:
    shape = replace(SHAPE, delta_net=NET)
    estimate = peak_memory_estimate(shape, 10, ChunkedPrefillConfig(chunk_size=4))
    full, chunked = estimate.full, estimate.chunked
    # One layer in three is left with keys and values.
    assert full.kv_cache_bytes == chunked.kv_cache_bytes == 400
    # 2 x 2 x 3 channels of queries and keys, 4 x 5 of values: 32 go through the convolution
    slot = 2 * (3 * 32 * 2 + 4 * 3 * 5 * 4)
    assert full.recurrent_bytes == chunked.recurrent_bytes == 2 * slot
    # 2 bytes x (32 into the convolution, 20 gate, 2 x 64 for 4 heads each, 20 output), float32 x 2 x 64;
    # 32 out of the convolution and 20 in float32
    per_token = 2 * (32 + 20 + 128 + 20) + 4 * 128 + 2 * 32 + 4 * 20
    # float32 x 4 heads x 64 tokens x (4 x 3 | 3 x 5 | 3 x 64), however many tokens the chunk has
    block = 4 * 4 * 64 * (12 + 15 + 192)  # one block each: neither chunk is longer
    assert (chunked.delta_net_bytes, full.delta_net_bytes) == (4 * per_token + block, 10 * per_token + block)
    assert chunked.delta_net_phase_bytes == 4 * 2 * 16 + chunked.delta_net_bytes
    assert chunked.activation_bytes == chunked.delta_net_phase_bytes
    assert estimate.chunked_bytes == 400 + 2 * slot + chunked.delta_net_phase_bytes


def test_an_overlap_keeps_two_more_states() -> None:
    shape = replace(SHAPE, delta_net=NET)
    plain, overlapping = (
        peak_memory_estimate(shape, 10, ChunkedPrefillConfig(4, overlap)).chunked for overlap in (0, 1)
    )
    assert overlapping.recurrent_bytes == 2 * plain.recurrent_bytes
    one_chunk = peak_memory_estimate(shape, 4, ChunkedPrefillConfig(4, 1)).chunked
    assert one_chunk.recurrent_bytes == plain.recurrent_bytes


def test_recurrent_state_is_the_same_for_any_prompt_and_its_matrix_for_any_dtype() -> None:
    shape = replace(SHAPE, delta_net=NET)
    short, long = (peak_memory_estimate(shape, n, ChunkedPrefillConfig(chunk_size=4)) for n in (1, 1000))
    assert short.chunked.recurrent_bytes == long.chunked.recurrent_bytes > 0
    wide = peak_memory_estimate(shape, 1000, ChunkedPrefillConfig(chunk_size=4), dtype_bytes=4)
    assert wide.chunked.recurrent_bytes - long.chunked.recurrent_bytes == 2 * 2 * 3 * 32 * 2  # of the tails
    assert peak_memory_estimate(shape, 0, ChunkedPrefillConfig()).full_bytes == 0


def test_gated_attention_projects_queries_twice_as_wide() -> None:
    plain, gated = (
        peak_memory_estimate(replace(SHAPE, gated_attention=is_gated), 10, ChunkedPrefillConfig()).full
        for is_gated in (False, True)
    )
    assert gated.projection_bytes - plain.projection_bytes == 2 * 10 * 4 * 5
    assert gated.attention_phase_bytes - plain.attention_phase_bytes == 2 * 10 * 4 * 5
    assert gated.attention_output_bytes == plain.attention_output_bytes


def test_experts_by_hand() -> None:
    chunked = peak_memory_estimate(
        replace(SHAPE, experts=EXPERTS), 10, ChunkedPrefillConfig(chunk_size=4)
    ).chunked
    # float32 x (6 probabilities, 8 sums), 2 bytes x (8 inputs, 8 outputs, 3 x 7 of an expert, 3 x 9 of the shared)
    assert chunked.mlp_bytes == 4 * (4 * (6 + 8) + 2 * (16 + 21 + 27))
    assert chunked.mlp_phase_bytes == chunked.mlp_bytes + 4 * 2 * 16


def test_a_dense_layer_counts_where_there_is_one() -> None:
    def mlp_bytes(num_layers: int) -> int:
        experts = replace(EXPERTS, num_layers=num_layers)
        shape = replace(SHAPE, intermediate_size=1000, experts=experts)
        return peak_memory_estimate(shape, 10, ChunkedPrefillConfig()).full.mlp_bytes

    assert mlp_bytes(2) == 10 * 2 * 3 * 1000
    assert mlp_bytes(3) == 10 * (4 * (6 + 8) + 2 * (16 + 21 + 27))


@given(hybrid_shapes(), st.integers(1, 200), configs())
def test_a_layer_of_another_kind_only_adds_phases_and_state(
    shape: ModelShape, num_tokens: int, config: ChunkedPrefillConfig
) -> None:
    plain = replace(shape, delta_net=None)
    parts, without = (peak_memory_estimate(s, num_tokens, config).chunked for s in (shape, plain))
    assert parts.kv_cache_bytes * shape.num_layers == without.kv_cache_bytes * shape.num_attention_layers
    assert (without.recurrent_bytes, without.delta_net_phase_bytes) == (0, 0)
    assert (parts.recurrent_bytes > 0) == (shape.delta_net is not None)
    assert parts.mlp_phase_bytes == without.mlp_phase_bytes
    expected = without.attention_phase_bytes if shape.num_attention_layers else 0
    assert parts.attention_phase_bytes == expected
    assert parts.total_bytes == parts.kv_cache_bytes + parts.recurrent_bytes + parts.activation_bytes


def test_summary_names_the_recurrent_state() -> None:
    net = DeltaNetShape(24, 16, 32, 128, 128, 4)
    shape = ModelShape(32, 2560, 9216, 16, 4, 256, 248_320, True, net)
    assert peak_memory_estimate(shape, 32_768, ChunkedPrefillConfig(chunk_size=2048)).summary() == (
        "32768 tokens in 16 chunks: 1.3 GiB at peak (1.0 GiB of it K/V cache, 98.2 MiB recurrent state), "
        "3.5 GiB unchunked, 62.6% saved"
    )


@pytest.mark.parametrize(
    "field",
    ["num_layers", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel"],
)
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", None])
def test_delta_net_shape_refuses(field: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"^{field}="):
        replace(NET, **{field: value})


@pytest.mark.parametrize(
    "field", ["num_layers", "num_experts", "intermediate_size", "shared_intermediate_size"]
)
@pytest.mark.parametrize("value", [-1, 1.0, True, "8", None])
def test_experts_shape_refuses(field: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"^{field}="):
        replace(EXPERTS, **{field: value})


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"delta_net": replace(NET, num_layers=4)},
            "delta_net.num_layers=4 is not accepted with num_layers=3",
        ),
        (
            {"experts": replace(EXPERTS, num_layers=4)},
            "experts.num_layers=4 is not accepted with num_layers=3",
        ),
        ({"delta_net": EXPERTS}, "give DeltaNetShape or None"),
        ({"experts": 8}, "experts=8 is not accepted: give ExpertsShape or None"),
        ({"gated_attention": 1}, "gated_attention=1 is not accepted: give True or False"),
    ],
)
def test_parts_of_a_shape_fit_it(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        replace(SHAPE, **parts)


def test_delta_net_heads_come_in_whole_groups() -> None:
    with pytest.raises(SettingError, match="num_key_heads=3 is not accepted with num_value_heads=4"):
        replace(NET, num_key_heads=3)
