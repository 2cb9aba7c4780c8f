"""Every section measures what it says, here on a processor with models of a few thousand weights."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cli import main
from benchmarks.harness import Bench, Results, read_results, write_results
from benchmarks.suites.gpu import prompts, stages, suite, weights
from benchmarks.suites.gpu.job import Job
from benchmarks.suites.gpu.models import Subject, load_untiled
from benchmarks.suites.gpu.plan import (
    BIG,
    EXPERTS,
    HYBRID,
    LARGE,
    LITTLE,
    MIXED_LAYERS,
    PLAN,
    SECTIONS,
    SMALL,
    WINDOWS,
)
from benchmarks.suites.gpu.prompts import Launch, grouped, milliseconds_between, peer_first_token, watch_power
from benchmarks.suites.gpu.steps import Requests, tokens_to_last
from benchmarks.suites.gpu.suite import TARGETS, run_sections
from penstock.cache.space import CacheSpace
from penstock.kernels.interface import select_kernels
from penstock.measure.transformers_model import load_transformers
from penstock.plan.step import SpanKind
from tests.benchmarks.gpu_tiny import TINY
from tests.benchmarks.made_up import results_of


def tiny_job(path: Path | None = None, **changes: Any) -> Job:
    """On a processor, with one repeat."""
    bench = Bench(results_of("gpu"), lambda line: None, path)
    return Job(TINY, torch.device("cpu"), bench, **{"repeats": 1, "peer_limit": 300, **changes})


def measured(section: str, **changes: Any) -> Results:
    job = tiny_job(**changes)
    run_sections(job, [section])
    (run,) = job.bench.results.sections
    assert run.error == ""
    return job.bench.results


@pytest.mark.parametrize("model", [BIG, MIXED_LAYERS])
def test_both_read_the_same_prompt(model: str) -> None:
    """With equal weights and in float32 they choose the same token, whatever the chunks."""
    job = tiny_job(dtype=torch.float32)
    subject, prompt = job.subject(model), job.prompt(model, 150)
    peer = load_transformers(job.weights(model), torch.float32)
    space = subject.space(200)
    ours = {subject.first_token(space, prompt, chunk) for chunk in (0, 64)}
    assert ours == {peer_first_token(peer, prompt, chunk) for chunk in (0, 64)}
    assert len(ours) == 1


def test_prefill_with_and_without_transformers() -> None:
    results = measured(LARGE)
    systems: dict[str, list[str]] = {figure.name: [] for figure in results.figures}
    for figure in results.figures:
        assert (figure.unit, figure.median > 0) == ("ms", True)
        systems[figure.name].append(figure.system)
    assert systems == {
        "8B, 200 tokens, chunk 64": ["Penstock", "transformers"],
        "8B, 200 tokens, whole": ["Penstock", "transformers"],
        "8B, 400 tokens, chunk 128": ["Penstock"],  # beyond the limit
    }
    assert "8B, 400 tokens" in results.notes[0]
    alone = measured(LARGE, with_peer=False)
    assert {figure.system for figure in alone.figures} == {"Penstock"}


def test_slow_peers_are_repeated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for attribute, repeats in (("_SLOW_PEER_MS", 3), ("_SLOWEST_PEER_MS", 1)):
        monkeypatch.setattr(prompts, attribute, 0.0)
        found = measured(SMALL, repeats=4)
        assert [len(each.values) for each in found.figures] == [4, repeats]


def test_a_peer_that_fails_leaves_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(prompts, "peer_first_token", fail)
    results = measured(SMALL)
    assert [figure.system for figure in results.figures] == ["Penstock"]
    assert results.notes == ["transformers fails in 0.6B, 200 tokens, chunk 64: OutOfMemoryError: no room"]


def test_sweep() -> None:
    results = measured("sweep", repeats=7)
    found = [(each.name, each.system, len(each.values)) for each in results.figures]
    assert found == [
        ("8B, 200 tokens, chunk 32", "Penstock", 3),
        ("8B, 200 tokens, chunk 128", "Penstock", 3),
        ("8B, 200 tokens, chunk 128", "transformers", 3),
        ("9B hybrid, 200 tokens, chunk 128", "Penstock", 3),
        ("9B hybrid, 200 tokens, chunk 128", "transformers", 3),
    ]


def test_decodes() -> None:
    assert [(each.name, len(each.values)) for each in measured("decode").figures] == [
        ("8B, decode, batch 1, after 20 tokens", 1),
        ("8B, decode, batch 5, after 20 tokens", 1),
        ("0.6B, decode, batch 3, after 20 tokens", 1),
    ]


def test_strict_decodes() -> None:
    label = "8B, decode, batch 3, after 20 tokens, "
    by_name = {figure.name.removeprefix(label): figure.values for figure in measured("strict").figures}
    ratios = tuple(a / b for a, b in zip(by_name["strict"], by_name["plain"], strict=True))
    assert by_name["strict over plain"] == pytest.approx(ratios)


def test_mixed_steps() -> None:
    label = "8B, step of 64 tokens after 128, "
    by_name = {
        figure.name.removeprefix(label): figure.values for figure in measured("mixed", repeats=2).figures
    }
    both, chunk = by_name["3 decodes beside them"], by_name["of a prompt"]
    decodes = by_name["3 decodes alone"]
    assert len(both) == len(chunk) == len(decodes) == 8
    assert by_name["3 decodes beside them, over none"] == tuple(
        a / b for a, b in zip(both, chunk, strict=True)
    )
    assert by_name["3 decodes beside them, over both apart"] == tuple(
        one / (first + second) for one, first, second in zip(both, chunk, decodes, strict=True)
    )


def test_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(work: Callable[[], object]) -> list[tuple[float, ...]]:
        work()
        return [(1500.0, 690.0, 700.0), (1600.0, 680.0, 700.0)]

    monkeypatch.setattr(prompts, "watch_power", watched)
    label = "8B, 200 tokens, whole, "
    found = {each.name.removeprefix(label): each for each in measured("profile", repeats=2).figures}
    assert len(found["without a rest"].values) == 4
    assert (found["clock"].values, found["clock"].unit) == ((1500.0, 1600.0), "MHz")
    assert found["power"].values == (690.0, 680.0)
    assert found["power, at most"].values == (700.0,)
    kernels = [figure.values for name, figure in found.items() if name.startswith("kernels: ")]
    assert kernels == sorted(kernels, reverse=True)
    assert found["between kernels"].values[0] >= 0


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention to the past"),
        ("tile_attention_kernel", "attention to a tile"),
        ("join_parts_kernel", "attention of decodes"),
        ("add_norm_kernel", "norms"),
        ("silu_and_mul_kernel", "activation"),
        ("place_heads_kernel", "heads"),
        ("Memset (Device)", "others"),
    ],
)
def test_kernels_are_told_by_their_names(kernel: str, group: str) -> None:
    assert grouped([Launch(kernel, 0.0, 1000.0)]) == {group: 1.0}


def test_time_of_kernels_and_between_them() -> None:
    launches = [
        Launch("nvjet_1", 1000.0, 3000.0),
        Launch("add_norm_kernel", 2500.0, 2800.0),  # beside it
        Launch("nvjet_2", 3200.0, 4200.0),
        Launch("add_norm_kernel", 5000.0, 5100.0),
    ]
    assert grouped(launches) == pytest.approx({"products": 3.0, "norms": 0.4})
    assert milliseconds_between(launches) == pytest.approx(1.0)
    assert milliseconds_between([]) == 0


def test_power_is_watched_while_something_runs() -> None:
    told = "1980, 100.0, 700.00", "1500, 690.5, 700.00", "[N/A], 1, 2", "1515, 688.0, 700.00"
    # What comes before the work begins is not its own; what is cut off is not told.
    script = (
        f"import time\nprint({told[0]!r}, flush=True)\ntime.sleep(0.5)\n"
        f"print({chr(10).join(told[1:])!r}, flush=True)\nprint('1,2', end='', flush=True)\ntime.sleep(60)"
    )
    samples = watch_power(lambda: time.sleep(1.5), (sys.executable, "-c", script))
    assert samples == [(1500.0, 690.5, 700.0), (1515.0, 688.0, 700.0)]
    ran: list[bool] = []
    assert watch_power(lambda: ran.append(True), ("no-such-program",)) == []
    assert ran == [True]


def test_start_is_of_a_process_of_its_own() -> None:
    first, again, imported = measured("start").figures
    assert first.name == "8B, from the start of a process until ready"
    assert again.name == f"{first.name}, with kernels compiled before"
    assert 0.1 < imported.median < again.median


def test_experts() -> None:
    results = measured("experts")
    assert [figure.name.removeprefix("30B-A3B, ") for figure in results.figures] == [
        *2 * ["12 layers, 200 tokens, chunk 64"],
        "12 layers, decode, batch 1, after 20 tokens",
        "loaded and probed",
        "200 tokens, chunk 64",
        "decode, batch 2, after 20 tokens",
    ]


@pytest.mark.skipif(select_kernels(torch.device("cpu")).quantised is None, reason="needs quantised weights")
def test_forms_of_weights() -> None:
    results = measured("weights")
    for form in TINY.forms:
        for case in TINY.weights:
            assert results.figure(weights.against(case.label, form)) is not None
    taken = results.figure(weights.against(f"{BIG}, {weights.TAKEN}", "int8"))
    assert taken is not None
    assert taken.median < 0.6


def test_bits() -> None:
    results = measured("bits")
    assert len(results.facts) == (1 + 2 * 7) * 3 + 1 + 3 * 5
    assert [fact.name for fact in results.facts if not fact.holds] == []
    names = {fact.name for fact in results.facts}
    assert "8B, 4 layers, chunk 50, beside 2 decodes: same keys and values as whole" in names
    assert "9B hybrid, 4 layers, whole, beside 2 decodes: same states as whole" in names
    assert not any(name.startswith("9B hybrid, 4 layers, chunk 50") for name in names)


def test_bits_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tiles, another chunk is another order of summing."""

    def untiled(self: Job, model: str, **changes: object) -> object:
        return load_untiled(self.weights(model, **changes), self.dtype, self.device, 0)

    monkeypatch.setenv("PENSTOCK_KERNELS", "torch")
    monkeypatch.setattr(Job, "subject", untiled)
    results = measured("bits")
    broken = [fact.name for fact in results.facts if not fact.holds]
    assert any("chunk 50, alone: same keys and values" in name for name in broken)
    assert results.status(check=False) == 1


def test_tiles() -> None:
    tiled, plain, cost = (figure.values for figure in measured("tiles", repeats=3).figures)
    assert cost == tuple(one / other - 1 for one, other in zip(tiled, plain, strict=True))


def test_what_fails_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu.json"
    job = tiny_job(path)

    def fail(*_: object) -> None:
        assert json.loads(path.read_text())["figures"]  # what was known before is there already
        raise RuntimeError("a kernel is wrong")

    monkeypatch.setitem(suite._WORK, "decode", fail)
    # Without a GPU there is no allocator to ask.
    run_sections(job, [SMALL, "decode", "memory", "tiles"])
    errors = {run.section: run.error for run in read_results([path], "gpu").sections}
    assert errors[SMALL] == errors["tiles"] == ""
    assert errors["decode"] == "stopped: RuntimeError: a kernel is wrong"
    assert "has no allocator that counts" in errors["memory"]


def test_a_case_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Subject.first_token

    def wrong(self: Subject, space: CacheSpace, prompt: Sequence[int], chunk: int) -> int:
        if chunk == 0:
            raise torch.OutOfMemoryError("no room")
        return read(self, space, prompt, chunk)

    monkeypatch.setattr(Subject, "first_token", wrong)
    job = tiny_job(with_peer=False)
    run_sections(job, [LARGE])
    names = [figure.name for figure in job.bench.results.figures]
    assert names == ["8B, 200 tokens, chunk 64", "8B, 400 tokens, chunk 128"]
    assert job.bench.results.sections[0].error == "8B, 200 tokens, whole: OutOfMemoryError: no room"


def test_after_the_device_failed_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job()
    monkeypatch.setattr(suite, "_is_alive", lambda job: False)
    run_sections(job, ["tiles", "mixed", "bits"])
    errors = [run.error for run in job.bench.results.sections]
    assert errors[0] == ""
    assert errors[1] == errors[2]
    assert "the device failed in tiles" in errors[1]


def test_the_plan_is_of_published_shapes() -> None:
    job, sizes = tiny_job(), {}
    for model in PLAN.models:
        weights = job.weights(model, **PLAN.models[model])
        sizes[model] = sum(torch.Size(weights.shape(name)).numel() for name in weights.names()) / 1e9
        cases = [case for cases in PLAN.prefills.values() for case in cases if case.model == model]
        assert weights.config.max_position > max((case.prompt_tokens for case in cases), default=0) + 1
    published = {BIG: 8.19, LITTLE: 0.60, MIXED_LAYERS: 9.0, "30B-A3B": 30.5, "Gemma 3 4B": 3.88}
    assert sizes == pytest.approx(published | {"30B-A3B, 12 layers": 8.1}, rel=0.04)
    assert set(PLAN.prefills) == {LARGE, SMALL, HYBRID, EXPERTS, WINDOWS}
    assert set(suite._WORK) == set(SECTIONS)


@pytest.mark.parametrize("chunk", [16, 2048, 0])
def test_requests_decode_together_for_as_long_as_is_asked(chunk: int) -> None:
    subject = tiny_job().subject(BIG)
    max_tokens = tokens_to_last(6, 5, 20, chunk)
    requests = Requests(subject, chunk, 6, 5 * (20 + max_tokens) + 102)
    requests.begin_decodes(range(100), 5, max_tokens)
    reader = requests.add_prompt("reading", range(100), 2)
    for index in range(6):
        step = requests.begin()
        assert step is not None
        kinds = [planned.kind for planned in step.plan.spans]
        assert index or SpanKind.CHUNK in kinds
        assert kinds.count(SpanKind.DECODE) == 5 + (reader.num_generated == 1)
        requests.settle(step, requests.run(step))
        requests.notices.clear()


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_step_is_one_token_of_each_request(looks_ahead: bool) -> None:
    """Where decodes go on with what was launched ahead, too."""
    subject = tiny_job().subject(BIG)
    max_tokens = tokens_to_last(8, 5, 20, 16)
    requests = Requests(subject, 16, 5, 5 * (20 + max_tokens), looks_ahead=looks_ahead)
    jobs = [requests.add_prompt(str(index), range(20), max_tokens) for index in range(5)]
    while not all(job.num_generated for job in jobs):
        requests.step()
    before = [job.num_generated for job in jobs]
    for index in range(8):
        requests.step()
        assert [job.num_generated for job in jobs] == [count + index + 1 for count in before]


def made_up(factor: float = 1.0) -> Results:
    """Every target, met by one percent unless the factor is another."""
    results = results_of("gpu")
    for target in TARGETS:
        value = 0.99 * factor * target.bar
        results.add(target.section, target.name, "ms", value, 1.1 * value, 0.9 * value)
    return results


def test_bars() -> None:
    assert all(bar.is_met for bar in suite.bars(made_up()))
    assert not any(bar.is_met for bar in suite.bars(made_up(1.02)))
    assert suite.bars(results_of("gpu")) == []  # of sections that were not begun
    begun = results_of("gpu")
    begun.add("tiles", "other", "ms", 1.0)
    assert [bar.value for bar in suite.bars(begun)] == [None]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = made_up()
    good.machine["card"] = {"name": "A card"}
    write_results(good, tmp_path / "good.json")
    write_results(made_up(1.5), tmp_path / "bad.json")
    assert main(["gpu", "--plot-from", str(tmp_path / "good.json"), "--check"]) == 0
    assert (
        main(["gpu", "--plot-from", str(tmp_path / "good.json"), str(tmp_path / "bad.json"), "--check"]) == 1
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["gpu", "--out", str(tmp_path / "gpu.json")]) == 2
    assert "there is no NVIDIA GPU" in capsys.readouterr().err


def test_sections_run_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(suite, "run_sections", lambda job, sections: ran.extend(sections))
    asked = argparse.Namespace(cases=("tiles", "8b"), sweep=True, repeats=None, no_peer=True, peer_limit=1)
    bench = Bench(results_of("gpu"), print)
    suite.measure(asked, bench, TINY, torch.device("cpu"))
    assert ran == ["8b", "tiles", "sweep"]
    assert bench.results.machine["card"]["name"] == "cpu"


def test_two_stages_on_one_card() -> None:
    results = measured("stages")
    names = {figure.name for figure in results.figures}
    for case in TINY.stages:
        assert {f"{case.label}, {stages.OVER_ONE}", f"{case.label}, {stages.PREDICTED}"} <= names
