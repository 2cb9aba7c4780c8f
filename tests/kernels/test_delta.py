"""The delta rule in its two forms, and the convolution, against what defines them: one token after the other."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.reference import delta as torch_delta
from penstock.kernels.reference.delta import BLOCK, STEP_TOKENS, RuleInputs, _inverse
from penstock.kernels.reference.kernels import TorchKernels

KERNELS = TorchKernels()
FORMS = {"rule": KERNELS.gated_delta_rule, "steps": KERNELS.gated_delta_steps}
LENGTHS = (1, 2, STEP_TOKENS, STEP_TOKENS + 1, 63, 64, 65, 130, 200)


@dataclass(frozen=True)
class Inputs:
    tokens: RuleInputs
    state: Tensor

    def rows(self, start: int, end: int, state: Tensor) -> "Inputs":
        return Inputs(self.tokens.of(slice(start, end)), state)


def random_inputs(
    num_tokens: int, *, num_heads: int = 4, num_key_heads: int = 2, key_dim: int = 16, value_dim: int = 24
) -> Inputs:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens = RuleInputs(
        normal(num_tokens, num_key_heads, key_dim),
        # Keys that are alike make the triangular system as hard as it gets.
        normal(num_tokens, num_key_heads, key_dim) + 1.0,
        normal(num_tokens, num_heads, value_dim),
        -torch.nn.functional.softplus(3 * normal(num_tokens, num_heads) - 3),
        torch.sigmoid(3 * normal(num_tokens, num_heads)),
    )
    return Inputs(tokens, normal(num_heads, key_dim, value_dim))


def run(form: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    out_state = torch.full_like(inputs.state, torch.nan)
    before = inputs.state.clone()
    out = FORMS[form](inputs.tokens, inputs.state, out_state)
    assert torch.equal(inputs.state, before)  # the state that is read is not written
    return out, out_state


def by_definition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """In float64: the state decays, a part of what it holds under a key is replaced, then a query reads it."""
    tokens = inputs.tokens
    group = tokens.values.shape[1] // tokens.keys.shape[1]

    def unit(x: Tensor) -> Tensor:
        x = x.double()
        return (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, dim=1)

    queries, keys = unit(tokens.queries) / tokens.queries.shape[-1] ** 0.5, unit(tokens.keys)
    state = inputs.state.double()
    outs = []
    for query, key, value, log_decay, beta in zip(
        queries, keys, tokens.values.double(), tokens.log_decay.double(), tokens.beta.double(), strict=True
    ):
        state = state * log_decay.exp()[:, None, None]
        held = torch.einsum("hk,hkv->hv", key, state)
        state = state + torch.einsum("hk,hv->hkv", key, (value - held) * beta[:, None])
        outs.append(torch.einsum("hk,hkv->hv", query, state))
    return torch.stack(outs), state


def assert_close(ours: Tensor, exact: Tensor) -> None:
    assert float((ours - exact).abs().max()) <= 2e-6 * float(exact.abs().max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("num_heads", [2, 4])
def test_is_the_delta_rule(form: str, num_tokens: int, num_heads: int) -> None:
    inputs = random_inputs(num_tokens, num_heads=num_heads)
    out, state = run(form, inputs)
    exact_out, exact_state = by_definition(inputs)
    assert_close(out, exact_out)
    assert_close(state, exact_state)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(cut=st.integers(1, 199))
@example(cut=64)
@example(cut=128)
@example(cut=192)
def test_carried_state(form: str, cut: int) -> None:
    """[0, a) then [a, n) is [0, n)."""
    inputs = random_inputs(200)
    whole_out, whole_state = run(form, inputs)
    first_out, state = run(form, inputs.rows(0, cut, inputs.state))
    second_out, state = run(form, inputs.rows(cut, 200, state))
    assert_close(torch.cat((first_out, second_out)), whole_out)
    assert_close(state, whole_state)
    if cut % BLOCK == 0:
        assert torch.equal(torch.cat((first_out, second_out)), whole_out)
        assert torch.equal(state, whole_state)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_blocks_at_once_do_not_matter(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(500)
    out, state = run("rule", inputs)
    monkeypatch.setattr(torch_delta, "_blocks_at_once", lambda width: num_blocks)
    other_out, other_state = run("rule", inputs)
    assert torch.equal(other_out, out)
    assert torch.equal(other_state, state)


def test_dropped_state_is_noticed() -> None:
    inputs = random_inputs(200)
    whole_out, _ = run("rule", inputs)
    second_out, _ = run("rule", inputs.rows(128, 200, torch.zeros_like(inputs.state)))
    assert float((second_out - whole_out[128:]).abs().max()) > 0.01 * float(whole_out.abs().max())


def test_strong_decay_does_not_overflow() -> None:
    inputs = random_inputs(130)
    tokens = inputs.tokens
    inputs = Inputs(tokens._replace(log_decay=tokens.log_decay - 50), inputs.state)
    out, state = run("rule", inputs)
    exact_out, exact_state = by_definition(inputs)
    assert_close(out, exact_out)
    assert_close(state, exact_state)


def test_inverse_where_powers_would_explode() -> None:
    """All ones below the diagonal: the 32nd power of that has entries of 1e17, its inverse none above 1."""
    system = torch.ones(2, BLOCK, BLOCK)
    exact = torch.linalg.inv(torch.ones(BLOCK, BLOCK, dtype=torch.float64).tril())
    assert torch.equal(_inverse(system[None])[0].double(), exact.expand(2, -1, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_taps", [2, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 63, 64, 65, 130])
def test_convolution(num_tokens: int, num_taps: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    before = torch.randn(num_taps - 1 + num_tokens, 40, generator=generator).to(dtype)
    weight = torch.randn(num_taps, 40, generator=generator)
    tail = before[: num_taps - 1]
    out_tail = torch.full_like(tail, torch.nan)
    out = KERNELS.causal_conv(before[num_taps - 1 :], tail, weight, out_tail)
    exact = torch.nn.functional.conv1d(before.double().t()[None], weight.double().t()[:, None], groups=40)
    exact = torch.nn.functional.silu(exact[0].t())
    assert out.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert float((out - exact).abs().max()) <= tolerance * float(exact.abs().max())
    assert torch.equal(out_tail, before[num_tokens:])


@settings(max_examples=40, deadline=None)
@given(cuts=st.sets(st.integers(1, 199), max_size=6))
@example(cuts={64})
@example(cuts={192})
@example(cuts={64, 128})
@example(cuts={64, 128, 192})
def test_convolution_in_spans(cuts: set[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(200, 40, generator=generator), torch.randn(4, 40, generator=generator)
    tail = torch.zeros(3, 40)
    whole_tail = torch.empty_like(tail)
    whole = KERNELS.causal_conv(x, tail, weight, whole_tail)
    outs, start = [], 0
    for end in (*sorted(cuts), 200):
        next_tail = torch.empty_like(tail)
        outs.append(KERNELS.causal_conv(x[start:end], tail, weight, next_tail))
        tail, start = next_tail, end
    assert torch.allclose(torch.cat(outs), whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(tail, whole_tail)
    if all(cut % BLOCK == 0 for cut in cuts):
        assert torch.equal(torch.cat(outs), whole)


def test_gates_and_gated_norm() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(2, 70, 64, generator=generator)
    rate, bias = -torch.rand(64, generator=generator), torch.randn(64, generator=generator)
    log_decay, beta = KERNELS.delta_gates(a, b, rate, bias)
    assert torch.allclose(log_decay, rate * torch.log1p(torch.exp(a + bias)), atol=1e-6)
    assert torch.allclose(beta, 1 / (1 + torch.exp(-b)), atol=1e-6)
    x, gate = torch.randn(70, 4, 24, generator=generator), torch.randn(70, 96, generator=generator)
    weight = torch.rand(24, generator=generator)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    expected = normed.flatten(1) * gate * torch.sigmoid(gate)
    assert torch.allclose(KERNELS.gated_norm(x, gate, weight, 1e-6), expected, atol=1e-5)
