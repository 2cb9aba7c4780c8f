"""Planning of chunked prefill: no tensors, standard library only. Of use on its own in any inference loop."""

from penstock.plan.chunks import (
    PrefillChunk,
    create_prefill_chunks,
    create_prefill_chunks_at,
    num_prefill_chunks,
    prefill_chunk_span,
)
from penstock.plan.config import DEFAULT_CHUNK_SIZE, ChunkedPrefillConfig, PrefillPriority
from penstock.plan.memory import (
    ModelShape,
    PrefillMemoryEstimate,
    PrefillMemoryParts,
    peak_memory_estimate,
)
from penstock.plan.request import Span
from penstock.plan.scheduler import (
    ChunkOrderError,
    Prefill,
    PrefillAction,
    PrefillScheduler,
    StartDecode,
    YieldToDecode,
)
from penstock.plan.settings import CHUNK_VARIABLE, ChunkSetting, ChunkSource, resolve_chunk_size
from penstock.plan.tokens import TokenView
from penstock.plan.units import format_bytes

__all__ = [
    "CHUNK_VARIABLE",
    "DEFAULT_CHUNK_SIZE",
    "ChunkOrderError",
    "ChunkSetting",
    "ChunkSource",
    "ChunkedPrefillConfig",
    "ModelShape",
    "Prefill",
    "PrefillAction",
    "PrefillChunk",
    "PrefillMemoryEstimate",
    "PrefillMemoryParts",
    "PrefillPriority",
    "PrefillScheduler",
    "Span",
    "StartDecode",
    "TokenView",
    "YieldToDecode",
    "create_prefill_chunks",
    "create_prefill_chunks_at",
    "format_bytes",
    "num_prefill_chunks",
    "peak_memory_estimate",
    "prefill_chunk_span",
    "resolve_chunk_size",
]
