"""The command line's options, with what each suite takes where they are not given."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from penstock.bench.cache_workload import CACHE
from penstock.bench.gpu_workload import GPU
from penstock.bench.peers_workload import PEERS
from penstock.bench.suites import SERVE, SUITES, SWEEP, SuiteName
from penstock.bench.target_workload import TARGETS
from penstock.bench.workload import DEFAULT_DECODE_TOKENS, DEFAULT_MEMORY_REPEATS
from penstock.errors import SettingError
from penstock.models.hub import DEFAULT_MODEL
from penstock.plan.config import DEFAULT_CHUNK_SIZE


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of which none is left open. Lengths that are given are those whose memory is measured too."""
    options = _parser().parse_args(arguments)
    if options.suite in (SERVE, SWEEP, TARGETS, CACHE, PEERS, GPU):
        raise SettingError(f"{options.suite} has options of its own: give it as the first argument")
    options.suite = SuiteName(options.suite)
    if options.suite is SuiteName.HYBRID and options.model is not None:
        raise SettingError(
            f"--model {options.model} contradicts hybrid, which makes its own model: leave one of them out"
        )
    suite = SUITES[options.suite]
    options.model = options.model or DEFAULT_MODEL
    options.memory_lengths = options.lengths or suite.memory_lengths
    options.lengths = options.lengths or suite.lengths
    options.output = options.output or Path("bench-results") / f"{options.suite}.json"
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.bench",
        description="Time to first token, decoding and memory of Penstock and of transformers, on the same "
        "weights and the same prompt, taking turns in one process. Takes about ten minutes on two cores, "
        "hybrid about five.",
    )
    add = parser.add_argument
    add(
        "suite",
        nargs="?",
        choices=[*(name.value for name in SuiteName), SERVE, SWEEP, TARGETS, CACHE, PEERS, GPU],
        default=SuiteName.PREFILL.value,
        help="prefill: a model of your choice reads a text; hybrid: a random Qwen3.5, three delta nets to one "
        "attention, reads random tokens; serve: many users at once; sweep: chunk sizes against prompt lengths; "
        "targets: automatic chunks and latency targets against fixed chunks; cache: prompts that were read before; "
        "peers: llama.cpp, vLLM and transformers beside Penstock; gpu: an NVIDIA GPU, with random weights "
        "(%(default)s; the last six have options of their own: see serve --help and so on)",
    )
    add(
        "--model",
        help=f"smollm2, a folder, a GGUF file or a Hugging Face name ({DEFAULT_MODEL}; prefill only)",
    )
    add("--lengths", type=counts, metavar="N,N", help=f"prompt tokens ({_default_lengths()})")
    add("--chunk", type=count, default=DEFAULT_CHUNK_SIZE, help="tokens per chunk (%(default)s)")
    add("--repeats", type=count, help="rounds at every length (5; 3 for long prompts and token by token)")
    add("--decode-tokens", type=count, default=DEFAULT_DECODE_TOKENS, help="after the first (%(default)s)")
    add("--memory-repeats", type=count, default=DEFAULT_MEMORY_REPEATS, help="for Penstock (%(default)s)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)")
    add_device(parser)
    add("--threads", type=count, help="threads that torch computes with (torch's own choice)")
    add("--full", action="store_true", help="every system and every round at long prompts too")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--skip-memory", action="store_true", help="timings only")
    which.add_argument("--only-memory", action="store_true", help="memory growth only")
    add("--check", action="store_true", help="exit with 1 where a bar is missed")
    add("--output", type=Path, help="the results as JSON (bench-results/SUITE.json)")
    add("--plot", type=Path, help="a picture of them (beside the JSON, where matplotlib is installed)")
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="auto, cpu, cuda, cuda:1 and so on, or mps (PENSTOCK_DEVICE, else auto)",
    )


def add_outputs(parser: argparse.ArgumentParser, output: Path, what: str) -> None:
    """`--json` and `--plot`, each with a file or without."""
    parser.add_argument(
        "--json",
        dest="output",
        nargs="?",
        type=Path,
        default=output,
        const=output,
        metavar="FILE",
        help=f"{what} (%(default)s)",
    )
    parser.add_argument(
        "--plot",
        nargs="?",
        type=Path,
        const=output.with_suffix(".png"),
        metavar="FILE",
        help="a picture (beside the JSON, where matplotlib is installed)",
    )


def count(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Several of them, with commas between."""
    return tuple(count(part) for part in text.split(","))


def _default_lengths() -> str:
    return "; ".join(
        f"{name}: {_listed(suite.lengths)}"
        + (f", memory {_listed(suite.memory_lengths)}" if suite.memory_lengths != suite.lengths else "")
        for name, suite in SUITES.items()
    )


def _listed(lengths: Sequence[int]) -> str:
    return ",".join(map(str, lengths))
