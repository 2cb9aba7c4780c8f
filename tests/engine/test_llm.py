"""The Python interface, on the real model."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.errors import ContextLengthError, ModelError, PenstockError, PromptError, SettingError
from penstock.plan import (
    ChunkSetting,
)
from penstock.plan.model import DeltaNetConfig, ModelConfig
from penstock.plan.progress import Progress
from penstock.plan.settings import DeviceSetting

QUESTION = "What is the capital of France? Answer in one word."


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path, chunk=64)


def test_generate(llm: LLM) -> None:
    seen: list[Progress] = []
    result = llm.generate(QUESTION * 12, max_tokens=12, on_progress=seen.append)
    assert "Paris" in llm.generate(QUESTION, max_tokens=12).text
    assert result.usage.prompt_tokens == len(llm.tokenize(QUESTION * 12))
    assert result.usage.completion_tokens == len(result.token_ids) <= 12
    assert [progress.chunks_done for progress in seen] == list(range(1, result.prefill.chunks + 1))
    assert [progress.num_done for progress in seen][:2] == [64, 128]
    assert seen[-1].num_done == seen[-1].num_tokens == result.usage.prompt_tokens
    assert seen[-1].eta_s == 0
    assert (result.prefill.requested, result.prefill.effective) == ("64", 64)
    assert result.prefill.same_bits
    assert result.memory.weights_bytes < result.memory.peak_resident_bytes
    assert result.timings.time_to_first_token_s


def test_stream_is_generate(llm: LLM) -> None:
    expected = llm.generate(QUESTION, max_tokens=20)
    with llm.stream(QUESTION, max_tokens=20) as stream:
        pieces = list(stream)
        assert stream.result.token_ids == expected.token_ids
    assert "".join(pieces) == expected.text
    assert len(pieces) > 1


def test_chunk_size_does_not_change_the_answer(smollm2_path: Path, llm: LLM) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20 + QUESTION
    expected = llm.generate(text, max_tokens=16).token_ids
    for chunk in (0, 7, "auto"):
        assert LLM(smollm2_path, chunk=chunk).generate(text, max_tokens=16).token_ids == expected


def test_prompts_of_every_kind_are_the_same_prompt(llm: LLM) -> None:
    system = "You answer briefly."
    ids = llm.tokenize(QUESTION, system=system)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    assert llm.tokenize(messages) == ids
    assert llm.tokenize(ids) == ids
    rendered = llm.tokenizer.render_chat(messages)
    assert llm.tokenize(rendered, raw=True) == ids


def test_stop_string_ends_the_text(llm: LLM) -> None:
    whole = llm.generate("Count from one to ten in words.", max_tokens=40)
    stop = whole.text[9:14]
    cut = llm.generate("Count from one to ten in words.", max_tokens=40, stop=[stop])
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert len(cut.token_ids) < len(whole.token_ids)


def test_cancel_between_chunks(llm: LLM) -> None:
    stream = llm.stream(QUESTION * 20, on_progress=lambda progress: stream.cancel())
    assert list(stream) == []
    result = stream.result
    assert result.finish_reason == "cancelled"
    assert result.prefill.chunks == 1
    assert result.token_ids == ()
    assert result.timings.time_to_first_token_s is None


def test_closing_early_frees_the_cache(llm: LLM) -> None:
    with llm.stream(QUESTION, max_tokens=30) as stream:
        next(stream)
    pool = stream._run.space.blocks
    assert pool.num_free == pool.num_blocks
    assert stream.result.finish_reason == "cancelled"


def test_sampling_repeats_with_a_seed(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    answers = {llm.generate("Tell me a story.", max_tokens=12, sampling=params).token_ids for _ in range(2)}
    assert len(answers) == 1
    other = SamplingParams(temperature=1.0, seed=12)
    assert llm.generate("Tell me a story.", max_tokens=12, sampling=other).token_ids not in answers


def test_context_limit(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"9000 tokens.*8192"):
        llm.stream([5] * 9000)
    with pytest.raises(ContextLengthError, match=r"8000 tokens.*max_tokens is 500.*8500.*8192"):
        llm.stream([5] * 8000, max_tokens=500)
    # Where no number is asked for, the answer may take what the context has left.
    assert llm.stream([5] * 8190)._run.job.request.max_tokens == 2


def test_bad_prompts(llm: LLM) -> None:
    with pytest.raises(PromptError):
        llm.generate([])
    mixed: Any = [1, "two"]
    with pytest.raises(SettingError, match="prompt"):
        llm.generate(mixed)
    with pytest.raises(SettingError, match="system"):
        llm.generate(QUESTION, system="x", raw=True)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"chunk": -1}, "chunk"),
        ({"chunk": "12x"}, "chunk"),
        ({"chunk": 64, "overlap": 64}, "overlap"),
        ({"align": "no"}, "align"),
        ({"align": 0}, "align"),
        ({"dtype": "float16"}, "dtype"),
        ({"threads": 0}, "threads"),
        ({"threads": True}, "threads"),
        ({"device": "gpu"}, "device"),
        ({"device": "cuda:99"}, "device='cuda:99' is not accepted here: torch sees cpu"),
    ],
)
def test_bad_settings_fail_before_the_model_is_opened(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingError, match=name):
        LLM("no-such-model", **settings)


def test_environment_sets_the_chunk(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PREFILL_CHUNK", "33")
    assert LLM(smollm2_path).chunk.effective == 33
    assert LLM(smollm2_path, chunk=50).chunk.effective == 50
    monkeypatch.setenv("PENSTOCK_PREFILL_CHUNK", "many")
    with pytest.raises(SettingError, match="PENSTOCK_PREFILL_CHUNK"):
        LLM(smollm2_path)


def test_environment_sets_the_device(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DEVICE", "cpu")
    assert LLM(smollm2_path).device == DeviceSetting("cpu", "environment", "set by PENSTOCK_DEVICE")
    monkeypatch.setenv("PENSTOCK_DEVICE", "cuda:99")
    assert LLM(smollm2_path, device="cpu").device == DeviceSetting("cpu", "argument", "set by argument")
    with pytest.raises(SettingError, match="PENSTOCK_DEVICE='cuda:99' is not accepted here: torch sees cpu"):
        LLM("no-such-model")


def test_environment_sets_the_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PREFILL_ALIGN", "maybe")
    with pytest.raises(SettingError, match="PENSTOCK_PREFILL_ALIGN='maybe'"):
        LLM("no-such-model")
    with pytest.raises(ModelError):
        LLM("no-such-model", align=True)


def test_alignment_is_not_a_matter_of_models_without_recurrent_state(llm: LLM, smollm2_path: Path) -> None:
    assert (llm.align.enabled, llm.align.source) == (True, "default")
    other = LLM(smollm2_path, chunk=100, align=True)
    assert other.chunk == ChunkSetting("100", 100, "argument", "set by argument")
    result = other.generate(QUESTION * 12, max_tokens=1)
    assert (result.prefill.effective, result.prefill.reason) == (100, "set by argument")
    assert result.prefill.same_bits


def test_nothing_of_the_model_is_skipped(llm: LLM) -> None:
    assert llm.skipped is None


PLAIN = ModelConfig(4, 32, 64, 4, 2, 8, 100, family="llama", max_position=4096)
HYBRID = replace(PLAIN, delta_net=DeltaNetConfig(3, 2, 4, 8, 8, 4, (0, 1, 2)))


WRONG = (
    b"bytes",
    True,
    3,
    2.5,
    {1},
    object(),
    [b"x"],
    [True],
    [None],
    {"a": b"x"},
    bytearray(b"ab"),
    10**400,
)
OF_NO_TYPE = {  # for each argument, values of other types than it may have
    "prompt": [*WRONG, None, [[1]], "\ud800"],
    "system": WRONG,
    "raw": [*WRONG[:1], None, *WRONG[2:]],
    "sampling": WRONG,
    "stop": [*WRONG[:-1], None],
    "json_format": WRONG,
    "num_logprobs": [value for value in WRONG if value not in (3, 10**400)],
    "max_tokens": [value for value in WRONG if value != 3],
    "ignore_eos": [*WRONG[:1], None, *WRONG[2:]],
    "on_progress": WRONG,
}


@pytest.mark.parametrize("name", OF_NO_TYPE)
def test_a_value_of_another_type_is_refused_by_name(name: str, llm: LLM) -> None:
    for value in OF_NO_TYPE[name]:
        given: dict[str, Any] = {"prompt": "hello", "max_tokens": 1, name: value}
        with pytest.raises(PenstockError) as refused:
            llm.generate(**given)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [each.name for each in fields(SamplingParams)])
def test_sampling_of_another_type_is_refused_by_name(name: str) -> None:
    wrong: Any
    for wrong in (b"bytes", {1}, object(), [b"x"], [True], [None], np.ones(2), "\ud800"):
        with pytest.raises(SettingError, match=name):
            SamplingParams(**{name: wrong})


@pytest.mark.parametrize(
    "given",
    [{"reuse_tokens": 10**30}, {"chunk": np.ones(2)}, {"cache_dir": "\ud800"}, {"cache_dir": "a\0b"}],
    ids=lambda given: next(iter(given)),
)
def test_settings_that_no_machine_has_are_refused(smollm2_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(PenstockError):
        LLM(smollm2_path, **given)


def test_a_model_and_settings_of_another_type_are_refused_by_name() -> None:
    wrong: Any
    for wrong in (*WRONG, None):
        with pytest.raises(SettingError, match="model"):
            LLM(wrong)
    for wrong in WRONG:
        with pytest.raises(SettingError, match="settings"):
            LLM("no-such-model", settings=wrong)


def test_what_is_exported_is_listed() -> None:
    code = "import penstock, sys; assert {*penstock.__all__} <= {*dir(penstock)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_penstock_is_importable_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import penstock, penstock.plan, penstock.cache"
    subprocess.run([sys.executable, "-c", code], check=True)
