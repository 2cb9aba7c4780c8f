"""Latent attention: what is cached of a token, products of single heads, attention of heads that no kernel holds."""

import pytest
import torch

from penstock.cache import TokenRange
from penstock.cache.tensors import KV, KVCache, KVSpec
from penstock.kernels.reference.attention import attend_by_tiles
from penstock.kernels.reference.kernels import TorchKernels
from penstock.kernels.spans import AttendedSpan, Scoring
from penstock.models.hf.config import hf_model_config
from penstock.models.reading import Fields
from penstock.plan.memory import kv_cache_bytes, kv_token_bytes
from tests.oracle import load_model, make_oracle


def test_deepseek_v3_takes_69_kib_a_token() -> None:
    """Measured: what the tensors of its 61 layers take for two blocks. Expanded keys and values would take 71 times
    as much."""
    config = hf_model_config(Fields("config.json", {"model_type": "deepseek_v3"}), Fields("", {}))
    spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, torch.bfloat16, is_latent=True)
    tensors = {part.data_ptr(): part.nbytes for layer in KVCache(spec, 2).layers for part in layer.parts}
    measured = sum(tensors.values()) / 128
    assert measured == spec.bytes_per_token == kv_token_bytes(config, 2) == 70_272  # 68.6 KiB
    assert kv_cache_bytes(config, 131_072, 2, 2048) == 131_072 * 70_272
    assert 2 * 61 * 128 * (192 + 128) / measured == pytest.approx(71, abs=0.2)


def test_a_plan_counts_what_a_model_caches() -> None:
    model = load_model(make_oracle("deepseek_v3").folder)
    assert model.cache_spec.bytes_per_token == kv_token_bytes(model.config, 4) == 4 * 3 * 40


@pytest.mark.parametrize("is_prompt", [True, False])
def test_attention_by_tiles(is_prompt: bool) -> None:
    """Against float64; in chunks, with the same bits, wherever the tokens lie."""
    generator = torch.Generator().manual_seed(3)
    num_tokens, heads, size = 700, 4, 576
    queries = torch.randn(num_tokens, heads, size, generator=generator)
    latents = torch.randn(num_tokens + 64, 1, size, generator=generator)
    kv = KV(latents, latents)
    places = (TokenRange(64, 300), TokenRange(300, num_tokens + 64))
    scoring = Scoring(size**-0.5)

    def attended(start: int, end: int) -> torch.Tensor:
        out = torch.empty(end - start, heads, size)
        reached = (places[0], TokenRange(300, 64 + end)) if end > 236 else (TokenRange(64, 64 + end),)
        span = AttendedSpan(0, end - start, start, reached, is_prompt=is_prompt)
        attend_by_tiles(queries[start:end], span, kv, scoring, out=out)
        return out

    if not is_prompt:
        rows = [attended(at, at + 1) for at in (0, 63, 511, 512, 699)]
        whole = torch.cat(rows)
        chosen = torch.tensor([0, 63, 511, 512, 699])
    else:
        whole, chosen = attended(0, num_tokens), torch.arange(num_tokens)
        for start, end in ((0, 1), (5, 100), (511, 514), (640, 700)):
            assert torch.equal(attended(start, end), whole[start:end])
    keys = latents[64:, 0].double()
    scores = torch.einsum("nhd,td->hnt", queries[chosen].double(), keys) * scoring.scale
    scores = scores.masked_fill(torch.arange(num_tokens) > chosen[:, None], -torch.inf)
    expected = torch.einsum("hnt,td->nhd", scores.softmax(-1), keys)
    assert float((whole - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_heads_do_not_notice_other_rows(dtype: torch.dtype) -> None:
    kernels, generator = TorchKernels(), torch.Generator().manual_seed(3)
    x = torch.randn(200, 3, 24, generator=generator).to(dtype)
    weight = torch.randn(3, 24, 40, generator=generator).to(dtype)
    whole = kernels.per_head(x, weight, is_canonical=True)
    expected = torch.einsum("nhi,hio->nho", x.double(), weight.double())
    assert float((whole - expected).abs().max()) < (1e-5 if dtype == torch.float32 else 0.2)
    for rows in (slice(199, 200), slice(3, 70), slice(64, 128)):
        assert torch.equal(kernels.per_head(x[rows], weight, is_canonical=True), whole[rows])
