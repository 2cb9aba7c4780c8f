"""Sets of instructions and forms of weights beside each other: random weights of published shapes, in turns."""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Bench, rotated, take_turns
from benchmarks.models import SHAPES, tied
from benchmarks.reading import DECODING, PREFILLING, Turn, read_turns
from benchmarks.suite import Suite, number, value
from benchmarks.systems import Child, PenstockSystem, ask
from penstock.errors import SettingError
from penstock.kernels.device import device_kind
from penstock.kernels.interface import select_kernels
from penstock.kernels.native.build import allows_tiles
from penstock.kernels.probe import probe
from penstock.machine import AMX, INSTRUCTION_SETS, ISA_VARIABLE, processor_flags
from penstock.measure.prompts import random_tokens
from penstock.measure.random_weights import MIXTURES, RandomBlocks, RandomWeights
from penstock.models.loading import load_decoder
from penstock.models.source import WeightSource
from penstock.plan.grids import DEFAULT_CHUNK_SIZE

# Those in blocks, and what `--weights bf16` makes of any file.
PLAIN = "bf16"
FORMS = ("Q4_K_M", "Q8_0", PLAIN)
WEIGHTS = "weights in memory"
_REPEATS = 5


def _source(model: str, layers: int | None, form: str) -> WeightSource:
    settings = dict(SHAPES[model] if model in SHAPES else json.loads(Path(model).read_text()))
    if layers:
        settings["num_hidden_layers"] = layers
    if form == PLAIN:
        return RandomWeights(model, settings)
    return RandomBlocks(model, settings, "cpu", tied(MIXTURES[form]))


def _file_bytes(source: WeightSource) -> int:
    """What a file takes that has the weights so, but for its header."""
    assert isinstance(source, RandomWeights)
    total = 0
    for name, shape in source.shapes.items():
        form, num_values = source.block_form(name), torch.Size(shape).numel()
        total += num_values // form.block_size * form.block_bytes if form else 2 * num_values
    return total


class Engine:
    """In a process of its own, whose environment names the set of instructions."""

    def load(
        self, model: str, layers: int | None, form: str, chunk: int, threads: int | None
    ) -> dict[str, Any]:
        if threads:
            torch.set_num_threads(threads)
        source, device = _source(model, layers, form), torch.device("cpu")
        kernels = select_kernels(device, "native")
        decoder = load_decoder(
            source, kernels, torch.bfloat16, device, "auto" if isinstance(source, RandomBlocks) else "bf16"
        )
        found = probe(kernels, decoder.probe_shapes, decoder.dtype, device)
        self.generate = PenstockSystem(decoder, found.bind(kernels), chunk).generate
        return {
            "instructions": kernels.instructions,
            "slower": kernels.slower,
            "weight_bytes": decoder.num_weight_bytes,
            "file_bytes": _file_bytes(source),
            "same_bits": found.same_bits,
            "vocab_size": source.config.vocab_size,
            "threads": device_kind(device).num_threads,
        }


def _systems(text: str) -> tuple[tuple[str, str], ...]:
    """Pairs of a set and a form, as `amx:Q4_K_M`."""
    found = []
    for part in text.split(","):
        name, _, form = part.partition(":")
        if name not in INSTRUCTION_SETS or form not in FORMS:
            sets, forms = ", ".join(INSTRUCTION_SETS), ", ".join(FORMS)
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {sets}, a colon, one of {forms}")
        found.append((name, form))
    return tuple(dict.fromkeys(found))


def _usual_systems() -> tuple[tuple[str, str], ...]:
    """The two best sets that this processor has."""
    sets = [name for name, needed in INSTRUCTION_SETS.items() if {*needed} <= processor_flags()]
    best = [name for name in sets if name != AMX or allows_tiles()][:2]
    if not best:
        raise SettingError("this processor has none of " + ", ".join(INSTRUCTION_SETS))
    return tuple((name, "Q4_K_M") for name in best)


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    results, lengths = bench.results, options.lengths
    systems = {f"{name}, {form}": (name, form) for name, form in options.systems or _usual_systems()}
    bench.describe(options.shapes, options, "layers", "chunk", "lengths", "decode_tokens", "threads")
    with ExitStack() as stack:
        children = {}
        for label, (name, form) in systems.items():
            child = stack.enter_context(
                Child("benchmarks.suites.instructions:Engine", label, env={ISA_VARIABLE: name})
            )
            wanted = {name: getattr(options, name) for name in ("layers", "chunk", "threads")}
            found = child.ask("load", model=options.shapes, form=form, **wanted)
            results.require(label, "these instructions run", found["instructions"] == name)
            results.require(label, "the probe finds the laws to hold", found["same_bits"])
            results.add(WEIGHTS, "weights", "GB", found["weight_bytes"] / 1e9, system=label)
            over_file = found["weight_bytes"] / found["file_bytes"]
            results.add(WEIGHTS, "over the file", "x", over_file, system=label)
            bench.say(f"{label}: {found['threads']} threads, {over_file:.2f} of the file in memory")
            children[label] = child
        prompt = random_tokens(found["vocab_size"], max(lengths))
        turns = [
            Turn(label, length, options.decode_tokens + 1, (PREFILLING, DECODING), child)
            for label, child in children.items()
            for length in lengths
        ]
        for child in children.values():
            ask(child, prompt[: min(lengths)], 4)
        read_turns(
            bench,
            take_turns(rotated(turns, options.repeats or _REPEATS)),
            lambda turn: ask(turn.by, prompt[: turn.length], turn.num_tokens),
        )
    results.arrange(list(systems))
    first, *others = systems
    for section in (PREFILLING, DECODING):
        for length in lengths:
            for other in others:
                results.add_ratio(
                    f"{section}: {first} over {other}", section, f"{length:,} tokens", first, other
                )


INSTRUCTIONS = Suite(
    "Prefill and decode with sets of instructions and forms of weights, each in a process of its own, taking turns; "
    "and what weights take. Weights are random, of published shapes, and in no file.",
    _measure,
    takes=("--threads",),
    options={
        "--shapes": value(
            str, "qwen3-1.7b", "NAME", f"{', '.join(SHAPES)} or a configuration's file (%(default)s)"
        ),
        "--systems": {
            "type": _systems,
            "default": None,
            "metavar": "SET:FORM,SET:FORM",
            "help": f"of {', '.join(INSTRUCTION_SETS)} and of {', '.join(FORMS)}; the first is compared "
            "with the others (the processor's two best with Q4_K_M)",
        },
        "--lengths": number((512, 2048), "tokens of the prompts"),
        "--decode-tokens": number(64, "tokens generated after the first"),
        "--chunk": number(DEFAULT_CHUNK_SIZE, "tokens of a chunk"),
        "--layers": number(None, "layers (all)"),
    },
)
