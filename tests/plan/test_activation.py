"""Laws of a step's activations, and the numbers that they share with what computes them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.plan import DeltaNetShape, ModelShape, activation
from penstock.plan.activation import PassSizes, StepMemory, _attending, step_memory, step_phases
from penstock.plan.step import StepShape, Workspace
from tests.plan.strategies import hybrid_shapes, shapes
from tests.plan.test_memory import workspaces

any_shape = shapes() | hybrid_shapes()
QWEN = ModelShape(36, 4096, 12288, 32, 8, 128, 151_936)


@st.composite
def steps(draw: st.DrawFn) -> StepShape:
    return StepShape.of_chunk(
        draw(st.integers(0, 3000)),
        draw(st.integers(0, 3000)),
        num_decodes=draw(st.integers(0, 40)),
        decode_pasts=draw(st.integers(0, 3000)),
        is_last=draw(st.booleans()),
    )


def peak(shape: ModelShape, step: StepShape, workspace: Workspace, dtype_bytes: int = 2) -> int:
    return step_memory(shape, step, dtype_bytes=dtype_bytes, workspace=workspace).peak_bytes


@given(any_shape, steps(), workspaces(), st.sampled_from([2, 4]))
def test_the_mark_is_the_largest_phase_and_the_sum_of_its_parts(
    shape: ModelShape, step: StepShape, workspace: Workspace, dtype_bytes: int
) -> None:
    phases = step_phases(shape, step, dtype_bytes=dtype_bytes, workspace=workspace)
    mark = step_memory(shape, step, dtype_bytes=dtype_bytes, workspace=workspace)
    assert len({phase.phase for phase in phases}) == len(phases)
    assert mark.peak_bytes == max((phase.peak_bytes for phase in phases), default=0)
    assert mark.peak_bytes == sum(mark.parts.values())
    assert all(size >= 0 for phase in phases for size in phase.parts.values())
    assert (mark.peak_bytes > 0) == (step.num_rows > 0)


@given(any_shape, steps(), workspaces(), st.integers(1, 500), st.sampled_from([2, 4]))
def test_more_work_never_needs_less(
    shape: ModelShape, step: StepShape, workspace: Workspace, more: int, dtype_bytes: int
) -> None:
    least = peak(shape, step, workspace, dtype_bytes)
    longer = replace(step, num_prompt_tokens=step.num_prompt_tokens + more)
    assert peak(shape, longer, workspace, dtype_bytes) >= least
    for name in ("longest_past", "num_decodes", "decode_pasts", "num_logits"):
        larger = replace(step, **{name: getattr(step, name) + more})
        assert peak(shape, larger, workspace, dtype_bytes) >= least, name
    if workspace.kernels != "cuda" or shape.delta_net is None:  # which a GPU runs in another way in float32
        assert peak(shape, step, workspace, 2 * dtype_bytes) >= least


@given(any_shape, steps(), workspaces(), st.integers(1, 500))
def test_of_one_prompt_a_longer_chunk_never_needs_less(
    shape: ModelShape, step: StepShape, workspace: Workspace, more: int
) -> None:
    """The end stays, so that the past gets shorter."""
    if step.num_prompt_tokens and step.longest_past >= more:
        longer = replace(
            step, num_prompt_tokens=step.num_prompt_tokens + more, longest_past=step.longest_past - more
        )
        assert peak(shape, longer, workspace) >= peak(shape, step, workspace)


@given(any_shape, steps(), workspaces())
def test_native_kernels_need_no_more_than_torch(
    shape: ModelShape, step: StepShape, workspace: Workspace
) -> None:
    native, torch = (peak(shape, step, replace(workspace, kernels=kind)) for kind in ("native", "torch"))
    assert native <= torch


def test_a_large_model_by_hand() -> None:
    """2,048 tokens after 30,720, in bfloat16 on native kernels: the feed-forward block is the largest."""
    step = StepShape.of_chunk(2048, 30_720, is_last=True)
    mark = step_memory(QWEN, step, dtype_bytes=2, workspace=Workspace("native", head_norm=True))
    rows = 2048
    assert mark == StepMemory(
        "mlp",
        input_bytes=activation.SMALL_BYTES + rows * (2 * 8 + 2 * 2 * 128) + 32_768 * 2 * 2 * 128,
        hidden_bytes=rows * 2 * 2 * 4096,
        mlp_bytes=rows * 2 * 3 * 12_288,
    )


def test_the_same_on_a_gpu() -> None:
    """What chunks are recorded into is kept, and so is what libraries take."""
    workspace = Workspace("cuda", 1024, head_norm=True, row_floor=512, row_grid=64, library_bytes=32 << 20)
    phases = step_phases(
        QWEN, StepShape.of_chunk(2000, 30_720, is_last=True), dtype_bytes=2, workspace=workspace
    )
    by_name = {phase.phase: phase for phase in phases}
    rows = 2048
    inputs = activation.SMALL_BYTES + (32 << 20) + rows * (3 * 8 + 2 * 2 * 128) + 32_768 * 2 * 2 * 128
    assert by_name["mlp"] == StepMemory(
        "mlp",
        input_bytes=inputs + rows * 2 * 4096,
        hidden_bytes=rows * 2 * 2 * 4096,
        mlp_bytes=rows * 2 * (2 * 12_288 + 4096),
    )
    assert by_name["attention"] == StepMemory(
        "attention",
        input_bytes=inputs + rows * 2 * 4096,
        hidden_bytes=rows * 2 * 2 * 4096,
        projection_bytes=rows * 2 * 6144,
        attention_bytes=rows * 2 * 4096,
    )


def test_many_rows_are_fed_in_slabs() -> None:
    """What one slab takes, and no more for each row than what stays of it."""
    workspace = Workspace("cuda", 1024, head_norm=True, row_grid=64, feed_rows=2560)

    def feeding(num_tokens: int, workspace: Workspace = workspace) -> StepMemory:
        step = StepShape.of_chunk(num_tokens, 0, is_last=True)
        phases = step_phases(QWEN, step, dtype_bytes=2, workspace=workspace)
        return next(phase for phase in phases if phase.phase == "mlp")

    slab = 2560 * 2 * (2 * 12_288 + 4096)
    assert feeding(2560) == feeding(2560, replace(workspace, feed_rows=0))
    assert feeding(2560).mlp_bytes == slab
    for rows in (3072, 5120, 32_768):
        found = feeding(rows)
        assert found.mlp_bytes == slab
        assert found.hidden_bytes == (rows + 2560) * 2 * 2 * 4096


def test_on_a_gpu_pasts_are_copied_only_where_they_must_be() -> None:
    def attending(workspace: Workspace, step: StepShape, dtype_bytes: int = 2) -> int:
        """Beside queries and output."""
        return _attending(PassSizes(QWEN, step, dtype_bytes, workspace, 4))

    alone = Workspace("cuda", 1024)
    first, later = StepShape.of_chunk(64, 0), StepShape.of_chunk(100, 30_720)
    assert attending(alone, first) == 0
    # The queries once more, filled up, what they saw before their tile, and its logarithms.
    assert attending(alone, later) == 128 * (2 * 2 * 4096 + 4 * 32)
    assert attending(alone, StepShape.of_chunk(5000, 0)) == 1024 * (2 * 2 * 4096 + 4 * 32)
    joined = replace(alone, joins_past=True)
    assert attending(joined, later) - attending(alone, later) == (30_720 + 100) * 2 * 2 * 1024
    # Heads of a group have keys and values of their own in float32.
    pieces = 128 * (2 * 4 * 4096 + 4 * 32)
    assert attending(alone, later, 4) == pieces + 30_820 * 2 * 4 * 4096
    decodes = StepShape(0, num_decodes=16, decode_pasts=160_000, num_logits=16)
    assert attending(joined, decodes) == 4 * 16 * 64 * (4096 + 32)


def test_delta_nets_on_a_gpu_run_in_pieces() -> None:
    net = DeltaNetShape(2, 16, 32, 128, 128, 4)
    shape = ModelShape(4, 2048, 8192, 16, 2, 256, 1000, delta_net=net)

    def carrying(num_tokens: int, dtype_bytes: int) -> int:
        step = StepShape.of_chunk(num_tokens, 0)
        phases = step_phases(shape, step, dtype_bytes=dtype_bytes, workspace=Workspace("cuda", 1024))
        return next(phase.delta_net_bytes for phase in phases if phase.phase == "delta_net")

    state = 4 * 32 * 128 * 128
    inputs = 2 * (2 * 16 * 128 + 4096) + 4 * 2 * 32  # of a token: queries, keys, values, gates
    blocks = 2 * (32 * 64 + 4096 + 3 * 4096) + state // 2 // 64  # inverses, erased, written, output; states
    out = 2 * 4096
    assert carrying(4096, 2) == 4096 * (out + inputs + blocks) + 2 * state
    assert carrying(8192, 2) == 4096 * (2 * out + inputs + blocks) + 2 * state + 4096 * out
    assert carrying(64, 4) == 64 * (2 * out + 2 * (inputs - 256) + 256 + 4 * 4096) + 2 * state


def test_prompts_have_their_own_tiles_and_pasts_in_torch_only() -> None:
    def attention(workspace: Workspace) -> int:
        phases = step_phases(QWEN, StepShape.of_chunk(64, 30_720), dtype_bytes=2, workspace=workspace)
        return next(phase.attention_bytes for phase in phases if phase.phase == "attention")

    torch, joined = (Workspace(joins_past=is_joined) for is_joined in (False, True))
    assert attention(joined) - attention(torch) == (30_720 + 64) * 2 * 2 * 1024
    assert attention(torch) > 512 * 2 * 2 * 1024  # the tile's keys and values, copied
    assert attention(replace(joined, kernels="native")) == 64 * 2 * 4096


def test_decodes_alone_are_not_padded() -> None:
    decodes = StepShape(0, num_decodes=3, decode_pasts=300, num_logits=3)
    beside = replace(decodes, num_prompt_tokens=1)
    slab = Workspace(row_slab=128)
    assert peak(QWEN, decodes, slab) < peak(QWEN, beside, slab) / 2


@pytest.mark.parametrize("dtype_bytes", [0, -1, 2.0, True, "2"])
def test_dtype_is_checked(dtype_bytes: int) -> None:
    with pytest.raises(SettingError, match="dtype_bytes="):
        step_memory(QWEN, StepShape(1), dtype_bytes=dtype_bytes)
