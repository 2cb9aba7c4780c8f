"""Weights in a GGUF file: dequantised a slice at a time into transformers' layout."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from penstock.errors import ModelError, ModelFileError
from penstock.kernels.quantised import BLOCK_FORMS, BlockForm
from penstock.models.bytefile import SLICE_BYTES, ByteFile, copy_plain, parts_of
from penstock.models.gguf.config import DIVISORS, LONG_FACTORS, SHORT_FACTORS, gguf_model_config
from penstock.models.gguf.header import GgufHeader, GgufTensor, GgufValue, read_header
from penstock.models.gguf.layout import SCALE, Place, tensor_places
from penstock.models.reading import Fields
from penstock.models.source import FileSource, require_shape

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# Blocks for which there are no kernels: they become plain numbers.
UNPACKED = tuple(
    GGMLQuantizationType[name]
    for name in ["IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"]
)
ACCEPTED_KINDS = (*_PLAIN, *(GGMLQuantizationType[name] for name in BLOCK_FORMS), *UNPACKED)

# Elements that are dequantised at once: the temporaries of a slice stay in a CPU's cache.
_SLICE_ELEMENTS = 1 << 18


class GgufFile(FileSource):
    """One GGUF file, or the first of several; `metadata` holds the tokenizer too."""

    format = "GGUF"

    def _open(self) -> None:
        path = self.path
        header = self._read_parts()
        self.metadata: dict[str, GgufValue] = header.metadata
        names = (DIVISORS, SHORT_FACTORS, LONG_FACTORS)
        divisors = {name: header.tensors[name] for name in names if name in header.tensors}
        tensors = {name: tensor for name, tensor in header.tensors.items() if name not in divisors}
        self._kinds = [tensor.kind.name for tensor in tensors.values()]
        read = {name: self._read_row(tensor) for name, tensor in divisors.items()}
        self.config = gguf_model_config(header, str(path), read)
        self._places = tensor_places(tensors, self.config, str(path))
        for name, place in self._places.items():
            if name != place.tensor.name:
                self._require_accepted(place.tensor)
        if scaled := [name for name in self._places if SCALE.fullmatch(name)]:
            raise ModelFileError(
                f"{path}: {scaled[0]} multiplies a weight, which is not supported for this family"
            )
        self.shapes = {name: place.shape for name, place in self._places.items()}
        kinds = {place.tensor.kind for place in self._places.values()}
        self.unpacked = tuple(kind.name for kind in UNPACKED if kind in kinds)

    def _read_parts(self) -> GgufHeader:
        """The header of the file, or of the first of several, with the tensors of all."""
        header = read_header(self.path)
        self._files.append(ByteFile(self.path))
        count = Fields(str(self.path), header.metadata).integer("split.count", 1)
        if count <= 1:
            return header
        parts, tensors = parts_of(self.path), dict(header.tensors)
        if count != len(parts) or header.metadata.get("split.no", 0) != 0:
            raise ModelError(
                f"{self.path} is one of {count} parts; open the first, -00001-of-{count:05}.gguf"
            )
        for index, part in enumerate(parts[1:], 1):
            own = read_header(part)
            if own.metadata.get("split.no") != index or tensors.keys() & own.tensors.keys():
                raise ModelFileError(f"{part} is not part {index + 1} of {self.path}")
            tensors |= {name: replace(tensor, part=index) for name, tensor in own.tensors.items()}
            self._files.append(ByteFile(part))
        total = header.metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise ModelFileError(f"{self.path} and its other parts have {len(tensors)} tensors, not {total}")
        return GgufHeader(header.metadata, tensors)

    @torch.no_grad()
    def load_into(self, name: str, out: torch.Tensor) -> None:
        place = self._places[name]
        require_shape(name, place.shape, out)
        self._require_accepted(place.tensor)
        if place.restore is None:
            self._fill(out, place)
        else:  # a row of a few thousand values, or a matrix of an expert
            values = torch.empty(out.shape, dtype=torch.float32)
            self._fill(values, place)
            out.copy_(place.restore(values))

    def block_form(self, name: str) -> BlockForm | None:
        place = self._places[name]
        is_by_rows = len(place.shape) == 2 and place.restore is None and not place.moves_columns
        return BLOCK_FORMS.get(place.tensor.kind.name) if is_by_rows else None

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        place, form = self._places[name], self.block_form(name)
        assert form is not None
        num_rows, row_bytes = place.shape[0], form.row_bytes(place.shape[1])
        start = place.tensor.start + form.row_bytes(place.first)
        file = self._files[place.tensor.part]
        if place.order is not None:
            rows = torch.empty(num_rows, row_bytes, dtype=torch.uint8)
            for part in place.order(rows):
                copy_plain(file, start, torch.uint8, part)
                start += part.numel()
            yield rows
            return
        at_once = max(1, SLICE_BYTES // row_bytes)
        buffer = torch.empty(min(at_once, num_rows), row_bytes, dtype=torch.uint8)
        for first in range(0, num_rows, at_once):
            part = buffer[: num_rows - first]
            file.read_into(start + first * row_bytes, part.view(-1))
            yield part

    def _fill(self, out: torch.Tensor, place: Place) -> None:
        file, kind = self._files[place.tensor.part], place.tensor.kind
        block, block_bytes = GGML_QUANT_SIZES[kind]
        start = place.tensor.start + place.first // block * block_bytes
        for part in place.order(out) if place.order else [out]:
            for rows in _in_slices(part, block):
                if kind in _PLAIN:
                    copy_plain(file, start, _PLAIN[kind], rows)
                else:
                    _copy_quantised(file, start, kind, rows)
                start += rows.numel() // block * block_bytes

    def _read_row(self, tensor: GgufTensor) -> tuple[float, ...]:
        if tensor.kind is not GGMLQuantizationType.F32 or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
            raise ModelFileError(f"{self.path}: {tensor.name} is not a short row of F32")
        values = torch.empty(tensor.shape)
        copy_plain(self._files[tensor.part], tensor.start, torch.float32, values)
        return tuple(values.tolist())

    def _require_accepted(self, tensor: GgufTensor) -> None:
        if tensor.kind not in ACCEPTED_KINDS:
            accepted = ", ".join(kind.name for kind in ACCEPTED_KINDS)
            raise ModelFileError(
                f"{self.path}: tensor {tensor.name} is {tensor.kind.name}; accepted are {accepted}"
            )


def _copy_quantised(file: ByteFile, start: int, kind: GGMLQuantizationType, rows: torch.Tensor) -> None:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rows = rows if rows.dim() > 1 else rows.unsqueeze(0)
    row_elements = rows[0].numel()
    row_bytes = row_elements // block * block_bytes
    num_rows = max(1, _SLICE_ELEMENTS // row_elements)
    buffer = torch.empty(min(num_rows, rows.shape[0]) * row_bytes, dtype=torch.uint8)
    for first in range(0, rows.shape[0], num_rows):
        part = rows[first : first + num_rows]
        raw = buffer[: part.shape[0] * row_bytes]
        file.read_into(start + first * row_bytes, raw)
        # As one row: gguf works in groups of rows, and this way the slice is the group.
        values = dequantize(raw.numpy().reshape(1, -1), kind)
        part.copy_(torch.from_numpy(values).view(part.shape))


def _in_slices(part: torch.Tensor, block: int) -> Iterator[torch.Tensor]:
    """The tensor in parts, one after the other, whose rows are as small as they get in whole blocks, or small enough
    to be converted at once."""
    row = part[0]
    if row.dim() > 1 and row.numel() > _SLICE_ELEMENTS and row[0].numel() % block == 0:
        for row in part:
            yield from _in_slices(row, block)
    else:
        yield part
