"""What each chunk size of a prompt needs in memory, and which one is chosen."""

from dataclasses import dataclass, replace

from penstock.errors import SettingError
from penstock.plan.activation import StepMemory
from penstock.plan.chunks import ChunkedPrefillConfig, num_prefill_chunks
from penstock.plan.grids import DEFAULT_CHUNK_SIZE, STATE_GRID
from penstock.plan.memory import ActivationModel, WeightBits, kv_cache_bytes, state_slot_bytes, weight_bytes
from penstock.plan.model import ModelConfig
from penstock.plan.sizing import LARGEST_CHUNK
from penstock.plan.step import Workspace
from penstock.plan.units import format_bytes

_SMALLEST_ROW = 128
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class PlanRow:
    """One chunk size."""

    chunk: int
    num_chunks: int
    activations: StepMemory
    total_bytes: int  # with weights, keys and values, states
    saved: float  # the share of one pass's memory, weights left aside
    fits: bool | None  # None: no budget


@dataclass(frozen=True)
class Plan:
    """What is needed whatever the chunk, and what each chunk size needs; `chosen` is one of the rows' sizes."""

    model: str
    dtype: str
    kernels: str
    prompt_tokens: int
    num_decodes: int
    weights_bytes: int
    kv_cache_bytes: int
    recurrent_bytes: int
    budget_bytes: int | None
    rows: tuple[PlanRow, ...] = ()
    chosen: int | None = None  # None: no chunk fits the budget
    reason: str = ""
    weights_reason: str = ""  # why they lie in memory as they do, where that was chosen

    @property
    def fixed_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.recurrent_bytes


def make_plan(
    config: ModelConfig,
    prompt_tokens: int,
    *,
    workspace: Workspace,
    model: str,
    dtype: str,
    chunk: int | None = None,
    budget_bytes: int | None = None,
    num_decodes: int = 0,
    bits: WeightBits | None = None,
    weights_reason: str = "",
) -> Plan:
    """Rows for powers of two, the whole prompt, and the chosen size. Chunks of a model with recurrent state are
    multiples of 64."""
    check_length(config, prompt_tokens)
    dtype_bytes, num_sequences = DTYPE_BYTES[dtype], 1 + num_decodes
    # A step reads one state of each sequence and writes another.
    num_slots = num_sequences * ChunkedPrefillConfig().num_state_slots
    plan = Plan(
        model=model,
        dtype=dtype,
        kernels=workspace.kernels,
        prompt_tokens=prompt_tokens,
        num_decodes=num_decodes,
        weights_bytes=weight_bytes(config, dtype_bytes, bits),
        kv_cache_bytes=kv_cache_bytes(
            config, prompt_tokens, dtype_bytes, chunk or LARGEST_CHUNK, num_sequences
        ),
        recurrent_bytes=num_slots * state_slot_bytes(config, dtype_bytes),
        budget_bytes=budget_bytes,
        weights_reason=weights_reason,
    )
    grid = STATE_GRID if config.has_state else 1
    planner = _Planner(plan, ActivationModel(config, dtype_bytes, workspace), grid)
    chosen, reason = planner.choose(chunk)
    sizes = {prompt_tokens} if chosen is None else {prompt_tokens, chosen}
    size = _SMALLEST_ROW
    while size < prompt_tokens:
        sizes.add(size)
        size *= 2
    return replace(plan, rows=tuple(map(planner.row, sorted(sizes))), chosen=chosen, reason=reason)


def check_length(config: ModelConfig, prompt_tokens: int) -> None:
    """Refuse a prompt that the model has no positions for."""
    if prompt_tokens > config.max_position:
        because = f"the model's context is {config.max_position} tokens"
        raise SettingError("prompt_tokens", prompt_tokens, f"at most {config.max_position}", because=because)


@dataclass(frozen=True)
class _Planner:
    """Chooses a chunk for a plan that has none yet, and makes its rows."""

    plan: Plan
    activations: ActivationModel
    grid: int

    def choose(self, chunk: int | None) -> tuple[int | None, str]:
        """The size that applies, at most the prompt's length, and why; None where nothing fits."""
        plan, prompt_tokens = self.plan, self.plan.prompt_tokens
        if chunk is not None:
            size = chunk or prompt_tokens
            rounded = -(-size // self.grid) * self.grid
            reason = "as asked" + (f", rounded up to a multiple of {self.grid}" if rounded != size else "")
            if plan.budget_bytes is not None:
                fits = plan.fixed_bytes + self._step(rounded).peak_bytes <= plan.budget_bytes
                reason += f", which {'fits' if fits else 'does not fit'} {format_bytes(plan.budget_bytes)}"
            return min(rounded, prompt_tokens), reason
        if plan.budget_bytes is None:
            return min(
                DEFAULT_CHUNK_SIZE, prompt_tokens
            ), "the default: neither a chunk nor a budget is given"
        found = self.activations.largest_chunk(
            prompt_tokens,
            max(plan.budget_bytes - plan.fixed_bytes, 0),
            grid=self.grid,
            num_decodes=plan.num_decodes,
        )
        if found is not None:
            whole = ": the whole prompt" if found >= prompt_tokens else ""
            return min(
                found, prompt_tokens
            ), f"the largest that fits {format_bytes(plan.budget_bytes)}{whole}"
        least = plan.fixed_bytes + self.activations.smallest_budget(
            prompt_tokens, grid=self.grid, num_decodes=plan.num_decodes
        )
        return None, (
            f"no chunk fits {format_bytes(plan.budget_bytes)}: weights take {format_bytes(plan.weights_bytes)}, keys "
            f"and values {format_bytes(plan.kv_cache_bytes)}; the smallest budget that would do is "
            f"{_at_least(least)} ({least} bytes), with chunks of {min(self.grid, prompt_tokens)}"
        )

    def row(self, chunk: int) -> PlanRow:
        plan, step = self.plan, self._step(chunk)
        total = plan.fixed_bytes + step.peak_bytes
        unchunked = plan.fixed_bytes + self._step(plan.prompt_tokens).peak_bytes - plan.weights_bytes
        return PlanRow(
            chunk=chunk,
            num_chunks=num_prefill_chunks(plan.prompt_tokens, ChunkedPrefillConfig(chunk)),
            activations=step,
            total_bytes=total,
            saved=1 - (total - plan.weights_bytes) / unchunked,
            fits=None if plan.budget_bytes is None else total <= plan.budget_bytes,
        )

    def _step(self, chunk: int) -> StepMemory:
        return self.activations.largest_step(
            self.plan.prompt_tokens, chunk, num_decodes=self.plan.num_decodes
        )


def _at_least(num_bytes: int) -> str:
    """Rounded up, so that it is enough when it is typed."""
    unit = 1 << 30 if num_bytes >= 1 << 30 else 1 << 20
    tenths = -(-num_bytes * 10 // unit)
    return f"{tenths / 10:.1f}{'GiB' if unit == 1 << 30 else 'MiB'}"
