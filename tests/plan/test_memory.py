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
from penstock.plan.activation import SMALL_BYTES, step_phases
from penstock.plan.memory import ActivationBudgetError, ActivationModel
from penstock.plan.sizing import SizeRules, largest_that
from penstock.plan.step import StepShape, Workspace
from penstock.plan.units import parse_bytes
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


@st.composite
def workspaces(draw: st.DrawFn) -> Workspace:
    return Workspace(
        kernels=draw(st.sampled_from(["torch", "native", "cuda"])),
        tile_size=draw(st.sampled_from([0, 16, 64, 512])),
        num_threads=draw(st.integers(1, 8)),
        row_floor=draw(st.integers(1, 8)),
        row_slab=draw(st.sampled_from([0, 0, 64])),
        row_grid=draw(st.sampled_from([8, 64])),
        expert_slab=draw(st.sampled_from([0, 0, 32])),
        head_rows=draw(st.sampled_from([8, 32])),
        feed_rows=draw(st.sampled_from([0, 128, 2560])),
        head_norm=draw(st.booleans()),
        float32_norm=draw(st.booleans()),
        num_active_experts=draw(st.integers(0, 4)),
        joins_past=draw(st.booleans()),
    )


NATIVE = Workspace("native")


def test_by_hand() -> None:
    estimate = peak_memory_estimate(SHAPE, 10, ChunkedPrefillConfig(chunk_size=4), workspace=NATIVE)
    full, chunked = estimate.full, estimate.chunked
    assert full.kv_cache_bytes == chunked.kv_cache_bytes == 2 * 3 * 2 * 5 * 10 * 2 == 1200
    assert estimate.num_chunks == 3
    # Ids and positions, 2 x 5 cosines and sines of each row, and of the 1,024 positions of a page
    tables = 1024 * 2 * 2 * 5
    inputs = [SMALL_BYTES + rows * (16 + 2 * 2 * 5) + tables for rows in (4, 10)]
    assert [chunked.input_bytes, full.input_bytes] == [
        size + tables // 2 + 1024 * (4 * 25 // 2 + 2 * 10) for size in inputs
    ]
    assert chunked.projection_bytes == 4 * 2 * 40
    # queries beside what they are a part of
    assert chunked.attention_output_bytes == 4 * 2 * 20
    assert chunked.attention_phase_bytes == inputs[0] + 4 * 2 * (16 + 40 + 20)
    # widths are whole vectors of 64: gate and up and their product
    assert chunked.mlp_bytes == 4 * 2 * 3 * 64
    assert chunked.mlp_phase_bytes == inputs[0] + 4 * 2 * (16 + 192)
    # 8 rows in the model's dtype, one of them in float32
    assert full.logits_bytes == chunked.logits_bytes == 8 * 2 * 50 + 4 * 50
    assert chunked.activation_bytes == chunked.start_phase_bytes == chunked.input_bytes + 4 * 2 * 16
    assert chunked.total_bytes == 1200 + chunked.activation_bytes
    assert estimate.savings_ratio == 1 - estimate.chunked_bytes / estimate.full_bytes


def test_scores_count_in_the_step_that_has_them() -> None:
    # Chunks [0, 6) and [6, 10): scores 6 x 6 = 36 and 4 x 10 = 40. The last has the larger scores, the first
    # the larger sum, for 6 tokens against 4 weigh more than 36 scores against 40.
    config = ChunkedPrefillConfig(chunk_size=6)
    fused, unfused = (
        peak_memory_estimate(SHAPE, 10, config, dtype_bytes=4, kv_dtype_bytes=1, fused_attention=is_fused)
        for is_fused in (True, False)
    )
    assert unfused.chunked.kv_cache_bytes == 2 * 3 * 2 * 5 * 10
    assert unfused.chunked.attention_scores_bytes == 4 * 4 * 40
    assert unfused.chunked.attention_phase_bytes == fused.chunked.attention_phase_bytes + 4 * 4 * 36
    assert unfused.full.attention_phase_bytes == fused.full.attention_phase_bytes + 4 * 4 * 100


def test_the_head_can_be_the_peak() -> None:
    shape = ModelShape(**{**SIZES, "vocab_size": 100_000})
    small, large = (
        peak_memory_estimate(shape, 10, ChunkedPrefillConfig(chunk_size=1), logits_dtype_bytes=size)
        for size in (2, 4)
    )
    assert small.chunked.activation_bytes == small.chunked.head_phase_bytes > 8 * 2 * 100_000
    assert large.chunked.logits_bytes - small.chunked.logits_bytes == 200_000


@given(shapes() | hybrid_shapes(), num_tokens_counts, configs(), workspaces(), st.booleans())
def test_the_worst_chunk_is_the_worst_of_all(
    shape: ModelShape,
    num_tokens: int,
    config: ChunkedPrefillConfig,
    workspace: Workspace,
    fused: bool,
) -> None:
    chunks = create_prefill_chunks(range(num_tokens), config)
    parts = peak_memory_estimate(
        shape, num_tokens, config, fused_attention=fused, workspace=workspace
    ).chunked
    steps = [StepShape.of_chunk(len(chunk), chunk.start_pos, is_last=True) for chunk in chunks]
    scores = [0 if fused else 2 * shape.num_heads * len(chunk) * chunk.end_pos for chunk in chunks]
    peaks = [
        phase.peak_bytes + (score if phase.phase == "attention" else 0)
        for step, score in zip(steps, scores, strict=True)
        for phase in step_phases(shape, step, dtype_bytes=2, workspace=workspace)
    ]
    assert parts.activation_bytes == max(peaks, default=0)
    if shape.num_attention_layers:
        assert parts.attention_scores_bytes == max(scores, default=0)


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
    assert estimates[0].chunked.activation_bytes <= estimates[1].chunked.activation_bytes
    if (
        shape.delta_net is None or not overlap
    ):  # an overlap keeps two more states, where there is a next chunk
        assert estimates[0].chunked_bytes <= estimates[1].chunked_bytes
    assert estimates[0].num_chunks >= estimates[1].num_chunks


@given(shapes() | hybrid_shapes(), st.integers(1, 50), st.integers(50, 200), st.integers(50, 200))
def test_activations_depend_on_the_chunk_and_not_on_the_prompt(
    shape: ModelShape, chunk_size: int, one: int, other: int
) -> None:
    config = ChunkedPrefillConfig(chunk_size=chunk_size)
    activations = [peak_memory_estimate(shape, n, config).chunked.activation_bytes for n in (one, other)]
    assert activations[0] == activations[1]


def test_of_activations_only_rotary_tables_grow_with_the_prompt() -> None:
    shape = ModelShape(36, 4096, 12288, 32, 8, 128, 151_936)
    short, long = (peak_memory_estimate(shape, n, ChunkedPrefillConfig(2048)).chunked for n in (8192, 65_536))
    assert long.activation_bytes - short.activation_bytes == (65_536 - 8192) * 2 * 128 * 2


def test_nothing_needs_nothing() -> None:
    estimate = peak_memory_estimate(SHAPE, 0, ChunkedPrefillConfig())
    assert (estimate.full_bytes, estimate.chunked_bytes, estimate.num_chunks) == (0, 0, 0)
    assert estimate.savings_ratio == 0.0


def test_summary_is_one_line_with_the_numbers() -> None:
    shape = ModelShape(36, 4096, 12288, 32, 8, 128, 151_936)
    assert peak_memory_estimate(shape, 32_768, ChunkedPrefillConfig(chunk_size=2048)).summary() == (
        "32768 tokens in 16 chunks: 4.7 GiB at peak (4.5 GiB of it K/V cache), 7.3 GiB unchunked, 35.6% saved"
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
    estimate = peak_memory_estimate(shape, 10, ChunkedPrefillConfig(chunk_size=4), workspace=NATIVE)
    full, chunked = estimate.full, estimate.chunked
    # One layer in three is left with keys and values.
    assert full.kv_cache_bytes == chunked.kv_cache_bytes == 400
    # 2 x 2 x 3 channels of queries and keys, 4 x 5 of values: 32 go through the convolution
    slot = 2 * (3 * 32 * 2 + 4 * 3 * 5 * 4)
    assert full.recurrent_bytes == chunked.recurrent_bytes == 2 * slot
    # 2 bytes x (32 into the convolution, 20 gate, 2 x 64 for 4 heads each), float32 x 2 x 64
    assert chunked.projection_bytes == 4 * (2 * (32 + 20 + 128) + 4 * 128)
    # The layer's output; out of the convolution; the rule's output; a block of 64 tokens on its way through the rule
    rule = 4 * 64 * (2 * 4 * 3 + 20 + 4 * 64 * 5 + 2 * 4 * 64 // 2 + 2 * 4 * 3 // 2)
    assert chunked.delta_net_bytes == 4 * (2 * 20 + 2 * 32 + 4 * 20) + rule
    assert full.delta_net_bytes == 10 * (2 * 20 + 2 * 32 + 4 * 20) + rule
    assert chunked.activation_bytes == chunked.delta_net_phase_bytes


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


def test_gated_attention_projects_queries_twice_as_wide_and_keeps_the_gates() -> None:
    plain, gated = (
        peak_memory_estimate(
            replace(SHAPE, gated_attention=is_gated), 10, ChunkedPrefillConfig(), workspace=NATIVE
        ).full
        for is_gated in (False, True)
    )
    # queries, all projections for the gates among them, what is attended to; gates in one piece and activated
    assert gated.attention_output_bytes == 2 * 10 * (20 + 60 + 20 + 2 * 20)
    assert gated.mlp_phase_bytes == plain.mlp_phase_bytes  # nothing of them is left by then


def experts_bytes(workspace: Workspace, rows: int) -> int:
    parts = peak_memory_estimate(
        replace(SHAPE, experts=EXPERTS), rows, ChunkedPrefillConfig(0), workspace=workspace
    ).full
    return parts.mlp_bytes


def test_experts_by_hand() -> None:
    """Where it is not known how many experts a token goes to, one may get all tokens."""
    # float32 x (6 + 64 scores, 6 chances, 8 sums); a token's expert, order, number, weight
    routed = 16 * (4 * (70 + 6 + 8) + 28)
    # the expert before, input, filled up, 3 x 64 in whole vectors; or the shared expert: with the last expert's
    # output, 64 gates in float32
    expert, shared = 16 * 2 * (24 + 192), 16 * (2 * 8 + 4 * 64 + 2 * 192)
    assert experts_bytes(Workspace("native"), 16) == routed + max(expert, shared)


def test_experts_share_the_tokens_where_their_number_is_known() -> None:
    all_in_one, some = (
        experts_bytes(Workspace("native", num_active_experts=active), 240) for active in (0, 1)
    )
    assert some < all_in_one


def test_a_dense_layer_counts_where_there_is_one() -> None:
    def mlp_bytes(num_layers: int) -> int:
        experts = replace(EXPERTS, num_layers=num_layers)
        shape = replace(SHAPE, intermediate_size=960, experts=experts)
        return peak_memory_estimate(shape, 16, ChunkedPrefillConfig()).full.mlp_bytes

    assert mlp_bytes(2) == 16 * 2 * 3 * 960
    assert mlp_bytes(3) == experts_bytes(Workspace(), 16)


@given(hybrid_shapes(), st.integers(1, 200), configs())
def test_a_layer_of_another_kind_only_adds_phases_and_state(
    shape: ModelShape, num_tokens: int, config: ChunkedPrefillConfig
) -> None:
    plain = replace(shape, delta_net=None)
    parts, without = (peak_memory_estimate(s, num_tokens, config).chunked for s in (shape, plain))
    assert parts.kv_cache_bytes * shape.num_layers == without.kv_cache_bytes * shape.num_attention_layers
    assert (without.recurrent_bytes, without.delta_net_phase_bytes) == (0, 0)
    assert (parts.recurrent_bytes > 0) == (shape.delta_net is not None)
    assert (parts.attention_phase_bytes > 0) == (shape.num_attention_layers > 0)
    if shape.num_attention_layers:  # each layer then holds what the other kind gave, where that is more
        assert parts.mlp_phase_bytes >= without.mlp_phase_bytes
    assert parts.total_bytes == parts.kv_cache_bytes + parts.recurrent_bytes + parts.activation_bytes


def test_summary_names_the_recurrent_state() -> None:
    net = DeltaNetShape(24, 16, 32, 128, 128, 4)
    shape = ModelShape(32, 2560, 9216, 16, 4, 256, 248_320, True, net)
    assert peak_memory_estimate(shape, 32_768, ChunkedPrefillConfig(chunk_size=2048)).summary() == (
        "32768 tokens in 16 chunks: 1.3 GiB at peak (1.0 GiB of it K/V cache, 98.2 MiB recurrent state), "
        "3.5 GiB unchunked, 63.3% saved"
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
        ({"delta_net": EXPERTS}, "give DeltaNetConfig or None"),
        ({"experts": 8}, "experts=8 is not accepted: give ExpertsConfig or None"),
        ({"gated_attention": 1}, "gated_attention=1 is not accepted: give True or False"),
    ],
)
def test_parts_of_a_shape_fit_it(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        replace(SHAPE, **parts)


def test_delta_net_heads_come_in_whole_groups() -> None:
    with pytest.raises(SettingError, match="num_key_heads=3 is not accepted with num_value_heads=4"):
        replace(NET, num_key_heads=3)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 << 30),
        ("8G", 8 << 30),
        ("1.5 gib", 3 << 29),
        ("512M", 512 << 20),
        ("512MiB", 512 << 20),
        ("3k", 3072),
        ("4096", 4096),
        ("4096B", 4096),
        ("0.1KiB", 102),
        ("2TiB", 2 << 40),
        (4096, 4096),
    ],
)
def test_bytes_as_people_write_them(text: object, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("num_bytes", [1, 1023, 1024, 1 << 20, 3 << 30, 1 << 40])
def test_what_is_shown_can_be_typed(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.05)


@pytest.mark.parametrize(
    "text",
    ["", " ", "-1", "+1", "0", "0GiB", "1e9", "1_000", "8 parsec", "GiB", "1.5.5G", "8 G iB", "\u0661G"],
)
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(SettingError, match=r"budget=.* is not accepted: .*give bytes with a binary unit"):
        parse_bytes(text, "budget")


@pytest.mark.parametrize("value", [None, True, 1.5, b"8GiB", -1, 0])
def test_what_is_no_text_of_bytes(value: object) -> None:
    with pytest.raises(SettingError, match="memory="):
        parse_bytes(value)


@pytest.mark.parametrize(("text", "said"), [("8GB", "8GiB"), ("1.5mb", "1.5MiB")])
def test_a_unit_with_two_meanings_is_refused(text: str, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_bytes(text)
    assert caught.value.accepted == said


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 50), st.lists(st.integers(-9, 110), max_size=5))
def test_the_largest_number_that_fits_is_found_whatever_is_guessed(
    start: int, num_fitting: int, num_more: int, guesses: list[int]
) -> None:
    largest, end = start + num_fitting, start + num_fitting + num_more
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= largest

    assert largest_that(fits, start, end, guesses) == largest
    assert all(start < number < end for number in asked)
    assert len(set(asked)) == len(asked) <= len(guesses) + (end - start).bit_length()


@pytest.mark.parametrize("num_decodes", [0, 7])
@pytest.mark.parametrize("fixed", [None, 0, 1, 100, 5000])
def test_a_prompt_is_refused_below_the_smallest_budget_that_would_do(
    fixed: int | None, num_decodes: int
) -> None:
    model = ActivationModel(SHAPE, 2)
    rules = SizeRules(grid=8, fixed=fixed)
    model.check(rules, 1000, num_decodes=num_decodes)  # there is no budget
    size = 8 if fixed is None else min(fixed or 1000, 1000)
    needed = model.largest_step(1000, size, num_decodes=num_decodes).peak_bytes
    model.check(replace(rules, max_activation_bytes=needed), 1000, num_decodes=num_decodes)
    with pytest.raises(ActivationBudgetError, match=f"give at least {needed} bytes") as error:
        model.check(replace(rules, max_activation_bytes=needed - 1), 1000, num_decodes=num_decodes)
    said = str(error.value)
    assert (f"beside {num_decodes} decodes" in said) == (num_decodes > 0)
    assert (f"a chunk of {size} needs" in said) == (fixed is not None)
    assert ("chunk of 96 at most" in said) == (fixed == 100)
