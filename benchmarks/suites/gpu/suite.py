"""Penstock on one NVIDIA GPU: options, bars beside what others reach, and the picture."""

import argparse
import importlib.metadata
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.harness import Bar, Bench, Results, SectionRun, Series, bar_of
from benchmarks.show import Picture
from benchmarks.suite import Suite, number, some_of, switch, value
from benchmarks.suites.gpu import prompts, stages, steps, weights, windows
from benchmarks.suites.gpu.job import Job
from benchmarks.suites.gpu.plan import (
    BIG,
    CHUNK,
    EXPERTS,
    FLOATS,
    FOUR_BITS,
    GROUPED_FOUR,
    HYBRID,
    LARGE,
    LITTLE,
    LONG,
    LONGEST,
    MIXED_LAYERS,
    PLAN,
    SECTIONS,
    SHORT,
    SMALL,
    SPARSE,
    WINDOWED,
    WINDOWS,
    DecodeCase,
    Plan,
    PrefillCase,
)
from benchmarks.suites.windows import MOST_SHARE, SHARE
from penstock.errors import SettingError
from penstock.pictures import Panel

VLLM = "vLLM 0.26 (FA3)"
METHOD = (
    "time to first token of one request on a cold cache, from the call to the token on the host, after warm-up; "
    "transformers with sdpa attention and its own cache, fed slices of the prompt, taking turns with Penstock. "
    f"Decode is a whole step of the engine, sampling included. {VLLM} was measured apart, on the same kind of card"
)


@dataclass(frozen=True)
class Target:
    """The most that a figure may be. What others reach was measured apart, on the same kind of card."""

    section: str
    name: str
    bar: float
    stretch: float | None = None
    limit: float | None = None  # of the card: arithmetic at its peak, or bytes at its bandwidth
    vllm: float | None = None


TARGETS = (
    Target(LARGE, PrefillCase(BIG, LONG, CHUNK).label, 1260, 1180, 1060, 1274),
    Target(LARGE, PrefillCase(BIG, LONG, 0).label, 1250, 1170, 1060, 1240),
    Target(LARGE, PrefillCase(BIG, LONG, 512).label, 1400, 1250, 1060, 1438),
    Target(LARGE, PrefillCase(BIG, LONGEST, CHUNK).label, 11_200, 10_600, 9820, 11_271),
    Target(LARGE, PrefillCase(BIG, SHORT, CHUNK).label, 222, 205, 177, 224),
    Target(SMALL, PrefillCase(LITTLE, LONG, CHUNK).label, 320, 270, 219, 366),
    Target(SMALL, PrefillCase(LITTLE, LONG, 512).label, 500, 350, 219, 775),
    Target(SMALL, PrefillCase(LITTLE, SHORT, CHUNK).label, 60, 40, 21, 87),
    Target(HYBRID, PrefillCase(MIXED_LAYERS, LONG, CHUNK).label, 1150, 980, 820),
    Target(HYBRID, PrefillCase(MIXED_LAYERS, LONG, 0).label, 1100, 950, 820),
    Target(HYBRID, PrefillCase(MIXED_LAYERS, LONG, 512).label, 1700, 1200, 820),
    Target(EXPERTS, PrefillCase(SPARSE, SHORT, CHUNK).label, 60, 40, 20),
    Target(EXPERTS, PrefillCase(SPARSE, LONG, CHUNK).label, 380, 310, 250),
    Target(EXPERTS, PrefillCase(SPARSE, SHORT, 512).label, 110, 70, 20),
    Target(EXPERTS, DecodeCase(SPARSE, 1, 128).label, 1.4, 1.0, 0.5),
    *(
        target
        for case in PLAN.prefills[WINDOWS]
        for target in (
            Target(WINDOWS, f"{case.label}, over {prompts.PEER}", 1 / 1.5),
            Target(WINDOWS, f"{windows.decode_label(case)}, over {prompts.PEER}", 1 / 4),
        )
    ),
    Target(WINDOWS, f"{WINDOWED}, {SHARE}", MOST_SHARE),
    Target("decode", DecodeCase(BIG, 1, 128).label, 5.83, vllm=5.30),
    Target("decode", DecodeCase(BIG, 32, 128).label, 6.64, vllm=6.04),
    Target("decode", DecodeCase(BIG, 1, LONG).label, 6.95, vllm=6.32),
    Target("decode", DecodeCase(LITTLE, 1, 128).label, 1.84, vllm=1.67),
    Target("decode", DecodeCase(LITTLE, 32, 128).label, 2.53, vllm=2.30),
    *(Target("strict", steps.strict_label(case), 1.05) for case in PLAN.strict),
    Target("memory", f"{PLAN.memory.label}, {prompts.ACTIVATIONS}", 0.30),
    Target("memory", f"{PLAN.memory.label}, {prompts.OFF_BY}", 0.10),
    Target("start", f"{PLAN.start}, {prompts.READY}", 15.0),
    *(
        target
        for case in PLAN.stages
        for target in (
            Target("stages", f"{case.label}, {stages.OVER_ONE}", 1.03),
            Target("stages", f"{case.label}, {stages.PREDICTED}", 1 / 1.8),
        )
    ),
    *(
        Target("weights", weights.against(label, form), bar)
        for form, label, bar in (
            (FLOATS, f"{BIG}, {weights.TAKEN}", 0.53),
            (FLOATS, PrefillCase(BIG, LONG, CHUNK).label, 0.80),
            (FLOATS, DecodeCase(BIG, 1, 128).label, 0.65),
            (FLOATS, DecodeCase(BIG, 32, 128).label, 0.75),
            *(
                (form, label, bar)
                for form in (FOUR_BITS, GROUPED_FOUR)
                for label, bar in (
                    (f"{BIG}, {weights.TAKEN}", 0.32),
                    (PrefillCase(BIG, SHORT, CHUNK).label, 1.15),
                    (DecodeCase(BIG, 1, 128).label, 0.55),
                )
            ),
        )
    ),
    Target("tiles", f"{PLAN.tiles.label}, {prompts.TILES_COST}", 0.03),
)


def bars(results: Results) -> list[Bar]:
    """The targets of the sections that were begun, with what others reach beside them."""
    begun = {run.section for run in results.sections} | {figure.section for figure in results.figures}
    found = []
    for target in TARGETS:
        if target.section in begun:
            marks = {"stretch": target.stretch, "card's limit": target.limit, VLLM: target.vllm}
            beside = ", ".join(f"{name} {value:,g}" for name, value in marks.items() if value is not None)
            figure = results.figure(target.name, section=target.section)
            name = f"{target.name} ({beside})" if beside else target.name
            found.append(bar_of(name, figure, target.bar, is_lower_limit=False))
    return found


def require_gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise SettingError("there is no NVIDIA GPU that torch can use: `bench gpu` measures on one")
    return torch.device("cuda", torch.cuda.current_device())


def this_card(device: torch.device) -> dict[str, Any]:
    """A GPU, and the software that only matters on one."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    card = {"triton": version("triton"), "flash_linear_attention": version("fla-core")}
    if device.type != "cuda":
        return {"name": str(device), **card}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        **card,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def run_sections(job: Job, sections: Sequence[str]) -> None:
    """In their order. After an error that the device does not recover from, the others are not tried."""
    results, failed_in = job.bench.results, ""
    for section in sections:
        errors: list[str] = [f"not run: the device failed in {failed_in}"] if failed_in else []
        started = time.perf_counter()
        if not failed_in:
            with job.attempt("stopped", errors):
                _WORK[section](replace(job, section=section), errors)
            failed_in = "" if _is_alive(job) else section
        run = SectionRun(section, time.perf_counter() - started, "; ".join(errors))
        results.sections.append(run)
        job.bench.say(f"{section}: {run.seconds:.0f} s" + (f", FAILED: {run.error}" if errors else ""))
        job.bench.save()


def _is_alive(job: Job) -> bool:
    """Whether the device still does what it is told."""
    try:
        job.synchronize()
    except RuntimeError:
        return False
    return True


def _prefill_section(job: Job, errors: list[str]) -> None:
    prompts.measure_prefills(job, errors, job.plan.prefills[job.section])


_WORK: Mapping[str, Callable[[Job, list[str]], None]] = {
    **dict.fromkeys((LARGE, SMALL, HYBRID), _prefill_section),
    EXPERTS: steps.measure_experts,
    WINDOWS: windows.measure_windows,
    "decode": steps.measure_decodes,
    "strict": steps.measure_strict,
    "memory": prompts.measure_memory,
    "start": prompts.measure_start,
    "bits": steps.measure_bits,
    "tiles": prompts.measure_tiles,
    "mixed": steps.measure_mixed,
    "stages": stages.measure_stages,
    "weights": weights.measure_weights,
    "profile": prompts.measure_profile,
    "sweep": prompts.measure_sweep,
}


def measure(
    options: argparse.Namespace, bench: Bench, plan: Plan = PLAN, device: torch.device | None = None
) -> None:
    device = device or require_gpu()
    bench.results.machine["card"] = this_card(device)
    bench.results.settings |= {"dtype": "bfloat16", "repeats": options.repeats or 5, "method": METHOD}
    wanted = {*options.cases, *(["sweep"] if options.sweep else [])}
    with_peer, peer_limit = not options.no_peer, options.peer_limit
    job = Job(plan, device, bench, options.repeats or 5, with_peer, peer_limit)
    run_sections(job, [section for section in SECTIONS if section in wanted])


def picture(results: Results, plan: Plan = PLAN) -> Picture:
    """A panel for each model whose chunks were swept: time to first token against the chunk."""
    swept = dict.fromkeys((case.model, case.prompt_tokens) for case in plan.sweeps)
    return Picture(
        "Time to first token, one request, bfloat16, random weights; medians, whiskers from least to most",
        [_panel(results, plan, model, tokens) for model, tokens in swept],
    )


def _panel(results: Results, plan: Plan, model: str, tokens: int) -> Panel:
    cases = [*(case for cases in plan.prefills.values() for case in cases), *plan.sweeps]
    chunks = {case.chunk for case in cases if (case.model, case.prompt_tokens) == (model, tokens)}
    marks = {target.name: target for target in TARGETS}
    series: Series = {}
    vllm: list[tuple[str, float]] = []
    limits = []
    for chunk in sorted(chunks, key=lambda chunk: chunk or tokens):
        label, x = PrefillCase(model, tokens, chunk).label, f"{chunk:,}" if chunk else "whole"
        for system in ("Penstock", "transformers"):
            figure = results.figure(label, system)
            if figure is not None:
                series.setdefault(system, {})[x] = figure.values
        target = marks.get(label)
        if target is not None and target.vllm is not None:
            vllm.append((x, target.vllm))
        limits += [target.limit] if target is not None and target.limit is not None else []
    return Panel(
        f"{model}, {tokens:,} tokens",
        "time to first token (ms)",
        series,
        "chunk (tokens)",
        "lines",
        marks={f"{VLLM}, measured apart": vllm} if vllm else {},
        limit=("the card's limit", min(limits)) if limits else None,
    )


GPU = Suite(
    "Penstock on one NVIDIA GPU, in bfloat16, with random weights of published shapes: time to the first token "
    "beside transformers, decodes, memory, starting, the same bits, what tiles cost, and where the time goes. Takes "
    "about eight minutes on an H200. Bits that differ are an error, whether bars are checked or not.",
    measure,
    bars,
    picture,
    repeats="passes of every prompt (5)",
    takes=(),
    options={
        "--cases": value(
            some_of(SECTIONS), SECTIONS[:-1], "C,C", f"of {', '.join(SECTIONS)} (all but sweep)"
        ),
        "--sweep": switch("more chunk sizes, too, for the picture"),
        "--no-peer": switch("without transformers"),
        "--peer-limit": number(
            65_536, "tokens of the longest prompt that transformers reads: of 131,072 it takes 24 s a pass"
        ),
    },
)
