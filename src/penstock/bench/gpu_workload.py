"""What is measured on a GPU: models, prompts, chunks and batches. Plain numbers; a test gives smaller ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.measure.random_weights import FAMILIES

GPU = "gpu"
_CHUNK = 2048
_LONG, _SHORT, _LONGEST = 32_768, 8_192, 131_072


class Section(StrEnum):
    """What each is called on the command line and in the results, in the order in which they run."""

    LARGE = "8b"
    SMALL = "0.6b"
    HYBRID = "hybrid"
    DECODE = "decode"
    MEMORY = "memory"
    START = "start"
    BITS = "bits"
    TILES = "tiles"
    MIXED = "mixed"
    PROFILE = "profile"
    SWEEP = "sweep"


class GpuModel(StrEnum):
    """The shapes of published models, with random weights."""

    LARGE = "8B"
    SMALL = "0.6B"
    HYBRID = "9B hybrid"


@dataclass(frozen=True)
class PrefillCase:
    """A prompt that is read in chunks of so many tokens; 0: whole."""

    model: GpuModel
    prompt_tokens: int
    chunk: int

    @property
    def label(self) -> str:
        how = f"chunk {self.chunk:,}" if self.chunk else "whole"
        return f"{self.model}, {self.prompt_tokens:,} tokens, {how}"


@dataclass(frozen=True)
class DecodeCase:
    """Sequences that decode together, each after a past of so many tokens."""

    model: GpuModel
    num_sequences: int
    past: int

    @property
    def label(self) -> str:
        return f"{self.model}, decode, batch {self.num_sequences}, after {self.past:,} tokens"


@dataclass(frozen=True)
class MixedCase:
    """A step of so many tokens of a prompt, after a past, of which some make room for sequences that decode."""

    model: GpuModel
    chunk: int
    past: int
    num_decodes: int
    decode_past: int

    @property
    def label(self) -> str:
        return f"{self.model}, step of {self.chunk:,} tokens after {self.past:,}"


@dataclass(frozen=True)
class BitsCase:
    """A prompt in many chunkings, through the first layers of a model, alone and beside sequences that decode."""

    num_layers: int
    prompt_tokens: int
    chunks: tuple[int, ...]  # against the whole
    off_grid_chunks: tuple[int, ...]  # of models without recurrent state alone
    num_decodes: int
    decode_past: int


@dataclass(frozen=True)
class GpuPlan:
    """All of it. Settings of models are in transformers' own names."""

    models: Mapping[GpuModel, Mapping[str, Any]]
    prefills: Mapping[Section, tuple[PrefillCase, ...]]
    decodes: tuple[DecodeCase, ...]
    decode_steps: int
    mixed: MixedCase
    memory: PrefillCase
    start: GpuModel
    bits: BitsCase
    tiles: PrefillCase
    profiles: tuple[PrefillCase, ...]  # all of one model
    sweeps: tuple[PrefillCase, ...]  # beside those of `prefills`
    sweep_repeats: int
    swept_peer_chunks: tuple[int, ...]  # of a sweep, those that transformers reads too


def sweep_prompts(plan: GpuPlan) -> list[tuple[GpuModel, int]]:
    """The prompts of which times are shown against chunks, each once."""
    return list(dict.fromkeys((case.model, case.prompt_tokens) for case in plan.sweeps))


_MODELS: Mapping[GpuModel, Mapping[str, Any]] = {
    GpuModel.LARGE: {
        **FAMILIES["qwen3-4b"],
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "max_position_embeddings": 140_000,
    },
    GpuModel.SMALL: {
        **FAMILIES["qwen3-0.6b"],
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    # transformers' default Qwen3.5, but for the context.
    GpuModel.HYBRID: {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    },
}


def _cases(model: GpuModel, *sizes: tuple[int, int]) -> tuple[PrefillCase, ...]:
    return tuple(PrefillCase(model, prompt_tokens, chunk) for prompt_tokens, chunk in sizes)


PLAN = GpuPlan(
    models=_MODELS,
    prefills={
        Section.LARGE: _cases(
            GpuModel.LARGE, (_LONG, _CHUNK), (_LONG, 0), (_LONG, 512), (_SHORT, _CHUNK), (_LONGEST, _CHUNK)
        ),
        Section.SMALL: _cases(GpuModel.SMALL, (_LONG, _CHUNK), (_LONG, 512), (_SHORT, _CHUNK)),
        Section.HYBRID: _cases(GpuModel.HYBRID, (_LONG, _CHUNK), (_LONG, 0), (_LONG, 512)),
    },
    decodes=(
        DecodeCase(GpuModel.LARGE, 1, 128),
        DecodeCase(GpuModel.LARGE, 32, 128),
        DecodeCase(GpuModel.LARGE, 1, _LONG),
        DecodeCase(GpuModel.SMALL, 1, 128),
        DecodeCase(GpuModel.SMALL, 32, 128),
    ),
    decode_steps=100,
    mixed=MixedCase(GpuModel.LARGE, _CHUNK, _SHORT, num_decodes=32, decode_past=128),
    memory=PrefillCase(GpuModel.LARGE, _LONG, _CHUNK),
    start=GpuModel.LARGE,
    bits=BitsCase(
        num_layers=4,
        prompt_tokens=9000,
        chunks=(64, 512, _CHUNK, 8192),
        off_grid_chunks=(1000,),
        num_decodes=4,
        decode_past=100,
    ),
    tiles=PrefillCase(GpuModel.LARGE, _LONG, _CHUNK),
    profiles=_cases(GpuModel.LARGE, (_LONG, _CHUNK), (_LONG, 0), (_SHORT, _CHUNK)),
    sweeps=(
        *(PrefillCase(model, _LONG, chunk) for model in GpuModel for chunk in (256, 1024, 4096, 8192)),
        PrefillCase(GpuModel.SMALL, _LONG, 0),
    ),
    sweep_repeats=3,
    swept_peer_chunks=(512, _CHUNK, 8192, 0),
)
