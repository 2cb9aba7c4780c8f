"""Weights in a Hugging Face folder: safetensors, in one file or in shards."""

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from penstock.errors import ModelError, ModelFileError
from penstock.kernels.quantised import GROUP, BlockForm
from penstock.models.by_transformers.families import TRIED
from penstock.models.bytefile import SLICE_BYTES, ByteFile, copy_plain
from penstock.models.hf.config import hf_model_config, text_model
from penstock.models.hf.families import FAMILIES
from penstock.models.hf.mixers import scale_weight
from penstock.models.hf.quantised import FourBitFloats, Quantised, combined, in_slices
from penstock.models.reading import Fields, first_line, reading, shortened
from penstock.models.source import FileSource, require_shape
from penstock.plan.model import ModelConfig
from penstock.plan.settings import ModelImpl

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Of the parts of quantised tensors, too.
_PART_DTYPES = {**_DTYPES, "I64": torch.int64, "I32": torch.int32, "F8_E4M3": torch.uint8, "U8": torch.uint8}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLE_REASON = "loading a pickle runs whatever code it contains; convert it to safetensors"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_JSON_BYTES = 16 << 20  # in memory an empty object takes many times its two letters
_MAX_TENSORS = 1 << 19
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Experts of a layer as one tensor: [experts, in, out], or blocks [experts, out, groups, 16] and their exponents.
_STACK = re.compile(
    r"(model\.layers\.\d{1,9}\.mlp\.experts)\.(gate_up_proj|down_proj)(|_blocks|_scales|_bias)"
)
_STACK_DIMS = {"": 3, "_blocks": 4, "_scales": 3, "_bias": 2}
# Of the text model within a multimodal one, and what they would be alone.
_SINGLE_BLOCK = re.compile(r"(model\.layers\.(\d{1,9})\.)mixer(?=\.)")
_TEXT_PREFIXES = {
    "backbone.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


@dataclass(frozen=True)
class _Stored:
    file: ByteFile
    start: int  # byte in the file
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    is_transposed: bool = False  # the file has the columns of that shape one after the other

    def part(self, index: int) -> "_Stored":
        """One of the tensors that are stored as one."""
        num_bytes = self.num_bytes // self.shape[0]
        start = self.start + index * num_bytes
        return replace(self, start=start, num_bytes=num_bytes, shape=self.shape[1:])

    def read(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Its rows [start, end)."""
        dtype = _PART_DTYPES.get(self.dtype)
        if dtype is None:
            raise ModelFileError(
                f"{self.file.path}: a part of a quantised tensor is {self.dtype}; accepted are "
                f"{', '.join(_PART_DTYPES)}"
            )
        end = (self.shape[0] if self.shape else 1) if end is None else end
        out = torch.empty((end - start, *self.shape[1:]) if self.shape else (), dtype=dtype)
        row_bytes = self.num_bytes // self.shape[0] if self.shape and self.shape[0] else 0
        copy_plain(self.file, self.start + start * row_bytes, dtype, out)
        return out

    def equals(self, other: "_Stored") -> bool:
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        mine, theirs = (torch.empty(min(self.num_bytes, SLICE_BYTES), dtype=torch.uint8) for _ in range(2))
        for at in range(0, self.num_bytes, SLICE_BYTES):
            num_bytes = min(self.num_bytes - at, SLICE_BYTES)
            self.file.read_into(self.start + at, mine[:num_bytes])
            other.file.read_into(other.start + at, theirs[:num_bytes])
            if not torch.equal(mine[:num_bytes], theirs[:num_bytes]):
                return False
        return True


class HfFolder(FileSource):
    """A folder as transformers' `save_pretrained` writes it. The text model of a multimodal one has the names it
    would have alone."""

    format = "safetensors"

    def _open(self) -> None:
        self.config = self._read_config()
        self._tensors: dict[str, _Stored] = {}
        with reading(self.path):
            shards = _weight_files(self.path)
        self._quantised: dict[str, Quantised] = {}
        self._stacks: dict[tuple[str, str], dict[str, _Stored]] = {}
        for shard in shards:
            self._add_file(shard)
        for (prefix, projection), forms in self._stacks.items():
            self._unstack(prefix, projection, forms)
        self._resolve_head()
        values = read_json(self.path / "config.json")
        stated = values if "quantization_config" in values else values.get("text_config")
        config = Fields(str(self.path / "config.json"), stated if isinstance(stated, dict) else {})
        found, parts = combined(self._tensors, config)
        self._quantised |= found
        plain = {name: stored.shape for name, stored in self._tensors.items() if name not in parts}
        self.shapes = {**plain, **{name: stored.shape for name, stored in self._quantised.items()}}

    def block_form(self, name: str) -> BlockForm | None:
        stored = self._quantised.get(name)
        return None if stored is None or stored.shape[1] % GROUP else stored.form

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        stored = self._quantised[name]
        yield from in_slices(stored, stored.blocks_of)

    def _read_config(self) -> ModelConfig:
        return hf_model_config(*read_config_files(self.path))

    def _own_name(self, name: str) -> str:
        """Of a tensor that the family may call otherwise."""
        name = FAMILIES[self.config.family].tensor_name(name)
        if self.config.feeding_layers is None:
            return name
        return _SINGLE_BLOCK.sub(lambda found: found[1] + _block_name(self.config, int(found[2])), name)

    def load_into(self, name: str, out: torch.Tensor) -> None:
        if (quantised := self._quantised.get(name)) is not None:
            require_shape(name, quantised.shape, out)
            start = 0
            for values in in_slices(quantised, quantised.values_of):
                out[start : start + len(values)].copy_(values)
                start += len(values)
            return
        stored, dtype = self._tensors[name], self.dtype_of(name)
        require_shape(name, stored.shape, out)
        copy_plain(stored.file, stored.start, dtype, out.t() if stored.is_transposed else out)
        scale_weight(name, out, self.config)

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a tensor in the file."""
        stored = self._tensors[name]
        if (dtype := _DTYPES.get(stored.dtype)) is None:
            raise ModelFileError(
                f"{stored.file.path}: tensor {name} is {stored.dtype}; accepted are {', '.join(_DTYPES)}"
            )
        return dtype

    def _add_file(self, path: Path) -> None:
        with reading(path), path.open("rb") as stream:
            if int.from_bytes(stream.read(8), "little") > _MAX_JSON_BYTES:
                raise ModelFileError(f"{path} is not a usable safetensors file: its header is absurdly large")
        # The library checks the whole table: offsets inside the file, no overlaps, sizes that fit the shapes.
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelFileError(f"{path} is not a usable safetensors file: {first_line(error)}") from error
        with reading(path), path.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            table = json.loads(stream.read(header_bytes))
        file = ByteFile(path)
        self._files.append(file)
        for name, entry in table.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            stored = _Stored(
                file, 8 + header_bytes + start, end - start, entry["dtype"], tuple(entry["shape"])
            )
            self._add(name, stored)

    def _add(self, stored_name: str, stored: _Stored) -> None:
        name = stored_name
        for prefix, alone in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                name = alone + name.removeprefix(prefix)
        name = self._own_name(name)
        experts = self.config.experts
        if experts is not None and experts.interleaved and (stack := _STACK.fullmatch(name)):
            if stored.shape[:1] != (experts.num_experts,) or len(stored.shape) != _STACK_DIMS[stack[3]]:
                raise ModelFileError(
                    f"{stored.file.path}: tensor {shortened(stored_name)} has shape {list(stored.shape)}, which is "
                    f"not that of {experts.num_experts} experts"
                )
            self._stacks.setdefault((stack[1], stack[2]), {})[stack[3]] = stored
            self._kinds.append(stored.dtype)
            return
        if name.endswith(".e_score_correction_bias"):  # some have a dimension of 1 more
            stored = replace(stored, shape=(math.prod(stored.shape),))
        if len(self._tensors) >= _MAX_TENSORS:
            raise ModelFileError(f"{stored.file.path}: more than {_MAX_TENSORS} tensors are absurd")
        if name in self._tensors:
            other = self._tensors[name].file.path
            where = f"in {other.name} too" if other != stored.file.path else "there twice, under two prefixes"
            raise ModelFileError(f"{stored.file.path}: tensor {shortened(stored_name)} is {where}")
        self._tensors[name] = stored
        self._kinds.append(stored.dtype)

    def _unstack(self, prefix: str, projection: str, forms: Mapping[str, _Stored]) -> None:
        """Tensors of all experts as one become those of each."""
        plain, blocks, exponents, bias = (forms.get(form) for form in _STACK_DIMS)
        if blocks is not None and (
            exponents is None
            or {blocks.dtype, exponents.dtype} != {"U8"}
            or blocks.shape != (*exponents.shape, GROUP // 2)
        ):
            raise ModelFileError(f"{blocks.file.path}: {prefix}.{projection} has blocks without their scales")
        for index in range(next(iter(forms.values())).shape[0]):
            name = f"{prefix}.{index}.{projection}"
            if bias is not None:
                self._tensors[f"{name}.bias"] = bias.part(index)
            if blocks is not None and exponents is not None:
                self._quantised[f"{name}.weight"] = FourBitFloats(blocks.part(index), exponents.part(index))
            elif plain is not None:
                own = plain.part(index)
                self._tensors[f"{name}.weight"] = replace(own, shape=own.shape[::-1], is_transposed=True)

    def _resolve_head(self) -> None:
        """Where the head is to be the embedding, and the file has one that is not, the file's counts. A file may have
        either name for the one matrix. Both are as in transformers."""
        head = self._tensors.get(_HEAD)
        if not self.config.tied_head or head is None:
            return
        if not head.equals(self._tensors.setdefault(_EMBEDDING, head)):
            self.config = replace(self.config, tied_head=False)


def is_by_transformers(family: str, model_impl: ModelImpl) -> bool:
    """Whether transformers' code is to run a family."""
    is_left = family not in FAMILIES and family in TRIED
    return model_impl == "transformers" or (model_impl == "auto" and is_left)


def has_quantised(path: Path) -> bool:
    """Whether a folder's weights are there, and quantised."""
    has_weights = any((path / name).is_file() for name in (_SINGLE, _INDEX))
    return has_weights and '"quantization_config"' in json.dumps(read_json(path / "config.json"))


def read_folder_config(path: Path) -> ModelConfig:
    """The configuration alone, without opening any weights."""
    return model_config(*read_config_files(path))


def model_config(file: Fields, generation: Fields) -> ModelConfig:
    """Of the two files, whoever's code is to run the model."""
    name, config = text_model(file)
    if not is_by_transformers(name, "auto"):
        return hf_model_config(file, generation)
    from penstock.models.by_transformers.config import transformers_config  # loads transformers' models

    return transformers_config(file, config, name, generation).model


def read_config_files(path: Path) -> tuple[Fields, Fields]:
    """A folder's config.json, and its generation_config.json, which is empty where there is none."""
    generation = path / "generation_config.json"
    with reading(path):
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is not a model folder: it has no config.json")
        generation_values = read_json(generation) if generation.is_file() else {}
    config = Fields(str(path / "config.json"), read_json(path / "config.json"))
    return config, Fields(str(generation), generation_values)


def read_json(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, object]:
    """A JSON object from a file that may hold anything."""
    with reading(path):
        if path.stat().st_size > max_bytes:
            raise ModelFileError(f"{path} is absurdly large for a JSON file")
        content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not hold a JSON object")
    return value


def _weight_files(path: Path) -> list[Path]:
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if (path / _INDEX).is_file():
        return _shards(path)
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelFileError(
            f"{path} holds only pickled weights ({pickles[0]}), which are refused: {PICKLE_REASON}"
        )
    raise ModelError(f"{path} holds no weights: neither {_SINGLE} nor {_INDEX}")


def _shards(path: Path) -> list[Path]:
    index = Fields(str(path / _INDEX), read_json(path / _INDEX))
    names: set[str] = set()
    for name in index.nested("weight_map").values.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise index.error("weight_map", name, "the name of a safetensors file in the same folder")
        names.add(name)
    if not names:
        raise ModelFileError(f"{index.origin}: weight_map is empty")
    for name in names:
        if not (path / name).is_file():
            raise ModelFileError(f"{path}: the shard {name} is missing; {_INDEX} calls for {len(names)}")
    return [path / name for name in sorted(names)]


def _block_name(config: ModelConfig, index: int) -> str:
    """Of the one block of a layer."""
    if index in (config.feeding_layers or ()):
        return "mlp"
    return "linear_attn" if config.mamba and index in config.mamba.layers else "self_attn"
