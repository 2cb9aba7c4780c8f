"""llama.cpp, by its Python package."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

# By name: what reads this file need not have it.
_PACKAGE = "llama_cpp"


def describe() -> str:
    """Its version, and the processor's features that it was built for."""
    package: Any = import_module(_PACKAGE)
    features = package.llama_print_system_info().decode(errors="replace").partition(":")[2]
    used = [part.partition("=")[0].strip() for part in features.split("|") if part.strip().endswith("= 1")]
    return f"llama-cpp-python {package.__version__} ({', '.join(used)})"


def prepare(settings: dict[str, Any]) -> None:
    """Its own tool writes the file `model` anew in another `format`, such as Q8_0, as `output`."""
    package: Any = import_module(_PACKAGE)
    wanted = package.llama_model_quantize_default_params()
    wanted.ftype = getattr(package, f"LLAMA_FTYPE_MOSTLY_{settings['format']}")
    wanted.allow_requantize = True
    wanted.nthread = settings["threads"]
    status = package.llama_model_quantize(settings["model"].encode(), settings["output"].encode(), wanted)
    if status != 0:
        raise RuntimeError(f"llama_model_quantize to {settings['format']} gave {status}")


def load(settings: dict[str, Any]) -> Callable[[list[int], int, Callable[[int], None]], None]:
    """`batch` is both the logical and the physical one."""
    batch = min(settings["batch"], settings["most_tokens"])
    llama = import_module(_PACKAGE).Llama(
        model_path=settings["model"],
        n_ctx=settings["most_tokens"],
        n_batch=batch,
        n_ubatch=batch,
        n_threads=settings["threads"],
        n_threads_batch=settings["threads"],
        flash_attn=settings["flash"],
        verbose=False,
    )

    def generate(prompt: list[int], num_tokens: int, on_token: Callable[[int], None]) -> None:
        llama.reset()
        tokens = prompt
        for _ in range(num_tokens):
            llama.eval(tokens)
            tokens = [int(llama.sample(temp=0.0))]
            on_token(tokens[0])

    return generate
