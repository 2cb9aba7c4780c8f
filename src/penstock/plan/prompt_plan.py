"""What each chunk size of a prompt needs in memory, and which one is chosen."""

from dataclasses import dataclass

from penstock.errors import SettingError
from penstock.plan.activation import StepMemory
from penstock.plan.chunks import ChunkedPrefillConfig, num_prefill_chunks
from penstock.plan.grids import DEFAULT_CHUNK_SIZE, STATE_GRID
from penstock.plan.memory import ActivationModel, WeightBits, kv_token_bytes, state_slot_bytes, weight_bytes
from penstock.plan.model import ModelConfig, ModelShape
from penstock.plan.step import Workspace
from penstock.plan.units import format_bytes

_SMALLEST_ROW = 128
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


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
    rows: tuple[PlanRow, ...]
    chosen: int | None  # None: no chunk fits the budget
    reason: str
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
    if prompt_tokens > config.max_position:
        raise SettingError(
            "prompt_tokens",
            prompt_tokens,
            f"at most {config.max_position}",
            because=f"the model's context is {config.max_position} tokens",
        )
    planner = _Planner(
        shape=config,
        prompt_tokens=prompt_tokens,
        num_decodes=num_decodes,
        dtype_bytes=_DTYPE_BYTES[dtype],
        workspace=workspace,
        grid=STATE_GRID if config.has_state else 1,
        budget_bytes=budget_bytes,
        bits=bits,
    )
    chosen, reason = planner.choose(chunk)
    sizes = {prompt_tokens} if chosen is None else {prompt_tokens, chosen}
    size = _SMALLEST_ROW
    while size < prompt_tokens:
        sizes.add(size)
        size *= 2
    return Plan(
        model=model,
        dtype=dtype,
        kernels=workspace.kernels,
        prompt_tokens=prompt_tokens,
        num_decodes=num_decodes,
        weights_bytes=planner.weights_bytes,
        kv_cache_bytes=planner.kv_cache_bytes,
        recurrent_bytes=planner.recurrent_bytes,
        budget_bytes=budget_bytes,
        rows=tuple(planner.row(size) for size in sorted(sizes)),
        chosen=chosen,
        reason=reason,
        weights_reason=weights_reason,
    )


@dataclass(frozen=True)
class _Planner:
    shape: ModelShape
    prompt_tokens: int
    num_decodes: int
    dtype_bytes: int
    workspace: Workspace
    grid: int
    budget_bytes: int | None
    bits: WeightBits | None = None  # of weights that are quantised

    @property
    def weights_bytes(self) -> int:
        return weight_bytes(self.shape, self.dtype_bytes, self.bits)

    @property
    def kv_cache_bytes(self) -> int:
        num_tokens = (1 + self.num_decodes) * self.prompt_tokens
        return num_tokens * kv_token_bytes(self.shape, self.dtype_bytes)

    @property
    def _activations(self) -> ActivationModel:
        return ActivationModel(self.shape, self.dtype_bytes, self.workspace)

    @property
    def recurrent_bytes(self) -> int:
        """A step reads one state of each sequence and writes another."""
        num_slots = (1 + self.num_decodes) * ChunkedPrefillConfig().num_state_slots
        return num_slots * state_slot_bytes(self.shape, self.dtype_bytes)

    @property
    def fixed_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.recurrent_bytes

    def choose(self, chunk: int | None) -> tuple[int | None, str]:
        """The size that applies, at most the prompt's length, and why; None where nothing fits."""
        if chunk is not None:
            size = chunk or self.prompt_tokens
            rounded = -(-size // self.grid) * self.grid
            reason = "as asked" + (f", rounded up to a multiple of {self.grid}" if rounded != size else "")
            return min(rounded, self.prompt_tokens), reason + self._against_budget(rounded)
        if self.budget_bytes is None:
            size = min(DEFAULT_CHUNK_SIZE, self.prompt_tokens)
            return size, "the default: neither a chunk nor a budget is given"
        found = self._activations.largest_chunk(
            self.prompt_tokens,
            max(self.budget_bytes - self.fixed_bytes, 0),
            grid=self.grid,
            num_decodes=self.num_decodes,
        )
        if found is not None:
            whole = found >= self.prompt_tokens
            return min(found, self.prompt_tokens), (
                f"the largest that fits {format_bytes(self.budget_bytes)}"
                + (": the whole prompt" if whole else "")
            )
        least = self.fixed_bytes + self._activations.smallest_budget(
            self.prompt_tokens, grid=self.grid, num_decodes=self.num_decodes
        )
        return None, (
            f"no chunk fits {format_bytes(self.budget_bytes)}: weights take {format_bytes(self.weights_bytes)}, keys "
            f"and values {format_bytes(self.kv_cache_bytes)}; the smallest budget that would do is "
            f"{_at_least(least)} ({least} bytes), with chunks of {min(self.grid, self.prompt_tokens)}"
        )

    def row(self, chunk: int) -> PlanRow:
        step, whole = self._step(chunk), self._step(self.prompt_tokens)
        total = self.fixed_bytes + step.peak_bytes
        unchunked = self.fixed_bytes + whole.peak_bytes - self.weights_bytes
        return PlanRow(
            chunk=chunk,
            num_chunks=num_prefill_chunks(self.prompt_tokens, ChunkedPrefillConfig(chunk)),
            activations=step,
            total_bytes=total,
            saved=1 - (total - self.weights_bytes) / unchunked,
            fits=None if self.budget_bytes is None else total <= self.budget_bytes,
        )

    def _step(self, chunk: int) -> StepMemory:
        return self._activations.largest_step(self.prompt_tokens, chunk, num_decodes=self.num_decodes)

    def _against_budget(self, chunk: int) -> str:
        if self.budget_bytes is None:
            return ""
        fits = self.fixed_bytes + self._step(chunk).peak_bytes <= self.budget_bytes
        return f", which {'fits' if fits else 'does not fit'} {format_bytes(self.budget_bytes)}"


def _at_least(num_bytes: int) -> str:
    """Rounded up, so that it is enough when it is typed."""
    unit = 1 << 30 if num_bytes >= 1 << 30 else 1 << 20
    tenths = -(-num_bytes * 10 // unit)
    return f"{tenths / 10:.1f}{'GiB' if unit == 1 << 30 else 'MiB'}"
