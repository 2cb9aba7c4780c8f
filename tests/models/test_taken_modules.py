"""What is put in place of transformers' modules: all that is the same function, and nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_pairs
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from penstock.kernels.interface import select_kernels
from penstock.models.by_transformers.folder import TransformersFolder
from penstock.models.by_transformers.modules import (
    GatedBlock,
    Joined,
    Product,
    RmsNorm,
    Rotation,
    Rotations,
    as_rms_norm,
    is_gated_block,
)
from tests.small import small_model

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def test_a_plain_model_has_nothing_of_its_own_left_but_sums() -> None:
    model: Any = TransformersFolder(small_model("llama").folder).decoder(
        select_kernels(CPU), torch.float32, CPU
    )
    modules = dict(model._model.named_modules())
    for name, module in modules.items():
        kind = {"LlamaRMSNorm": RmsNorm, "LlamaMLP": GatedBlock}.get(type(module).__name__, object)
        assert isinstance(module.forward, kind), name
    layer = modules["model.layers.1.self_attn"]
    joined = {module.forward.func.__self__ for module in (layer.q_proj, layer.k_proj, layer.v_proj)}
    assert len(joined) == 1
    assert isinstance(joined.pop(), Joined)
    assert isinstance(layer.o_proj.forward, Product)
    assert isinstance(layer.forward.__func__.__globals__["apply_rotary_pos_emb"], Rotation)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, GemmaRMSNorm])
def test_norms(kind: Any, dtype: torch.dtype) -> None:
    norm = kind(48, eps=1e-5).to(dtype)
    norm.weight.data.uniform_(-0.5, 1.5)
    ours, x = as_rms_norm(norm, select_kernels(CPU)), torch.randn(1, 5, 3, 48).to(dtype)
    assert ours is not None
    for rows in (x, x.transpose(1, 2), x[0]):
        torch.testing.assert_close(ours(rows), norm(rows))


class OffsetRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(48)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x + 0.1, (48,), self.weight, self.eps)


@torch.no_grad()
def test_what_only_looks_like_a_norm_stays() -> None:
    assert as_rms_norm(OffsetRMSNorm(), select_kernels(CPU)) is None
    assert as_rms_norm(nn.LayerNorm(48), select_kernels(CPU)) is None


class Block(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 50), nn.Linear(32, 50)
        self.down_proj, self.act_fn = nn.Linear(50, 32), nn.SiLU()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return self.factor * out


@torch.no_grad()
def test_what_only_looks_like_a_gated_block_stays() -> None:
    assert is_gated_block(Block(1.0), {})
    assert not is_gated_block(Block(1.1), {})


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation(dtype: torch.dtype) -> None:
    rotations = Rotations(select_kernels(CPU), dtype, CPU)
    assert rotations._is_rotation(rotate_halves)
    assert not rotations._is_rotation(rotate_pairs)
    ours = Rotation(select_kernels(CPU), rotate_halves)
    projected = torch.randn(1, 7, 10 * 24).to(dtype)
    q, k, _ = (part.view(1, 7, -1, 24).transpose(1, 2) for part in projected.split((144, 48, 48), dim=-1))
    cos, sin = torch.randn(2, 1, 7, 24).to(dtype)
    for pair in ((q, k), (q, k.clone()), (k, q)):
        for found, expected in zip(ours(*pair, cos, sin), rotate_halves(*pair, cos, sin), strict=True):
            torch.testing.assert_close(found, expected)
    other = ours(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(
        other, rotate_halves(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    )


def test_joined_products_are_computed_once_for_the_same_rows() -> None:
    calls: list[Tensor] = []

    def product(x: Tensor) -> Tensor:
        calls.append(x)
        return torch.cat((x, 2 * x), dim=-1)

    joined, x = Joined(product, (3, 3)), torch.randn(2, 3)  # type: ignore[arg-type]
    assert torch.equal(joined.part(1, x), 2 * x)
    assert torch.equal(joined.part(0, x), x)
    assert len(calls) == 1
    assert torch.equal(joined.part(0, x), x)
    assert torch.equal(joined.part(0, x + 1), x + 1)
    assert len(calls) == 3
