"""Automatic chunks on real models: the same answer, within the budget, and every chunk explained."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.events import ChunkRecord, Finished, GenerationRequest, TokenGenerated
from penstock.engine.llm import LLM
from penstock.engine.profile import TuneProfile, profile_key, save_profile
from penstock.engine.service import Service, ServiceConfig
from penstock.errors import PromptError, SettingError
from penstock.plan import ScheduleConfig, SchedulePolicy, StepShape, StepTimeCoefficients
from penstock.plan.memory import ActivationBudgetError
from tests.byte_models import model_of_bytes
from tests.oracle import random_prompt

FAMILIES = ["llama", "qwen3_5_text"]
PROMPT = random_prompt(1100, 256)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(autouse=True)
def _private_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a profile is kept for a moment, nobody else may find it."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path_factory.getbasetemp() / "auto-home"))


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, dtype="float32", **settings)


def assert_covers(records: tuple[ChunkRecord, ...], num_tokens: int) -> None:
    assert [record.start for record in records] == [0, *(record.end for record in records[:-1])]
    assert records[-1].end == num_tokens
    for record in records:
        assert record.past == record.start
        assert record.measured_s > 0
        assert record.predicted_bytes


def test_auto_is_the_default_and_says_what_it_did(folder: Path) -> None:
    llm = open_llm(folder)
    assert llm.chunk.is_auto
    assert (llm.chunk.requested, llm.chunk.source, llm.chunk.effective) == ("auto", "default", 512)
    result = llm.generate(PROMPT, max_tokens=3)
    assert result.token_ids == open_llm(folder, chunk=0).generate(PROMPT, max_tokens=3).token_ids
    assert (result.prefill.requested, result.prefill.effective) == ("auto", 512)
    assert result.prefill.reason == "auto: the default"
    assert [(len(record), record.rule) for record in result.prefill.records] == [
        (512, "default"),
        (320, "balanced"),
        (268, "end"),
    ]
    assert_covers(result.prefill.records, len(PROMPT))
    assert result.prefill.records[0].predicted_s is None  # nothing was known
    assert all(record.predicted_s for record in result.prefill.records[1:])
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["prefill"]["records"][1]["rule"] == "balanced"
    # What was learned stays: the next prompt's first chunk is predicted.
    assert llm.generate(PROMPT, max_tokens=1).prefill.records[0].predicted_s


def test_a_fixed_chunk_is_explained_too(folder: Path) -> None:
    records = open_llm(folder, chunk=512).generate(PROMPT, max_tokens=1).prefill.records
    assert [(len(record), record.rule) for record in records] == [(512, "fixed"), (512, "fixed"), (76, "end")]
    assert_covers(records, len(PROMPT))


def test_a_profile_is_what_auto_starts_from(folder: Path) -> None:
    known = StepTimeCoefficients(1e-4, 1e-6, 1e-10, 1e-5, 1e-9)
    profile = TuneProfile(profile_key(open_llm(folder)), known, best_chunk=256)
    path = save_profile(profile)
    try:
        llm = open_llm(folder)
        fixed = open_llm(folder, chunk=128)
    finally:
        path.unlink()
    assert (llm.chunk.effective, llm.chunk.reason) == (256, "auto: tuned on this machine")
    assert llm.times.coefficients == known
    prefill = llm.generate(PROMPT, max_tokens=1).prefill
    assert prefill.reason == "auto: tuned on this machine"
    assert {len(record) for record in prefill.records[:-2]} == {256}
    assert prefill.records[0].predicted_s == pytest.approx(known.seconds(StepShape.of_chunk(256, 0)))
    # A size that was asked for stays, whatever a profile says.
    assert fixed.chunk.effective == 128


def test_a_budget_is_kept_and_the_answer_is_the_same(folder: Path) -> None:
    expected = open_llm(folder).generate(PROMPT, max_tokens=3)
    whole_bytes = max(record.predicted_bytes or 0 for record in expected.prefill.records)
    llm = open_llm(folder, max_activation=whole_bytes // 2)
    result = llm.generate(PROMPT, max_tokens=3)
    assert result.token_ids == expected.token_ids
    assert "memory" in {record.rule for record in result.prefill.records}
    assert result.prefill.reason.startswith("auto: ")
    assert "by memory" in result.prefill.reason
    for record in result.prefill.records:
        assert record.predicted_bytes is not None
        assert record.predicted_bytes <= whole_bytes // 2
    # A large budget gives the largest chunk that fits, here the whole prompt.
    assert open_llm(folder, max_activation="1GiB").generate(PROMPT, max_tokens=3).prefill.chunks == 1


def test_a_budget_that_is_too_small_is_refused_before_any_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(folder, max_activation="1KiB")
    monkeypatch.setattr(llm.model, "forward", None)
    too_small = r"max_activation=1.0 KiB .* give at least \d+ bytes$"
    with pytest.raises(ActivationBudgetError, match=too_small) as error:
        llm.stream(PROMPT)
    assert isinstance(error.value, PromptError | SettingError)
    least = int(str(error.value).split()[-2])
    records = open_llm(folder, max_activation=least).generate(PROMPT, max_tokens=1).prefill.records
    assert max(record.predicted_bytes or 0 for record in records) <= least
    with pytest.raises(ActivationBudgetError):
        open_llm(folder, max_activation=least - 1).stream(PROMPT)
    # A fixed chunk is not made smaller in silence.
    too_long = r"a chunk of 512 needs .* or use a chunk of \d+ at most"
    with pytest.raises(ActivationBudgetError, match=too_long) as error:
        open_llm(folder, chunk=512, max_activation=2 * least).stream(PROMPT)
    largest = int(str(error.value).split()[-3])
    fitting = open_llm(folder, chunk=largest, max_activation=2 * least)
    assert fitting.generate(PROMPT, max_tokens=1).prefill.effective == largest


def test_a_target_makes_chunks_cautious_then_learns(folder: Path) -> None:
    llm = open_llm(folder, target_itl_ms=10**7)  # however slow the machine is, and whatever it waits for
    result = llm.generate(PROMPT, max_tokens=3)
    assert result.token_ids == open_llm(folder).generate(PROMPT, max_tokens=3).token_ids
    records = result.prefill.records
    assert (len(records[0]), records[0].rule) == (64, "latency")
    assert records[0].because == "nothing is known of step times yet"
    for index in range(1, len(records)):
        assert len(records[index]) <= 2 * max(map(len, records[:index]))
    assert max(map(len, records)) >= 256
    out_of_reach = open_llm(folder, target_itl_ms=0.001)
    out_of_reach.generate(PROMPT, max_tokens=3)
    records = out_of_reach.generate(PROMPT, max_tokens=1).prefill.records
    assert {record.rule for record in records[:-1]} == {"smallest"}
    assert result.prefill.same_bits == out_of_reach.generate(PROMPT, max_tokens=1).prefill.same_bits


@pytest.mark.parametrize(
    "settings", [{}, {"target_itl_ms": 20}, {"max_activation": "2MiB", "target_ttft_ms": 9}]
)
def test_a_service_sizes_by_itself_and_answers_the_same(folder: Path, settings: dict[str, Any]) -> None:
    llm = open_llm(folder, **settings)
    expected = [
        open_llm(folder, chunk=64).generate(random_prompt(length, 256, length), max_tokens=6).token_ids
        for length in (700, 90, 300)
    ]
    with Service(llm, ServiceConfig(cache_tokens=4096, strict=True)) as service:
        assert service.schedule.auto_chunk
        answers: list[list[int]] = [[], [], []]
        ids = []
        ended = []
        for answer, length in zip(answers, (700, 90, 300), strict=True):

            def listen(event: object, answer: list[int] = answer) -> None:
                if isinstance(event, TokenGenerated):
                    answer.append(event.token)
                elif isinstance(event, Finished):
                    ended.append(event)

            request = GenerationRequest(random_prompt(length, 256, length), 6, ignore_eos=True)
            ids.append(service.submit(request, listen))
        service.close(grace_s=60)
        assert len(ended) == 3
        assert [tuple(answer) for answer in answers] == expected
        for request_id, length in zip(ids, (700, 90, 300), strict=True):
            records = service.explain(request_id)
            assert records is not None
            assert_covers(records, length)
        assert service.explain("req-unknown") is None


def test_a_service_refuses_what_cannot_be_kept(folder: Path) -> None:
    llm = open_llm(folder, max_activation="1KiB")
    with Service(llm, ServiceConfig(cache_tokens=2048)) as service, pytest.raises(ActivationBudgetError):
        service.submit(GenerationRequest(PROMPT, 4), lambda event: None)
    llm = open_llm(folder, target_itl_ms=50)
    with pytest.raises(SettingError, match="contradicts policy='prefill-first'"):
        Service(llm, ServiceConfig(ScheduleConfig(SchedulePolicy.PREFILL_FIRST, auto_chunk=True), 2048))
    with pytest.raises(SettingError, match="contradicts chunk_size=128"):
        Service(llm, ServiceConfig(ScheduleConfig(chunk_size=128), 2048))


def test_what_ended_is_explained_for_a_while(folder: Path) -> None:
    with Service(open_llm(folder, chunk=64), ServiceConfig(cache_tokens=1024)) as service:
        ids = []
        for index in range(66):
            ids.append(service.submit(GenerationRequest([index], 1), lambda event: None))
        service.close(grace_s=60)
        assert [service.explain(request_id) is None for request_id in ids] == [True] * 2 + [False] * 64


def test_the_environment_sets_them_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TARGET_ITL", "80")
    monkeypatch.setenv("PENSTOCK_MAX_ACTIVATION", "64MiB")
    llm = open_llm(folder)
    assert (llm.size.target_itl_s, llm.size.max_activation_bytes) == (0.08, 64 << 20)
    with pytest.raises(SettingError, match="PENSTOCK_TARGET_ITL='80' contradicts chunk_size=64"):
        open_llm(folder, chunk=64)
