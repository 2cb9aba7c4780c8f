"""How much memory a prefill needs at its peak, whole and in chunks, from the model's shape alone."""

from dataclasses import dataclass, fields

from penstock.errors import SettingError
from penstock.plan.checks import check_int
from penstock.plan.chunks import num_prefill_chunks, prefill_chunk_span
from penstock.plan.config import ChunkedPrefillConfig
from penstock.plan.request import Span
from penstock.plan.units import format_bytes


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that decide its memory."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def __post_init__(self) -> None:
        for field in fields(self):
            check_int(field.name, getattr(self, field.name), 1)
        if self.num_heads % self.num_kv_heads:
            raise SettingError(
                f"num_kv_heads={self.num_kv_heads} is not accepted with num_heads={self.num_heads}: "
                f"give a divisor of {self.num_heads}"
            )


@dataclass(frozen=True)
class PrefillMemoryParts:
    """The K/V cache, and the high-water mark of each kind of activation over the chunks of a prefill.

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

    @property
    def activation_bytes(self) -> int:
        return max(self.attention_phase_bytes, self.mlp_phase_bytes, self.head_phase_bytes)

    @property
    def total_bytes(self) -> int:
        return self.kv_cache_bytes + self.activation_bytes


@dataclass(frozen=True)
class PrefillMemoryEstimate:
    """Peak memory of one prefill: the prompt's K/V cache and the activations; weights are not counted."""

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
        """The share of the whole prompt's peak that chunking saves; 0.0 where it saves nothing."""
        if self.chunked_bytes == self.full_bytes:
            return 0.0
        return 1 - self.chunked_bytes / self.full_bytes

    def summary(self) -> str:
        chunks = "1 chunk" if self.num_chunks == 1 else f"{self.num_chunks} chunks"
        return (
            f"{self.prompt_tokens} tokens in {chunks}: {format_bytes(self.chunked_bytes)} at peak "
            f"({format_bytes(self.chunked.kv_cache_bytes)} of it K/V cache), "
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

    # Bytes per token of a chunk, by the tensors that hold them.
    hidden = dtype_bytes * 2 * shape.hidden_size  # residual, normed input: 2 x [chunk, hidden]
    # queries [chunk, heads, head_dim], keys and values 2 x [chunk, kv_heads, head_dim]
    projection = dtype_bytes * (query_size + 2 * kv_size)
    attention_output = dtype_bytes * query_size  # [chunk, heads, head_dim]
    mlp = dtype_bytes * 3 * shape.intermediate_size  # gate, up, their product: 3 x [chunk, intermediate]

    def scores_bytes(span: Span) -> int:
        # [heads, chunk, past + chunk]; past + chunk is where the chunk ends
        return 0 if fused_attention else dtype_bytes * shape.num_heads * len(span) * span.end

    # The head runs once, on the prompt's last row: [1, vocab].
    logits_bytes = logits_dtype_bytes * shape.vocab_size if spans else 0
    last_row_bytes = dtype_bytes * shape.hidden_size if spans else 0  # [1, hidden]

    attention_per_token = hidden + projection + attention_output
    return PrefillMemoryParts(
        # keys and values of every layer: 2 x [layers, tokens, kv_heads, head_dim]
        kv_cache_bytes=kv_dtype_bytes * 2 * shape.num_layers * num_tokens * kv_size,
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
    )


def _worst_spans(num_tokens: int, config: ChunkedPrefillConfig) -> tuple[Span, ...]:
    """The chunks among which every maximum lies: the last, and the one before it.

    All chunks but the last are equally long, so the latest of them has the longest past. The last may be
    shorter, with a longer past still.
    """
    num_chunks = num_prefill_chunks(num_tokens, config)
    return tuple(
        prefill_chunk_span(index, num_tokens, config) for index in range(max(0, num_chunks - 2), num_chunks)
    )
