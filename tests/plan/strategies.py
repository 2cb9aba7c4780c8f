"""Random configurations and prompts for the laws in this folder."""

from hypothesis import strategies as st

from penstock.plan import ChunkedPrefillConfig, ModelShape, PrefillPriority


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


prompts = st.lists(st.integers(0, 9), max_size=200)
