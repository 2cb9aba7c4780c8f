"""A whole benchmark of a small random model."""

from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch

from penstock.bench import benchmark
from penstock.bench.benchmark import run_benchmark
from penstock.bench.memory import Growth, Job, growth_in_fresh_process
from penstock.bench.report import render
from penstock.bench.results import Settings
from penstock.bench.suites import SUITES, SuiteName
from penstock.bench.systems import SystemName, load_systems
from penstock.measure.growth import MeasurementError, can_measure_growth
from penstock.measure.prompts import text_tokens
from penstock.measure.transformers_model import load_transformers
from penstock.models.opened import open_weights
from penstock.models.text.tokenizer import SpecialTokens, Tokenizer
from tests.oracle import make_oracle, random_prompt

# Keys and values of 64 tokens, 2 layers, 2 heads of 16, in float32.
CACHE_BYTES = 64 * 2 * 2 * 2 * 16 * 4


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))


def settings_for(
    lengths: tuple[int, ...], *, with_memory: bool, suite: SuiteName = SuiteName.PREFILL
) -> Settings:
    return Settings(
        suite=suite,
        model="random",
        dtype="float32",
        chunk=24,
        lengths=lengths,
        memory_lengths=lengths,
        repeats=2,
        decode_tokens=3,
        memory_repeats=1,
        with_memory=with_memory,
    )


@pytest.mark.parametrize(
    ("suite", "family"), [(SuiteName.PREFILL, "llama"), (SuiteName.HYBRID, "qwen3_5_text")]
)
def test_all_systems_take_turns(suite: SuiteName, family: str) -> None:
    said: list[str] = []
    results = run_benchmark(
        make_oracle(family).folder,
        random_prompt(64),
        settings_for((32, 64), with_memory=False, suite=suite),
        said.append,
    )
    systems = SUITES[suite].systems
    assert len(results.passes) == 2 * 2 * len(systems)
    assert {speed.system for speed in results.speeds} == set(systems)
    assert {speed.system for speed in results.speeds if speed.decode} == {
        SystemName.PENSTOCK,
        SystemName.TRANSFORMERS,
    }
    # In float32 all of them are right, so all agree.
    for length in (32, 64):
        assert len({each.token_ids[0] for each in results.passes if each.prompt_tokens == length}) == 1
    assert all(each.num_equal == each.num_tokens == 4 for each in results.agreements)
    assert len(said) == 1 + len(results.passes)
    assert "MISS" not in render(results)


@pytest.mark.skipif(not can_measure_growth(), reason="this system does not tell a process its memory")
def test_a_process_of_its_own_measures_memory() -> None:
    folder = str(make_oracle("llama").folder)
    growth = growth_in_fresh_process(
        Job(folder, SystemName.PENSTOCK, "float32", 24, 1, tuple(random_prompt(64)))
    )
    assert (growth.system, growth.prompt_tokens) == (SystemName.PENSTOCK, 64)
    assert growth.cache_bytes == CACHE_BYTES
    assert 0 <= growth.growth_bytes < 2**30


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match=r"penstock failed \(exit 1\).*there is no file"):
        growth_in_fresh_process(Job(str(tmp_path / "no.gguf"), SystemName.PENSTOCK, "float32", 24, 1, (1, 2)))


@pytest.mark.parametrize("name", SUITES[SuiteName.PREFILL].systems)
def test_the_cache_counts_the_prompt_alone(name: SystemName) -> None:
    source = open_weights(make_oracle("llama").folder)
    system = load_systems([name], source, torch.float32, 24)[name]
    source.close()
    assert system.generate(random_prompt(64), 1, lambda token: None) == CACHE_BYTES


def test_the_cache_counts_recurrent_states() -> None:
    source = open_weights(make_oracle("qwen3_5_text").folder)
    names = [SystemName.PENSTOCK, SystemName.TRANSFORMERS, SystemName.TRANSFORMERS_CHUNKED]
    systems = load_systems(names, source, torch.float32, 24)
    source.close()
    cached = {
        name: [system.generate(random_prompt(length), 1, lambda token: None) for length in (64, 128)]
        for name, system in systems.items()
    }
    # One attention layer, 2 heads of 16: 64 tokens more are so much more, whatever the states take.
    assert {longer - shorter for shorter, longer in cached.values()} == {64 * 2 * 2 * 16 * 4}
    # Three delta nets, each with a matrix of 16 by 24 for each of 4 heads, and a convolution's last inputs.
    matrices, channels = 3 * 4 * 16 * 24 * 4, 3 * (2 * 2 * 16 + 4 * 24) * 4
    keys_and_values = 64 * 2 * 2 * 16 * 4
    # Penstock keeps the state that a step reads beside the one it writes; transformers one more input.
    assert cached[SystemName.PENSTOCK][0] == keys_and_values + 2 * (matrices + 3 * channels)
    assert cached[SystemName.TRANSFORMERS][0] == keys_and_values + matrices + 4 * channels
    assert cached[SystemName.TRANSFORMERS_CHUNKED] == cached[SystemName.TRANSFORMERS]


def test_memory_is_measured_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def record(job: Job) -> Growth:
        jobs.append(job)
        return Growth(job.system, len(job.prompt), 7, 5)

    monkeypatch.setattr(benchmark, "growth_in_fresh_process", record)
    settings = replace(settings_for((70, 90), with_memory=True), with_timings=False, memory_repeats=2)
    results = run_benchmark(make_oracle("llama").folder, random_prompt(90), settings, lambda line: None)
    assert results.passes == ()
    # The first job of all only prepares what later ones find ready.
    assert [len(job.prompt) for job in jobs] == [64, *[70] * 4, *[90] * 4]
    assert [growth.activation_bytes for growth in results.growths] == [2] * 8
    assert [each.activation_bytes.values for each in results.memory] == [(2, 2), (2,), (2,)] * 2


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_runs_the_same_weights(family: str, tied: bool) -> None:
    oracle = make_oracle(family, tie_word_embeddings=tied)
    source = open_weights(oracle.folder)
    rebuilt = load_transformers(source, torch.float32)
    source.close()
    prompt = torch.tensor([random_prompt(50)])
    ours, theirs = rebuilt.state_dict(), oracle.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with torch.inference_mode():
        torch.testing.assert_close(rebuilt(prompt).logits, oracle.model(prompt).logits, rtol=1e-6, atol=1e-6)


def test_rotary_scaling_is_carried_over() -> None:
    oracle = make_oracle(
        "llama",
        rope=(("rope_type", "yarn"), ("factor", 4.0), ("original_max_position_embeddings", 256)),
    )
    source = open_weights(oracle.folder)
    rebuilt = load_transformers(source, torch.float32)
    source.close()
    prompt = torch.tensor([random_prompt(300)])
    with torch.inference_mode():
        torch.testing.assert_close(rebuilt(prompt).logits, oracle.model(prompt).logits)


def test_only_what_is_asked_for_is_loaded() -> None:
    source = open_weights(make_oracle("llama").folder)
    systems = load_systems([SystemName.TRANSFORMERS_CHUNKED], source, torch.float32, 24)
    source.close()
    assert list(systems) == [SystemName.TRANSFORMERS_CHUNKED]


def test_the_text_is_as_long_as_it_must_be() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(backend, SpecialTokens(), None)
    assert len(text_tokens(tokenizer, 300_000)) == 300_000
    assert text_tokens(tokenizer, 10) == text_tokens(tokenizer, 100)[:10]
