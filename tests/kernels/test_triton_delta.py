"""Gated delta nets as a GPU runs them, interpreted: against the reference, and the laws of carried states."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.cache.states import EMPTY
from penstock.cache.tensors import LayerStates, RecurrentCache, RecurrentSpec
from penstock.kernels.cuda.work import static_decode_states, static_span_states
from penstock.kernels.reference.kernels import TorchKernels
from penstock.kernels.spans import DeltaHeads, StateRows, StateWork
from penstock.plan.model import DeltaNetConfig
from tests.kernels.triton_interpreter import require_interpreter

REFERENCE = TorchKernels()
LANES = 64
NUM_SLOTS = 6


@pytest.fixture(autouse=True)
def interpreter() -> None:
    require_interpreter()


def carry(projected: Tensor, net: DeltaHeads, work: StateWork, states: LayerStates) -> Tensor:
    from penstock.kernels.cuda.delta import carry_states

    return carry_states(projected, net, work, states)


def random_net(
    num_key_heads: int = 1, num_value_heads: int = 2, key_dim: int = 8, value_dim: int = 12, taps: int = 4
) -> DeltaHeads:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    sizes = DeltaNetConfig(1, num_key_heads, num_value_heads, key_dim, value_dim, taps)
    return DeltaHeads(
        sizes,
        norm_eps=1e-6,
        conv_weight=normal(taps, sizes.conv_size),
        decay_rate=-normal(LANES).exp(),
        decay_bias=normal(LANES),
        norm=normal(value_dim),
    )


def random_rows(net: DeltaHeads, num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(
        num_rows, net.sizes.conv_size + net.sizes.value_size + 2 * LANES, generator=generator
    ).to(dtype)


def random_states(net: DeltaHeads, dtype: torch.dtype = torch.float32) -> LayerStates:
    states = RecurrentCache(RecurrentSpec.of(net.sizes, dtype), NUM_SLOTS).layer(0)
    generator = torch.Generator().manual_seed(3)
    states.tails.copy_(torch.randn(states.tails.shape, generator=generator))
    states.matrices.copy_(torch.randn(states.matrices.shape, generator=generator))
    return states


def assert_like_the_reference(net: DeltaHeads, num_rows: int, work: StateWork, dtype: torch.dtype) -> None:
    projected = random_rows(net, num_rows, dtype)
    ours, theirs = random_states(net, dtype), random_states(net, dtype)
    out = carry(projected, net, work, ours)
    expected = REFERENCE.carry_states(projected, net, work, theirs)
    assert out.dtype == dtype
    assert_close(out, expected)
    assert_close(ours.matrices, theirs.matrices, dtype)
    assert torch.equal(ours.tails, theirs.tails)


def assert_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype | None = None) -> None:
    tolerance = 2e-5 if (dtype or ours.dtype) == torch.float32 else 0.02
    assert float((ours.float() - theirs.float()).abs().max()) <= tolerance * float(theirs.float().abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_decodes(taps: int, dtype: torch.dtype) -> None:
    """Of several sequences, one of which begins; the last rows are padding."""
    net = random_net(num_key_heads=2, num_value_heads=4, taps=taps)
    slots = [(0, 3), (EMPTY, 4), (2, 5)]
    rows = tuple(
        StateRows(row, row + 1, read, write, is_prompt=False) for row, (read, write) in enumerate(slots)
    )
    assert_like_the_reference(net, 5, StateWork(rows), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 64, 65])
def test_span(num_tokens: int, dtype: torch.dtype) -> None:
    work = StateWork((StateRows(0, num_tokens, 1, 4, is_prompt=True),))
    assert_like_the_reference(random_net(), num_tokens, work, dtype)


@pytest.mark.parametrize("taps", [1, 2, 6])
def test_span_of_fewer_tokens_than_taps(taps: int) -> None:
    work = StateWork((StateRows(0, 2, EMPTY, 0, is_prompt=True),))
    assert_like_the_reference(random_net(taps=taps, key_dim=12, value_dim=8), 3, work, torch.float32)


def test_spans_and_decodes_beside_each_other() -> None:
    """A span of one sequence that is cut to keep a state, another's, decodes, and two tokens that are no prompt."""
    rows = (
        StateRows(0, 20, EMPTY, 0, is_prompt=True),
        StateRows(20, 25, 0, 1, is_prompt=True),
        StateRows(25, 26, 3, 2, is_prompt=False),
        StateRows(26, 28, 3, 4, is_prompt=False),
        StateRows(28, 29, EMPTY, 5, is_prompt=False),
    )
    assert_like_the_reference(
        random_net(num_key_heads=2, num_value_heads=2), 32, StateWork(rows), torch.float32
    )


def test_pieces_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.kernels.cuda import delta as cuda_delta

    net, projected = random_net(), random_rows(random_net(), 70)
    work = StateWork((StateRows(0, 70, 1, 4, is_prompt=True),))
    whole, parts = random_states(net), random_states(net)
    expected = carry(projected, net, work, whole)
    monkeypatch.setattr(cuda_delta, "PIECE_TOKENS", 32)
    assert torch.equal(carry(projected, net, work, parts), expected)
    assert torch.equal(parts.matrices, whole.matrices)
    assert torch.equal(parts.tails, whole.tails)


@settings(max_examples=4, deadline=None)
@given(cut=st.integers(1, 19))
@example(cut=1)
@example(cut=18)
def test_carried_state(cut: int) -> None:
    """[0, a) then [a, n) is [0, n), bit for bit where one token follows the other."""
    net, projected = random_net(), random_rows(random_net(), 20)
    whole, parts = random_states(net), random_states(net)
    expected = carry(projected, net, StateWork((StateRows(0, 20, 1, 4, is_prompt=True),)), whole)
    first = carry(projected[:cut], net, StateWork((StateRows(0, cut, 1, 3, is_prompt=True),)), parts)
    rest = StateWork((StateRows(0, 20 - cut, 3, 4, is_prompt=True),))
    second = carry(projected[cut:], net, rest, parts)
    assert torch.equal(torch.cat((first, second)), expected)
    assert torch.equal(parts.matrices[4], whole.matrices[4])
    assert torch.equal(parts.tails[4], whole.tails[4])


def test_decodes_do_not_notice_each_other() -> None:
    net, projected = random_net(), random_rows(random_net(), 3)
    together, alone = random_states(net), random_states(net)
    read, write = torch.tensor([0, 1, -1]), torch.tensor([3, 4, 5])
    outs = carry(projected, net, static_decode_states(read, write), together)
    for row in range(3):
        work = static_decode_states(read[row : row + 1], write[row : row + 1])
        assert torch.equal(carry(projected[row : row + 1], net, work, alone)[0], outs[row])
    assert torch.equal(together.matrices, alone.matrices)
    assert torch.equal(together.tails, alone.tails)


def test_rows_without_slots_write_nothing() -> None:
    net, projected = random_net(), random_rows(random_net(), 9)
    states, before = random_states(net), random_states(net)
    none = torch.tensor([-1])
    carry(projected, net, static_span_states([9], none, none), states)
    carry(projected, net, static_decode_states(none.repeat(9), none.repeat(9)), states)
    assert torch.equal(states.matrices, before.matrices)
    assert torch.equal(states.tails, before.tails)


def test_slots_in_tensors_are_the_same_work() -> None:
    net, projected = random_net(), random_rows(random_net(), 9)
    ours, theirs = random_states(net), random_states(net)
    out = carry(projected, net, static_span_states([7], torch.tensor([2]), torch.tensor([0])), ours)
    work = StateWork((StateRows(0, 7, 2, 0, is_prompt=True),))
    assert torch.equal(out, carry(projected, net, work, theirs))
    assert not out[7:].any()
    assert torch.equal(ours.matrices, theirs.matrices)


def test_decay_that_is_barely_there() -> None:
    """A softplus of 1e-9 is not lost: the device's own logarithm would make it 0."""
    net = random_net(taps=1)
    projected, states = random_rows(net, 1), random_states(net)
    projected[:, -LANES:] = 0  # no decay but by the bias
    projected[:, -2 * LANES : -LANES] = -40  # and nothing is written
    rate, bias = torch.full((LANES,), -1e9), torch.full((LANES,), -20.0)
    net = replace(net, decay_rate=rate, decay_bias=bias)
    before = states.matrices[1].clone()
    carry(projected, net, static_decode_states(torch.tensor([1]), torch.tensor([0])), states)
    decay = (-1e9 * torch.nn.functional.softplus(bias[0].double())).exp()
    assert torch.allclose(states.matrices[0], before * decay.float(), rtol=1e-5)
