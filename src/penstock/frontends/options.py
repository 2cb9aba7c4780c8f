"""Options that commands share, each declared once: a command takes `chunk: str | None = options.CHUNK`.

Parameters have the names of the engine's settings, so that `engine_settings(locals())`, first in a command, resolves
all of them.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from penstock.plan import EngineSettings


def in_panel(title: str | None) -> Callable[..., Any]:
    """Declares options under this title of a command's help: by default, text, and names where they differ from the
    parameter's."""

    def declare(default: object, text: str, *names: str, **more: Any) -> Any:
        return typer.Option(default, *names, help=text, rich_help_panel=title, **more)

    return declare


option = in_panel(None)
on_model, on_chunks, on_cache, on_output = map(in_panel, ("Model", "Chunks", "Cache", "Output"))

DEFAULT_MODEL = "smollm2"
Dtype = Literal["auto", "bfloat16", "float32"]
MODEL = on_model(
    DEFAULT_MODEL, "smollm2, a folder with safetensors, a GGUF file or a Hugging Face name.", metavar="NAME"
)
MODEL_IMPL = on_model(
    None,
    "Whose code runs it: penstock, transformers, or auto, which is Penstock's where it has the family, else "
    "transformers', if that was tried. Without it $PENSTOCK_MODEL_IMPL applies, else auto.",
    metavar="WHOSE",
)
DTYPE = on_model("auto", "What to compute in; auto is bfloat16 where the device does it natively.")
WEIGHTS = on_model(
    None,
    "How weights lie in memory: auto (as quantised as the file has them), fp8, int8, int4, bf16 or f32. "
    "Without it $PENSTOCK_WEIGHTS applies, else auto.",
    metavar="FORM",
)
ACTIVATIONS = on_model(
    None,
    "How activations go into products with quantised weights: plain, or int8, rounded to 8 bits by group, which is "
    "faster and less exact (processors with native kernels). Without it $PENSTOCK_ACTIVATIONS applies, else plain.",
    metavar="FORM",
)
DEVICE = on_model(
    None,
    "Where it runs: cpu, cuda, cuda:1 and so on, mps, or auto, the first GPU of NVIDIA's, else the "
    "processor. Without it $PENSTOCK_DEVICE applies, else auto.",
    metavar="NAME",
)
THREADS = on_model(
    None,
    "Threads that compute. Without it $PENSTOCK_THREADS applies, else $OMP_NUM_THREADS, else as many as "
    "there are physical cores that the process may use.",
    min=1,
    metavar="NUMBER",
)
CHUNK = on_chunks(
    None,
    "Read prompts in chunks of so many tokens; 0 is the whole prompt in one, auto leaves it to Penstock. "
    "Without it $PENSTOCK_PREFILL_CHUNK applies, else auto.",
    metavar="TOKENS",
)
MAX_ACTIVATION = on_chunks(
    None,
    "The most memory that a step may need beside weights and cache, such as 512MiB: chunks are as long "
    "as that allows. Without it $PENSTOCK_MAX_ACTIVATION applies, else half of what is free.",
    metavar="BYTES",
)
TARGET_ITL_MS = on_chunks(
    None,
    "Milliseconds that a step may take at most, which others wait for between two of their tokens: "
    "automatic chunks follow it. Without it $PENSTOCK_TARGET_ITL applies.",
    "--target-itl",
    metavar="MS",
)
TARGET_TTFT_MS = on_chunks(
    None,
    "Milliseconds to a prompt's first token: automatic chunks are as long as that takes, within "
    "--target-itl. Without it $PENSTOCK_TARGET_TTFT applies.",
    "--target-ttft",
    metavar="MS",
)
ALIGN = on_chunks(
    None,
    "On a model with recurrent state, round the chunk up to a multiple of 64, which gives the same bits "
    "and runs faster; --no-align keeps any size. Without either $PENSTOCK_PREFILL_ALIGN (0 or 1) applies, else "
    "--align.",
    "--align/--no-align",
)
CACHE_DIR = on_cache(
    None,
    "Keep what was read in this folder: a prompt that begins alike, or was interrupted, goes on from "
    "there. Without it $PENSTOCK_CACHE_DIR applies, else nothing is kept.",
    metavar="PATH",
)
CACHE_SIZE = on_cache(
    None,
    "The most that the folder may hold, such as 20GiB; what was used longest ago goes first. Without it "
    "$PENSTOCK_CACHE_SIZE applies, else 10GiB.",
    metavar="BYTES",
)


_on_stages = in_panel("Several processes or machines")
STAGES = _on_stages(
    None,
    "Cut the model into so many stages, with workers on this machine; or the addresses of workers (penstock worker), "
    "such as 10.0.0.2:7070,10.0.0.3:7070. This process is the last stage.",
    metavar="NUMBER|ADDRESSES",
)
LAYERS = _on_stages(
    None, "The layers of each stage, such as 10,20; by what they take by default.", metavar="NUMBERS"
)
STAGE_TIMEOUT = _on_stages(None, "Seconds after which a silent worker counts as lost; 10 by default.")
MIXED = _on_stages(
    False, "Let workers in that may give other bits: another processor, other libraries.", "--mixed"
)
TOKEN_FILE = _on_stages(None, "The file with the token that workers know.", metavar="PATH")


def engine_settings(options: Mapping[str, Any]) -> "EngineSettings":
    """The settings of an engine, out of all that a command was given."""
    from penstock.plan import EngineKeywords, EngineSettings

    known: Any = {name: options[name] for name in EngineKeywords.__annotations__ if name in options}
    return EngineSettings.resolve(options={"chunk": "--chunk", "device": "--device"}, **known)
