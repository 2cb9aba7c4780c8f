"""The largest chunk that a budget of activation memory allows, and the smallest budget that allows any."""

from penstock.plan.activation import step_memory
from penstock.plan.activation_parts import REFERENCE, StepMemory
from penstock.plan.checks import check_int
from penstock.plan.shape import ModelShape
from penstock.plan.step_shape import StepShape, Workspace


def largest_step(
    shape: ModelShape,
    prompt_tokens: int,
    chunk: int,
    *,
    dtype_bytes: int,
    workspace: Workspace = REFERENCE,
    num_decodes: int = 0,
) -> StepMemory:
    """The activations of a prompt's largest step, if no chunk of it is longer than `chunk`, with decodes beside it.

    A step needs more the longer it is and the more lies before it, and the last one has logits, so the bound is a
    chunk of full length that ends the prompt: as long as any, wherever chunks are cut. Decodes are taken to be as
    long as the prompt.
    """
    check_int("prompt_tokens", prompt_tokens, 1)
    size = min(check_int("chunk", chunk, 1), prompt_tokens)
    step = StepShape.of_chunk(
        size,
        prompt_tokens - size,
        num_decodes=check_int("num_decodes", num_decodes, 0),
        decode_pasts=num_decodes * prompt_tokens,
        is_last=True,
    )
    return step_memory(shape, step, dtype_bytes=dtype_bytes, workspace=workspace)


def chunk_peak_bytes(
    shape: ModelShape,
    prompt_tokens: int,
    chunk: int,
    *,
    dtype_bytes: int,
    workspace: Workspace = REFERENCE,
    num_decodes: int = 0,
) -> int:
    """The bytes of `largest_step`."""
    return largest_step(
        shape, prompt_tokens, chunk, dtype_bytes=dtype_bytes, workspace=workspace, num_decodes=num_decodes
    ).peak_bytes


def largest_chunk(
    shape: ModelShape,
    prompt_tokens: int,
    budget_bytes: int,
    *,
    dtype_bytes: int,
    workspace: Workspace = REFERENCE,
    grid: int = 1,
    num_decodes: int = 0,
    most: int | None = None,
) -> int | None:
    """The largest chunk, a multiple of `grid` of `most` tokens at most, whose every step fits the budget; None where
    not even one of `grid` tokens does. Where the whole prompt fits, that is its length, rounded up to the grid."""
    check_int("budget_bytes", budget_bytes, 0)
    check_int("grid", grid, 1)

    def fits(num_grids: int) -> bool:
        peak = chunk_peak_bytes(
            shape,
            prompt_tokens,
            num_grids * grid,
            dtype_bytes=dtype_bytes,
            workspace=workspace,
            num_decodes=num_decodes,
        )
        return peak <= budget_bytes

    if not fits(1):
        return None
    whole = -(-prompt_tokens // grid)
    # Peaks never fall as chunks grow: chunks up to `low` grids fit, those above `high` do not, or are not asked for.
    low, high = 1, whole if most is None else max(1, min(whole, check_int("most", most, 1) // grid))
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low * grid


def smallest_budget(
    shape: ModelShape,
    prompt_tokens: int,
    *,
    dtype_bytes: int,
    workspace: Workspace = REFERENCE,
    grid: int = 1,
    num_decodes: int = 0,
) -> int:
    """The least budget with which `largest_chunk` finds a chunk: that of chunks of `grid` tokens."""
    return chunk_peak_bytes(
        shape,
        prompt_tokens,
        check_int("grid", grid, 1),
        dtype_bytes=dtype_bytes,
        workspace=workspace,
        num_decodes=num_decodes,
    )
