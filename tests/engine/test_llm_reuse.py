"""What was read stays: from one request to the next, from one process to the next."""

from pathlib import Path
from typing import Any

import pytest

from penstock.cache import BLOCK_TOKENS
from penstock.engine.events import Finished, GenerationRequest
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.errors import PenstockError, SettingError
from penstock.plan.progress import Progress
from tests.byte_models import model_of_bytes
from tests.oracle import random_prompt

PROMPT = random_prompt(300, vocab_size=256)
NUM_KNOWN = 4 * BLOCK_TOKENS


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes(request.param, tmp_path_factory.mktemp("models") / request.param)


def load(folder: Path, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", chunk=64, threads=1, **options)


def test_another_process_finds_it_on_disk(folder: Path, tmp_path: Path) -> None:
    with load(folder, cache_dir=tmp_path) as llm:
        cold = llm.generate(PROMPT, max_tokens=5)
    seen: list[Progress] = []
    with load(folder, cache_dir=tmp_path) as llm:
        stream = llm.stream(PROMPT, max_tokens=5, on_progress=seen.append)
        assert stream.progress.num_done == stream.progress.num_cached == NUM_KNOWN
        list(stream)
        warm = stream.result
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, NUM_KNOWN)
    assert warm.token_ids == cold.token_ids
    assert [(progress.num_done, progress.num_cached) for progress in seen] == [(300, NUM_KNOWN)]
    assert [record.start for record in warm.prefill.records] == [NUM_KNOWN]
    assert warm.prefill.same_bits == cold.prefill.same_bits


def test_without_a_folder_memory_serves_if_it_may(folder: Path) -> None:
    cold = load(folder).generate(PROMPT, max_tokens=5)
    llm = load(folder, reuse_tokens=1000)
    answers = [llm.generate(PROMPT, max_tokens=5) for _ in range(3)]
    assert [answer.usage.cached_tokens for answer in answers] == [0, NUM_KNOWN, NUM_KNOWN]
    assert {answer.token_ids for answer in answers} == {cold.token_ids}
    # What has no room in it runs in a cache of its own.
    longer = random_prompt(1200, vocab_size=256)
    assert [llm.generate(longer, max_tokens=1).usage.cached_tokens for _ in range(2)] == [0, 0]


def test_a_stream_that_was_left_is_gone_on_with(folder: Path) -> None:
    llm = load(folder, reuse_tokens=1000)
    seen: list[Progress] = []
    stream = llm.stream(PROMPT, max_tokens=5, on_progress=seen.append)

    def leave(progress: Progress) -> None:
        if progress.num_done == 2 * BLOCK_TOKENS:
            stream.cancel()

    stream._on_progress = leave
    list(stream)
    assert stream.result.finish_reason == "cancelled"
    assert llm.generate(PROMPT, max_tokens=5).usage.cached_tokens == 2 * BLOCK_TOKENS


def test_a_service_and_a_command_share_the_folder(folder: Path, tmp_path: Path) -> None:
    with load(folder, cache_dir=tmp_path) as llm:
        alone = llm.generate(PROMPT, max_tokens=5)
    with load(folder, cache_dir=tmp_path) as llm, Service(llm, ServiceConfig(cache_tokens=2000)) as service:
        ends = [service.run(GenerationRequest(PROMPT, 5))[-1] for _ in range(2)]
        status = service.status().reuse
    assert [end.usage.cached_tokens for end in ends if isinstance(end, Finished)] == [NUM_KNOWN, NUM_KNOWN]
    assert (status.disk_tokens, status.memory_tokens) == (NUM_KNOWN, NUM_KNOWN)
    assert status.num_hits == 2
    assert alone.usage.cached_tokens == 0


def test_salts_keep_prompts_apart(folder: Path) -> None:
    with Service(load(folder), ServiceConfig(cache_tokens=2000)) as service:

        def cached(salt: str) -> int:
            end = service.run(GenerationRequest(PROMPT, 2, cache_salt=salt))[-1]
            assert isinstance(end, Finished)
            return end.usage.cached_tokens

        found = [cached(salt) for salt in ("", "a", "b", "a", "", "b")]
    assert found == [0, 0, 0, NUM_KNOWN, NUM_KNOWN, NUM_KNOWN]


def test_reuse_can_be_turned_off(folder: Path) -> None:
    with Service(load(folder), ServiceConfig(cache_tokens=2000, reuse=False)) as service:
        for _ in range(2):
            end = service.run(GenerationRequest(PROMPT, 2))[-1]
            assert isinstance(end, Finished)
            assert end.usage.cached_tokens == 0
        assert not service.status().reuse.is_on
        assert service.status().cache.blocks_idle == 0


@pytest.mark.parametrize("kept", [{"cache_dir": "somewhere"}, {"reuse_tokens": 100}])
def test_overlap_contradicts_it(folder: Path, kept: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="overlap=8 contradicts"):
        load(folder, overlap=8, **kept)


def test_a_folder_that_cannot_be_used_costs_nothing_but_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cold = load(folder).generate(PROMPT, max_tokens=5)
    with load(folder, cache_dir=tmp_path / "file") as llm:
        assert llm.generate(PROMPT, max_tokens=5).token_ids == cold.token_ids
    assert "file" in caplog.text


@pytest.mark.parametrize("max_tokens", [10**8, -5])
def test_what_cannot_run_is_refused_before_a_cache_is_made(
    folder: Path, tmp_path: Path, max_tokens: int
) -> None:
    with load(folder, cache_dir=tmp_path) as llm, pytest.raises(PenstockError, match="max_tokens"):
        llm.stream(PROMPT, max_tokens=max_tokens)


def test_an_answer_that_becomes_a_prompt_is_read_so_that_bits_stay(folder: Path) -> None:
    llm = load(folder, reuse_tokens=1000)
    answer = llm.generate(PROMPT[:128], max_tokens=80)
    turn = [*PROMPT[:128], *answer.token_ids, 7]
    warm, cold = llm.generate(turn, max_tokens=8), load(folder).generate(turn, max_tokens=8)
    assert (warm.usage.cached_tokens, warm.token_ids) == (128, cold.token_ids)
