"""Random configurations and prompts for the laws in this folder."""

from dataclasses import replace

from hypothesis import strategies as st

from penstock.plan import (
    ChunkedPrefillConfig,
    DeltaNetShape,
    ExpertsShape,
    ModelShape,
    PrefillPriority,
)


@st.composite
def configs(draw: st.DrawFn, *, max_chunk_size: int = 40) -> ChunkedPrefillConfig:
    chunk_size = draw(st.integers(0, max_chunk_size))
    return ChunkedPrefillConfig(
        chunk_size=chunk_size,
        overlap=draw(st.integers(0, max(0, chunk_size - 1))),
        priority=draw(st.sampled_from(PrefillPriority)),
        max_decode_steps=draw(st.integers(1, 10)),
    )


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    num_kv_heads = draw(st.integers(1, 4))
    return ModelShape(
        num_layers=draw(st.integers(1, 4)),
        hidden_size=draw(st.integers(1, 64)),
        intermediate_size=draw(st.integers(1, 64)),
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.integers(1, 16)),
        vocab_size=draw(st.integers(1, 4000)),
    )


@st.composite
def hybrid_shapes(draw: st.DrawFn) -> ModelShape:
    """Any of: delta-net layers, experts, gated attention."""
    plain = draw(shapes())
    num_layers = st.integers(1, plain.num_layers)
    num_key_heads = draw(st.integers(1, 3))
    net = st.builds(
        DeltaNetShape,
        num_layers=num_layers,
        num_key_heads=st.just(num_key_heads),
        num_value_heads=st.integers(1, 3).map(lambda groups: groups * num_key_heads),
        key_head_dim=st.integers(1, 16),
        value_head_dim=st.integers(1, 16),
        conv_kernel=st.integers(1, 5),
    )
    experts = st.builds(
        ExpertsShape,
        num_layers=num_layers,
        num_experts=st.integers(1, 64),
        intermediate_size=st.integers(1, 64),
        shared_intermediate_size=st.integers(0, 64),
    )
    return replace(
        plain,
        gated_attention=draw(st.booleans()),
        delta_net=draw(st.none() | net),
        experts=draw(st.none() | experts),
    )


prompts = st.lists(st.integers(0, 9), max_size=200)
