"""The answer is transformers' answer, whatever the family, the shape and the chunks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import NUM_GREEDY, Oracle, load_model, make_oracle, random_prompt, run_prompt

CHUNK_SIZES = (0, 1, 3, 7, 64, 100)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, all heads": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama, group of 8, tied": (
        "llama",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama, odd head size": ("llama", {"head_dim": 34, "hidden_size": 54}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("llama", {"rope": (("rope_type", "linear"), ("factor", 4.0))}),
    "llama, llama3": (
        "llama",
        {
            "rope": (
                ("rope_type", "llama3"),
                ("factor", 8.0),
                ("low_freq_factor", 1.0),
                ("high_freq_factor", 4.0),
                ("original_max_position_embeddings", 128),
            )
        },
    ),
    "llama, yarn": (
        "llama",
        {
            "rope": (
                ("rope_type", "yarn"),
                ("factor", 4.0),
                ("original_max_position_embeddings", 256),
            )
        },
    ),
    "mistral": ("mistral", {}),
    "mistral, windows": ("mistral", {"sliding_window": 48}),
    "qwen2": ("qwen2", {}),
    "qwen2, some windows": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 130, "max_window_layers": 1},
    ),
    "qwen2, tied, all heads": (
        "qwen2",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "mixtral, windows": ("mixtral", {"sliding_window": 48}),
    "phi3, windows": ("phi3", {"sliding_window": 48}),
    "qwen3": ("qwen3", {}),
    "qwen3, wide heads, group of 8": (
        "qwen3",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 40},
    ),
    "qwen3, yarn": (
        "qwen3",
        {"rope": (("rope_type", "yarn"), ("factor", 2.0), ("original_max_position_embeddings", 128))},
    ),
}


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def oracle(request: pytest.FixtureRequest) -> Oracle:
    family, overrides = MODELS[request.param]
    return make_oracle(family, **overrides)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    ("num_tokens", "chunk_size"),
    [(1, 0), (1, 7), (1100, 100), (1100, 512)],
)
def test_logits_after_the_prompt(oracle: Oracle, chunk_size: int, num_tokens: int) -> None:
    prompt = random_prompt(num_tokens)
    run = run_prompt(load_model(oracle.folder), prompt, chunk_size=chunk_size)
    assert run.logits is not None
    assert relative_error(run.logits, oracle.logits(prompt)) < 1e-4


def test_greedy_tokens(oracle: Oracle) -> None:
    prompt = random_prompt(200)
    logits, tokens = oracle.logits(prompt), oracle.greedy(prompt, NUM_GREEDY)
    for chunk_size in CHUNK_SIZES:
        run = run_prompt(load_model(oracle.folder), prompt, chunk_size=chunk_size, max_tokens=NUM_GREEDY)
        assert run.logits is not None
        assert relative_error(run.logits, logits) < 1e-4, chunk_size
        while run.finish_reason is None:
            run.step()
        assert run.generated == tokens, chunk_size


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_uneven_chunks(data: st.DataObject) -> None:
    family, overrides = MODELS[data.draw(st.sampled_from(sorted(MODELS)))]
    oracle = make_oracle(family, **overrides)
    prompt = random_prompt(data.draw(st.integers(2, 700)), seed=data.draw(st.integers(0, 3)))
    cuts = data.draw(st.sets(st.integers(1, len(prompt) - 1), max_size=8))
    ends = [*sorted(cuts), len(prompt)]
    run = run_prompt(load_model(oracle.folder), prompt, chunk_ends=ends, max_tokens=32)
    assert run.logits is not None
    assert relative_error(run.logits, oracle.logits(prompt)) < 1e-4
    while run.finish_reason is None:
        run.step()
    assert run.generated == oracle.greedy(prompt, 32)


def test_bfloat16_error_is_that_of_the_dtype(oracle: Oracle) -> None:
    """Chunked against whole in bfloat16 differs by no more than whole bfloat16 does from float32."""
    prompt = random_prompt(300)
    exact = oracle.logits(prompt)
    model = load_model(oracle.folder, torch.bfloat16)
    whole = run_prompt(model, prompt).logits
    assert whole is not None
    allowed = float((whole - exact).abs().max())
    assert allowed < 0.2 * float(exact.abs().max())
    for chunk_size in (7, 64, 100):
        chunked = run_prompt(model, prompt, chunk_size=chunk_size).logits
        assert chunked is not None
        assert float((chunked - whole).abs().max()) <= allowed
