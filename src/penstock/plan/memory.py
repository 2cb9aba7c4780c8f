"""What a prompt takes: weights, cache and activations; and the largest chunk that fits a budget."""

import math
from collections import Counter
from dataclasses import dataclass

from penstock.errors import PromptError, SettingError
from penstock.plan.activation import REFERENCE, StepMemory, step_memory, step_phases
from penstock.plan.admission import WindowRoom
from penstock.plan.checks import check_int
from penstock.plan.chunks import ChunkedPrefillConfig, num_prefill_chunks, prefill_chunk_span
from penstock.plan.grids import BLOCK_TOKENS, LANES, whole_lanes
from penstock.plan.model import ModelConfig, input_size
from penstock.plan.sizing import SizeRules, largest_that
from penstock.plan.step import Span, StepShape, Workspace
from penstock.plan.units import format_bytes

# The delta rule keeps its state in float32, and its layers the small weights.
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class WeightBits:
    """How many bits a value of quantised weights takes, with its part of scales: in matrices, and in the embedding
    and the head, which are one where they are tied."""

    matrices: float
    vocabulary: float
    is_tied: bool


@dataclass(frozen=True)
class PrefillMemoryParts:
    """The K/V cache, the recurrent state, and the high-water mark of each kind of activation over the chunks of a
    prefill. `mlp_bytes` is of the dense feed-forward block or the experts, whichever needs more;
    `attention_output_bytes` has rotated queries, what they attend to, and the kernel's work space.

    The phases of a layer never live at the same time: the peak is the largest phase, not a sum of the parts.
    """

    kv_cache_bytes: int
    hidden_bytes: int = 0
    projection_bytes: int = 0
    attention_output_bytes: int = 0
    attention_scores_bytes: int = 0
    mlp_bytes: int = 0
    logits_bytes: int = 0
    attention_phase_bytes: int = 0
    mlp_phase_bytes: int = 0
    head_phase_bytes: int = 0
    recurrent_bytes: int = 0
    delta_net_bytes: int = 0
    delta_net_phase_bytes: int = 0
    input_bytes: int = 0  # token ids, positions, rotary tables
    start_phase_bytes: int = 0

    @property
    def activation_bytes(self) -> int:
        return max(
            self.start_phase_bytes,
            self.attention_phase_bytes,
            self.delta_net_phase_bytes,
            self.mlp_phase_bytes,
            self.head_phase_bytes,
        )

    @property
    def total_bytes(self) -> int:
        return self.kv_cache_bytes + self.recurrent_bytes + self.activation_bytes


@dataclass(frozen=True)
class PrefillMemoryEstimate:
    """Peak memory of one prefill: the prompt's K/V cache, the recurrent state where a model has one, and the
    activations. Weights are not counted."""

    prompt_tokens: int
    num_chunks: int
    full: PrefillMemoryParts
    chunked: PrefillMemoryParts

    @property
    def full_bytes(self) -> int:
        return self.full.total_bytes

    @property
    def chunked_bytes(self) -> int:
        return self.chunked.total_bytes

    @property
    def savings_ratio(self) -> float:
        """The share of the whole prompt's peak that chunking saves; 0.0 where it saves nothing, below it where an
        overlap's states take more than the chunks save."""
        if self.chunked_bytes == self.full_bytes:
            return 0.0
        return 1 - self.chunked_bytes / self.full_bytes

    def summary(self) -> str:
        chunks = "1 chunk" if self.num_chunks == 1 else f"{self.num_chunks} chunks"
        cache = f"{format_bytes(self.chunked.kv_cache_bytes)} of it K/V cache"
        if self.chunked.recurrent_bytes:
            cache += f", {format_bytes(self.chunked.recurrent_bytes)} recurrent state"
        return (
            f"{self.prompt_tokens} tokens in {chunks}: {format_bytes(self.chunked_bytes)} at peak ({cache}), "
            f"{format_bytes(self.full_bytes)} unchunked, {self.savings_ratio:.1%} saved"
        )


def peak_memory_estimate(
    shape: ModelConfig,
    prompt_tokens: int,
    config: ChunkedPrefillConfig,
    *,
    dtype_bytes: int = 2,
    kv_dtype_bytes: int | None = None,
    fused_attention: bool = True,
    logits_dtype_bytes: int = 4,
    workspace: Workspace = REFERENCE,
) -> PrefillMemoryEstimate:
    """Peak memory of a prompt of `prompt_tokens` tokens, whole and cut as `config` says.

    `kv_dtype_bytes` is `dtype_bytes` unless given. Fused attention holds no scores. `workspace` says what computes a
    step: see `penstock.plan.activation`.
    """
    check_int("prompt_tokens", prompt_tokens, 0)
    check_int("dtype_bytes", dtype_bytes, 1)
    check_int("logits_dtype_bytes", logits_dtype_bytes, 1)
    kv_dtype_bytes = dtype_bytes if kv_dtype_bytes is None else check_int("kv_dtype_bytes", kv_dtype_bytes, 1)

    def parts(config: ChunkedPrefillConfig) -> PrefillMemoryParts:
        spans = _worst_spans(prompt_tokens, config)
        most: Counter[str] = Counter()  # of each kind of activation, of the scores and of each phase
        for span in spans:
            # [heads, chunk, past + chunk]; past + chunk is where the chunk ends
            scores = 0 if fused_attention else dtype_bytes * shape.num_heads * len(span) * span.end
            for phase in step_phases(
                shape,
                # Any may be the last, where chunks are balanced.
                StepShape.of_chunk(len(span), span.start, is_last=True),
                dtype_bytes=dtype_bytes,
                workspace=workspace,
                logits_dtype_bytes=logits_dtype_bytes,
            ):
                own = scores if phase.phase == "attention" else 0
                most |= Counter({f"{name}_bytes": size for name, size in phase.parts.items()})
                most |= Counter(
                    {"attention_scores_bytes": own, f"{phase.phase}_phase_bytes": phase.peak_bytes + own}
                )
        num_slots = (config if len(spans) > 1 else ChunkedPrefillConfig()).num_state_slots
        return PrefillMemoryParts(
            kv_cache_bytes=kv_cache_bytes(shape, prompt_tokens, kv_dtype_bytes, config.chunk_size),
            recurrent_bytes=num_slots * state_slot_bytes(shape, dtype_bytes) if spans else 0,
            attention_output_bytes=most.pop("attention_bytes", 0),
            **most,
        )

    return PrefillMemoryEstimate(
        prompt_tokens=prompt_tokens,
        num_chunks=num_prefill_chunks(prompt_tokens, config),
        full=parts(ChunkedPrefillConfig(chunk_size=0)),
        chunked=parts(config),
    )


def kv_token_bytes(shape: ModelConfig, kv_dtype_bytes: int) -> int:
    """The keys and values of one token in layers that keep them to the end: 2 x [layers, kv_heads, head_dim], or the
    latents that are both."""
    parts = shape.num_kv_parts * shape.num_full_layers
    return kv_dtype_bytes * parts * math.prod(shape.kv_heads(windowed=False))


def kv_cache_bytes(
    shape: ModelConfig, num_tokens: int, kv_dtype_bytes: int, step_tokens: int, num_sequences: int = 1
) -> int:
    """The keys and values of sequences of so many tokens each, whose steps write `step_tokens` together, or all of a
    sequence (0): those of layers with a window are freed behind it."""
    total = num_sequences * num_tokens * kv_token_bytes(shape, kv_dtype_bytes)
    if (window := shape.window) is not None and num_tokens:
        most = num_sequences * -(-num_tokens // BLOCK_TOKENS)
        num_blocks = WindowRoom(num_sequences, step_tokens).num_blocks(window.size, BLOCK_TOKENS, most)
        layer_bytes = kv_dtype_bytes * 2 * shape.num_kv_heads * shape.head_dim
        held = min(num_blocks * BLOCK_TOKENS, num_sequences * num_tokens)
        total += held * window.num_layers * layer_bytes
    return total


def state_slot_bytes(shape: ModelConfig, dtype_bytes: int) -> int:
    """One recurrent state: in each such layer the convolution's last inputs and a matrix a head."""
    net = shape.recurrent
    if net is None:
        return 0
    tail = dtype_bytes * (net.conv_kernel - 1) * net.conv_size  # [taps - 1, conv]
    return net.num_layers * (tail + _FLOAT32_BYTES * math.prod(net.matrix_shape))


def weight_bytes(shape: ModelConfig, dtype_bytes: int, bits: WeightBits | None = None) -> int:
    """The weights as they lie in memory: matrices in whole vectors, and the output head beside the embedding, also
    where a file has them as one, unless they are quantised. Biases and the norms of single heads, which no size tells
    of, are left out."""
    check_int("dtype_bytes", dtype_bytes, 1)
    bits = bits or WeightBits(8 * dtype_bytes, 8 * dtype_bytes, is_tied=False)
    hidden = shape.hidden_size
    norms = (2 * shape.num_layers + 1) * hidden
    vocabulary = (1 if bits.is_tied else 2) * shape.vocab_size * hidden  # embedding, head
    elements = shape.num_attention_weights
    elements += shape.num_dense_layers * 3 * whole_lanes(shape.intermediate_size) * hidden
    float32_elements = 0
    if net := shape.recurrent:
        elements += net.num_layers * (input_size(net) + net.value_size) * hidden
        float32_elements = net.num_layers * net.num_weights
    if experts := shape.experts:
        widths = experts.num_experts * whole_lanes(experts.intermediate_size)
        widths += whole_lanes(experts.shared_intermediate_size)
        routed = experts.num_experts + (LANES if experts.shared_intermediate_size else 0)
        elements += experts.num_layers * (3 * widths + routed) * hidden
    quantised = math.ceil((bits.matrices * elements + bits.vocabulary * vocabulary) / 8)
    return quantised + dtype_bytes * norms + _FLOAT32_BYTES * float32_elements


def vocabulary_bytes(shape: ModelConfig, dtype_bytes: int, bits: WeightBits | None = None) -> int:
    """The embedding, or the output head: either takes as much."""
    per_value = bits.vocabulary if bits else 8 * dtype_bytes
    return math.ceil(per_value * shape.vocab_size * shape.hidden_size / 8)


def _worst_spans(num_tokens: int, config: ChunkedPrefillConfig) -> tuple[Span, ...]:
    """The chunks among which every maximum lies: the last, and the one before it.

    All chunks but the last are equally long, so the latest of them has the longest past. The last may be
    shorter, with a longer past still.
    """
    num_chunks = num_prefill_chunks(num_tokens, config)
    return tuple(
        prefill_chunk_span(index, num_tokens, config) for index in range(max(0, num_chunks - 2), num_chunks)
    )


class ActivationBudgetError(PromptError, SettingError):
    """A memory budget that a prompt cannot be read within."""


@dataclass(frozen=True)
class ActivationModel:
    """The activations of a model's steps, by arithmetic."""

    shape: ModelConfig
    dtype_bytes: int
    workspace: Workspace = REFERENCE

    def step(self, step: StepShape) -> StepMemory:
        return step_memory(self.shape, step, dtype_bytes=self.dtype_bytes, workspace=self.workspace)

    def step_bytes(self, step: StepShape) -> int:
        return self.step(step).peak_bytes

    def largest_step(self, prompt_tokens: int, chunk: int, *, num_decodes: int = 0) -> StepMemory:
        """A prompt's largest step, if no chunk of it is longer than `chunk`, with decodes beside it.

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
        return self.step(step)

    def largest_chunk(
        self,
        prompt_tokens: int,
        budget_bytes: int,
        *,
        grid: int = 1,
        num_decodes: int = 0,
        most: int | None = None,
    ) -> int | None:
        """The largest chunk, a multiple of `grid` of `most` tokens at most, whose every step fits the budget; None
        where not even one of `grid` tokens does. Where the whole prompt fits, that is its length, rounded up to the
        grid."""
        check_int("budget_bytes", budget_bytes, 0)
        check_int("grid", grid, 1)

        def fits(num_grids: int) -> bool:
            step = self.largest_step(prompt_tokens, num_grids * grid, num_decodes=num_decodes)
            return step.peak_bytes <= budget_bytes

        if not fits(1):
            return None
        whole = -(-prompt_tokens // grid)
        longest = whole if most is None else max(1, min(whole, check_int("most", most, 1) // grid))
        return grid * largest_that(fits, 1, longest + 1)  # peaks never fall as chunks grow

    def smallest_budget(self, prompt_tokens: int, *, grid: int = 1, num_decodes: int = 0) -> int:
        """The least budget with which `largest_chunk` finds a chunk: that of chunks of `grid` tokens."""
        return self.largest_step(
            prompt_tokens, check_int("grid", grid, 1), num_decodes=num_decodes
        ).peak_bytes

    def check(self, rules: SizeRules, num_prompt: int, *, num_decodes: int = 0) -> None:
        """Refuse a prompt that cannot be read within the budget, with so many decodes beside each chunk: say the
        smallest budget that would do, and the largest chunk that fits if the chunk is fixed."""
        budget = rules.max_activation_bytes
        if budget is None:
            return
        fixed = None if rules.fixed is None else min(rules.fixed or num_prompt, num_prompt)
        needed = self.smallest_budget(num_prompt, grid=fixed or rules.grid, num_decodes=num_decodes)
        if needed <= budget:
            return
        largest = self.largest_chunk(num_prompt, budget, grid=rules.grid, num_decodes=num_decodes)
        what = "the smallest chunk" if fixed is None else f"a chunk of {fixed}"
        beside = f" beside {num_decodes} decodes" if num_decodes else ""
        smaller = f", or use a chunk of {largest} at most" if largest is not None else ""
        raise ActivationBudgetError(
            f"max_activation={format_bytes(budget)} is not accepted for a prompt of {num_prompt} tokens: {what} "
            f"needs {format_bytes(needed)}{beside}; give at least {needed} bytes{smaller}"
        )
