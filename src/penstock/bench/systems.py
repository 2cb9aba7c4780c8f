"""The systems that are compared. All run the same weights and choose greedily."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from penstock.engine.run import Run
from penstock.kernels.device import chosen_device, device_kind
from penstock.kernels.interface import select_kernels
from penstock.kernels.probe.probe import probe
from penstock.measure.transformers_model import load_transformers
from penstock.models.decoder import Decoder
from penstock.models.loading import load_decoder
from penstock.models.source import WeightSource
from penstock.plan import ChunkedPrefillConfig
from penstock.plan.grids import RowLaw

OnToken = Callable[[int], None]


class SystemName(StrEnum):
    """What each is called on the command line and in the results."""

    PENSTOCK = "penstock"
    PENSTOCK_WHOLE = "penstock-whole"
    PENSTOCK_UNTILED = "penstock-untiled"
    PENSTOCK_TOKENWISE = "penstock-token-by-token"
    TRANSFORMERS = "transformers"
    TRANSFORMERS_CHUNKED = "transformers-chunked"
    # Of the sweep over chunk sizes alone: see `penstock.bench.sweep_systems`.
    PENSTOCK_AUTO = "penstock-auto"
    LLAMA_CPP = "llama.cpp"

    def label(self, chunk: int) -> str:
        return {
            SystemName.PENSTOCK: f"Penstock, chunk {chunk}",
            SystemName.PENSTOCK_WHOLE: "Penstock, whole",
            SystemName.PENSTOCK_UNTILED: f"Penstock, chunk {chunk}, no tiles",
            SystemName.PENSTOCK_TOKENWISE: "Penstock, token by token",
            SystemName.TRANSFORMERS: "transformers, whole",
            SystemName.TRANSFORMERS_CHUNKED: f"transformers, chunk {chunk}",
            SystemName.PENSTOCK_AUTO: "Penstock, auto",
            SystemName.LLAMA_CPP: f"llama.cpp, batch {chunk}" if chunk else "llama.cpp, whole",
        }[self]


class System(Protocol):
    """Something that reads a prompt and generates after it."""

    name: SystemName

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> int:
        """Generate exactly `num_tokens` tokens and report each as soon as it is known. Returns the bytes of
        the keys, values and recurrent states that were cached at the end."""
        ...


class PenstockSystem:
    """Penstock's own run: chunked, whole or token by token, with its tile grid or without."""

    def __init__(self, name: SystemName, model: Decoder, canon: RowLaw, chunk: int) -> None:
        self.name = name
        self._model = model
        self._canon = canon
        self._config = ChunkedPrefillConfig(chunk)

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> int:
        run = Run(self._model, prompt, config=self._config, canon=self._canon, max_tokens=num_tokens)
        return finish_run(run, on_token)


def finish_run(run: Run, on_token: OnToken) -> int:
    """Run it to its end. Returns the bytes of what it cached."""
    while run.finish_reason is None:
        token = run.step().token
        if token is not None:
            on_token(token)
    key_value_bytes = (
        run.prompt_length + run.job.request.max_tokens - 1
    ) * run.model.cache_spec.bytes_per_token
    # A step reads one state and writes another: after two steps both are in memory.
    return key_value_bytes + run.space.tensors.state_bytes


class TransformersSystem:
    """transformers' `generate`, with `prefill_chunk_size` or without, and its dynamic cache."""

    def __init__(self, name: SystemName, model: Any, chunk: int | None) -> None:
        self.name = name
        self._model = model
        self._chunk = chunk

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> int:
        input_ids = torch.tensor([prompt], device=self._model.device)
        settings = GenerationConfig(
            max_new_tokens=num_tokens,
            do_sample=False,
            use_cache=True,
            prefill_chunk_size=self._chunk,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=settings,
            streamer=_Streamer(on_token),
        )
        return sum(
            tensor.nbytes for layer in output.past_key_values.layers for tensor in _cached_tensors(layer)
        )


def _cached_tensors(layer: Any) -> list[torch.Tensor]:
    """What a layer of transformers' cache holds: keys and values, or the states of a linear attention."""
    if hasattr(layer, "keys"):
        return [layer.keys, layer.values]
    return [*layer.conv_states.values(), *layer.recurrent_states.values()]


class _Streamer:
    """Passes on what `generate` streams: the prompt first, then token by token."""

    def __init__(self, on_token: OnToken) -> None:
        self._on_token = on_token
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self._on_token(int(value))
        self._has_prompt = True

    def end(self) -> None:
        pass


def load_systems(
    names: Iterable[SystemName],
    source: WeightSource,
    dtype: torch.dtype,
    chunk: int,
    device_name: str | None = None,
) -> dict[SystemName, System]:
    """The systems of these names, with each engine's weights loaded once, and only if it is among them; all on the
    device that the name, else the environment, comes to."""
    device = chosen_device(device_name)
    device_kind(device).use()
    wanted = list(names)
    ours = [name for name in wanted if name.startswith("penstock")]
    theirs = [name for name in wanted if name.startswith("transformers")]
    systems: dict[SystemName, System] = {}
    if ours:
        model = load_decoder(source, select_kernels(device), dtype, device)
        tiled = probe(model.kernels, model.probe_shapes, dtype, device).bind(model.kernels)
        untiled = RowLaw(tile_size=0)
        sizes = {SystemName.PENSTOCK_WHOLE: 0, SystemName.PENSTOCK_TOKENWISE: 1}
        for name in ours:
            canon = untiled if name is SystemName.PENSTOCK_UNTILED else tiled
            systems[name] = PenstockSystem(name, model, canon, sizes.get(name, chunk))
    if theirs:
        reference = load_transformers(source, dtype, device)
        for name in theirs:
            size_or_none = chunk if name is SystemName.TRANSFORMERS_CHUNKED else None
            systems[name] = TransformersSystem(name, reference, size_or_none)
    return {name: systems[name] for name in wanted}
