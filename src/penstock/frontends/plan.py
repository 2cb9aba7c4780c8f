"""The command `penstock plan`: what chunks of a prompt take in memory, from a model's configuration alone.

torch is imported only when it is asked.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.errors import MemoryExhaustedError, ModelError, SettingError
from penstock.frontends import options, plan_stages
from penstock.frontends.exits import reported
from penstock.machine import has_fast_bfloat16, instruction_set, processor_flags
from penstock.plan import format_bytes
from penstock.plan.grids import EXPERT_PLACES
from penstock.plan.memory import WeightBits
from penstock.plan.model import ModelConfig
from penstock.plan.pipeline import Link
from penstock.plan.prompt_plan import Plan, make_plan
from penstock.plan.settings import KERNELS, resolve_device, resolve_threads
from penstock.plan.stage_plan import StageQuestion, make_stage_plan
from penstock.plan.step import KernelKind, Workspace
from penstock.plan.units import parse_bytes, parse_rate
from penstock.plan.weight_settings import (
    WeightsSetting,
    resolve_weights,
    settle_weights,
    settle_without_blocks,
)

if TYPE_CHECKING:
    import torch

_MOST_TOKENS = 1 << 30
_MOST_DECODES = 1 << 16
_PLAIN_BITS = 16  # of a value of bfloat16
# What probes find on GPUs: products of fewer rows are padded up to it.
_ROW_FLOOR_ON_GPU = 512
_TITLES = {
    "input": "inputs",
    "hidden": "hidden",
    "projection": "projections",
    "attention": "attention",
    "delta_net": "recurrent",
    "mlp": "MLP",
    "logits": "logits",
}
_NOTES = (
    "Parts are what lives at the moment a step holds the most. Peak has weights, K/V cache and states too.",
    "Saved is the share of one pass's memory, weights left aside.",
)

_what, _stages = map(options.in_panel, ("What is planned", "Several machines"))


def plan(
    model: str = _what(
        ...,
        "A folder with config.json (weights need not be there), a config.json, a GGUF file, smollm2 or a "
        "Hugging Face name, of which only the configuration is fetched.",
        metavar="NAME",
    ),
    prompt_tokens: int = _what(..., "The prompt's length.", metavar="TOKENS"),
    chunk: int | None = _what(
        None, "A chunk size to plan with; 0 is the whole prompt in one.", metavar="TOKENS"
    ),
    memory: str | None = _what(
        None,
        "Memory for weights, keys and values, states and activations, such as 8GiB: the largest chunk that "
        "fits is chosen.",
        metavar="BYTES",
    ),
    decodes: int = _what(
        0, "Answers that are generated beside it, each after as many tokens.", metavar="NUMBER"
    ),
    stages: int | None = _stages(
        None,
        "Plan a pipeline of so many machines: the layers of each, its memory (--memory 8GiB,16GiB where "
        "machines are unequal), and the time to the first token.",
        metavar="NUMBER",
    ),
    link: str | None = _stages(
        None, "What joins two of them, such as 10Gb/s, 4Mb/s or 1.2GB/s.", metavar="RATE"
    ),
    layers: str | None = _stages(
        None, "The layers of each stage, such as 10,20, in place of the best cut.", metavar="NUMBERS"
    ),
    speed: str | None = _stages(
        None,
        "Tokens a second at which one machine alone reads this prompt, or those of each: 60,120.",
        metavar="NUMBERS",
    ),
    profile: Path | None = _stages(
        None, "A file of `penstock tune --json FILE`: step times of one machine.", metavar="FILE"
    ),
    dtype: options.Dtype = options.DTYPE,
    device: str | None = options.DEVICE,
    weights: str | None = options.WEIGHTS,
    plot: Path | None = options.on_output(
        None, "Draw a picture: png, svg or pdf by its name.", metavar="PATH"
    ),
    as_json: bool = options.on_output(False, "Print JSON in place of a table.", "--json"),
) -> None:
    """Show what a prompt takes in memory at each chunk size, and the largest chunk that fits. Loads no weights."""
    with reported(plan):
        for name, value, low, high in (
            ("prompt_tokens", prompt_tokens, 1, _MOST_TOKENS),
            ("chunk", chunk or 0, 0, _MOST_TOKENS),
            ("decodes", decodes, 0, _MOST_DECODES),
        ):
            if not low <= value <= high:
                raise SettingError(name, value, f"a number from {low} to {high}")
        is_staged = stages is not None or layers is not None
        if is_staged:
            num_stages, counts = plan_stages.parse_stages(stages, layers)
            speeds = plan_stages.parse_speeds(speed, num_stages)
            machines = plan_stages.parse_machines(num_stages, memory, speeds)
            joined = None if link is None else Link(parse_rate(link))
            if plot is not None:
                raise SettingError("plot", str(plot), contradicts={"stages": num_stages})
        else:
            for name, given in {"link": link, "speed": speed, "profile": profile}.items():
                if given is not None:
                    raise SettingError(name, str(given), needs=("stages",))
        budget = None if memory is None or is_staged else parse_bytes(memory, "memory")
        if plot is not None:
            from penstock.frontends.plan_plot import require_plotting

            require_plotting(plot)
        asked = resolve_weights(weights, dtype=dtype)
        resolve_device(device)
        from penstock.kernels.device import chosen_device, device_kind
        from penstock.models.decoder import workspace_for

        place = chosen_device(device)
        computed = asked.dtype if dtype == "auto" else dtype
        if computed == "auto":
            computed = str(device_kind(place).dtype(computed)).removeprefix("torch.")
        known = read_model(model)
        kept = known.settled(asked, computed, place)
        bits = known.bits(kept.name, computed, place)
        workspace = workspace_for(known.config, expected_workspace(place, has_blocks=bits is not None))
        if bits is not None and kept.name != "fp8" and workspace.kernels == "cuda":
            # Gate and up, in bfloat16.
            largest = 2 * known.config.intermediate_size * known.config.hidden_size
            workspace = replace(workspace, unpacked_bytes=2 * largest)
        if is_staged:
            found = make_stage_plan(
                StageQuestion(
                    known.config,
                    prompt_tokens,
                    machines,
                    workspace,
                    joined,
                    model=model,
                    dtype=computed,
                    bits=bits,
                    chunk=chunk,
                    layers=counts,
                    num_decodes=decodes,
                    coefficients=plan_stages.step_times(known.config, prompt_tokens, speeds, profile),
                )
            )
            if as_json:
                typer.echo(json.dumps(plan_stages.to_json(found), indent=2))
            else:
                plan_stages.show(found)
            if any(stage.fits is False for stage in found.stages):
                raise MemoryExhaustedError("these layers do not fit: see the stages that do not")
            return
        made = make_plan(
            known.config,
            prompt_tokens,
            chunk=chunk,
            budget_bytes=budget,
            num_decodes=decodes,
            dtype=computed,
            bits=bits,
            model=model,
            weights_reason=kept.reason,
            workspace=workspace,
        )
        if plot is not None:
            from penstock.frontends.plan_plot import draw

            draw(made, plot)
        if as_json:
            typer.echo(json.dumps(to_json(made), indent=2))
        else:
            show(made)
            if plot is not None:
                typer.echo(f"picture: {plot}")
        if made.chosen is None:
            raise MemoryExhaustedError(made.reason)


@dataclass(frozen=True)
class PlannedModel:
    """A configuration, and what the weights take where its file has them quantised: in a processor's memory, and in a
    GPU's; and the kinds of blocks that are not kept."""

    config: ModelConfig
    stored: WeightBits | None = None
    stored_on_gpu: WeightBits | None = None
    unpacked: tuple[str, ...] = ()

    def settled(self, setting: WeightsSetting, dtype: str, device: "torch.device") -> WeightsSetting:
        """What `auto` would come to on this machine, and why."""
        from penstock.kernels.device import device_kind

        if self.stored is None or self.stored.matrices >= _PLAIN_BITS:
            return setting
        is_host = device_kind(device).is_host
        if self.bits("auto", dtype, device) is None:
            return setting if is_host else settle_without_blocks(setting, dtype)
        return settle_weights(setting, self.unpacked)

    def bits(self, weights: str, dtype: str, device: "torch.device") -> WeightBits | None:
        """What weights take that are kept in this way; None where they are of the dtype."""
        kernels = _expected_kernels(device)
        if weights == "auto":
            stored = {"native": self.stored, "cuda": self.stored_on_gpu}.get(kernels)
            return stored if dtype == "bfloat16" else None
        from penstock.models.assembly import QUANTISED_FORMS, vocabulary_form

        if (form := QUANTISED_FORMS.get(weights)) is None:
            return None
        forms = (form, vocabulary_form(form))
        matrices, vocabulary = (
            each.device_bits if kernels == "cuda" else each.resident_bits for each in forms
        )
        return WeightBits(matrices, vocabulary, self.config.tied_head)


def read_model(model: str) -> PlannedModel:
    """What is known of a folder, a config.json, a GGUF file or a Hugging Face name; weights are not needed."""
    from penstock.models.hf.folder import has_quantised, read_folder_config

    path = Path(os.path.expanduser(model))  # pathlib's own questions fail for a name that no file can have
    if os.path.isdir(path) and not has_quantised(path):
        return PlannedModel(read_folder_config(path))
    if os.path.isfile(path) and path.suffix == ".json":
        return PlannedModel(_read_config_file(path))
    if not os.path.exists(path) and (config := _from_hugging_face(model)):
        return PlannedModel(_read_config_file(config))
    from penstock.models.hub import resolve_model
    from penstock.models.opened import open_weights
    from penstock.models.source import stored_bits

    source = open_weights(resolve_model(model))
    source.close()
    on_gpu = stored_bits(source, _PLAIN_BITS, on_gpu=True)
    return PlannedModel(source.config, stored_bits(source, _PLAIN_BITS), on_gpu, source.unpacked)


def _read_config_file(path: Path) -> ModelConfig:
    from penstock.models.hf.folder import model_config, read_json
    from penstock.models.reading import Fields

    return model_config(Fields(str(path), read_json(path)), Fields(str(path), {}))


def _from_hugging_face(name: str) -> Path | None:
    """The configuration alone of a name like org/name; None where it is no such name."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith((".gguf", ".json")):
        return None
    from penstock.models.reading import first_line

    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # no connection, no such repository, no permission
        raise ModelError(
            f"there is no file or folder {name!r}, and Hugging Face does not give its config.json: "
            f"{first_line(error)}"
        ) from error


def expected_workspace(device: "torch.device", *, has_blocks: bool = False) -> Workspace:
    """Of the kernels that would be chosen on this machine for weights that are quantised or plain, as far as can be
    told without building any."""
    import torch

    from penstock.kernels.interface import select_kernels

    num_threads = resolve_threads().within(torch.get_num_threads())
    kind = _expected_kernels(device)
    if kind != "cuda":
        are_torchs = not has_blocks and has_fast_bfloat16(processor_flags())
        places = 0 if kind != "native" or are_torchs else EXPERT_PLACES
        return Workspace(kind, num_threads=num_threads, expert_places=places)
    kernels = select_kernels(device)
    return Workspace(
        kind,
        kernels.law.tile_size,
        num_threads,
        row_floor=_ROW_FLOOR_ON_GPU,
        row_grid=kernels.law.row_grid,
        head_rows=kernels.head_rows,
        feed_rows=kernels.feed_rows,
    )


def _expected_kernels(device: "torch.device") -> KernelKind:
    from penstock.kernels.device import device_kind

    is_reference = KERNELS.resolve().effective == "torch"
    kind = device_kind(device)
    if not kind.is_host:
        return "torch" if is_reference else kind.kernels
    has_vectors = instruction_set(processor_flags()) is not None
    has_compiler = "CXX" in os.environ or any(map(shutil.which, ("c++", "g++", "clang++")))
    return "native" if not is_reference and has_vectors and has_compiler else "torch"


def to_json(made: Plan) -> dict[str, object]:
    """Everything in bytes, parts by name."""
    rows = [
        {
            "chunk": row.chunk,
            "chunks": row.num_chunks,
            "activation_bytes": row.activations.peak_bytes,
            "activation_parts": row.activations.parts,
            "phase": row.activations.phase,
            "total_bytes": row.total_bytes,
            "saved": row.saved,
            "fits": row.fits,
            "is_chosen": row.chunk == made.chosen,
        }
        for row in made.rows
    ]
    return {**asdict(replace(made, rows=())), "rows": rows}


def table(made: Plan) -> list[list[str]]:
    """Titles, then a row for each chunk size. Parts that are empty in every row are left out."""
    shown = [name for name in _TITLES if any(row.activations.parts[name] for row in made.rows)]
    titles = ["", "chunk", "chunks", *(_TITLES[name] for name in shown), "activations", "peak", "saved"]
    rows = [titles + ([] if made.budget_bytes is None else ["fits"])]
    for row in made.rows:
        parts = row.activations.parts
        rows.append(
            [
                "->" if row.chunk == made.chosen else "",
                "whole" if row.chunk == made.prompt_tokens else f"{row.chunk:,}",
                f"{row.num_chunks:,}",
                *(format_bytes(parts[name]) if parts[name] else "-" for name in shown),
                format_bytes(row.activations.peak_bytes),
                format_bytes(row.total_bytes),
                f"{row.saved:.1%}",
                *([] if row.fits is None else ["yes" if row.fits else "no"]),
            ]
        )
    return rows


def show(made: Plan) -> None:
    from penstock.tables import make_table, show_table

    beside = f", {made.num_decodes} answers of as many tokens beside it" if made.num_decodes else ""
    typer.echo(
        f"{made.model}: a prompt of {made.prompt_tokens:,} tokens{beside}, {made.dtype}, {made.kernels} kernels"
    )
    why = f" ({made.weights_reason})" if made.weights_reason else ""
    states = f", recurrent states {format_bytes(made.recurrent_bytes)}" if made.recurrent_bytes else ""
    typer.echo(
        f"whatever the chunk: weights {format_bytes(made.weights_bytes)}{why}, "
        f"K/V cache {format_bytes(made.kv_cache_bytes)}{states}\n"
    )
    titles, *rows = table(made)
    shown = make_table(titles, rows)
    chosen = "none"
    if made.chosen is not None:
        shown.rows[[row[0] for row in rows].index("->")].style = "bold green"
        chosen = f"chunk {made.chosen:,}, {made.reason}"
    show_table(shown)
    for line in ("", f"chosen: {chosen}", *_NOTES):
        typer.echo(line)
