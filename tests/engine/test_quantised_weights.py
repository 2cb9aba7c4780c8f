"""Weights that stay quantised: parity with the same weights dequantised, the laws, and the memory they take."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import SettingError
from penstock.kernels.interface import select_kernels
from penstock.kernels.quantised import PACKED, QuantisedWeight
from penstock.kernels.reference.kernels import TorchKernels
from penstock.layers.attention import Attention
from penstock.layers.mlp import MLP, ExpertMLP
from penstock.measure.prompts import text_tokens
from penstock.measure.transformers_model import load_transformers
from penstock.models.decoder import Decoder
from penstock.models.gguf.file import GgufFile
from penstock.models.hf.folder import HfFolder
from penstock.models.loading import load_decoder
from penstock.models.opened import OpenedModel, open_model
from penstock.models.source import stored_bits
from penstock.plan.memory import weight_bytes
from penstock.plan.policy import ScheduleConfig
from penstock.plan.weight_settings import WeightsName
from tests.engine.batching import Wish, serve
from tests.engine.test_same_bits import assert_same_bits
from tests.models.gguf_builders import write_hybrid_gguf
from tests.models.test_gguf_hybrid import QUANTISED, small
from tests.oracle import Oracle, make_oracle, random_prompt, run_prompt

CPU = torch.device("cpu")
NUM_DECODES = 24

pytestmark = pytest.mark.skipif(
    select_kernels(CPU).quantised is None, reason="there are no kernels for quantised weights here"
)


def load(source: Any, weights: WeightsName) -> Decoder:
    return load_decoder(source, select_kernels(CPU), torch.bfloat16, CPU, weights)


@pytest.fixture(scope="module")
def opened(smollm2_path: Path) -> Iterator[OpenedModel]:
    opened = open_model(smollm2_path)
    yield opened
    opened.source.close()


@pytest.fixture(scope="module")
def kept(opened: OpenedModel) -> Decoder:
    return load(opened.source, "auto")


def test_the_file_s_blocks_are_kept(opened: OpenedModel, kept: Decoder) -> None:
    source, products = opened.source, kept.kernels.quantised
    assert products is not None
    mixer, mlp = kept.layers[3].mixer, kept.layers[3].mlp
    assert isinstance(mixer, Attention)
    assert isinstance(mlp, MLP)
    layer = "model.layers.3"
    fused = {
        mixer.qkv.parts[0]: [f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"],
        mlp.gate_up.parts[0]: [f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up")],
        mlp.down.parts[0]: [f"{layer}.mlp.down_proj.weight"],
        kept._embedding: ["model.embed_tokens.weight"],
    }
    for weight, names in fused.items():
        assert isinstance(weight, QuantisedWeight)
        parts = [torch.empty(source.shape(name)) for name in names]
        for name, part in zip(names, parts, strict=True):
            source.load_into(name, part)
        rows = products.rows(weight, torch.arange(weight.shape[0]), torch.float32)
        assert torch.equal(rows, torch.cat(parts))
    assert kept._head is kept._embedding
    assert kept.num_weight_bytes < 98.4e6  # the file


def test_the_arithmetic_knows_their_size(opened: OpenedModel, kept: Decoder) -> None:
    shape, bits = kept.config, stored_bits(opened.source, plain_bits=16)
    assert weight_bytes(shape, 2, bits) == pytest.approx(kept.num_weight_bytes, rel=1e-3)
    assert weight_bytes(shape, 2) == pytest.approx(load(opened.source, "bf16").num_weight_bytes, rel=1e-3)


def test_transformers_agrees(opened: OpenedModel, kept: Decoder) -> None:
    """Prompt and decodes are as close to float32 as bfloat16 weights are, and choose the same unless two are near."""
    prompt = text_tokens(opened.tokenizer, 300)
    theirs = load_transformers(opened.source, torch.float32)
    with torch.inference_mode():
        answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=NUM_DECODES, do_sample=False)
        exact = theirs(answer).logits[0, len(prompt) - 1 : -1]

    def forced(model: Decoder) -> torch.Tensor:
        run = run_prompt(model, prompt, max_tokens=NUM_DECODES + 1)
        logits = [run.logits]
        for token in answer[0, len(prompt) : -1].tolist():
            run.tokens[-1] = token
            run.step()
            logits.append(run.logits)
        return torch.stack([row for row in logits if row is not None])

    plain, ours = forced(load(opened.source, "bf16")), forced(kept)
    allowed = (plain - exact).abs().amax(dim=-1)
    error = (ours - exact).abs().amax(dim=-1)
    assert float(error.max()) < 1.5 * float(allowed.max())
    assert float(error.mean()) < 1.2 * float(allowed.mean())
    best = exact.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 2 * error
    assert int(is_clear.sum()) > NUM_DECODES // 2
    assert torch.equal(ours.argmax(dim=-1)[is_clear], exact.argmax(dim=-1)[is_clear])
    assert torch.equal(ours.argmax(dim=-1)[is_clear], plain.argmax(dim=-1)[is_clear])


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "qwen3_5_text", "qwen3_next"])
def test_quantised_at_loading(family: str, weights: WeightsName) -> None:
    """The same bits at any chunk size."""
    oracle = make_oracle(family)
    model = load(HfFolder(oracle.folder), weights)
    assert model.num_weight_bytes < load(HfFolder(oracle.folder), "bf16").num_weight_bytes
    prompt = random_prompt(300)
    whole = run_prompt(model, prompt)
    for chunk_size in (64, 128) if model.config.has_state else (1, 7, 64, 100):
        assert_same_bits(run_prompt(model, prompt, chunk_size=chunk_size), whole)


def test_eight_bits_are_closer_than_four() -> None:
    oracle: Oracle = make_oracle("llama")
    prompt = random_prompt(200)
    exact = oracle.logits(prompt)

    def error(weights: WeightsName) -> float:
        logits = run_prompt(load(HfFolder(oracle.folder), weights), prompt).logits
        assert logits is not None
        return float((logits - exact).norm() / exact.norm())

    plain, eight, four = error("bf16"), error("int8"), error("int4")
    assert eight < 2 * plain + 0.02
    assert eight < four < 0.5


# Plain, with biases, with norms of heads; with experts, beside one that all rows go through and that has a gate, or
# after a layer without any.
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "glm4_moe"])
def test_layers_in_one_call_are_the_layers(family: str) -> None:
    model = load(HfFolder(make_oracle(family).folder), "int4")
    block = model.layers[-1].mlp
    if isinstance(block, ExpertMLP) and not isinstance(block.scoring.parts[0], QuantisedWeight):
        pytest.skip("routers are torch's here")
    assert model.dense_layers is not None
    wishes = [Wish(tuple(random_prompt(40 + index, seed=index)), 12) for index in range(3)]
    schedule = ScheduleConfig(chunk_size=64)
    together = serve(model, wishes, schedule)
    model.dense_layers = None
    for ours, theirs in zip(together, serve(model, wishes, schedule), strict=True):
        assert ours.generated == theirs.generated
        for row, same in zip(ours.logits, theirs.logits, strict=True):
            assert torch.equal(row, same)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_text"])
def test_other_layers_are_not_one_call(family: str) -> None:
    assert load(HfFolder(make_oracle(family).folder), "int8").dense_layers is None


def test_batched_is_alone_where_strict() -> None:
    model = load(HfFolder(make_oracle("llama").folder), "int4")
    wishes = [Wish(tuple(random_prompt(70, seed=index)), 12, arrives=2 * index) for index in range(4)]
    schedule = ScheduleConfig(chunk_size=64)
    for wish, job in zip(wishes, serve(model, wishes, schedule, strict=True), strict=True):
        (alone,) = serve(model, [Wish(wish.prompt, 12)], schedule, strict=True)
        for ours, theirs in zip(job.logits, alone.logits, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_refused_without_kernels_for_them(weights: WeightsName) -> None:
    source = HfFolder(make_oracle("llama").folder)
    with pytest.raises(SettingError, match="quantised weights need the native kernels"):
        load_decoder(source, TorchKernels(), torch.bfloat16, CPU, weights)
    with pytest.raises(SettingError, match="dtype bfloat16"):
        load_decoder(source, select_kernels(CPU), torch.float32, CPU, weights)


RESIDENT = """
import torch
from pathlib import Path

def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

before = resident()
from penstock.engine.llm import LLM
llm = LLM()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's account of resident memory")
def test_resident_memory_is_about_the_file(smollm2_path: Path) -> None:
    """Beyond an interpreter with torch imported, tokenizer and all."""
    done = subprocess.run([sys.executable, "-c", RESIDENT], check=True, capture_output=True, text=True)
    assert int(done.stdout) <= 1.5 * smollm2_path.stat().st_size


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_a_file_that_is_quantised_in_parts(tmp_path: Path, family: str) -> None:
    """Parts of a matrix that are not quantised are of bfloat16, beside those that are kept."""
    path = write_hybrid_gguf(small(family), tmp_path / "model.gguf", quantised=QUANTISED)
    source = GgufFile(path)
    kept, plain = load(source, "auto"), load(source, "bf16")
    source.close()
    assert kept.num_weight_bytes < plain.num_weight_bytes
    weights = [layer.mixer.qkv for layer in kept.layers if isinstance(layer.mixer, Attention)]
    assert weights
    for weight in weights:  # keys and values are F32
        in_blocks = {isinstance(part, QuantisedWeight) and part.form is not PACKED for part in weight.parts}
        assert in_blocks == {True, False}
    prompt = random_prompt(130, vocab_size=kept.config.vocab_size)
    ours, theirs = run_prompt(kept, prompt), run_prompt(plain, prompt)
    assert ours.logits is not None
    assert theirs.logits is not None
    assert float((ours.logits - theirs.logits).norm()) < 0.05 * float(theirs.logits.norm())
    assert_same_bits(run_prompt(kept, prompt, chunk_size=64), ours)
