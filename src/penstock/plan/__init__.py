"""Planning of chunked prefill: no tensors, standard library only. Of use on its own in any inference loop."""

from penstock.plan.admission import CacheLimits
from penstock.plan.batch_scheduler import BatchScheduler, RequestPhase, RequestView, StepOrderError
from penstock.plan.chunks import (
    PrefillChunk,
    create_prefill_chunks,
    create_prefill_chunks_at,
    num_prefill_chunks,
    prefill_chunk_span,
)
from penstock.plan.config import DEFAULT_CHUNK_SIZE, ChunkedPrefillConfig, PrefillPriority
from penstock.plan.engine_settings import EngineKeywords, EngineSettings
from penstock.plan.grids import STATE_GRID
from penstock.plan.memory import PrefillMemoryEstimate, PrefillMemoryParts, peak_memory_estimate
from penstock.plan.model import (
    DeltaNetConfig,
    DeltaNetShape,
    ExpertsConfig,
    ExpertsShape,
    ModelConfig,
    ModelShape,
    RotaryConfig,
)
from penstock.plan.policy import ScheduleConfig, SchedulePolicy
from penstock.plan.prefill import (
    ChunkOrderError,
    Prefill,
    PrefillAction,
    PrefillScheduler,
    StartDecode,
    YieldToDecode,
)
from penstock.plan.request import Span
from penstock.plan.settings import (
    ALIGN_VARIABLE,
    CACHE_DIR_VARIABLE,
    CACHE_SIZE_VARIABLE,
    CHUNK_VARIABLE,
    MAX_ACTIVATION_VARIABLE,
    TARGET_ITL_VARIABLE,
    TARGET_TTFT_VARIABLE,
    WEIGHTS_VARIABLE,
    AlignSetting,
    ChunkSetting,
    Resolved,
    SettingSource,
    SizeSettings,
    StoreSettings,
    WeightsName,
    WeightsSetting,
    resolve_align,
    resolve_chunk_size,
    resolve_size,
    resolve_store,
    resolve_weights,
)
from penstock.plan.sizing import ChunkSizer, SizeDecision, SizeQuestion, SizeRule, SizeRules
from penstock.plan.step import PlannedSpan, Preemption, RequestId, SpanKind, StepPlan
from penstock.plan.step_shape import StepShape, Workspace
from penstock.plan.step_time import StepTimeCoefficients, StepTimeModel
from penstock.plan.tokens import TokenView
from penstock.plan.units import format_bytes

__all__ = [
    "ALIGN_VARIABLE",
    "CACHE_DIR_VARIABLE",
    "CACHE_SIZE_VARIABLE",
    "CHUNK_VARIABLE",
    "DEFAULT_CHUNK_SIZE",
    "MAX_ACTIVATION_VARIABLE",
    "STATE_GRID",
    "TARGET_ITL_VARIABLE",
    "TARGET_TTFT_VARIABLE",
    "WEIGHTS_VARIABLE",
    "AlignSetting",
    "BatchScheduler",
    "CacheLimits",
    "ChunkOrderError",
    "ChunkSetting",
    "ChunkSizer",
    "ChunkedPrefillConfig",
    "DeltaNetConfig",
    "DeltaNetShape",
    "EngineKeywords",
    "EngineSettings",
    "ExpertsConfig",
    "ExpertsShape",
    "ModelConfig",
    "ModelShape",
    "PlannedSpan",
    "Preemption",
    "Prefill",
    "PrefillAction",
    "PrefillChunk",
    "PrefillMemoryEstimate",
    "PrefillMemoryParts",
    "PrefillPriority",
    "PrefillScheduler",
    "RequestId",
    "RequestPhase",
    "RequestView",
    "Resolved",
    "RotaryConfig",
    "ScheduleConfig",
    "SchedulePolicy",
    "SettingSource",
    "SizeDecision",
    "SizeQuestion",
    "SizeRule",
    "SizeRules",
    "SizeSettings",
    "Span",
    "SpanKind",
    "StartDecode",
    "StepOrderError",
    "StepPlan",
    "StepShape",
    "StepTimeCoefficients",
    "StepTimeModel",
    "StoreSettings",
    "TokenView",
    "WeightsName",
    "WeightsSetting",
    "Workspace",
    "YieldToDecode",
    "create_prefill_chunks",
    "create_prefill_chunks_at",
    "format_bytes",
    "num_prefill_chunks",
    "peak_memory_estimate",
    "prefill_chunk_span",
    "resolve_align",
    "resolve_chunk_size",
    "resolve_size",
    "resolve_store",
    "resolve_weights",
]
