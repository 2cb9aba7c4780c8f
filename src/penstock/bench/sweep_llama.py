"""llama.cpp, by its Python package, as a system to compare with."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from penstock.bench.systems import OnToken, SystemName
from penstock.errors import SettingError

_PACKAGE = "llama_cpp"


def check_llama(path: Path) -> None:
    """Refuse, before any work, what llama.cpp cannot run."""
    if find_spec(_PACKAGE) is None:
        raise SettingError(
            "--baseline llama.cpp needs llama-cpp-python, which is not installed: pip install llama-cpp-python"
        )
    if path.is_dir() or path.suffix != ".gguf":
        raise SettingError(
            f"--baseline llama.cpp reads GGUF files alone, and {path} is none: give one as --model, "
            "or leave the baseline out"
        )


def describe_llama() -> str:
    """Its version, and the processor's features that it was built for."""
    package: Any = import_module(_PACKAGE)
    features = package.llama_print_system_info().decode(errors="replace").partition(":")[2]
    used = [part.partition("=")[0].strip() for part in features.split("|") if part.strip().endswith("= 1")]
    return f"llama-cpp-python {package.__version__} ({', '.join(used)})"


class LlamaSystem:
    """llama.cpp on the blocks of a GGUF file as they are, where Penstock unpacks them. The chunk is its batch, both
    logical and physical."""

    name = SystemName.LLAMA_CPP

    def __init__(self, path: Path, chunk: int, most_tokens: int) -> None:
        size = min(chunk or most_tokens, most_tokens)
        threads = torch.get_num_threads()
        # By name, since few have it.
        self._llama: Any = import_module(_PACKAGE).Llama(
            model_path=str(path),
            n_ctx=most_tokens,
            n_batch=size,
            n_ubatch=size,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,  # as its own programs choose; the package's default is slower
            verbose=False,
        )

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> int:
        llama = self._llama
        llama.reset()
        tokens = list(prompt)
        for _ in range(num_tokens):
            llama.eval(tokens)
            tokens = [int(llama.sample(temp=0.0))]
            on_token(tokens[0])
        return 0  # it does not tell
