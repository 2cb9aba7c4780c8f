"""A model cut into ranges of layers is the whole model, bit for bit: what crosses a cut is the residual."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from penstock.cache.space import CacheSpace
from penstock.cache.tensors import CacheTensors
from penstock.engine.step import build_batch
from penstock.errors import SettingError
from penstock.kernels.interface import Kernels, select_kernels
from penstock.kernels.reference.kernels import TorchKernels
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder
from penstock.models.hf.folder import HfFolder
from penstock.models.loading import load_decoder
from penstock.plan import Span
from penstock.plan.weight_settings import WeightsName
from tests.engine.hybrids import Tape, assert_all_equal
from tests.oracle import canon_of, make_oracle, random_prompt

CPU = torch.device("cpu")
NUM_LAYERS = 4
NUM_DECODES = 3
CUTS = [(0, 1, 4), (0, 3, 4), (0, 1, 2, 3, 4), (0, 2, 4)]
DENSE: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS}


class Chain:
    """Stages with caches of their own, as far as one process goes: blocks and slots are the whole model's."""

    def __init__(self, stages: list[Decoder], space_of: Tape) -> None:
        self.stages = stages
        space = space_of.space
        num_slots = space.slots.num_slots if space.slots else 0
        self.caches = [
            CacheTensors.of(stage.cache_spec, [space.tensors.kv.num_blocks], num_slots, CPU)
            for stage in stages
        ]

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        x = None
        for stage, caches in zip(self.stages, self.caches, strict=True):
            x = stage.forward(batch, caches, x)
        return x

    def cached(self, tape: Tape) -> list[torch.Tensor]:
        """Keys and values, then states, of all stages in the order of the whole model's."""
        places = tape.cache.blocks.locate(0, tape.cache.num_tokens)
        found = []
        for caches in self.caches:
            for layer in caches.kv.layers:
                kv = layer.read(places)
                found += [kv.keys, kv.values]
        for caches in self.caches:
            for states in caches.recurrent.layers if caches.recurrent else ():
                assert tape.cache.state is not None
                slot = tape.cache.state.slot
                found += [states.tail(slot), states.matrix(slot)]
        return found


def load(
    family: str,
    kernels: Kernels,
    dtype: torch.dtype,
    layers: range | None = None,
    weights: WeightsName = "auto",
    **settings: Any,
) -> Decoder:
    source = HfFolder(make_oracle(family, **settings).folder)
    return load_decoder(source, kernels, dtype, CPU, weights, layers)


def check_chain(whole: Decoder, stages: list[Decoder], *, strict: bool = False) -> None:
    """Two chunks and some decodes, each through both."""
    tape = Tape(whole, random_prompt(150), num_generated=NUM_DECODES)
    chain, canon = Chain(stages, tape), canon_of(whole)
    ends = [64, 150, *range(151, 151 + NUM_DECODES)]
    for start, end in pairwise([0, *ends]):
        is_prompt = end <= tape.prompt_length
        if not is_prompt:
            tape.tokens.append(start % 200)
        item = tape.reserve(Span(start, end), is_prompt=is_prompt)
        batch = build_batch([item], canon=canon, strict=strict)
        ours, theirs = chain.forward(batch), whole.forward(batch, tape.space.tensors)
        tape.cache.commit(end)
        assert (ours is None) == (theirs is None) == (end == 64)
        if ours is not None and theirs is not None:
            assert torch.equal(ours, theirs)
        assert_all_equal(chain.cached(tape), [*tape.keys_and_values(), *tape.states()])


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", DENSE),
        ("llama", {**DENSE, "tie_word_embeddings": True}),
        ("qwen3_moe", {**DENSE, "mlp_only_layers": (1,)}),
        ("qwen3_5_text", {}),  # the first three layers have states, and no keys and values
        ("qwen3_next", {"decoder_sparse_step": 2}),
        ("bamba", {}),
        ("deepseek_v3", {"num_hidden_layers": NUM_LAYERS}),
    ],
    ids=str,
)
def test_stages_are_the_model(
    family: str, settings: dict[str, Any], dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    kernels = select_kernels(CPU)
    whole = load(family, kernels, dtype, **settings)
    stages = [load(family, kernels, dtype, range(*cut), **settings) for cut in pairwise(cuts)]
    check_chain(whole, stages)


@pytest.mark.parametrize("cuts", CUTS[:2], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_stages_of_the_reference_kernels(family: str, cuts: tuple[int, ...]) -> None:
    kernels = TorchKernels()
    settings: dict[str, Any] = {} if family == "qwen3_5_text" else DENSE
    whole = load(family, kernels, torch.bfloat16, **settings)
    check_chain(
        whole, [load(family, kernels, torch.bfloat16, range(*cut), **settings) for cut in pairwise(cuts)]
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5_text"])
def test_chunks_beside_decodes(family: str) -> None:
    """A step of two requests, of which one decodes: only its row has logits."""
    kernels, settings = select_kernels(CPU), {} if family == "qwen3_5_text" else DENSE
    whole = load(family, kernels, torch.bfloat16, **settings)
    stages = [load(family, kernels, torch.bfloat16, range(*cut), **settings) for cut in pairwise(CUTS[0])]
    space = CacheSpace.for_tokens(whole, 320, num_slots=6)
    decoding, reading = (Tape(whole, random_prompt(length, seed=length), space=space) for length in (70, 200))
    chain, canon = Chain(stages, decoding), canon_of(whole)
    decoding.tokens.append(7)
    steps = [[(decoding, Span(0, 70), True)], [(reading, Span(0, 64), True), (decoding, Span(70, 71), False)]]
    for step in steps:
        items = [tape.reserve(span, is_prompt=is_prompt) for tape, span, is_prompt in step]
        batch = build_batch(items, canon=canon)
        ours, theirs = chain.forward(batch), whole.forward(batch, space.tensors)
        for tape, span, _ in step:
            tape.cache.commit(span.end)
            assert_all_equal(chain.cached(tape), [*tape.keys_and_values(), *tape.states()])
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_in_one_call_work_by_range(family: str, cuts: tuple[int, ...], strict: bool) -> None:
    kernels = select_kernels(CPU)
    if kernels.quantised is None:
        pytest.skip("needs quantised weights")
    whole = load(family, kernels, torch.bfloat16, weights="int4", **DENSE)
    stages = [load(family, kernels, torch.bfloat16, range(*cut), "int4", **DENSE) for cut in pairwise(cuts)]
    assert all(stage.dense_layers is not None for stage in (whole, *stages))
    check_chain(whole, stages, strict=strict)


@pytest.mark.parametrize("kernels", [TorchKernels(), select_kernels(CPU)], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_normed_as_it_is_rounded(kernels: Kernels, weight_dtype: torch.dtype) -> None:
    """What a stage hands on is a rounded sum: its norm must be the one that the sum had where it was made."""
    x, delta = torch.randn(2, 33, 160, dtype=torch.bfloat16)
    weight = torch.rand(160).to(weight_dtype)
    total, normed = kernels.add_norm(x, delta, weight, 1e-5)
    assert torch.equal(kernels.rms_norm(total, weight, 1e-5), normed)


def test_a_stage_has_only_its_own_weights() -> None:
    kernels = TorchKernels()
    whole = load("llama", kernels, torch.float32, **DENSE)
    stages = [load("llama", kernels, torch.float32, range(*cut), **DENSE) for cut in pairwise((0, 1, 3, 4))]
    assert [len(stage.layers) for stage in stages] == [1, 2, 1]
    assert [stage.cache_spec.kv.num_layers for stage in stages] == [1, 2, 1]
    # The norm between two stages is in both.
    norms = 2 * 4 * whole.config.hidden_size
    assert sum(stage.num_weight_bytes for stage in stages) == whole.num_weight_bytes + norms
    assert whole.is_whole
    assert not any(stage.is_whole for stage in stages)


@pytest.mark.parametrize("layers", [range(2, 2), range(5), range(-1, 2), range(0, 4, 2)])
def test_other_ranges_are_refused(layers: range) -> None:
    with pytest.raises(SettingError) as error:
        load("llama", TorchKernels(), torch.float32, layers, **DENSE)
    assert (error.value.setting, error.value.value) == ("layers", layers)
