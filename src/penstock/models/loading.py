"""Which form the weights of a file take in memory, and the decoder that is made of them."""

import torch

from penstock.errors import SettingError
from penstock.kernels.device import device_kind
from penstock.kernels.interface import Kernels
from penstock.kernels.quantised import (
    BLOCK_FORMS,
    F8_ROW,
    BlockForm,
)
from penstock.models.assembly import Assembler
from penstock.models.decoder import Decoder
from penstock.models.source import WeightSource, check_source
from penstock.plan.weight_settings import (
    QUANTISED_WEIGHTS,
    WeightsName,
    WeightsSetting,
    settle_weights,
    settle_without_blocks,
)


def load_decoder(
    source: WeightSource,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightsName = "auto",
    layers: range | None = None,
) -> Decoder:
    """Build a model, or a stage of these `layers` alone, from a file. Matrices stay in the blocks that the file has
    them in where the kernels can compute with those (`auto`), become blocks (`int8`, `int4`), or are of `dtype`."""
    kind = device_kind(device)
    if source.config.by_transformers:
        return _by_transformers(source, kernels, dtype, device, weights, layers)
    check_source(source)
    if weights in QUANTISED_WEIGHTS and not kind.takes_quantised:
        raise SettingError(
            "weights",
            weights,
            "auto, bf16 or f32",
            where=f"on {kind.name}",
            because="only a CPU and NVIDIA's GPUs compute with quantised weights",
        )
    if weights in QUANTISED_WEIGHTS and (kernels.quantised is None or dtype != torch.bfloat16):
        raise SettingError(
            "weights",
            weights,
            "bf16 or f32",
            where="here",
            because="quantised weights need the native kernels or a GPU of NVIDIA's, and dtype bfloat16",
        )
    if weights == "fp8" and kernels.quantised is not None and not kernels.quantised.takes(F8_ROW, device):
        raise SettingError(
            "weights",
            weights,
            "int8, int4, bf16 or f32",
            where="here",
            because="8-bit floats need a GPU with units for them (Ada, Hopper or newer)",
        )
    is_quantised = weights in ("int8", "int4") or (weights == "auto" and _taken(source, kernels, device))
    if kernels.activations != "plain" and not is_quantised:
        raise SettingError(
            "activations",
            kernels.activations,
            "plain, or weights int8 or int4 beside it",
            where=f"for {source.config.family}",
            because="its weights are not quantised, so nothing would be rounded",
        )
    every = range(source.config.num_layers)
    if layers is not None and not (
        layers and layers.step == 1 and layers[0] in every and layers[-1] in every
    ):
        raise SettingError("layers", layers, f"a range of at least one layer, of 0 to {every.stop}")
    return Assembler(source, kernels, dtype, device, weights, every if layers is None else layers).decoder()


def _by_transformers(
    source: WeightSource,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightsName,
    layers: range | None,
) -> Decoder:
    from penstock.models.by_transformers.folder import TransformersFolder

    assert isinstance(source, TransformersFolder)
    settings = (
        ("weights", weights, weights in QUANTISED_WEIGHTS, "auto, bf16 or f32"),
        ("activations", kernels.activations, kernels.activations != "plain", "plain"),
        ("layers", layers, layers is not None, "model_impl penstock"),
    )
    for name, value, is_lacking, accepted in settings:
        if is_lacking:
            raise SettingError(
                name,
                value,
                accepted,
                where=f"for {source.config.family}",
                because="transformers' code runs it, which has no quantised weights and no stages here",
            )
    return source.decoder(kernels, dtype, device)


def computing_dtype(
    source: WeightSource, kernels: Kernels, device: torch.device, name: str, weights: WeightsName
) -> torch.dtype:
    """The dtype of a name. `auto` is bfloat16 for weights in blocks, whose kernels take no other rows, else the
    device's own."""
    has_blocks = weights in QUANTISED_WEIGHTS or (weights == "auto" and _taken(source, kernels, device))
    if name == "auto" and kernels.quantised is not None and has_blocks:
        return torch.bfloat16
    return device_kind(device).dtype(name)


def _forms(source: WeightSource) -> set[BlockForm]:
    """The forms of blocks that a file has tensors in."""
    return {form for name in source.names() if (form := source.block_form(name)) is not None}


def _taken(source: WeightSource, kernels: Kernels, device: torch.device) -> set[BlockForm]:
    """Those of them that there are kernels for."""
    products = kernels.quantised
    return set() if products is None else {form for form in _forms(source) if products.takes(form, device)}


def settled_weights(
    source: WeightSource,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    setting: WeightsSetting,
) -> WeightsSetting:
    """What `auto` comes to for these weights on this machine, and why."""
    forms = _forms(source)
    if not forms and not source.unpacked:
        return setting
    is_host, taken = device_kind(device).is_host, _taken(source, kernels, device)
    if forms and kernels.quantised is None and is_host and forms <= {*BLOCK_FORMS.values()}:
        return setting
    if not taken or dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return settle_without_blocks(setting, name, "bfloat16" if taken else "")
    return settle_weights(setting, (*sorted(form.name for form in forms - taken), *source.unpacked))
