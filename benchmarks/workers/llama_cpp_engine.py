"""llama.cpp, by its Python package."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

# By name: what reads this file need not have it.
_PACKAGE = "llama_cpp"


class Engine:
    def prepare(self, model: str, output: str, format: str, threads: int, **_: Any) -> None:
        """Its own tool writes a file anew in another format, such as Q8_0."""
        package: Any = import_module(_PACKAGE)
        wanted = package.llama_model_quantize_default_params()
        wanted.ftype = getattr(package, f"LLAMA_FTYPE_MOSTLY_{format}")
        wanted.allow_requantize = True
        wanted.nthread = threads
        status = package.llama_model_quantize(model.encode(), output.encode(), wanted)
        if status != 0:
            raise RuntimeError(f"llama_model_quantize to {format} gave {status}")

    def load(
        self, model: str, batch: int, most_tokens: int, threads: int, flash: bool, **_: Any
    ) -> dict[str, Any]:
        """`batch` is both the logical and the physical one; 0: the whole prompt. Answers its version, and the
        processor's features that it was built for."""
        package: Any = import_module(_PACKAGE)
        size = min(batch or most_tokens, most_tokens)
        self._llama = package.Llama(
            model_path=model,
            n_ctx=most_tokens,
            n_batch=size,
            n_ubatch=size,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash,
            verbose=False,
        )
        features = package.llama_print_system_info().decode(errors="replace").partition(":")[2]
        used = [
            part.partition("=")[0].strip() for part in features.split("|") if part.strip().endswith("= 1")
        ]
        return {"about": f"llama-cpp-python {package.__version__} ({', '.join(used)})"}

    def generate(self, prompt: list[int], num_tokens: int, on_token: Callable[[int], None]) -> None:
        self._llama.reset()
        tokens = prompt
        for _ in range(num_tokens):
            self._llama.eval(tokens)
            tokens = [int(self._llama.sample(temp=0.0))]
            on_token(tokens[0])
