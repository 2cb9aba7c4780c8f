"""What is measured on a GPU: models, prompts, chunks and batches. Plain numbers; a test has smaller ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.measure.random_weights import FAMILIES

# Sections, in the order in which they run.
LARGE, SMALL, HYBRID, WINDOWS = "8b", "0.6b", "hybrid", "windows"
EXPERTS = "experts"
_OTHERS = (
    "decode",
    "strict",
    "memory",
    "start",
    "bits",
    "tiles",
    "mixed",
    "stages",
    "weights",
    "profile",
    "sweep",
)
SECTIONS = (LARGE, SMALL, HYBRID, EXPERTS, WINDOWS, *_OTHERS)
# Models of published shapes, by what they are called in the results.
BIG, LITTLE, MIXED_LAYERS, WINDOWED = "8B", "0.6B", "9B hybrid", "Gemma 3 4B"
SPARSE, DEEP_SPARSE = "30B-A3B, 12 layers", "30B-A3B"
# Forms of weights; the first is what others are compared with.
PLAIN, FLOATS, FOUR_BITS, GROUPED_FOUR = "bf16", "fp8", "Q4_K_M", "AWQ"
CHUNK = 2048
LONG, SHORT, LONGEST = 32_768, 8_192, 131_072


@dataclass(frozen=True)
class PrefillCase:
    """A prompt that is read in chunks of so many tokens; 0: whole."""

    model: str
    prompt_tokens: int
    chunk: int

    @property
    def label(self) -> str:
        how = f"chunk {self.chunk:,}" if self.chunk else "whole"
        return f"{self.model}, {self.prompt_tokens:,} tokens, {how}"


@dataclass(frozen=True)
class DecodeCase:
    """Sequences that decode together, each after a past of so many tokens."""

    model: str
    num_sequences: int
    past: int

    @property
    def label(self) -> str:
        return f"{self.model}, decode, batch {self.num_sequences}, after {self.past:,} tokens"


@dataclass(frozen=True)
class MixedCase:
    """A step of so many tokens of a prompt, after a past, with sequences beside it that decode."""

    model: str
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
    models: tuple[str, ...] = (BIG, LITTLE, MIXED_LAYERS, SPARSE)


@dataclass(frozen=True)
class Plan:
    """All of it; a test has smaller numbers. Settings of models are in transformers' own names."""

    models: Mapping[str, Mapping[str, Any]]
    prefills: Mapping[str, tuple[PrefillCase, ...]]  # by section
    decodes: tuple[DecodeCase, ...]
    decode_steps: int
    mixed: MixedCase
    memory: PrefillCase
    start: str
    bits: BitsCase
    tiles: PrefillCase
    profiles: tuple[PrefillCase, ...]  # all of one model
    sweeps: tuple[PrefillCase, ...]  # beside those of `prefills`
    sweep_repeats: int
    swept_peer_chunks: tuple[int, ...]  # of a sweep, those that transformers reads too
    stages: tuple[PrefillCase, ...] = ()  # through two stages on the one card
    expert_decodes: tuple[DecodeCase, ...] = ()
    strict: tuple[DecodeCase, ...] = ()  # strict decodes beside others
    deep: PrefillCase | None = None  # a model with as many layers as were published; without transformers
    weights: tuple[PrefillCase | DecodeCase, ...] = ()  # in each form
    forms: tuple[str, ...] = (FLOATS, FOUR_BITS, GROUPED_FOUR)


_SPARSE = {**FAMILIES["qwen3-30b-a3b"], "num_experts": 128, "num_experts_per_tok": 8}
_MODELS: Mapping[str, Mapping[str, Any]] = {
    BIG: {
        **FAMILIES["qwen3-4b"],
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "max_position_embeddings": 140_000,
    },
    LITTLE: {**FAMILIES["qwen3-0.6b"], "num_hidden_layers": 28, "tie_word_embeddings": True},
    # transformers' default Qwen3.5, but for the context.
    MIXED_LAYERS: {
        **FAMILIES["qwen3.5-0.8b"],
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "layer_types": None,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    },
    SPARSE: {**_SPARSE, "num_hidden_layers": 12},
    DEEP_SPARSE: {**_SPARSE, "num_hidden_layers": 48},
    WINDOWED: {
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131_072,
    },
}


def _cases(model: str, *sizes: tuple[int, int]) -> tuple[PrefillCase, ...]:
    return tuple(PrefillCase(model, prompt_tokens, chunk) for prompt_tokens, chunk in sizes)


PLAN = Plan(
    models=_MODELS,
    prefills={
        LARGE: _cases(BIG, (LONG, CHUNK), (LONG, 0), (LONG, 512), (SHORT, CHUNK), (LONGEST, CHUNK)),
        SMALL: _cases(LITTLE, (LONG, CHUNK), (LONG, 512), (SHORT, CHUNK)),
        HYBRID: _cases(MIXED_LAYERS, (LONG, CHUNK), (LONG, 0), (LONG, 512)),
        EXPERTS: _cases(SPARSE, (SHORT, CHUNK), (LONG, CHUNK), (SHORT, 512)),
        WINDOWS: _cases(WINDOWED, (LONG, CHUNK)),
    },
    decodes=(
        DecodeCase(BIG, 1, 128),
        DecodeCase(BIG, 32, 128),
        DecodeCase(BIG, 1, LONG),
        DecodeCase(LITTLE, 1, 128),
        DecodeCase(LITTLE, 32, 128),
    ),
    decode_steps=100,
    mixed=MixedCase(BIG, CHUNK, SHORT, num_decodes=32, decode_past=128),
    memory=PrefillCase(BIG, LONG, CHUNK),
    start=BIG,
    bits=BitsCase(4, 9000, (64, 512, CHUNK, 8192), (1000,), num_decodes=4, decode_past=100),
    tiles=PrefillCase(BIG, LONG, CHUNK),
    profiles=_cases(BIG, (LONG, CHUNK), (LONG, 0), (SHORT, CHUNK)),
    sweeps=(
        *(
            PrefillCase(model, LONG, chunk)
            for model in (BIG, LITTLE, MIXED_LAYERS)
            for chunk in (256, 1024, 4096, 8192)
        ),
        PrefillCase(LITTLE, LONG, 0),
    ),
    sweep_repeats=3,
    swept_peer_chunks=(512, CHUNK, 8192, 0),
    stages=_cases(BIG, (LONG, 512), (LONG, CHUNK)),
    expert_decodes=(
        DecodeCase(SPARSE, 1, 128),
        *(DecodeCase(DEEP_SPARSE, count, 128) for count in (1, 8, 32)),
    ),
    strict=tuple(
        DecodeCase(model, count, 512) for model in (BIG, LITTLE, MIXED_LAYERS) for count in (1, 8, 32, 64)
    ),
    deep=PrefillCase(DEEP_SPARSE, SHORT, CHUNK),
    weights=(
        *_cases(BIG, (LONG, CHUNK), (SHORT, CHUNK)),
        DecodeCase(BIG, 1, 128),
        DecodeCase(BIG, 32, 128),
        *_cases(SPARSE, (SHORT, CHUNK)),
        *(DecodeCase(SPARSE, count, 128) for count in (1, 8, 32)),
    ),
)
