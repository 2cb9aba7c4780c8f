"""Calls that launch every kernel of the CUDA kernels once, in the shapes of real models. What they give is of no
interest."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.cache import TokenRange
from penstock.cache.tensors import KV, LayerStates
from penstock.kernels.cuda import fla as fla_delta
from penstock.kernels.cuda import kernels as cuda_kernels
from penstock.kernels.cuda.delta import carry_states
from penstock.kernels.cuda.fp8 import scale_rows
from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.elementwise import ACTIVATIONS
from penstock.kernels.experts import Router
from penstock.kernels.quantised import F8_BLOCK, F8_ROW, Q4_K, Q5_K, Q6_K, Q8_0
from penstock.kernels.spans import (
    AttendedSpan,
    AttentionWork,
    DeltaHeads,
    HeadLayout,
    Scoring,
    StateRows,
    StateWork,
    WrittenPlaces,
)
from penstock.plan.model import DeltaNetConfig, ExpertsConfig

_DTYPES = (torch.bfloat16, torch.float32)


def rows() -> None:
    kernels = CudaKernels()
    for dtype in _DTYPES:
        x, weight = torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
        for norm in (weight, weight.float()):
            kernels.rms_norm(x, norm, 1e-6)
            kernels.add_norm(x, x, norm, 1e-6)
        kernels.silu_and_mul(torch.zeros(3, 24_576, dtype=dtype))
        for bias in (None, torch.zeros(1024, dtype=dtype)):
            kernels.linear(x, torch.zeros(1024, 4096, dtype=dtype), bias, is_canonical=False)


def heads() -> None:
    kernels = CudaKernels()
    for dtype, head_dim, rotary_dim, norm_dtype in (
        (torch.bfloat16, 64, 64, None),
        (torch.bfloat16, 128, 128, torch.bfloat16),
        (torch.bfloat16, 256, 64, torch.float32),
        (torch.float32, 256, 64, torch.float32),
    ):
        norm = torch.zeros(head_dim, dtype=norm_dtype) if norm_dtype else None
        layout = HeadLayout(16, 4, head_dim, norm, norm)
        angles = torch.zeros(3, rotary_dim, dtype=dtype)
        projected = torch.zeros(3, 24 * head_dim, dtype=dtype)
        places = WrittenPlaces((TokenRange(0, 2),))
        kernels.place_heads(projected, layout, angles, angles, _kv(128, head_dim, dtype), places)


def attention() -> None:
    kernels = CudaKernels()
    vars(cuda_kernels)["attend_past"] = _attend_past
    here, split = (TokenRange(0, 2048),), (TokenRange(0, 1088), TokenRange(2048, 3008))
    plain, sinks = Scoring(1.0), torch.zeros(16)
    for dtype, head_dim, places, scoring in (
        (torch.bfloat16, 64, split, plain),
        (torch.bfloat16, 128, here, plain),
        (torch.bfloat16, 256, here, plain),
        (torch.float32, 128, here, plain),
        (torch.bfloat16, 128, here, Scoring(1.0, window=1024)),
        (torch.bfloat16, 64, split, Scoring(1.0, window=128, sinks=sinks)),
        (torch.bfloat16, 64, here, Scoring(1.0, sinks=sinks)),
        (torch.bfloat16, 256, here, Scoring(1.0, window=4096, soft_cap=50.0)),
        (torch.bfloat16, 512, here, plain),
    ):
        chunk = AttendedSpan(0, 1024, 512, places, is_prompt=True, tile_size=1024)
        decode = AttendedSpan(1024, 1025, 1600, places, is_prompt=False)
        queries = torch.zeros(1025, 16, head_dim, dtype=dtype)
        kernels.attend(queries, AttentionWork((chunk, decode)), _kv(4096, head_dim, dtype), scoring)


def delta_nets() -> None:
    for dtype in _DTYPES:
        net = _net(dtype)
        width = net.sizes.conv_size + net.sizes.value_size + 2 * len(net.decay_rate)
        slots = 4
        tails = torch.zeros(slots, 3, net.sizes.conv_size, dtype=dtype)
        matrices = torch.zeros(
            slots, net.sizes.num_value_heads, net.sizes.key_head_dim, net.sizes.value_head_dim
        )
        states = LayerStates(tails, matrices, tails[0], matrices[0])
        work = StateWork(
            (StateRows(0, 100, 0, 1, is_prompt=True), StateRows(100, 101, 2, 3, is_prompt=False))
        )
        for has_library in {fla_delta.is_available(), False}:
            is_available = fla_delta.is_available
            fla_delta.is_available = lambda has_library=has_library: has_library  # type: ignore[assignment]
            carry_states(torch.zeros(101, width, dtype=dtype), net, work, states)
            fla_delta.is_available = is_available


def experts() -> None:
    for dtype, num_rows in ((torch.bfloat16, (1, 100, 2048)), (torch.float32, (40,))):
        gate_up, down = torch.zeros(8, 512, 512, dtype=dtype), torch.zeros(8, 512, 256, dtype=dtype)
        for config, bias, function in (
            (ExpertsConfig(1, 8, 256, num_active=2), None, None),
            (ExpertsConfig(1, 8, 256, 64, num_active=2, num_groups=4), torch.zeros(8), ACTIVATIONS["gelu"]),
        ):
            found = CudaKernels().stacked_experts(Router(config, bias), gate_up, down, function)
            for count in num_rows if function is None else num_rows[:1]:
                x, scores = torch.zeros(count, 512, dtype=dtype), torch.zeros(count, 72, dtype=dtype)
                found.run(x, scores, x if function else None)


def quantised_experts() -> None:
    kernels, config = CudaKernels(), ExpertsConfig(1, 8, 256, num_active=2)
    for forms in ((Q4_K, Q6_K), (F8_BLOCK, F8_BLOCK), (F8_ROW, F8_ROW)):
        shapes = (8 * 512, 512), (8 * 512, 256)
        gate_up, down = (
            kernels.quantised.zeros(form, *shape) for form, shape in zip(forms, shapes, strict=True)
        )
        found = kernels.stacked_experts(Router(config), gate_up, down)
        for count, is_canonical in ((1, False), (1, True), (100, True), (2048, True)):
            x = torch.zeros(count, 512, dtype=torch.bfloat16)
            found.run(x, x[:, :8], None, is_canonical=is_canonical)


def weights() -> None:
    kernels = CudaKernels()
    for form in (Q4_K, Q5_K, Q6_K, Q8_0, F8_BLOCK):
        weight = kernels.quantised.zeros(form, 4096, 4096, torch.device("cpu"))
        kernels.embed(torch.zeros(1, dtype=torch.int64), weight)
        for num_rows in (1, 4, 32):
            x = torch.zeros(num_rows, 4096, dtype=torch.bfloat16)
            kernels.linear(x, weight, is_canonical=False)
    scale_rows(torch.zeros(64, 4096, dtype=torch.bfloat16), 4096, 1)
    scale_rows(torch.zeros(64, 4096, dtype=torch.bfloat16), 128, 16)


LAUNCHES: dict[str, Callable[[], None]] = {
    "rows": rows,
    "heads": heads,
    "attention": attention,
    "delta_nets": delta_nets,
    "experts": experts,
    "quantised_experts": quantised_experts,
    "weights": weights,
}


def _kv(num_tokens: int, head_dim: int, dtype: torch.dtype) -> KV:
    zeros = torch.zeros(num_tokens, 4, head_dim, dtype=dtype)
    return KV(zeros, zeros)


def _attend_past(queries: Tensor, past: KV, scale: float) -> tuple[Tensor, Tensor]:
    num_rows, num_heads, _ = queries.shape
    return torch.zeros(2, *queries.shape, dtype=queries.dtype), torch.zeros(2, num_heads, num_rows)


def _net(dtype: torch.dtype) -> DeltaHeads:
    num_lanes = 64
    return DeltaHeads(
        DeltaNetConfig(1, 16, 32, 128, 128, 4),
        norm_eps=1e-6,
        conv_weight=torch.zeros(4, 2 * 16 * 128 + 32 * 128),
        decay_rate=torch.zeros(num_lanes),
        decay_bias=torch.zeros(num_lanes),
        norm=torch.zeros(128),
    )
