"""Every decoder of text that transformers has, with each field of its configuration moved off what it is: it has
transformers' logits, or it is refused in one line. It never runs wrongly. As it is, it runs in bfloat16, too.

`python -m tests.models.sweep` runs all of it in ten minutes of one core (`--part 1/8`: an eighth of the families; or
names of families; `--families`: each once, as it is; `--pairs 20`: and so many pairs of fields moved at once), and
prints what is wrong, then how many families run. A test runs a sample."""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.errors import PenstockError
from penstock.kernels.interface import select_kernels
from penstock.models.by_transformers.families import REASONS, TRIED
from penstock.models.hf.families import FAMILIES, MULTIMODAL
from penstock.models.loading import load_decoder
from penstock.models.opened import open_weights
from penstock.plan.settings import ModelImpl
from tests.models.hf_defaults import WITHOUT_EFFECT
from tests.oracle import Oracle, random_prompt, run_prompt
from tests.small import SIZES, make_model, small_config

NUM_TOKENS = 120  # more than two windows
MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.2}
_TEXTS = {
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"),
    "position_embedding_type": ("rope", "nope"),
}
_SKIPPED = {*WITHOUT_EFFECT, *(field.name for field in fields(PreTrainedConfig)), "vocab_size"} - {
    "tie_word_embeddings"
}
_ROPE = {"rope_theta": 500.0}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
)


def families() -> list[str]:
    """Decoders of text, by transformers' names."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def runner(name: str) -> str:
    """Whose code runs a family, or why it is refused; empty where nothing is known of it."""
    if name in FAMILIES or name in MULTIMODAL:
        return "penstock"
    return "transformers" if name in TRIED else REASONS.get(name, "")


@dataclass(frozen=True)
class Case:
    """A family, and what differs of its small configuration."""

    family: str
    changes: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.family} {dict(self.changes) or ''}"


def cases(family: str) -> Iterator[Case]:
    """Each field moved."""
    yield Case(family)
    config = small_config(family)
    for field in fields(config):
        if field.name in _SKIPPED:
            continue
        for value in _moved(field.name, vars(config).get(field.name), str(field.type)):
            yield Case(family, ((field.name, deepcopy(value)),))


def _moved(name: str, value: Any, kind: str) -> list[Any]:
    if name == "rope_parameters":
        if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            return [{**value, layers: _ROPE | rope} for layers in value for rope in _ROPES]
        return [(value or {}) | _ROPE | rope for rope in _ROPES]
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value] if value else [1]
        case float():
            return [0.5 * value if value else 0.25]
        case str() if "act" in name:
            return [each for each in ("gelu", "relu") if each != value]
        case str():
            return [each for each in _TEXTS.get(name, (value + "_other",)) if each != value]
        case [] if "int" in kind:
            return [[1]]
        case list() if len(set(map(str, value))) > 1:
            return [value[::-1], [value[0]] * len(value)]
        case list() if name == "layer_types":
            return [
                [each, *value[1:]] for each in ("sliding_attention", "full_attention") if each != value[0]
            ]
        case None:
            hints = {"bool": True, "float": 0.5, "int": 4}
            return [next((moved for hint, moved in hints.items() if hint in kind), None)]
    return []


def pairs(family: str, count: int, seed: int = 0) -> list[Case]:
    """Two fields moved at once."""
    moved, chosen = [case for case in cases(family) if case.changes], random.Random(seed)
    drawn = (chosen.sample(moved, 2) for _ in range(count))
    return [Case(family, one.changes + other.changes) for one, other in drawn]


def outcome(case: Case, model_impl: ModelImpl = "auto", dtype: torch.dtype = torch.float32) -> str:
    """`equal`, `refused: ...`, or `transformers: ...` where that does not run it; everything else is wrong."""
    with TemporaryDirectory(prefix="penstock-sweep-") as folder:
        try:
            oracle = make_model(small_config(case.family, **deepcopy(dict(case.changes))), Path(folder))
            prompt = random_prompt(NUM_TOKENS, SIZES["vocab_size"])
            expected = oracle.logits(prompt)
            assert expected.isfinite().all()
        except Exception as error:  # whatever transformers' classes say to it
            return f"transformers: {type(error).__name__} {error}".splitlines()[0]
        return _outcome(oracle, expected, prompt, model_impl, dtype)


def _outcome(
    oracle: Oracle, expected: torch.Tensor, prompt: list[int], model_impl: ModelImpl, dtype: torch.dtype
) -> str:
    cpu = torch.device("cpu")
    try:
        with closing(open_weights(oracle.folder, model_impl)) as source:
            model = load_decoder(source, select_kernels(cpu), dtype, cpu)
        ends = (33, 34, 80, NUM_TOKENS)
        found = run_prompt(model, prompt, canon=model.kernels.law, chunk_ends=ends).logits
    except PenstockError as error:
        lines = str(error).splitlines()
        return f"refused: {lines[0]}" if len(lines) == 1 else f"WRONG: an error of several lines: {lines}"
    except Exception as error:
        return f"WRONG: {type(error).__name__} {error}".splitlines()[0]
    assert found is not None
    difference = float((found - expected).abs().max() / expected.abs().max())
    return (
        "equal"
        if difference <= MOST_ERROR[dtype]
        else f"WRONG: logits differ by {difference:.1e} of the largest"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models.sweep")
    parser.add_argument("names", nargs="*", help="families; all by default")
    parser.add_argument("--families", action="store_true", help="each family as it is, no field moved")
    parser.add_argument("--model-impl", choices=("auto", "penstock", "transformers"), default="auto")
    parser.add_argument("--part", default="1/1", help="of the families, such as 2/8")
    parser.add_argument("--pairs", type=int, default=0, help="pairs of fields of each family")
    parser.add_argument("--verbose", action="store_true", help="print every outcome")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    part, parts = map(int, options.part.split("/"))
    names = options.names or families()[part - 1 :: parts]
    unknown = [name for name in names if not runner(name)]
    counts: Counter[str] = Counter()
    running: Counter[str] = Counter()
    for name in names:
        by = runner(name)
        if by not in ("penstock", "transformers") or name in MULTIMODAL:
            continue
        tried = [Case(name)] if options.families else [*cases(name), *pairs(name, options.pairs)]
        for case in tried:
            found = outcome(case, options.model_impl)
            if not case.changes and found == "equal":
                found = outcome(case, options.model_impl, torch.bfloat16)
            if not case.changes and found != "equal":
                found = f"WRONG: as it is: {found}"  # else nothing would be known of its fields
            counts[found.split(":")[0]] += 1
            running[by] += not case.changes and found == "equal"
            if options.verbose or found.startswith("WRONG"):
                print(case, found, flush=True)
        print(f"{name}: {dict(counts)}", file=sys.stderr, flush=True)
    refused = [name for name in names if runner(name) not in ("penstock", "transformers", "")]
    print(f"outcomes: {dict(counts)}")
    print(f"{sum(running.values())} families run: {dict(running)}; {len(refused)} are refused by name")
    print(f"not known: {', '.join(unknown)}" if unknown else "all families are known")
    return bool(counts["WRONG"] or unknown)


if __name__ == "__main__":
    sys.exit(main())
