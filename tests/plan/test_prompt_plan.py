"""What each chunk size of a prompt needs, and which is chosen: on shapes of published models, by arithmetic."""

from typing import Any

import pytest

from penstock.errors import SettingError
from penstock.plan.memory import ActivationModel, WeightBits, kv_token_bytes, state_slot_bytes, weight_bytes
from penstock.plan.model import DeltaNetConfig, ModelConfig
from penstock.plan.prompt_plan import Plan, make_plan
from penstock.plan.step import Workspace

QWEN3_8B = ModelConfig(36, 4096, 12_288, 32, 8, 128, 151_936, max_position=131_072)
HYBRID = ModelConfig(
    24,
    1024,
    3584,
    8,
    2,
    256,
    248_320,
    max_position=262_144,
    delta_net=DeltaNetConfig(
        num_layers=18,
        num_key_heads=16,
        num_value_heads=16,
        key_head_dim=128,
        value_head_dim=128,
        conv_kernel=4,
    ),
)
MIB = 1 << 20


def plan_of(config: ModelConfig, prompt_tokens: int, *, kernels: Any = "native", **settings: Any) -> Plan:
    return make_plan(
        config, prompt_tokens, workspace=Workspace(kernels), model="m", dtype="bfloat16", **settings
    )


@pytest.mark.parametrize("config", [QWEN3_8B, HYBRID], ids=["attention", "hybrid"])
def test_the_largest_chunk_that_fits_is_chosen(config: ModelConfig) -> None:
    budget = 24_000 * MIB
    made = plan_of(config, 50_000, budget_bytes=budget)
    assert made.chosen is not None
    rows = {row.chunk: row for row in made.rows}
    assert rows[made.chosen].fits
    assert made.weights_bytes == weight_bytes(config, 2)
    assert made.kv_cache_bytes == 50_000 * kv_token_bytes(config, 2)
    assert made.recurrent_bytes == 2 * state_slot_bytes(config, 2)
    assert made.fixed_bytes == made.weights_bytes + made.kv_cache_bytes + made.recurrent_bytes
    found = ActivationModel(config, 2, Workspace("native")).largest_chunk(
        50_000, budget - made.fixed_bytes, grid=64 if config is HYBRID else 1
    )
    assert found is not None
    assert made.chosen == min(found, 50_000)
    whole = made.rows[-1]
    for row in made.rows:
        assert row.fits == (row.total_bytes <= budget)
        assert row.total_bytes == made.fixed_bytes + row.activations.peak_bytes
        assert row.num_chunks == -(-50_000 // row.chunk)
        rest = [each.total_bytes - made.weights_bytes for each in (row, whole)]
        assert row.saved == pytest.approx(1 - rest[0] / rest[1])
    assert [row.total_bytes for row in made.rows] == sorted(row.total_bytes for row in made.rows)
    assert whole.saved == 0


def test_rows_are_powers_of_two_the_chosen_size_and_the_whole_prompt() -> None:
    made = plan_of(QWEN3_8B, 1000, chunk=300)
    assert [row.chunk for row in made.rows] == [128, 256, 300, 512, 1000]
    assert [row.num_chunks for row in made.rows] == [8, 4, 4, 2, 1]
    assert [row.chunk for row in plan_of(QWEN3_8B, 128).rows] == [128]
    assert [row.fits for row in made.rows] == [None] * 5
    assert (made.kernels, made.dtype, made.prompt_tokens, made.num_decodes) == ("native", "bfloat16", 1000, 0)


def test_the_default_is_chosen_where_nothing_is_said() -> None:
    assert plan_of(QWEN3_8B, 20_000).chosen == 512
    assert plan_of(QWEN3_8B, 100).chosen == 100
    assert plan_of(QWEN3_8B, 20_000).reason.startswith("the default")


def test_a_given_chunk_is_chosen_and_compared_with_the_budget() -> None:
    fits = plan_of(QWEN3_8B, 20_000, chunk=1000, budget_bytes=1 << 40)
    assert (fits.chosen, fits.reason) == (1000, "as asked, which fits 1.0 TiB")
    too_much = plan_of(QWEN3_8B, 20_000, chunk=1000, budget_bytes=1 << 30)
    assert (too_much.chosen, too_much.reason) == (1000, "as asked, which does not fit 1.0 GiB")
    exact = next(row for row in fits.rows if row.chunk == 1000).total_bytes
    assert "which fits" in plan_of(QWEN3_8B, 20_000, chunk=1000, budget_bytes=exact).reason
    assert plan_of(QWEN3_8B, 20_000, chunk=0).chosen == 20_000
    hybrid = plan_of(HYBRID, 20_000, chunk=100)
    assert (hybrid.chosen, hybrid.reason) == (128, "as asked, rounded up to a multiple of 64")
    assert plan_of(HYBRID, 20_000, chunk=128).reason == "as asked"
    assert plan_of(HYBRID, 100, chunk=90).chosen == 100


def test_a_budget_that_is_too_small_names_the_smallest_that_is_not() -> None:
    made = plan_of(QWEN3_8B, 20_000, budget_bytes=1 << 30)
    assert made.chosen is None
    assert not any(row.fits for row in made.rows)
    least = int(made.reason.split("(")[1].split()[0])
    assert plan_of(QWEN3_8B, 20_000, budget_bytes=least).chosen == 1
    assert plan_of(QWEN3_8B, 20_000, budget_bytes=least - 1).chosen is None
    typed = float(made.reason.split("would do is ")[1].split("GiB")[0])
    assert 0 <= typed * (1 << 30) - least <= 0.1 * (1 << 30)
    whole = plan_of(QWEN3_8B, 20_000, budget_bytes=1 << 40)
    assert (whole.chosen, whole.reason) == (20_000, "the largest that fits 1.0 TiB: the whole prompt")


def test_a_small_budget_is_named_in_mebibytes() -> None:
    tiny = ModelConfig(1, 64, 128, 2, 1, 32, 500)
    made = plan_of(tiny, 100, budget_bytes=1)
    typed = float(made.reason.split("would do is ")[1].split("MiB")[0])
    least = int(made.reason.split("(")[1].split()[0])
    assert 0 <= typed * MIB - least <= 0.1 * MIB


def test_answers_beside_it_have_keys_and_values_and_states() -> None:
    alone, beside = (plan_of(HYBRID, 10_000, num_decodes=count) for count in (0, 3))
    assert beside.kv_cache_bytes == 4 * alone.kv_cache_bytes
    assert beside.recurrent_bytes == 4 * alone.recurrent_bytes > 0
    assert beside.rows[0].activations.peak_bytes > alone.rows[0].activations.peak_bytes


def test_weights_and_kernels_count() -> None:
    native, torch = (plan_of(QWEN3_8B, 10_000, kernels=kind) for kind in ("native", "torch"))
    assert all(a.total_bytes <= b.total_bytes for a, b in zip(native.rows, torch.rows, strict=True))
    bits = WeightBits(4.5, 8.5, is_tied=False)
    assert plan_of(QWEN3_8B, 100, bits=bits).weights_bytes == weight_bytes(QWEN3_8B, 2, bits)
    single = make_plan(QWEN3_8B, 100, workspace=Workspace("native"), model="m", dtype="float32")
    assert single.kv_cache_bytes == 100 * kv_token_bytes(QWEN3_8B, 4)


def test_a_prompt_beyond_the_context_is_refused() -> None:
    assert plan_of(QWEN3_8B, 131_072).prompt_tokens == 131_072
    with pytest.raises(SettingError) as caught:
        plan_of(QWEN3_8B, 131_073)
    assert (caught.value.setting, caught.value.value) == ("prompt_tokens", 131_073)
