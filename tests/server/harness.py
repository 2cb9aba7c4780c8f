"""`python -m tests.server.harness`: lm-evaluation-harness's `local-completions`, against this server, gives the
log-likelihoods of its own `hf` on the same weights. Needs `pip install 'lm-eval[api]' accelerate` beside the
development's packages."""

import json
import tempfile
from pathlib import Path
from typing import Any

import lm_eval  # type: ignore[import-not-found]
import torch
import transformers
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

from penstock.engine.llm import LLM
from penstock.frontends.server.settings import ServerSettings
from penstock.measure.transformers_model import load_transformers
from penstock.models.hub import resolve_model
from penstock.models.opened import open_model
from tests.server.running import running

QUESTIONS = [
    ("The capital of France is", [" Paris", " London", " a dog of some years"]),
    ("Two and two are", [" four", " five", " never"]),
    ("A penstock lets water into a", [" turbine", " mountain made of cheese", " book"]),
    ("def add(a, b):\n    return", [" a + b", " a - b\n", " None"]),
    ("Grüße aus Köln, sagte sie, und", [" lachte", " 🙂", " the"]),
    ("word " * 700 + "and the next word is", [" word", " none"]),
]
TASK: dict[str, Any] = {
    "task": "penstock",
    "dataset_path": "json",
    "test_split": "train",
    "output_type": "multiple_choice",
    "doc_to_text": "question",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
TOLERANCE = 1e-3


def scores(model: str, arguments: dict[str, Any], folder: Path) -> list[tuple[float, bool]]:
    """The log-likelihood of each choice, and whether it is what a greedy model would say."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model, model_args=arguments, tasks=["penstock"], task_manager=manager, batch_size=1, bootstrap_iters=0
    )
    samples = sorted(found["samples"]["penstock"], key=lambda sample: int(sample["doc_id"]))
    return [(float(score), bool(greedy)) for sample in samples for score, greedy in sample["filtered_resps"]]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, weights = Path(name), Path(name) / "smollm2"
        source = resolve_model("smollm2")
        load_transformers(open_model(source).source, torch.float32).save_pretrained(weights)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.save_pretrained(weights)
        docs = [{"question": question, "choices": choices, "answer": 0} for question, choices in QUESTIONS]
        (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
        task = {**TASK, "dataset_kwargs": {"data_files": {"train": str(folder / "docs.jsonl")}}}
        (folder / "penstock.yaml").write_text(json.dumps(task))
        theirs = scores("hf", {"pretrained": str(weights), "dtype": "float32", "device": "cpu"}, folder)
        llm = LLM(weights, dtype="float32", weights="f32", chunk=256)
        with running(llm, ServerSettings("smollm2")) as server:
            arguments = {"model": "smollm2", "base_url": f"{server.url}/v1/completions"}
            ours = scores("local-completions", {**arguments, "tokenizer": str(weights)}, folder)
        differences = [abs(one[0] - other[0]) for one, other in zip(ours, theirs, strict=True)]
        same = sum(one[1] == other[1] for one, other in zip(ours, theirs, strict=True))
        print(f"{len(ours)} log-likelihoods from {min(theirs)[0]:.2f} to {max(theirs)[0]:.2f}")
        print(f"largest difference {max(differences):.1e}, greedy alike in {same}")
        if max(differences) > TOLERANCE or same < len(ours):
            raise SystemExit(f"they differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
