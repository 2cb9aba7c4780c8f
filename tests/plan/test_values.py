"""Values stay as they are made: whoever holds one need not copy it."""

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass
from typing import Any

from penstock import plan
from penstock.plan.admission import TrackedRequest
from tests.numbers_of import numbers_of

# Numbers that are neither 0 nor false, where nobody gives others.
NUMBERS = {
    "(0.1, 3600.0)": "stage_settings._TIMEOUTS_S",
    "(64, 128, 256, 512)": "grids.QUERY_BUCKETS",
    "0.0001": "step_time.PRIOR_SHARE",
    "0.0002": """
        pipeline.STEP_OVERHEAD_S pipeline.decode_rate.overhead_s pipeline.least_seconds.overhead_s
        pipeline.run_pipeline.overhead_s
    """,
    "0.002": "pipeline.STEP_S",
    "0.02": "step_time.LEAST_WEIGHT",
    "0.2": "step_time.SURPRISE",
    "0.25": "sizing.SLIVER",
    "0.5": "sizing.DECODE_GAP_S",
    "1": """
        admission.WindowRoom.num_sequences batch_scheduler.BatchScheduler.depth grids.RowLaw.row_floor
        memory.ActivationModel.largest_chunk.grid memory.ActivationModel.smallest_budget.grid
        memory.kv_cache_bytes.num_sequences model.ExpertsConfig.num_active_groups
        model.ExpertsConfig.num_groups model.ExpertsShape.num_active_groups
        model.ExpertsShape.num_groups model.MambaConfig.norm_groups model.MambaConfig.num_gates
        policy.ScheduleConfig.grid prefill.PrefillScheduler.grid settings.ChunkSetting.grid
        settings.resolve_chunk_size.grid settings.resolve_size.grid sizing.SizeQuestion.num_prompts
        sizing.SizeRules.grid step.Workspace.row_floor
    """,
    "1.0": """
        model.ExpertsConfig.scale model.ExpertsShape.scale model.ModelConfig.embedding_scale
        model.ModelConfig.logit_scale model.ModelConfig.residual_scale model.ModelShape.embedding_scale
        model.ModelShape.logit_scale model.ModelShape.residual_scale model.RotaryConfig.beta_slow
        model.RotaryConfig.factor model.RotaryConfig.low_freq_factor model.RotaryConfig.share
        pipeline.Machine.speed
    """,
    "1.000000001": "pipeline._ALIKE",
    "1.05": "stage_plan._AS_GOOD",
    "1.25": "grids.ROUNDED_BYTES",
    "10.0": "stage_settings.DEFAULT_STAGE_TIMEOUT_S stage_settings.StagesSetting.timeout_s",
    "10000.0": "model.RotaryConfig.theta",
    "1024": "grids.GPU_TILE grids.JOINED_TOKENS grids.ROTARY_PAGE settings.MAX_THREADS",
    "1048576": "model.ModelConfig.max_position model.ModelShape.max_position",
    "10737418240": "settings.DEFAULT_CACHE_BYTES",
    "1099511627776": "sizing.MOST_TOKENS",
    "128": "prompt_plan._SMALLEST_ROW step_time.HALF_LIFE",
    "16": "grids.FEW_ROWS policy.ScheduleConfig.max_running",
    "1e-06": """
        model.LatentConfig.norm_eps model.ModelConfig.norm_eps model.ModelShape.norm_eps
        step_time.LEAST_S
    """,
    "1e-12": "step_time.LEAST_GAIN",
    "2": """
        activation._BUSIEST batch_scheduler._TOKENS_AFTER memory.peak_memory_estimate.dtype_bytes
        model.DeltaNetConfig.num_gates
        model.ExpertsConfig.group_best model.ExpertsShape.group_best
        pipeline.PartCosts.of_model.dtype_bytes prefill.PrefillScheduler.memory_savings.dtype_bytes
        stage_settings.StagesSetting.cut.dtype_bytes step.Workspace.num_threads
    """,
    "2048": """
        grids.ELEMENTS_PER_THREAD grids.EXPERT_PLACES grids.GPU_CHUNK_SIZE sizing.LARGEST_CHUNK
        sizing.SizeRules.largest
    """,
    "256": """
        grids.NATIVE_SEGMENT grids.NORM_ROWS grids.SQUARE policy.ScheduleConfig.max_waiting
        stage_settings.MAX_STAGES
    """,
    "2560": "grids.FINE_ROWS",
    "262144": "activation.SMALL_BYTES",
    "32": "grids.GPU_HEAD_ROWS grids.HEADS_AND_PARTS",
    "32.0": "model.RotaryConfig.beta_fast",
    "4": """
        activation.FLOAT32 activation.step_phases.logits_dtype_bytes chunks._SHOWN memory._FLOAT32_BYTES
        memory.peak_memory_estimate.logits_dtype_bytes policy.MOST_SHARES
        prefill.PrefillScheduler.memory_savings.logits_dtype_bytes stage_plan._STREAMS_PER_STAGE
        step_time.REFIT_EVERY
    """,
    "4.0": "model.RotaryConfig.high_freq_factor",
    "4096": "grids.LONG_PAST grids.PIECE_TOKENS stage_plan._MOST_CHUNKS stage_settings._USUAL_PAST",
    "5": "step_time.SAMPLES_PER_KIND",
    "512": """
        chunks.ChunkedPrefillConfig.chunk_size grids.DEFAULT_CHUNK_SIZE grids.TILE
        grids.ROUNDED_ROWS
        policy.ScheduleConfig.chunk_size settings.SizeSettings.rules.default sizing.SizeRules.default
        step.Workspace.tile_size
    """,
    "64": """
        admission.REPLAY_TOKENS grids.BLOCK_TOKENS grids.GPU_FEW_ROWS grids.GPU_ROW_GRID grids.LANES
        grids.NATIVE_BLOCK grids.QUERY_GRID grids.SHARE_GRID grids.SPLITS grids.STATE_GRID grids.VECTOR_BYTES
        policy.ScheduleConfig.max_chunk_steps sizing.CAUTIOUS_CHUNK sizing.SHRUNK_STEPS
        step_time.MOST_KINDS
    """,
    "8": """
        activation.INT64 chunks.ChunkedPrefillConfig.max_decode_steps grids.COARSER grids.HEAD_ROWS
        grids.MOST_STATE_BLOCKS grids.ROW_GRID grids.RowLaw.row_grid
        policy.ScheduleConfig.max_decode_steps policy.ScheduleConfig.max_overtakes sizing.SMALLEST_CHUNK
        sizing.SizeRules.smallest step.Workspace.head_rows step.Workspace.row_grid
    """,
    "True": """
        memory.peak_memory_estimate.fused_attention model.ExpertsConfig.normalised
        model.ExpertsConfig.shared_gate model.ExpertsShape.normalised model.ExpertsShape.shared_gate
        model.MambaConfig.conv_bias model.MambaConfig.gates_first model.ModelConfig.gated_mlp
        model.ModelConfig.pre_norm model.ModelShape.gated_mlp model.ModelShape.pre_norm
        model.RotaryConfig.truncate prefill.PrefillScheduler.memory_savings.fused_attention
        step.Preemption.was_running
    """,
    "inf": "model.MambaConfig.most_step pipeline.Link.bytes_per_s",
}


def test_every_dataclass_but_a_tracked_request_is_frozen() -> None:
    modules = [
        importlib.import_module(f"penstock.plan.{found.name}")
        for found in pkgutil.iter_modules(plan.__path__)
    ]
    classes: set[Any] = {kind for module in modules for _, kind in inspect.getmembers(module, is_dataclass)}
    changeable = {kind for kind in classes if not kind.__dataclass_params__.frozen}
    assert changeable == {TrackedRequest}
    assert len(classes) > 30


def test_numbers_are_those_that_were_meant() -> None:
    assert numbers_of(plan) == {number: set(names.split()) for number, names in NUMBERS.items()}
