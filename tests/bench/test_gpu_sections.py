"""Every section measures what it says, here on a processor with models of a few thousand weights."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bench import gpu_benchmark, gpu_memory, gpu_prefill, gpu_profile
from penstock.bench.gpu_benchmark import run_sections
from penstock.bench.gpu_job import GpuJob
from penstock.bench.gpu_models import Subject, first_token, load_untiled, peer_first_token
from penstock.bench.gpu_power import PowerSample, watch_power
from penstock.bench.gpu_requests import Requests, tokens_to_last
from penstock.bench.gpu_results import GpuResults, read_results
from penstock.bench.gpu_workload import PLAN, GpuModel, Section
from penstock.cache.space import CacheSpace
from penstock.measure.transformers_model import load_transformers
from penstock.plan.step import SpanKind
from tests.bench.gpu_tiny import TINY, tiny_job


def measured(section: Section, **changes: Any) -> GpuResults:
    job = tiny_job(**changes)
    run_sections(job, [section])
    (run,) = job.ledger.results.runs
    assert run.error == ""
    return job.ledger.results


@pytest.mark.parametrize("model", list(GpuModel))
def test_both_read_the_same_prompt(model: GpuModel) -> None:
    """With equal weights and in float32 they choose the same token, whatever the chunks."""
    job = tiny_job(dtype=torch.float32)
    subject = job.subject(model)
    peer = load_transformers(job.weights(model), torch.float32)
    prompt = job.prompt(model, 150)
    space = subject.space(200)
    ours = {first_token(subject, space, prompt, chunk) for chunk in (0, 64)}
    theirs = {peer_first_token(peer, prompt, chunk) for chunk in (0, 64)}
    assert ours == theirs
    assert len(ours) == 1
    assert space.blocks.num_free == space.blocks.num_blocks


def test_prefill_with_and_without_transformers() -> None:
    results = measured(Section.LARGE)
    systems: dict[str, list[str]] = {figure.name: [] for figure in results.figures}
    for figure in results.figures:
        assert figure.unit == "ms"
        assert all(value > 0 for value in figure.values)
        systems[figure.name].append(figure.system)
    assert systems == {
        "8B, 200 tokens, chunk 64": ["Penstock", "transformers"],
        "8B, 200 tokens, whole": ["Penstock", "transformers"],
        "8B, 400 tokens, chunk 128": ["Penstock"],  # beyond the limit
    }
    assert "8B, 400 tokens" in results.notes[0]
    alone = measured(Section.LARGE, with_peer=False)
    assert {figure.system for figure in alone.figures} == {"Penstock"}
    assert alone.notes == []


def test_slow_peers_are_repeated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for attribute, repeats in (("_SLOW_PEER_MS", 3), ("_SLOWEST_PEER_MS", 1)):
        monkeypatch.setattr(gpu_prefill, attribute, 0.0)
        found = measured(Section.SMALL, repeats=4)
        assert [(each.system, len(each.values)) for each in found.figures] == [
            ("Penstock", 4),
            ("transformers", repeats),
        ]


def test_a_peer_that_fails_leaves_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(gpu_prefill, "peer_first_token", fail)
    results = measured(Section.SMALL)
    assert [figure.system for figure in results.figures] == ["Penstock"]
    assert results.notes == ["transformers fails in 0.6B, 200 tokens, chunk 64: OutOfMemoryError: no room"]


def test_sweep() -> None:
    results = measured(Section.SWEEP, repeats=7)
    found = [(each.name, each.system, len(each.values)) for each in results.figures]
    assert found == [
        ("8B, 200 tokens, chunk 32", "Penstock", 3),
        ("8B, 200 tokens, chunk 128", "Penstock", 3),
        ("8B, 200 tokens, chunk 128", "transformers", 3),
        ("9B hybrid, 200 tokens, chunk 128", "Penstock", 3),
        ("9B hybrid, 200 tokens, chunk 128", "transformers", 3),
    ]


def test_decodes() -> None:
    results = measured(Section.DECODE)
    assert [(each.name, len(each.values)) for each in results.figures] == [
        ("8B, decode, batch 1, after 20 tokens", 1),
        ("8B, decode, batch 5, after 20 tokens", 1),
        ("0.6B, decode, batch 3, after 20 tokens", 1),
    ]


def test_mixed_steps() -> None:
    results = measured(Section.MIXED, repeats=2)
    label = "8B, step of 64 tokens after 128, "
    assert all(figure.name.startswith(label) for figure in results.figures)
    by_name = {figure.name.removeprefix(label): figure.values for figure in results.figures}
    both, chunk = by_name["3 decodes among them"], by_name["of a prompt"]
    decodes = by_name["3 decodes alone"]
    assert len(both) == len(chunk) == len(decodes) == 8
    assert by_name["3 decodes among them, over none"] == tuple(
        one / other for one, other in zip(both, chunk, strict=True)
    )
    assert by_name["3 decodes among them, over both apart"] == tuple(
        one / (first + second) for one, first, second in zip(both, chunk, decodes, strict=True)
    )


def test_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(work: Callable[[], object]) -> list[PowerSample]:
        work()
        return [PowerSample(1500.0, 690.0, 700.0), PowerSample(1600.0, 680.0, 700.0)]

    monkeypatch.setattr(gpu_profile, "watch_power", watched)
    results = measured(Section.PROFILE, repeats=2)
    for label in ("8B, 200 tokens, chunk 64", "8B, 200 tokens, whole"):
        found = {
            figure.name.removeprefix(f"{label}, "): figure
            for figure in results.figures
            if figure.name.startswith(label)
        }
        assert len(found["without a rest"].values) == 4
        assert (found["clock"].values, found["clock"].unit) == ((1500.0, 1600.0), "MHz")
        assert found["power"].values == (690.0, 680.0)
        assert found["power, at most"].values == (700.0,)
        kernels = [figure for name, figure in found.items() if name.startswith("kernels: ")]
        assert [each.values for each in kernels] == sorted((each.values for each in kernels), reverse=True)
        assert kernels
        assert found["between kernels"].values[0] >= 0
    monkeypatch.setattr(gpu_profile, "watch_power", lambda work: [work()][:0])
    assert not [each for each in measured(Section.PROFILE).figures if "power" in each.name]


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
    assert gpu_profile.group_of(kernel) == group


def test_time_of_kernels_and_between_them() -> None:
    launches = [
        gpu_profile.Launch("nvjet_1", 1000.0, 3000.0),
        gpu_profile.Launch("add_norm_kernel", 2500.0, 2800.0),  # beside it
        gpu_profile.Launch("nvjet_2", 3200.0, 4200.0),
        gpu_profile.Launch("add_norm_kernel", 5000.0, 5100.0),
    ]
    assert gpu_profile.grouped(launches) == pytest.approx({"products": 3.0, "norms": 0.4})
    assert gpu_profile.milliseconds_between(launches) == pytest.approx(1.0)
    assert gpu_profile.milliseconds_between([]) == 0


def test_power_is_watched_while_something_runs() -> None:
    told = "1980, 100.0, 700.00", "1500, 690.5, 700.00", "[N/A], 1, 2", "1515, 688.0, 700.00"
    # What comes before the work begins is not its own; what is cut off is not told.
    script = (
        f"import time\nprint({told[0]!r}, flush=True)\ntime.sleep(0.5)\n"
        f"print({chr(10).join(told[1:])!r}, flush=True)\nprint('1,2', end='', flush=True)\ntime.sleep(60)"
    )
    samples = watch_power(lambda: time.sleep(1.5), (sys.executable, "-c", script))
    assert samples == [PowerSample(1500.0, 690.5, 700.0), PowerSample(1515.0, 688.0, 700.0)]
    ran: list[bool] = []
    assert watch_power(lambda: ran.append(True), ("no-such-program",)) == []
    assert ran == [True]


def test_memory_is_what_the_allocator_had_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job()
    subject = job.subject(GpuModel.LARGE)
    known = subject.model.num_weight_bytes + gpu_memory.cache_bytes(subject.space(200))
    predicted = gpu_memory.predicted_bytes(subject, TINY.memory)
    allocated = iter([1000, 1000 + known, 1000 + known + 50])
    monkeypatch.setattr(gpu_memory, "allocated_bytes", lambda device: next(allocated))
    monkeypatch.setattr(gpu_memory, "peak_bytes", lambda device: 1000 + known + 2 * predicted)
    monkeypatch.setattr(gpu_memory, "reserved_bytes", lambda device: 1000 + known + 3 * predicted)
    results = measured(Section.MEMORY)
    label = "8B, 200 tokens, chunk 64, "
    by_name = {figure.name.removeprefix(label): figure.median for figure in results.figures}
    assert by_name == {
        "activations": 2 * predicted / 2**30,
        "activations, of them kept between passes": 50 / 2**30,
        "activations, with what the allocator has set aside": 3 * predicted / 2**30,
        "activations, predicted": predicted / 2**30,
        "predicted activations over measured": 0.5,
        "predicted activations over measured, off by": 0.5,
    }


def test_start_is_of_a_process_of_its_own() -> None:
    first, again, imported = measured(Section.START).figures
    assert first.name == "8B, from the start of a process until ready"
    assert again.name == f"{first.name}, with kernels compiled before"
    assert 0.1 < imported.median < again.median


def test_bits() -> None:
    results = measured(Section.BITS)
    assert len(results.facts) == (1 + 2 * 7) * 2 + 1 + 3 * 5
    assert [fact.name for fact in results.facts if not fact.holds] == []
    names = {fact.name for fact in results.facts}
    assert "8B, 4 layers, chunk 50, beside 2 decodes: same keys and values as whole" in names
    assert "9B hybrid, 4 layers, whole, beside 2 decodes: same states as whole" in names
    assert not any(name.startswith("9B hybrid, 4 layers, chunk 50") for name in names)


def test_bits_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tiles, another chunk is another order of summing."""

    def untiled(self: GpuJob, model: GpuModel, **changes: object) -> object:
        return load_untiled(self.weights(model, **changes), self.dtype, self.device, 0)

    monkeypatch.setattr(GpuJob, "subject", untiled)
    results = measured(Section.BITS)
    broken = [fact.name for fact in results.facts if not fact.holds]
    assert any("chunk 50, alone: same keys and values" in name for name in broken)


def test_tiles() -> None:
    results = measured(Section.TILES, repeats=3)
    tiled, plain, cost = (figure.values for figure in results.figures)
    assert cost == tuple(one / other - 1 for one, other in zip(tiled, plain, strict=True))


def test_what_fails_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "gpu.json", list[str]()
    job = tiny_job(path, said)

    def fail(*_: object) -> None:
        assert json.loads(path.read_text())["figures"]  # what was known before is there already
        raise RuntimeError("a kernel is wrong")

    monkeypatch.setattr(gpu_benchmark, "measure_decodes", fail)
    # Without a GPU there is no allocator to ask.
    run_sections(job, [Section.SMALL, Section.DECODE, Section.MEMORY, Section.TILES])
    results = read_results([path])
    assert {run.section: run.error for run in results.runs} == {
        Section.SMALL: "",
        Section.DECODE: "stopped: RuntimeError: a kernel is wrong",
        Section.MEMORY: "stopped: SettingError: device 'cpu' has no allocator that counts: memory is measured on "
        "cuda",
        Section.TILES: "",
    }
    assert results.figures == job.ledger.results.figures
    assert any(line.startswith("0.6B, 200 tokens, chunk 64, Penstock: ") for line in said)


def test_a_case_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(subject: Subject, space: CacheSpace, prompt: Sequence[int], chunk: int) -> int:
        if chunk == 0:
            raise torch.OutOfMemoryError("no room")
        return first_token(subject, space, prompt, chunk)

    monkeypatch.setattr(gpu_prefill, "first_token", wrong)
    job = tiny_job(with_peer=False)
    run_sections(job, [Section.LARGE])
    assert [figure.name for figure in job.ledger.results.figures] == [
        "8B, 200 tokens, chunk 64",
        "8B, 400 tokens, chunk 128",
    ]
    assert job.ledger.results.runs[0].error == "8B, 200 tokens, whole: OutOfMemoryError: no room"


def test_after_the_device_failed_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("illegal memory access")

    job = tiny_job()
    monkeypatch.setattr(gpu_benchmark, "free_memory", fail)
    run_sections(job, [Section.TILES, Section.MIXED, Section.BITS])
    errors = {run.section: run.error for run in job.ledger.results.runs}
    assert errors[Section.TILES] == ""
    assert errors[Section.MIXED] == errors[Section.BITS]
    assert "the device failed in tiles" in errors[Section.BITS]


def test_the_plan_is_of_published_shapes() -> None:
    job = tiny_job()
    sizes = {}
    for model in GpuModel:
        weights = job.weights(model, **PLAN.models[model])
        sizes[model] = sum(torch.Size(weights.shape(name)).numel() for name in weights.names()) / 1e9
        longest = [
            case.prompt_tokens for cases in PLAN.prefills.values() for case in cases if case.model is model
        ]
        assert weights.config.max_position > max(longest) + 1
    assert sizes[GpuModel.LARGE] == pytest.approx(8.19, abs=0.01)
    assert sizes[GpuModel.SMALL] == pytest.approx(0.60, abs=0.01)
    assert sizes[GpuModel.HYBRID] == pytest.approx(9.0, abs=0.3)


@pytest.mark.parametrize("chunk", [16, 64, 2048, 0])
def test_requests_decode_together_for_as_long_as_is_asked(chunk: int) -> None:
    subject = tiny_job().subject(GpuModel.LARGE)
    max_tokens = tokens_to_last(6, 5, 20, chunk)
    requests = Requests(subject, chunk, 6, 5 * (20 + max_tokens) + 102)
    requests.begin_decodes(range(100), 5, max_tokens)
    reader = requests.add("reading", range(100), 2)
    for index in range(6):
        step = requests.begin()
        kinds = [planned.kind for planned in step.plan.spans]
        assert index or SpanKind.CHUNK in kinds
        assert kinds.count(SpanKind.DECODE) == 5 + (reader.num_generated == 1)
        requests.settle(step, requests.run(step))
