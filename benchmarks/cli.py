"""`python -m benchmarks SUITE`: options, the run, its table, JSON and picture, and the exit status."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch

from benchmarks import show
from benchmarks.harness import UNUSABLE, Bench, Results, read_results
from benchmarks.suite import COMMON, Suite, number, switch
from penstock.errors import PenstockError, SettingError
from penstock.files import require_outputs
from penstock.kernels.device import chosen_device
from penstock.measure.machine import this_machine
from penstock.plan.settings import DEVICE_VARIABLE

# By name: where it is, and what it measures.
SUITES = {
    "prefill": (
        "prefill:PREFILL",
        "reading, decoding and memory beside transformers, on a model of your choice",
    ),
    "hybrid": ("prefill:HYBRID", "the same on a random Qwen3.5, three delta nets to one attention"),
    "experts": ("prefill:EXPERTS", "the same on a random Qwen3-MoE with 64 experts"),
    "decode": ("decode:DECODE", "where the time of a decode step goes"),
    "host": ("host:HOST", "what the host does for a step, by the number of sequences"),
    "activations": ("activations:ACTIVATIONS", "8-bit activations beside plain ones: likelihoods, speed"),
    "implementations": (
        "implementations:IMPLEMENTATIONS",
        "a family by transformers' code, over Penstock's own",
    ),
    "instructions": (
        "instructions:INSTRUCTIONS",
        "sets of instructions and forms of weights beside each other",
    ),
    "windows": ("windows:WINDOWS", "attention of a layer with a window beside one without"),
    "start": ("start:START", "how soon there is progress, and what a loaded model occupies"),
    "sweep": ("sweep:SWEEP", "chunk sizes against prompt lengths"),
    "serve": ("serve:SERVE", "many users at once"),
    "strict": ("strict:STRICT_SUITE", "what it costs that answers do not depend on each other"),
    "targets": ("targets:TARGETS", "automatic chunks and latency targets against fixed chunks"),
    "cache": ("cache:CACHE", "prompts that were read before"),
    "tools": ("tools:TOOLS", "what tools in a request cost"),
    "busy": ("busy:BUSY", "a machine that does other work, and another checkout in turns"),
    "stages": ("stages:STAGES_SUITE", "several stages on one machine, and over slow links"),
    "peers": ("peers:PEERS", "llama.cpp, vLLM and transformers beside Penstock"),
    "load": ("load:LOAD", "a GPU under load, in turns with vLLM"),
    "gpu": ("gpu.suite:GPU", "an NVIDIA GPU, with random weights of published shapes"),
}
DEFAULT_SUITE = "prefill"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0; 1 where a bar that is checked is missed or answers differ that must not; 2 where nothing
    could be measured; 3 where figures were too noisy to be given."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["--help"], ["-h"]):
        print(_overview())
        return 0
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else DEFAULT_SUITE
    try:
        if name not in SUITES:
            raise SettingError(f"suite {name!r} is not accepted: give one of {', '.join(SUITES)}")
        return _run(name, find_suite(name), arguments)
    except PenstockError as error:
        say(f"error: {error.message(_as_option) if isinstance(error, SettingError) else error}")
        return UNUSABLE


def find_suite(name: str) -> Suite:
    """Suites are imported when they are asked for: some machines have not what others need."""
    module, _, attribute = SUITES[name][0].partition(":")
    suite: Suite = getattr(import_module(f"benchmarks.suites.{module}"), attribute)
    return suite


def _run(name: str, suite: Suite, arguments: Sequence[str]) -> int:
    options = _parser(name, suite).parse_args(arguments)
    usual = Path("bench-results") / f"{name}.json"
    output = options.plot_from[0] if options.plot_from else options.output or usual
    require_outputs({"plot": options.plot, "output": None if options.plot_from else output})
    if options.plot_from:
        results = read_results(options.plot_from, name)
    else:
        _prepare(options)
        results = Results(name, asdict(this_machine()), {})
        bench = Bench(results, say, output)
        try:
            suite.measure(options, bench)
        except KeyboardInterrupt:
            if results.figures:
                bench.save()
            kept = f"what was measured is in {output}" if results.figures else "nothing was written"
            say(f"stopped: {kept}")
            return 130
    results.bars = suite.bars(results)
    if not options.plot_from:
        bench.save()
    print(f"\n{show.render(results)}\n")
    if not options.plot_from:
        print(f"results: {output}")
    _draw(suite, results, options.plot or output.with_suffix(".png"))
    for fact in results.facts:
        if not fact.holds:
            say(f"error: {fact.section}: {fact.name}: not so")
    return results.status(check=options.check)


def _draw(suite: Suite, results: Results, path: Path) -> None:
    if suite.picture is None or not results.figures:
        return
    if show.can_draw():
        show.draw(path, results, suite.picture(results))
        if path.exists():
            print(f"plot:    {path}")
    else:
        print("plot:    none, matplotlib is not installed")


def _parser(name: str, suite: Suite) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=suite.about)
    add, folder = parser.add_argument, Path("bench-results")
    for option, how in {**{each: COMMON[each] for each in suite.takes}, **suite.options}.items():
        add(option, **how)
    add("--repeats", **number(None, suite.repeats))
    add("--check", **switch("exit with 1 where a bar is missed or was not measured"))
    usual = f"results as JSON ({folder / name}.json)"
    add("--output", "--json", "--out", nargs="?", type=Path, metavar="FILE", help=usual)
    usual, picture = "a picture (beside the results, where matplotlib is installed)", folder / f"{name}.png"
    add("--plot", nargs="?", type=Path, metavar="FILE", const=picture, help=usual)
    usual = "measure nothing: table and picture of these results, the later ones' sections before the earlier ones'"
    add("--plot-from", nargs="+", type=Path, metavar="FILE", help=usual)
    return parser


def _prepare(options: argparse.Namespace) -> None:
    if getattr(options, "threads", None) is not None:
        torch.set_num_threads(options.threads)
    if getattr(options, "device", None) is not None:
        chosen_device(options.device)
        os.environ[DEVICE_VARIABLE] = options.device  # for processes that measure, too


def _as_option(setting: str, value: object) -> str:
    option = f"--{setting.replace('_', '-')}"
    return option if value is ... else f"{option} {value}"


def _overview() -> str:
    lines = [f"  {name:<17}{about}" for name, (_, about) in SUITES.items()]
    usage = "usage: python -m benchmarks SUITE [OPTIONS]; SUITE --help lists its options"
    return "\n".join([usage, "", *lines])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
