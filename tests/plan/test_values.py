"""Values stay as they are made: whoever holds one need not copy it."""

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass
from typing import Any

from penstock import plan
from penstock.plan.admission import TrackedRequest
from tests.defaults import numbers_by_default

# A caller that says nothing gets nothing: 0, no, none. But for these.
BY_DEFAULT = {
    "0.0002": """
        pipeline.decode_rate.overhead_s pipeline.least_seconds.overhead_s
        pipeline.run_pipeline.overhead_s
    """,
    "1": """
        admission.WindowRoom.num_sequences batch_scheduler.BatchScheduler.depth grids.RowLaw.row_floor
        memory.ActivationModel.largest_chunk.grid memory.ActivationModel.smallest_budget.grid
        memory.kv_cache_bytes.num_sequences model.ExpertsConfig.num_active_groups
        model.ExpertsConfig.num_groups model.ExpertsShape.num_active_groups
        model.ExpertsShape.num_groups model.MambaConfig.norm_groups policy.ScheduleConfig.grid
        prefill.PrefillScheduler.grid settings.ChunkSetting.grid settings.resolve_chunk_size.grid
        settings.resolve_size.grid sizing.SizeQuestion.num_prompts sizing.SizeRules.grid
        step.Workspace.row_floor
    """,
    "1.0": """
        model.ExpertsConfig.scale model.ExpertsShape.scale model.ModelConfig.embedding_scale
        model.ModelConfig.logit_scale model.ModelConfig.residual_scale model.ModelShape.embedding_scale
        model.ModelShape.logit_scale model.ModelShape.residual_scale model.RotaryConfig.beta_slow
        model.RotaryConfig.factor model.RotaryConfig.low_freq_factor model.RotaryConfig.share
        pipeline.Machine.speed
    """,
    "10.0": "stage_settings.StagesSetting.timeout_s",
    "10000.0": "model.RotaryConfig.theta",
    "1048576": "model.ModelConfig.max_position model.ModelShape.max_position",
    "16": "policy.ScheduleConfig.max_running",
    "1e-06": "model.LatentConfig.norm_eps model.ModelConfig.norm_eps model.ModelShape.norm_eps",
    "2": """
        memory.peak_memory_estimate.dtype_bytes model.ExpertsConfig.group_best
        model.ExpertsShape.group_best pipeline.PartCosts.of_model.dtype_bytes
        prefill.PrefillScheduler.memory_savings.dtype_bytes stage_settings.StagesSetting.cut.dtype_bytes
        step.Workspace.num_threads
    """,
    "2048": "sizing.SizeRules.largest",
    "256": "policy.ScheduleConfig.max_waiting",
    "32.0": "model.RotaryConfig.beta_fast",
    "4": """
        activation.step_phases.logits_dtype_bytes memory.peak_memory_estimate.logits_dtype_bytes
        prefill.PrefillScheduler.memory_savings.logits_dtype_bytes
    """,
    "4.0": "model.RotaryConfig.high_freq_factor",
    "512": """
        chunks.ChunkedPrefillConfig.chunk_size policy.ScheduleConfig.chunk_size
        settings.SizeSettings.rules.default sizing.SizeRules.default step.Workspace.tile_size
    """,
    "64": "policy.ScheduleConfig.max_chunk_steps",
    "8": """
        chunks.ChunkedPrefillConfig.max_decode_steps grids.RowLaw.row_grid
        policy.ScheduleConfig.max_decode_steps policy.ScheduleConfig.max_overtakes
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


def test_what_a_caller_does_not_say() -> None:
    assert numbers_by_default(plan) == {number: set(names.split()) for number, names in BY_DEFAULT.items()}
