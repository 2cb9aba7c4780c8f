"""Activations of 8 bits: the laws, how near they stay to plain ones, and where they are refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.fingerprint import cache_fingerprint
from penstock.engine.llm import LLM
from penstock.engine.profile import profile_key
from penstock.engine.stages.joining import check_parts, common_parts
from penstock.errors import SettingError, StageRefusedError
from penstock.kernels.interface import select_kernels
from penstock.measure.prompts import text_tokens
from penstock.models.decoder import Decoder, workspace_of
from penstock.models.hf.folder import HfFolder
from penstock.models.loading import load_decoder
from penstock.models.opened import OpenedModel, open_model
from penstock.plan.activation import step_memory
from penstock.plan.policy import ScheduleConfig
from penstock.plan.step import StepShape
from penstock.plan.weight_settings import ActivationsName, WeightsName
from tests.engine.batching import Wish, serve
from tests.engine.test_same_bits import assert_same_bits
from tests.oracle import make_oracle, random_prompt, run_prompt

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    select_kernels(CPU).quantised is None, reason="there are no native kernels here"
)


def load(source: Any, weights: WeightsName, activations: ActivationsName = "int8") -> Decoder:
    return load_decoder(source, select_kernels(CPU, activations=activations), torch.bfloat16, CPU, weights)


@pytest.fixture(scope="module")
def opened(smollm2_path: Path) -> Iterator[OpenedModel]:
    opened = open_model(smollm2_path)
    yield opened
    opened.source.close()


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "qwen3_5_text"])
def test_chunked_is_whole(family: str, weights: WeightsName) -> None:
    model = load(HfFolder(make_oracle(family).folder), weights)
    prompt = random_prompt(300)
    whole = run_prompt(model, prompt)
    for chunk_size in (64, 128) if model.config.has_state else (1, 7, 64, 100):
        assert_same_bits(run_prompt(model, prompt, chunk_size=chunk_size), whole)
    plain = run_prompt(load(HfFolder(make_oracle(family).folder), weights, "plain"), prompt)
    assert whole.logits is not None
    assert plain.logits is not None
    assert not torch.equal(whole.logits, plain.logits)
    assert float((whole.logits - plain.logits).norm()) < 0.1 * float(plain.logits.norm())


@pytest.mark.parametrize("strict", [False, True])
def test_batched_is_alone_strict_or_not(strict: bool) -> None:
    model = load(HfFolder(make_oracle("llama").folder), "int4")
    wishes = [Wish(tuple(random_prompt(70, seed=index)), 12, arrives=2 * index) for index in range(4)]
    schedule = ScheduleConfig(chunk_size=64)
    for wish, job in zip(wishes, serve(model, wishes, schedule, strict=strict), strict=True):
        (alone,) = serve(model, [Wish(wish.prompt, 12)], schedule, strict=strict)
        for ours, theirs in zip(job.logits, alone.logits, strict=True):
            assert torch.equal(ours, theirs)


def test_layers_in_one_call_are_the_layers() -> None:
    model = load(HfFolder(make_oracle("qwen3").folder), "int4")
    assert model.dense_layers is not None
    wishes = [Wish(tuple(random_prompt(40 + index, seed=index)), 12) for index in range(3)]
    together = serve(model, wishes, ScheduleConfig(chunk_size=64))
    model.dense_layers = None
    for ours, theirs in zip(together, serve(model, wishes, ScheduleConfig(chunk_size=64)), strict=True):
        assert ours.generated == theirs.generated
        for row, same in zip(ours.logits, theirs.logits, strict=True):
            assert torch.equal(row, same)


def test_smollm2_chunked_is_whole_and_near_plain(opened: OpenedModel) -> None:
    prompt = text_tokens(opened.tokenizer, 700)
    model = load(opened.source, "auto")
    whole = run_prompt(model, prompt)
    for schedule in ({"chunk_size": 100}, {"chunk_ends": [*range(1, 20), 513, *range(515, 560, 3), 700]}):
        assert_same_bits(run_prompt(model, prompt, **schedule), whole)
    plain = run_prompt(load(opened.source, "auto", "plain"), prompt)
    assert whole.logits is not None
    assert plain.logits is not None
    assert 0 < float((whole.logits - plain.logits).norm()) < 0.1 * float(plain.logits.norm())


def test_smollm2_batched_is_alone(opened: OpenedModel) -> None:
    model = load(opened.source, "auto")
    text = text_tokens(opened.tokenizer, 400)
    wishes = [Wish(tuple(text[start : start + 90]), 8, arrives=start // 50) for start in (0, 100, 200)]
    for wish, job in zip(wishes, serve(model, wishes, ScheduleConfig(chunk_size=64)), strict=True):
        (alone,) = serve(model, [Wish(wish.prompt, 8)], ScheduleConfig(chunk_size=64))
        assert job.generated == alone.generated
        for ours, theirs in zip(job.logits, alone.logits, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("weights", "kernels"), [("auto", "native"), ("bf16", "native"), ("int8", "torch")])
def test_refused_where_nothing_would_be_rounded(weights: WeightsName, kernels: str) -> None:
    source = HfFolder(make_oracle("llama").folder)
    with pytest.raises(SettingError) as caught:
        load_decoder(source, select_kernels(CPU, kernels, "int8"), torch.bfloat16, CPU, weights)
    assert (caught.value.setting, caught.value.value) == ("activations", "int8")


def test_cached_bits_and_profiles_know_the_setting(smollm2_path: Path) -> None:
    plain, rounded = (LLM(smollm2_path, activations=name) for name in ("plain", "int8"))
    assert cache_fingerprint(plain) != cache_fingerprint(rounded)
    assert replace(profile_key(plain), activations="int8") == profile_key(rounded)
    assert rounded.settings.activations.effective == "int8"
    assert rounded.canon.free_decodes > 0


def test_a_worker_with_another_setting_is_refused() -> None:
    folder = make_oracle("llama").folder
    plain, rounded = (
        common_parts(folder, load(HfFolder(folder), "int8", name), "int8", same_machine=True)
        for name in ("plain", "int8")
    )
    with pytest.raises(StageRefusedError, match="activations"):
        check_parts(1, "here", plain, rounded, mixed=True)


def test_stages_have_the_bits_of_one_machine(smollm2_path: Path) -> None:
    with LLM(smollm2_path, activations="int8") as whole:
        prompt = whole.tokenize("The quick brown fox jumps over the lazy dog. " * 9, raw=True)
        expected = whole.generate(prompt, max_tokens=6, num_logprobs=1)
    with LLM(smollm2_path, activations="int8", stages=2) as staged:
        answer = staged.generate(prompt, max_tokens=6, num_logprobs=1)
    assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs)


def test_the_arithmetic_of_memory_knows_rounded_rows() -> None:
    source = HfFolder(make_oracle("qwen3_moe").folder)
    step = StepShape.of_chunk(512, 0)
    rounded, plain = (workspace_of(load(source, "int8", name)) for name in ("int8", "plain"))
    assert (rounded.rounds_rows, plain.rounds_rows) == (True, False)
    assert rounded.unpacked_bytes > plain.unpacked_bytes == 0
    config = source.config
    bytes_of = [
        step_memory(config, step, dtype_bytes=2, workspace=each).peak_bytes for each in (rounded, plain)
    ]
    assert bytes_of[0] > bytes_of[1] + rounded.unpacked_bytes
