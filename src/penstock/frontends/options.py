"""Options that commands share, each declared once: a command takes `chunk: options.Chunk = None`.

Parameters have the names of the engine's settings, so that `engine_settings(locals())`, first in a command, resolves
all of them.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from penstock.plan import EngineSettings

on_model = partial(typer.Option, rich_help_panel="Model")
on_chunks = partial(typer.Option, rich_help_panel="Chunks")
on_cache = partial(typer.Option, rich_help_panel="Cache")
on_output = partial(typer.Option, rich_help_panel="Output")

DEFAULT_MODEL = "smollm2"
Model = Annotated[
    str,
    on_model(metavar="NAME", help="smollm2, a folder with safetensors, a GGUF file or a Hugging Face name."),
]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32"],
    on_model(help="What to compute in; auto is bfloat16 where the device does it natively."),
]
Weights = Annotated[
    str | None,
    on_model(
        metavar="FORM",
        help="How weights lie in memory: auto (as quantised as the file has them), int8, int4, bf16 or f32. "
        "Without it $PENSTOCK_WEIGHTS applies, else auto.",
    ),
]
Device = Annotated[
    str | None,
    on_model(
        metavar="NAME",
        help="Where it runs: cpu, cuda, cuda:1 and so on, mps, or auto, the first GPU of NVIDIA's, else the "
        "processor. Without it $PENSTOCK_DEVICE applies, else auto.",
    ),
]
Threads = Annotated[
    int | None,
    on_model(
        min=1,
        metavar="NUMBER",
        help="Threads that compute. Without it $PENSTOCK_THREADS applies, else $OMP_NUM_THREADS, else as many as "
        "there are physical cores that the process may use.",
    ),
]
Chunk = Annotated[
    str | None,
    on_chunks(
        metavar="TOKENS",
        help="Read prompts in chunks of so many tokens; 0 is the whole prompt in one, auto leaves it to Penstock. "
        "Without it $PENSTOCK_PREFILL_CHUNK applies, else auto.",
    ),
]
MaxActivation = Annotated[
    str | None,
    on_chunks(
        metavar="BYTES",
        help="The most memory that a step may need beside weights and cache, such as 512MiB: chunks are as long "
        "as that allows. Without it $PENSTOCK_MAX_ACTIVATION applies, else half of what is free.",
    ),
]
TargetItl = Annotated[
    str | None,
    on_chunks(
        "--target-itl",
        metavar="MS",
        help="Milliseconds that a step may take at most, which others wait for between two of their tokens: "
        "automatic chunks follow it. Without it $PENSTOCK_TARGET_ITL applies.",
    ),
]
TargetTtft = Annotated[
    str | None,
    on_chunks(
        "--target-ttft",
        metavar="MS",
        help="Milliseconds to a prompt's first token: automatic chunks are as long as that takes, within "
        "--target-itl. Without it $PENSTOCK_TARGET_TTFT applies.",
    ),
]
Align = Annotated[
    bool | None,
    on_chunks(
        "--align/--no-align",
        help="On a model with recurrent state, round the chunk up to a multiple of 64, which gives the same bits "
        "and runs faster; --no-align keeps any size. Without either $PENSTOCK_PREFILL_ALIGN (0 or 1) applies, else "
        "--align.",
    ),
]
CacheDir = Annotated[
    str | None,
    on_cache(
        metavar="PATH",
        help="Keep what was read in this folder: a prompt that begins alike, or was interrupted, goes on from "
        "there. Without it $PENSTOCK_CACHE_DIR applies, else nothing is kept.",
    ),
]
CacheSize = Annotated[
    str | None,
    on_cache(
        metavar="BYTES",
        help="The most that the folder may hold, such as 20GiB; what was used longest ago goes first. Without it "
        "$PENSTOCK_CACHE_SIZE applies, else 10GiB.",
    ),
]


def engine_settings(options: Mapping[str, Any]) -> "EngineSettings":
    """The settings of an engine, out of all that a command was given."""
    from penstock.plan import EngineKeywords, EngineSettings

    known: Any = {name: options[name] for name in EngineKeywords.__annotations__ if name in options}
    return EngineSettings.resolve(**known)
