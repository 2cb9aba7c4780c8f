"""How much memory a prefill needs at its peak, whole and in chunks, from the model's shape alone."""

from dataclasses import dataclass

from penstock.plan.checks import check_int
from penstock.plan.chunks import num_prefill_chunks, prefill_chunk_span
from penstock.plan.config import STATE_GRID, ChunkedPrefillConfig
from penstock.plan.request import Span
from penstock.plan.shape import DeltaNetShape, ExpertsShape, ModelShape
from penstock.plan.units import format_bytes

# The delta rule keeps its state in float32; so do a router its probabilities and experts their sum.
_FLOAT32_BYTES = 4
# Blocks of a delta rule that are prepared together where there are threads for it.
_MOST_BLOCKS_AT_ONCE = 8
# The heads' decays and write strengths are projected with rows of whole vectors.
_VECTOR = 64


@dataclass(frozen=True)
class PrefillMemoryParts:
    """The K/V cache, the recurrent state, and the high-water mark of each kind of activation over the chunks of a
    prefill. `mlp_bytes` is of the dense feed-forward block or the experts, whichever needs more.

    The phases of a layer never live at the same time: the peak is the largest phase, not a sum of the parts.
    """

    kv_cache_bytes: int
    hidden_bytes: int
    projection_bytes: int
    attention_output_bytes: int
    attention_scores_bytes: int
    mlp_bytes: int
    logits_bytes: int
    attention_phase_bytes: int
    mlp_phase_bytes: int
    head_phase_bytes: int
    recurrent_bytes: int = 0
    delta_net_bytes: int = 0
    delta_net_phase_bytes: int = 0

    @property
    def activation_bytes(self) -> int:
        return max(
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
    shape: ModelShape,
    prompt_tokens: int,
    config: ChunkedPrefillConfig,
    *,
    dtype_bytes: int = 2,
    kv_dtype_bytes: int | None = None,
    fused_attention: bool = True,
    logits_dtype_bytes: int = 4,
) -> PrefillMemoryEstimate:
    """Peak memory of a prompt of `prompt_tokens` tokens, whole and cut as `config` says.

    `kv_dtype_bytes` is `dtype_bytes` unless given. Fused attention holds no scores.
    """
    check_int("prompt_tokens", prompt_tokens, 0)
    check_int("dtype_bytes", dtype_bytes, 1)
    check_int("logits_dtype_bytes", logits_dtype_bytes, 1)
    kv_dtype_bytes = dtype_bytes if kv_dtype_bytes is None else check_int("kv_dtype_bytes", kv_dtype_bytes, 1)

    def parts(config: ChunkedPrefillConfig) -> PrefillMemoryParts:
        return _parts(
            shape,
            prompt_tokens,
            config,
            dtype_bytes=dtype_bytes,
            kv_dtype_bytes=kv_dtype_bytes,
            fused_attention=fused_attention,
            logits_dtype_bytes=logits_dtype_bytes,
        )

    return PrefillMemoryEstimate(
        prompt_tokens=prompt_tokens,
        num_chunks=num_prefill_chunks(prompt_tokens, config),
        full=parts(ChunkedPrefillConfig(chunk_size=0)),
        chunked=parts(config),
    )


def _parts(
    shape: ModelShape,
    num_tokens: int,
    config: ChunkedPrefillConfig,
    *,
    dtype_bytes: int,
    kv_dtype_bytes: int,
    fused_attention: bool,
    logits_dtype_bytes: int,
) -> PrefillMemoryParts:
    spans = _worst_spans(num_tokens, config)
    chunk = max(map(len, spans), default=0)
    query_size = shape.num_heads * shape.head_dim
    kv_size = shape.num_kv_heads * shape.head_dim
    has_attention = shape.num_attention_layers > 0

    # Bytes per token of a chunk, by the tensors that hold them.
    hidden = dtype_bytes * 2 * shape.hidden_size  # residual, normed input: 2 x [chunk, hidden]
    # queries [chunk, heads, head_dim], with their gates twice that; keys and values 2 x [chunk, kv_heads, head_dim]
    projected_size = (2 if shape.gated_attention else 1) * query_size + 2 * kv_size
    projection = dtype_bytes * projected_size if has_attention else 0
    attention_output = dtype_bytes * query_size if has_attention else 0  # [chunk, heads, head_dim]
    mlp = _mlp_per_token(shape, dtype_bytes)

    def scores_bytes(span: Span) -> int:
        # [heads, chunk, past + chunk]; past + chunk is where the chunk ends
        if fused_attention or not has_attention:
            return 0
        return dtype_bytes * shape.num_heads * len(span) * span.end

    # The head runs once, on the prompt's last row: [1, vocab].
    logits_bytes = logits_dtype_bytes * shape.vocab_size if spans else 0
    last_row_bytes = dtype_bytes * shape.hidden_size if spans else 0  # [1, hidden]

    attention_per_token = hidden + projection + attention_output if has_attention else 0
    net = shape.delta_net if spans else None
    num_slots = config.num_state_slots if len(spans) > 1 else ChunkedPrefillConfig().num_state_slots
    delta_net_bytes = (
        chunk * _delta_net_per_token(net, dtype_bytes) + _delta_rule_bytes(net, chunk) if net else 0
    )
    return PrefillMemoryParts(
        # keys and values of every attention layer: 2 x [layers, tokens, kv_heads, head_dim]
        kv_cache_bytes=kv_dtype_bytes * 2 * shape.num_attention_layers * num_tokens * kv_size,
        hidden_bytes=chunk * hidden,
        projection_bytes=chunk * projection,
        attention_output_bytes=chunk * attention_output,
        attention_scores_bytes=max(map(scores_bytes, spans), default=0),
        mlp_bytes=chunk * mlp,
        logits_bytes=logits_bytes,
        attention_phase_bytes=max(
            (len(span) * attention_per_token + scores_bytes(span) for span in spans), default=0
        ),
        mlp_phase_bytes=chunk * (hidden + mlp),
        head_phase_bytes=last_row_bytes + logits_bytes,
        recurrent_bytes=num_slots * _slot_bytes(net, dtype_bytes) if net else 0,
        delta_net_bytes=delta_net_bytes,
        delta_net_phase_bytes=chunk * hidden + delta_net_bytes if net else 0,
    )


def _mlp_per_token(shape: ModelShape, dtype_bytes: int) -> int:
    """Bytes per token of the feed-forward block, in the layers that need the most."""
    # gate, up, their product: 3 x [chunk, intermediate]
    dense = dtype_bytes * 3 * shape.intermediate_size if shape.num_dense_layers else 0
    return max(
        dense, _experts_per_token(shape.experts, shape.hidden_size, dtype_bytes) if shape.experts else 0
    )


def _experts_per_token(experts: ExpertsShape, hidden_size: int, dtype_bytes: int) -> int:
    # router probabilities [chunk, experts], sum of the experts' outputs [chunk, hidden]
    routed = _FLOAT32_BYTES * (experts.num_experts + hidden_size)
    # Experts run one after the other; at worst every token is sent to one of them: its inputs and outputs
    # 2 x [chunk, hidden], its gate, up and their product 3 x [chunk, expert]
    expert = dtype_bytes * (2 * hidden_size + 3 * experts.intermediate_size)
    return routed + expert + dtype_bytes * 3 * experts.shared_intermediate_size  # 3 x [chunk, shared]


def _delta_net_per_token(net: DeltaNetShape, dtype_bytes: int) -> int:
    lanes = _rounded_up(net.num_value_heads, _VECTOR)
    # into the convolution [chunk, conv], output gate [chunk, values], decays and strengths 2 x [chunk, lanes]
    projected = dtype_bytes * (net.conv_size + net.value_size + 2 * lanes)
    # the layer's output [chunk, values]; decays and strengths again, in float32
    held = dtype_bytes * net.value_size + _FLOAT32_BYTES * 2 * lanes
    # The delta rule: out of the convolution [chunk, conv], and its own output in float32 [chunk, values]
    rule = dtype_bytes * net.conv_size + _FLOAT32_BYTES * net.value_size
    # The gated norm after it holds no more: it goes over that output a few rows at a time.
    return projected + held + rule


def _delta_rule_bytes(net: DeltaNetShape, chunk: int) -> int:
    """At most: how many blocks are prepared at once depends on the threads, up to a number that no chunk exceeds."""
    num_blocks = min(-(-chunk // STATE_GRID), _MOST_BLOCKS_AT_ONCE)
    # A head's queries, keys and both scaled 4 x [block, key_dim]; values before and after, output
    # 3 x [block, value_dim]; products of keys, their inverse, products with queries 3 x [block, block]
    per_row = 4 * net.key_head_dim + 3 * net.value_head_dim + 3 * STATE_GRID
    return _FLOAT32_BYTES * num_blocks * net.num_value_heads * STATE_GRID * per_row


def _slot_bytes(net: DeltaNetShape, dtype_bytes: int) -> int:
    """One sequence's state: in each layer the convolution's last inputs and a matrix a head."""
    tail = dtype_bytes * (net.conv_kernel - 1) * net.conv_size  # [taps - 1, conv]
    # [heads, key_dim, value_dim]
    matrix = _FLOAT32_BYTES * net.num_value_heads * net.key_head_dim * net.value_head_dim
    return net.num_layers * (tail + matrix)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _worst_spans(num_tokens: int, config: ChunkedPrefillConfig) -> tuple[Span, ...]:
    """The chunks among which every maximum lies: the last, and the one before it.

    All chunks but the last are equally long, so the latest of them has the longest past. The last may be
    shorter, with a longer past still.
    """
    num_chunks = num_prefill_chunks(num_tokens, config)
    return tuple(
        prefill_chunk_span(index, num_tokens, config) for index in range(max(0, num_chunks - 2), num_chunks)
    )
