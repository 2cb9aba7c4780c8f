"""The command `penstock plan`: what chunks of a prompt take in memory, from a model's configuration alone."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import MemoryExhaustedError, SettingError
from penstock.frontends import options
from penstock.frontends.exits import reported
from penstock.frontends.plan_rows import make_plan
from penstock.frontends.plan_source import expected_workspace, read_model, resolved_dtype
from penstock.frontends.plan_table import show, to_json
from penstock.plan.settings import resolve_device, resolve_weights
from penstock.plan.units import parse_bytes

_MOST_TOKENS = 1 << 30
_MOST_DECODES = 1 << 16

_what = partial(typer.Option, rich_help_panel="What is planned")


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
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    weights: options.Weights = None,
    plot: Annotated[
        Path | None, options.on_output(metavar="PATH", help="Draw a picture: png, svg or pdf by its name.")
    ] = None,
    as_json: Annotated[bool, options.on_output("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Show what a prompt takes in memory at each chunk size, and the largest chunk that fits. Loads no weights."""
    with reported(plan):
        _check(prompt_tokens, chunk, decodes)
        budget = None if memory is None else parse_bytes(memory, "memory")
        if plot is not None:
            from penstock.frontends.plan_plot import require_plotting

            require_plotting(plot)
        asked = resolve_weights(weights, dtype=dtype)
        resolve_device(device)
        from penstock.kernels.device import chosen_device

        place = chosen_device(device)
        computed = resolved_dtype(asked.dtype if dtype == "auto" else dtype, place)
        known = read_model(model)
        kept = known.settled(asked, computed, place)
        made = make_plan(
            known.config,
            prompt_tokens,
            chunk=chunk,
            budget_bytes=budget,
            num_decodes=decodes,
            dtype=computed,
            bits=known.bits(kept.name, computed, place),
            model=model,
            weights_reason=kept.reason,
            workspace=expected_workspace(place),
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


def _check(prompt_tokens: int, chunk: int | None, decodes: int) -> None:
    for name, value, low, high in (
        ("prompt_tokens", prompt_tokens, 1, _MOST_TOKENS),
        ("chunk", 0 if chunk is None else chunk, 0, _MOST_TOKENS),
        ("decodes", decodes, 0, _MOST_DECODES),
    ):
        if not low <= value <= high:
            raise SettingError(name, value, f"a number from {low} to {high}")
