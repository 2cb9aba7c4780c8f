"""The measurements on a GPU, of models and prompts so small that a processor does them in seconds."""

from dataclasses import replace
from typing import Any

from benchmarks.suites.gpu.plan import (
    BIG,
    DEEP_SPARSE,
    EXPERTS,
    HYBRID,
    LARGE,
    LITTLE,
    MIXED_LAYERS,
    PLAN,
    SMALL,
    SPARSE,
    WINDOWED,
    WINDOWS,
    BitsCase,
    DecodeCase,
    MixedCase,
    PrefillCase,
)

_SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _shrunk(model: str, **changes: Any) -> dict[str, Any]:
    return {**PLAN.models[model], **_SMALL, **changes}


TINY = replace(
    PLAN,
    models={
        BIG: _shrunk(BIG),
        LITTLE: _shrunk(LITTLE, hidden_size=32),
        MIXED_LAYERS: _shrunk(MIXED_LAYERS, **_DELTA_NET),
        SPARSE: _shrunk(SPARSE, **_EXPERTS),
        DEEP_SPARSE: _shrunk(DEEP_SPARSE, **_EXPERTS, num_hidden_layers=3),
        WINDOWED: _shrunk(WINDOWED, sliding_window=30, num_hidden_layers=6),
    },
    prefills={
        LARGE: (PrefillCase(BIG, 200, 64), PrefillCase(BIG, 200, 0), PrefillCase(BIG, 400, 128)),
        SMALL: (PrefillCase(LITTLE, 200, 64),),
        HYBRID: (PrefillCase(MIXED_LAYERS, 200, 64),),
        EXPERTS: (PrefillCase(SPARSE, 200, 64),),
        WINDOWS: (PrefillCase(WINDOWED, 256, 64),),
    },
    decodes=(DecodeCase(BIG, 1, 20), DecodeCase(BIG, 5, 20), DecodeCase(LITTLE, 3, 20)),
    strict=(DecodeCase(BIG, 3, 20),),
    decode_steps=4,
    profiles=(PrefillCase(BIG, 200, 64), PrefillCase(BIG, 200, 0)),
    mixed=MixedCase(BIG, 64, 128, num_decodes=3, decode_past=20),
    memory=PrefillCase(BIG, 200, 64),
    bits=BitsCase(4, 200, (64, 128), (50,), num_decodes=2, decode_past=10),
    tiles=PrefillCase(BIG, 200, 64),
    sweeps=(PrefillCase(BIG, 200, 32), PrefillCase(BIG, 200, 128), PrefillCase(MIXED_LAYERS, 200, 128)),
    swept_peer_chunks=(128,),
    stages=(PrefillCase(BIG, 200, 64), PrefillCase(MIXED_LAYERS, 200, 64)),
    expert_decodes=(DecodeCase(SPARSE, 1, 20), DecodeCase(DEEP_SPARSE, 2, 20)),
    deep=PrefillCase(DEEP_SPARSE, 200, 64),
    weights=(PrefillCase(BIG, 200, 64), DecodeCase(BIG, 1, 20)),
    forms=("int8", "Q4_K_M"),
)
