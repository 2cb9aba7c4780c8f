"""The chunk that a budget allows: never over it, never smaller than it must be, and a refusal says what would do."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.plan import DeltaNetShape, ExpertsShape, ModelShape, create_prefill_chunks_at
from penstock.plan.memory import ActivationModel
from penstock.plan.step import StepShape, Workspace
from tests.plan.test_memory import workspaces

LLAMA = ModelShape(16, 2048, 8192, 32, 8, 64, 128_256)


@st.composite
def real_shapes(draw: st.DrawFn) -> ModelShape:
    """Sizes as published models have them, of every kind."""
    num_kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    num_layers = draw(st.integers(2, 80))
    net = DeltaNetShape(num_layers // 2, 16, draw(st.sampled_from([16, 32])), 128, 128, 4)
    experts = ExpertsShape(
        num_layers, draw(st.sampled_from([8, 128, 512])), 768, draw(st.sampled_from([0, 512]))
    )
    return ModelShape(
        num_layers=num_layers,
        hidden_size=draw(st.sampled_from([576, 1024, 2048, 4096, 8192])),
        intermediate_size=draw(st.sampled_from([1536, 3072, 8192, 28_672])),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 3, 4, 8])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([64, 128, 256])),
        vocab_size=draw(st.sampled_from([32_000, 49_152, 151_936, 248_320])),
        gated_attention=draw(st.booleans()),
        delta_net=draw(st.sampled_from([None, net])),
        experts=draw(st.sampled_from([None, experts])),
    )


@settings(max_examples=200)
@given(
    shape=real_shapes(),
    workspace=workspaces(),
    prompt_tokens=st.integers(1, 200_000),
    budget_bytes=st.integers(0, 1 << 33) | st.integers(0, 1 << 25),
    grid=st.sampled_from([1, 64]),
    num_decodes=st.integers(0, 64),
    dtype_bytes=st.sampled_from([2, 4]),
    data=st.data(),
)
def test_the_largest_chunk_fits_is_maximal_and_a_refusal_names_what_would_do(
    shape: ModelShape,
    workspace: Workspace,
    prompt_tokens: int,
    budget_bytes: int,
    grid: int,
    num_decodes: int,
    dtype_bytes: int,
    data: st.DataObject,
) -> None:
    model = ActivationModel(shape, dtype_bytes, workspace)

    def fitted(budget: int) -> int | None:
        return model.largest_chunk(prompt_tokens, budget, grid=grid, num_decodes=num_decodes)

    def peak(chunk: int) -> int:
        return model.largest_step(prompt_tokens, chunk, num_decodes=num_decodes).peak_bytes

    least = model.smallest_budget(prompt_tokens, grid=grid, num_decodes=num_decodes)
    chunk = fitted(budget_bytes)
    if chunk is None:
        assert budget_bytes < least
        assert fitted(least) is not None
        assert fitted(least - 1) is None
        return
    assert budget_bytes >= least
    assert chunk % grid == 0
    assert peak(chunk) <= budget_bytes
    whole = -(-prompt_tokens // grid) * grid
    assert chunk <= whole
    if chunk < whole:
        assert peak(chunk + grid) > budget_bytes
        larger = data.draw(st.integers(chunk // grid + 1, whole // grid)) * grid
        assert peak(larger) > budget_bytes

    # Every step of the prompt keeps to it, with chunks cut anywhere but no longer.
    end = data.draw(st.integers(1, min(chunk, prompt_tokens)))
    start = data.draw(st.integers(end, prompt_tokens)) - end
    step = StepShape.of_chunk(
        end,
        start,
        num_decodes=num_decodes,
        decode_pasts=num_decodes * prompt_tokens,
        is_last=start + end == prompt_tokens,
    )
    assert model.step_bytes(step) <= budget_bytes


def test_a_limit_on_the_chunk_is_kept() -> None:
    def fitted(most: int | None, grid: int = 1) -> int | None:
        return ActivationModel(LLAMA, 2).largest_chunk(10_000, 1 << 40, most=most, grid=grid)

    assert (fitted(None), fitted(700), fitted(20_000)) == (10_000, 700, 10_000)
    assert (fitted(None, 64), fitted(700, 64), fitted(20, 64)) == (10_048, 640, 64)


def test_more_memory_never_gives_a_smaller_chunk() -> None:
    model = ActivationModel(LLAMA, 2)
    sizes = [model.largest_chunk(30_000, budget << 20) or 0 for budget in range(1, 400, 7)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0
    assert 512 < sizes[-1] < 30_000


def test_the_largest_step_is_that_of_all_chunks() -> None:
    model = ActivationModel(LLAMA, 2)
    ends = [700, 1400, 2100, 2800, 3000]
    peaks = [
        model.step_bytes(StepShape.of_chunk(len(chunk), chunk.start_pos, is_last=chunk.is_last))
        for chunk in create_prefill_chunks_at(range(3000), ends)
    ]
    bound = model.largest_step(3000, 700).peak_bytes
    assert max(peaks) <= bound <= 1.05 * max(peaks)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens=0"),
        ({"budget_bytes": -1}, "budget_bytes=-1"),
        ({"grid": 0}, "grid=0"),
        ({"most": 0}, "most=0"),
        ({"num_decodes": -1}, "num_decodes=-1"),
        ({"dtype_bytes": 0}, "dtype_bytes=0"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"prompt_tokens": 100, "budget_bytes": 1 << 40, **changes}
    model = ActivationModel(LLAMA, arguments.pop("dtype_bytes", 2))
    with pytest.raises(SettingError, match=said):
        model.largest_chunk(**arguments)
