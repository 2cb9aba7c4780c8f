"""The command `penstock plan`: what chunks of a prompt take in memory, from a model's configuration alone."""

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.errors import MemoryExhaustedError, ModelError, SettingError
from penstock.frontends.exits import reported
from penstock.plan import (
    DEFAULT_CHUNK_SIZE,
    STATE_GRID,
    ChunkedPrefillConfig,
    ModelShape,
    format_bytes,
    num_prefill_chunks,
)
from penstock.plan.activation import StepMemory
from penstock.plan.fitting import largest_chunk, largest_step, smallest_budget
from penstock.plan.memory import kv_token_bytes, state_slot_bytes, weight_bytes
from penstock.plan.step_shape import KernelKind, Workspace
from penstock.plan.units import parse_bytes

if TYPE_CHECKING:  # torch comes with it
    from penstock.models.config import ModelConfig

_SMALLEST_ROW = 128
_MOST_TOKENS = 1 << 30
_MOST_DECODES = 1 << 16
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}

_what = partial(typer.Option, rich_help_panel="What is planned")
_output = partial(typer.Option, rich_help_panel="Output")


@dataclass(frozen=True)
class PlanRow:
    """One chunk size."""

    chunk: int
    num_chunks: int
    activations: StepMemory
    total_bytes: int  # with weights, keys and values, states
    saved: float  # the share of one pass's memory, weights left aside
    fits: bool | None  # None: no budget


@dataclass(frozen=True)
class Plan:
    """What is needed whatever the chunk, and what each chunk size needs; `chosen` is one of the rows' sizes."""

    model: str
    dtype: str
    kernels: str
    prompt_tokens: int
    num_decodes: int
    weights_bytes: int
    kv_cache_bytes: int
    recurrent_bytes: int
    budget_bytes: int | None
    rows: tuple[PlanRow, ...]
    chosen: int | None  # None: no chunk fits the budget
    reason: str

    @property
    def fixed_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.recurrent_bytes


def plan(
    model: Annotated[
        str,
        _what(
            metavar="NAME",
            help="A folder with config.json (weights need not be there), a config.json, a GGUF file, smollm2 or a "
            "Hugging Face name, of which only the configuration is fetched.",
        ),
    ],
    prompt_tokens: Annotated[int, _what(metavar="TOKENS", help="The prompt's length.")],
    chunk: Annotated[
        int | None, _what(metavar="TOKENS", help="A chunk size to plan with; 0 is the whole prompt in one.")
    ] = None,
    memory: Annotated[
        str | None,
        _what(
            metavar="BYTES",
            help="Memory for weights, keys and values, states and activations, such as 8GiB: the largest chunk that "
            "fits is chosen.",
        ),
    ] = None,
    decodes: Annotated[
        int, _what(metavar="NUMBER", help="Answers that are generated beside it, each after as many tokens.")
    ] = 0,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        _what(help="auto is bfloat16 where this machine computes it natively."),
    ] = "auto",
    plot: Annotated[
        Path | None, _output(metavar="PATH", help="Draw a picture: png, svg or pdf by its name.")
    ] = None,
    as_json: Annotated[bool, _output("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Show what a prompt takes in memory at each chunk size, and the largest chunk that fits. Loads no weights."""
    with reported():
        _check(prompt_tokens, chunk, decodes)
        budget = None if memory is None else parse_bytes(memory, "--memory")
        if plot is not None:
            from penstock.frontends.plan_plot import require_plotting

            require_plotting(plot)
        made = make_plan(
            read_config(model),
            prompt_tokens,
            chunk=chunk,
            budget_bytes=budget,
            num_decodes=decodes,
            dtype=_dtype(dtype),
            model=model,
            workspace=Workspace(_kernels(), num_threads=_num_threads()),
        )
        if plot is not None:
            from penstock.frontends.plan_plot import draw

            draw(made, plot)
        if as_json:
            typer.echo(json.dumps(to_json(made), indent=2))
        else:
            _show(made)
            if plot is not None:
                typer.echo(f"picture: {plot}")
        if made.chosen is None:
            raise MemoryExhaustedError(made.reason)


def make_plan(
    config: "ModelConfig",
    prompt_tokens: int,
    *,
    workspace: Workspace,
    model: str,
    dtype: str,
    chunk: int | None = None,
    budget_bytes: int | None = None,
    num_decodes: int = 0,
) -> Plan:
    """Rows for powers of two, the whole prompt, and the chosen size. Chunks of a model with recurrent state are
    multiples of 64."""
    from penstock.models.shape import model_shape, workspace_for

    if prompt_tokens > config.max_position:
        raise SettingError(
            f"--prompt-tokens {prompt_tokens} is not accepted: the model's context is {config.max_position} tokens; "
            f"give at most {config.max_position}"
        )
    planner = _Planner(
        shape=model_shape(config),
        prompt_tokens=prompt_tokens,
        num_decodes=num_decodes,
        dtype_bytes=_DTYPE_BYTES[dtype],
        workspace=workspace_for(config, workspace),
        grid=STATE_GRID if config.has_state else 1,
        budget_bytes=budget_bytes,
    )
    chosen, reason = planner.choose(chunk)
    sizes = {prompt_tokens} if chosen is None else {prompt_tokens, chosen}
    size = _SMALLEST_ROW
    while size < prompt_tokens:
        sizes.add(size)
        size *= 2
    return Plan(
        model=model,
        dtype=dtype,
        kernels=workspace.kernels,
        prompt_tokens=prompt_tokens,
        num_decodes=num_decodes,
        weights_bytes=planner.weights_bytes,
        kv_cache_bytes=planner.kv_cache_bytes,
        recurrent_bytes=planner.recurrent_bytes,
        budget_bytes=budget_bytes,
        rows=tuple(planner.row(size) for size in sorted(sizes)),
        chosen=chosen,
        reason=reason,
    )


@dataclass(frozen=True)
class _Planner:
    shape: ModelShape
    prompt_tokens: int
    num_decodes: int
    dtype_bytes: int
    workspace: Workspace
    grid: int
    budget_bytes: int | None

    @property
    def weights_bytes(self) -> int:
        return weight_bytes(self.shape, self.dtype_bytes)

    @property
    def kv_cache_bytes(self) -> int:
        num_tokens = (1 + self.num_decodes) * self.prompt_tokens
        return num_tokens * kv_token_bytes(self.shape, self.dtype_bytes)

    @property
    def recurrent_bytes(self) -> int:
        """A step reads one state of each sequence and writes another."""
        num_slots = (1 + self.num_decodes) * ChunkedPrefillConfig().num_state_slots
        return num_slots * state_slot_bytes(self.shape, self.dtype_bytes)

    @property
    def fixed_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.recurrent_bytes

    def choose(self, chunk: int | None) -> tuple[int | None, str]:
        """The size that applies, at most the prompt's length, and why; None where nothing fits."""
        if chunk is not None:
            size = chunk or self.prompt_tokens
            rounded = -(-size // self.grid) * self.grid
            reason = "--chunk" + (f", rounded up to a multiple of {self.grid}" if rounded != size else "")
            return min(rounded, self.prompt_tokens), reason + self._against_budget(rounded)
        if self.budget_bytes is None:
            return min(
                DEFAULT_CHUNK_SIZE, self.prompt_tokens
            ), "the default: neither --chunk nor --memory is given"
        found = largest_chunk(
            self.shape,
            self.prompt_tokens,
            max(self.budget_bytes - self.fixed_bytes, 0),
            dtype_bytes=self.dtype_bytes,
            workspace=self.workspace,
            grid=self.grid,
            num_decodes=self.num_decodes,
        )
        if found is not None:
            whole = found >= self.prompt_tokens
            return min(found, self.prompt_tokens), (
                f"the largest that fits {format_bytes(self.budget_bytes)}"
                + (": the whole prompt" if whole else "")
            )
        least = self.fixed_bytes + smallest_budget(
            self.shape,
            self.prompt_tokens,
            dtype_bytes=self.dtype_bytes,
            workspace=self.workspace,
            grid=self.grid,
            num_decodes=self.num_decodes,
        )
        return None, (
            f"no chunk fits {format_bytes(self.budget_bytes)}: weights take {format_bytes(self.weights_bytes)}, keys "
            f"and values {format_bytes(self.kv_cache_bytes)}; the smallest --memory that would do is "
            f"{_at_least(least)} ({least} bytes), with chunks of {min(self.grid, self.prompt_tokens)}"
        )

    def row(self, chunk: int) -> PlanRow:
        step, whole = self._step(chunk), self._step(self.prompt_tokens)
        total = self.fixed_bytes + step.peak_bytes
        unchunked = self.fixed_bytes + whole.peak_bytes - self.weights_bytes
        return PlanRow(
            chunk=chunk,
            num_chunks=num_prefill_chunks(self.prompt_tokens, ChunkedPrefillConfig(chunk)),
            activations=step,
            total_bytes=total,
            saved=1 - (total - self.weights_bytes) / unchunked,
            fits=None if self.budget_bytes is None else total <= self.budget_bytes,
        )

    def _step(self, chunk: int) -> StepMemory:
        return largest_step(
            self.shape,
            self.prompt_tokens,
            chunk,
            dtype_bytes=self.dtype_bytes,
            workspace=self.workspace,
            num_decodes=self.num_decodes,
        )

    def _against_budget(self, chunk: int) -> str:
        if self.budget_bytes is None:
            return ""
        fits = self.fixed_bytes + self._step(chunk).peak_bytes <= self.budget_bytes
        return f", which {'fits' if fits else 'does not fit'} {format_bytes(self.budget_bytes)}"


# The model


def read_config(model: str) -> "ModelConfig":
    """The configuration of a folder, a config.json, a GGUF file or a Hugging Face name; weights are not needed."""
    from penstock.models.folder import read_folder_config

    path = Path(model).expanduser()
    if path.is_dir():
        return read_folder_config(path)
    if path.is_file() and path.suffix == ".json":
        return _read_config_file(path)
    if not path.exists() and (config := _from_hugging_face(model)):
        return _read_config_file(config)
    from penstock.models.hub import resolve_model
    from penstock.models.opened import open_weights

    source = open_weights(resolve_model(model))
    source.close()
    return source.config


def _read_config_file(path: Path) -> "ModelConfig":
    from penstock.models.fields import Fields
    from penstock.models.folder import read_json
    from penstock.models.hf_config import hf_model_config

    return hf_model_config(Fields(str(path), read_json(path)), Fields(str(path), {}))


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


def _check(prompt_tokens: int, chunk: int | None, decodes: int) -> None:
    for name, value, low, high in (
        ("--prompt-tokens", prompt_tokens, 1, _MOST_TOKENS),
        ("--chunk", 0 if chunk is None else chunk, 0, _MOST_TOKENS),
        ("--decodes", decodes, 0, _MOST_DECODES),
    ):
        if not low <= value <= high:
            raise SettingError(f"{name} {value} is not accepted: give a number from {low} to {high}")


def _dtype(name: str) -> str:
    if name != "auto":
        return name
    from penstock.engine.llm import resolve_dtype

    return str(resolve_dtype(name)).removeprefix("torch.")


def _kernels() -> KernelKind:
    """Those that would be chosen on this machine, as far as can be told without building any."""
    import torch

    from penstock.kernels.protocol import KERNELS_VARIABLE

    has_vectors = "AVX512" in torch.backends.cpu.get_cpu_capability()
    has_compiler = "CXX" in os.environ or any(map(shutil.which, ("c++", "g++", "clang++")))
    is_wanted = os.environ.get(KERNELS_VARIABLE, "auto") != "torch"
    return "native" if is_wanted and has_vectors and has_compiler else "torch"


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


# The table

_TITLES = {
    "input": "inputs",
    "hidden": "hidden",
    "projection": "projections",
    "attention": "attention",
    "delta_net": "delta net",
    "mlp": "MLP",
    "logits": "logits",
}


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


def summary_lines(made: Plan) -> list[str]:
    """What does not depend on the chunk."""
    beside = f", {made.num_decodes} answers of as many tokens beside it" if made.num_decodes else ""
    fixed = [f"weights {format_bytes(made.weights_bytes)}", f"K/V cache {format_bytes(made.kv_cache_bytes)}"]
    if made.recurrent_bytes:
        fixed.append(f"recurrent states {format_bytes(made.recurrent_bytes)}")
    return [
        f"{made.model}: a prompt of {made.prompt_tokens:,} tokens{beside}, {made.dtype}, {made.kernels} kernels",
        f"whatever the chunk: {', '.join(fixed)}",
    ]


def verdict(made: Plan) -> str:
    """Which row is chosen, and why."""
    if made.chosen is None:
        return "chosen: none"
    return f"chosen: chunk {made.chosen:,}, {made.reason}"


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


_NOTES = (
    "Parts are what lives at the moment a step holds the most. Peak has weights, K/V cache and states too.",
    "Saved is the share of one pass's memory, weights left aside.",
)


def _show(made: Plan) -> None:
    for line in summary_lines(made):
        typer.echo(line)
    typer.echo()
    rows = table(made)
    if sys.stdout.isatty():
        _show_rich(rows, made.chosen is not None)
    else:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            typer.echo("  ".join(cells).rstrip())
    typer.echo()
    typer.echo(verdict(made))
    for line in _NOTES:
        typer.echo(line)


def _show_rich(rows: list[list[str]], has_choice: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, header_style="bold", padding=(0, 1))
    for title in rows[0]:
        shown.add_column(title, justify="right")
    for row in rows[1:]:
        shown.add_row(*row, style="bold green" if has_choice and row[0] else None)
    Console().print(shown)


def _at_least(num_bytes: int) -> str:
    """Rounded up, so that it is enough when it is typed."""
    unit = 1 << 30 if num_bytes >= 1 << 30 else 1 << 20
    tenths = -(-num_bytes * 10 // unit)
    return f"{tenths / 10:.1f}{'GiB' if unit == 1 << 30 else 'MiB'}"
