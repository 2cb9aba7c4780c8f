"""The options of `python -m penstock.bench peers`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from penstock.bench.options import add_outputs, count, counts
from penstock.bench.peers_workload import (
    DEFAULT_DECODE_TOKENS,
    DEFAULT_LENGTHS,
    DEFAULT_REPEATS,
    DEFAULT_TRIAL_PASSES,
    PEER_ENGINES,
    PEERS,
    QUICK_DECODE_TOKENS,
    QUICK_LENGTHS,
    QUICK_REPEATS,
    QUICK_TRIAL_PASSES,
    EngineName,
    PeerSystem,
    PeerWorkload,
)
from penstock.models.hub import DEFAULT_MODEL

_OUTPUT = Path("bench-results") / f"{PEERS}.json"
_FOLDER = Path(".peers")
_NONE = "none"


def parse_peers_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of which none is left open, but for `plot`: None is beside the JSON, where a picture can be drawn.
    `workload` has the numbers."""
    options = _parser().parse_args(arguments)
    quick = options.quick
    options.workload = PeerWorkload(
        lengths=tuple(sorted(set(options.lengths or (QUICK_LENGTHS if quick else DEFAULT_LENGTHS)))),
        decode_tokens=options.decode_tokens or (QUICK_DECODE_TOKENS if quick else DEFAULT_DECODE_TOKENS),
        repeats=options.repeats or (QUICK_REPEATS if quick else DEFAULT_REPEATS),
        trial_passes=QUICK_TRIAL_PASSES if quick else DEFAULT_TRIAL_PASSES,
        seed=options.seed,
    )
    return options


def left_out(
    wanted: Sequence[EngineName], present: Sequence[EngineName], path: Path
) -> dict[PeerSystem, str]:
    """The systems that do not take part, and why."""
    found = {}
    for system in PeerSystem:
        engine = system.engine
        if engine not in PEER_ENGINES:
            continue
        if engine not in wanted:
            found[system] = "not asked for"
        elif engine not in present:
            found[system] = "not installed: make bench-peers"
        elif engine is EngineName.LLAMA_CPP and (path.is_dir() or path.suffix != ".gguf"):
            found[system] = "reads GGUF files alone, and the model is none"
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m penstock.bench {PEERS}",
        description="Penstock, transformers, llama.cpp and vLLM read the same tokens and decode after them, each in "
        "a process of its own, taking turns. llama.cpp and vLLM take part where `make bench-peers` has made their "
        "environments, each with its best settings, which are looked for first. On two cores and the default "
        "model that takes 45 minutes to an hour, half of it before the first round and nearly all of it theirs; with "
        "--peers none, about 6 minutes.",
    )
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="smollm2 or a GGUF file; a folder, without llama.cpp (%(default)s)",
    )
    add("--lengths", type=counts, metavar="N,N", help=f"prompt tokens ({_listed(DEFAULT_LENGTHS)})")
    add(
        "--decode-tokens",
        type=count,
        metavar="N",
        help=f"after the first, after the shortest and the longest prompt ({DEFAULT_DECODE_TOKENS})",
    )
    add("--repeats", type=count, metavar="N", help=f"rounds ({DEFAULT_REPEATS})")
    add(
        "--quick",
        action="store_true",
        help=f"{_listed(QUICK_LENGTHS)} tokens, {QUICK_DECODE_TOKENS} decoded, {QUICK_REPEATS} rounds, where nothing "
        "else is given; some bars are not measured then",
    )
    add(
        "--peers",
        type=_engines,
        default=PEER_ENGINES,
        metavar="NAME,NAME",
        help=f"of those in environments of their own; {_NONE}: no one ({_listed(PEER_ENGINES)})",
    )
    add("--peers-folder", type=Path, default=_FOLDER, metavar="FOLDER", help="where they are (%(default)s)")
    add("--weights", metavar="FORM", help="the form in which Penstock keeps weights (its own choice)")
    add("--seed", type=int, default=0, metavar="N", help="of the order of turns (%(default)s)")
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of Penstock and transformers (%(default)s)",
    )
    add(
        "--threads",
        type=count,
        metavar="N",
        help="threads that each engine computes with (torch's own choice)",
    )
    add("--check", action="store_true", help="exit with 1 where a bar is missed, or was not measured")
    add_outputs(parser, _OUTPUT, "results with all times")
    return parser


def _engines(text: str) -> tuple[EngineName, ...]:
    if text == _NONE:
        return ()
    try:
        found = tuple(EngineName(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not set(found) <= set(PEER_ENGINES):
        raise argparse.ArgumentTypeError(f"{text!r} is not {_NONE}, nor some of {_listed(PEER_ENGINES)}")
    return tuple(dict.fromkeys(found))


def _listed(values: Sequence[object]) -> str:
    return ",".join(str(value) for value in values)
