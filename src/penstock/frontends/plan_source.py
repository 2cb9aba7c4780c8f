"""Where a plan's numbers come from: the model's configuration, and what this machine would compute with.

torch is imported only when it is asked.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ModelError
from penstock.machine import has_fast_bfloat16, memory_bytes, processor_flags
from penstock.plan.memory import WeightBits, weight_bytes
from penstock.plan.settings import WeightsSetting, resolve_threads, settle_weights, settle_without_blocks
from penstock.plan.step_shape import KernelKind, Workspace

if TYPE_CHECKING:
    import torch

    from penstock.plan.model import ModelConfig


_PLAIN_BITS = 16  # of a value of bfloat16
# What probes find on GPUs: products of fewer rows are padded up to it.
_ROW_FLOOR_ON_GPU = 512


@dataclass(frozen=True)
class PlannedModel:
    """A configuration, and what the weights take where its file has them quantised."""

    config: "ModelConfig"
    stored: WeightBits | None = None

    def settled(self, setting: WeightsSetting, dtype: str, device: "torch.device") -> WeightsSetting:
        """What `auto` would come to on this machine, and why."""
        from penstock.kernels.device import device_kind

        if self.stored is None or self.stored.matrices >= _PLAIN_BITS:
            return setting
        if not device_kind(device).takes_quantised:
            return settle_without_blocks(setting, dtype)
        if self.bits("auto", dtype, device) is None:
            return setting
        return settle_weights(
            setting,
            fast_bfloat16=has_fast_bfloat16(processor_flags()),
            bfloat16_bytes=weight_bytes(self.config, 2),
            memory_bytes=memory_bytes(),
        )

    def bits(self, weights: str, dtype: str, device: "torch.device") -> WeightBits | None:
        """What weights take that are kept in this way; None where they are of the dtype."""
        if weights == "auto":
            return self.stored if dtype == "bfloat16" and _expected_kernels(device) == "native" else None
        from penstock.kernels.quantised import Q4_1, Q8_0

        form = {"int8": Q8_0, "int4": Q4_1}.get(weights)
        if form is None:
            return None
        return WeightBits(form.resident_bits, Q8_0.resident_bits, self.config.tied_head)


def read_model(model: str) -> PlannedModel:
    """What is known of a folder, a config.json, a GGUF file or a Hugging Face name; weights are not needed."""
    from penstock.models.hf.folder import read_folder_config

    path = Path(model).expanduser()
    if path.is_dir():
        return PlannedModel(read_folder_config(path))
    if path.is_file() and path.suffix == ".json":
        return PlannedModel(_read_config_file(path))
    if not path.exists() and (config := _from_hugging_face(model)):
        return PlannedModel(_read_config_file(config))
    from penstock.models.hub import resolve_model
    from penstock.models.opened import open_weights
    from penstock.models.shape import stored_bits

    source = open_weights(resolve_model(model))
    source.close()
    return PlannedModel(source.config, stored_bits(source, _PLAIN_BITS))


def _read_config_file(path: Path) -> "ModelConfig":
    from penstock.models.fields import Fields
    from penstock.models.hf.config import hf_model_config
    from penstock.models.hf.folder import read_json

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


def resolved_dtype(name: str, device: "torch.device") -> str:
    if name != "auto":
        return name
    from penstock.kernels.device import device_kind

    return str(device_kind(device).dtype(name)).removeprefix("torch.")


def expected_workspace(device: "torch.device") -> Workspace:
    """Of the kernels that would be chosen on this machine, as far as can be told without building any."""
    import torch

    from penstock.kernels.interface import select_kernels

    num_threads = resolve_threads().within(torch.get_num_threads())
    kind = _expected_kernels(device)
    if kind != "cuda":
        return Workspace(kind, num_threads=num_threads)
    kernels = select_kernels(device)
    return Workspace(
        kind,
        kernels.law.tile_size,
        num_threads,
        row_floor=_ROW_FLOOR_ON_GPU,
        row_grid=kernels.law.row_grid,
        head_rows=kernels.head_rows,
        feed_rows=kernels.feed_rows,
    )


def _expected_kernels(device: "torch.device") -> KernelKind:
    import torch

    from penstock.kernels.device import device_kind
    from penstock.plan.settings import KERNELS_VARIABLE

    is_reference = os.environ.get(KERNELS_VARIABLE, "auto") == "torch"
    kind = device_kind(device)
    if not kind.is_host:
        return "torch" if is_reference else kind.kernels
    has_vectors = "AVX512" in torch.backends.cpu.get_cpu_capability()
    has_compiler = "CXX" in os.environ or any(map(shutil.which, ("c++", "g++", "clang++")))
    return "native" if not is_reference and has_vectors and has_compiler else "torch"
