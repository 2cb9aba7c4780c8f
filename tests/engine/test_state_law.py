"""Running [0, a) and then [a, n) leaves the state of [0, n), and the next chunk reads what the last one left."""

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels.reference.delta import RuleInputs
from penstock.kernels.reference.kernels import TorchKernels
from penstock.models.decoder import Decoder
from tests.engine.hybrids import MODELS, Tape, hybrid
from tests.oracle import canon_of, random_prompt

NUM_TOKENS = 150
SOME_CUTS = (1, 2, 3, 64, 100, NUM_TOKENS - 1)


@pytest.fixture
def sound_model() -> Decoder:
    """A model whose shapes were probed before its kernels are broken: the probe itself would notice."""
    model = hybrid("qwen3_5")
    canon_of(model)
    return model


def worst_differences(model: Decoder, cuts: Iterable[int]) -> Iterator[float]:
    """Of any state of the prompt, relative to the largest of its values, when it is cut in two at each of `cuts`."""
    prompt = random_prompt(NUM_TOKENS)
    whole = Tape(model, prompt)
    whole.run(NUM_TOKENS)
    expected = whole.states()
    for cut in cuts:
        parts = Tape(model, prompt)
        parts.run(cut)
        parts.run(NUM_TOKENS)
        yield max(
            float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
            for ours, theirs in zip(parts.states(), expected, strict=True)
        )


@pytest.mark.parametrize("name", MODELS)
def test_cut_anywhere(name: str) -> None:
    some = {*range(1, NUM_TOKENS, 5), *range(1, 6), *range(62, 67), *range(126, 131), NUM_TOKENS - 1}
    cuts = range(1, NUM_TOKENS) if name == "qwen3_5" else sorted(some)
    for cut, worst in zip(cuts, worst_differences(hybrid(name), cuts), strict=True):
        assert worst < 2e-5, cut


def test_zero_padding_is_noticed(sound_model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution that begins every chunk with zeros breaks the law, at any cut."""
    padded = TorchKernels.causal_conv

    def zero_padded(x: Tensor, tail: Tensor, weight: Tensor, out_tail: Tensor) -> Tensor:
        return padded(x, torch.zeros_like(tail), weight, out_tail)

    monkeypatch.setattr(TorchKernels, "causal_conv", staticmethod(zero_padded))
    assert min(worst_differences(sound_model, SOME_CUTS)) > 1e-3


def test_dropped_state_is_noticed(sound_model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = TorchKernels.gated_delta_rule

    def forgetful(inputs: RuleInputs, state: Tensor, out_state: Tensor) -> Tensor:
        return rule(inputs, torch.zeros_like(state), out_state)

    monkeypatch.setattr(TorchKernels, "gated_delta_rule", staticmethod(forgetful))
    assert min(worst_differences(sound_model, SOME_CUTS)) > 1e-3


@pytest.mark.parametrize("num_short", [1, 2])
def test_chunks_shorter_than_the_convolution(num_short: int) -> None:
    """The tail is made of several chunks, the newest last."""
    model = hybrid("qwen3_5")
    prompt = random_prompt(40)
    whole, parts = Tape(model, prompt), Tape(model, prompt)
    whole.run(40)
    for end in (*range(num_short, 40, num_short), 40):
        parts.run(end)
    for ours, theirs in zip(parts.states(), whole.states(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_abort_leaves_the_state() -> None:
    model = hybrid("qwen3_next")
    tape = Tape(model, random_prompt(200))
    tape.run(100)
    before = tape.states()
    tape.run(130, fails=True)
    assert tape.cache.num_tokens == 100
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tape.states(), before, strict=True))


def test_restore_gives_the_state_back() -> None:
    model = hybrid("qwen3_5")
    tape = Tape(model, random_prompt(200))
    tape.run(77)
    before = tape.states()
    with_snapshot = tape.snapshot()
    tape.run(150)
    after = tape.states()
    tape.restore(with_snapshot)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tape.states(), before, strict=True))
    tape.run(150)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tape.states(), after, strict=True))
    with_snapshot.release()
