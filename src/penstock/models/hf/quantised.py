"""Quantised weights as folders have them: 8-bit floats with scales, and 4 bits as AWQ and GPTQ pack them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock.errors import ModelError, ModelFileError
from penstock.kernels.quantised import (
    F8_BLOCK,
    F8_ROW,
    FLOAT8,
    GROUP,
    MXFP4,
    Q4_Z,
    BlockForm,
    mxfp4_blocks,
    mxfp4_values,
)
from penstock.models.reading import Fields

METHODS = ("fp8", "compressed-tensors", "awq", "gptq", "mxfp4")
_FLOAT8_BLOCK = 128
_PACKED = 8  # quants to a word
_MIDDLE = 8  # of quants
# Of the quants in a word.
_ORDERS = {"awq": (0, 4, 1, 5, 2, 6, 3, 7), "gptq": range(_PACKED), "compressed-tensors": range(_PACKED)}
_VALUES_AT_ONCE = 1 << 22


class Part(Protocol):
    """A tensor of a file."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int = 0, end: int | None = None) -> Tensor:
        """Its rows [start, end)."""


@dataclass(frozen=True)
class FourBitFloats:
    """4-bit floats [out, groups, 16], two to a byte, and the exponents of their groups [out, groups]."""

    pairs: Part
    exponents: Part
    form: BlockForm | None = MXFP4

    @property
    def shape(self) -> tuple[int, ...]:
        return self.exponents.shape[0], self.exponents.shape[1] * GROUP

    def check(self, name: str) -> None:
        """They fit each other."""

    def values_of(self, start: int, end: int) -> Tensor:
        return mxfp4_values(self.blocks_of(start, end))

    def blocks_of(self, start: int, end: int) -> Tensor:
        return mxfp4_blocks(self.pairs.read(start, end), self.exponents.read(start, end))


@dataclass(frozen=True)
class Floats:
    """8-bit floats [out, in] and what they are multiples of: one number, one for each output, or one for each block
    of 128 outputs and inputs."""

    values: Part
    scales: Part

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def form(self) -> BlockForm | None:
        return F8_BLOCK if self._has_blocks else F8_ROW

    @property
    def _has_blocks(self) -> bool:
        return len(self.scales.shape) == 2 and self.scales.shape[1] > 1

    def check(self, name: str) -> None:
        num_out, num_in = self.shape
        blocks = (-(-num_out // _FLOAT8_BLOCK), -(-num_in // _FLOAT8_BLOCK))
        if self.scales.shape not in ((), (1,), (num_out,), (num_out, 1), blocks):
            raise ModelFileError(
                f"tensor {name}: scales of shape {list(self.scales.shape)} are not supported"
            )

    def rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Bytes [n, in], and scales of each 32 inputs [n, in / 32] in float32."""
        num_out, num_in = self.shape
        scales = self.scales.read().float()
        if self._has_blocks:
            own = scales[torch.arange(start, end) // _FLOAT8_BLOCK]
            scales = own.repeat_interleave(_FLOAT8_BLOCK // GROUP, dim=1)[:, : num_in // GROUP]
        else:
            scales = scales.flatten().expand(num_out)[start:end, None].expand(-1, num_in // GROUP)
        return self.values.read(start, end), scales

    def values_of(self, start: int, end: int) -> Tensor:
        values, scales = self.rows(start, end)
        return values.view(FLOAT8).float() * scales.repeat_interleave(GROUP, dim=1)

    def blocks_of(self, start: int, end: int) -> Tensor:
        values, scales = self.rows(start, end)
        scale_bytes = scales.contiguous().view(torch.uint8).view(end - start, -1, 4)
        return torch.cat((scale_bytes, values.view(end - start, -1, GROUP)), dim=2).flatten(1)


@dataclass(frozen=True)
class Packed:
    """4 bits, with a scale and a zero point for each group of inputs. `by` says what words hold, and so how all parts
    lie: AWQ's outputs; GPTQ's inputs, of parts [.., out]; compressed-tensors' inputs, of parts [out, ..]."""

    quants: Part
    zeros: Part | None  # none: 8, the middle
    scales: Part
    groups: Part | None  # of each input, where a file says so
    by: Literal["awq", "gptq", "compressed-tensors"]
    zero_offset: int = 0  # files have zero points less this

    @property
    def shape(self) -> tuple[int, ...]:
        if self.by == "compressed-tensors":
            return self.scales.shape[0], self.quants.shape[1] * _PACKED
        return self.scales.shape[1], self.quants.shape[0] * (1 if self.by == "awq" else _PACKED)

    @property
    def _num_groups(self) -> int:
        return self.scales.shape[1 if self.by == "compressed-tensors" else 0]

    @property
    def form(self) -> BlockForm | None:
        """Blocks have scales of float16: those of another dtype must be such numbers."""
        is_whole = self.shape[1] // self._num_groups % GROUP == 0
        return Q4_Z if is_whole and not self._is_shuffled and self._fits_half else None

    @property
    def _is_shuffled(self) -> bool:
        """Whether groups are not of successive inputs."""
        return self.groups is not None and not torch.equal(self.groups.read().long(), self._in_order())

    @property
    def _fits_half(self) -> bool:
        if self.scales.dtype == "F16":
            return True
        scales = self.scales.read().float()
        return torch.equal(scales.half().float(), scales)

    def _in_order(self) -> Tensor:
        num_in = self.shape[1]
        return torch.arange(num_in) // (num_in // self._num_groups)

    def check(self, name: str) -> None:
        num_out, num_in = self.shape
        num_groups = self._num_groups
        zeros: tuple[int, ...] = (num_groups, num_out // _PACKED)
        words = {
            "awq": (num_in, num_out // _PACKED),
            "gptq": (num_in // _PACKED, num_out),
            "compressed-tensors": (num_out, num_in // _PACKED),
        }
        if self.by == "compressed-tensors":
            zeros = zeros[::-1]
        if (
            num_out % _PACKED
            or not num_groups
            or num_in % num_groups
            or self.quants.shape != words[self.by]
            or (self.zeros is not None and self.zeros.shape != zeros)
            or (self.groups is not None and self.groups.shape != (num_in,))
        ):
            raise ModelFileError(f"tensor {name}: its parts do not fit each other as 4 bits in groups")

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Words, zero points [groups, out], scales [groups, out], and the group of each input."""
        words, scales = self.quants.read(), self.scales.read()
        zeros = None if self.zeros is None else self.zeros.read()
        if self.by == "compressed-tensors":
            scales, zeros = scales.t(), None if zeros is None else zeros.t()
        if zeros is None:
            zeros = torch.full(scales.shape, _MIDDLE)
        else:
            zeros = (_unpacked(zeros, _ORDERS[self.by]) + self.zero_offset) & 15
        groups = self._in_order() if self.groups is None else self.groups.read().long()
        if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < len(zeros):
            raise ModelFileError("inputs are in groups that have no scale")
        return words, zeros, scales, groups

    def quants_of(self, words: Tensor, start: int, end: int) -> Tensor:
        """Of outputs [start, end), which are whole words [n, in]."""
        order = _ORDERS[self.by]
        if self.by == "awq":
            return _unpacked(words[:, start // _PACKED : end // _PACKED], order).t()
        return _unpacked(
            words[start:end] if self.by == "compressed-tensors" else words[:, start:end].t(), order
        )

    def values_of(self, start: int, end: int, read: tuple[Tensor, ...] | None = None) -> Tensor:
        words, zeros, scales, groups = read or self.parts()
        quants = self.quants_of(words, start, end).float()
        own_zeros, own_scales = zeros[:, start:end].t().float(), scales[:, start:end].t().float()
        return (quants - own_zeros[:, groups]) * own_scales[:, groups]

    def blocks_of(self, start: int, end: int, read: tuple[Tensor, ...] | None = None) -> Tensor:
        words, zeros, scales, groups = read or self.parts()
        quants = self.quants_of(words, start, end).reshape(end - start, -1, 2, GROUP // 2).to(torch.uint8)
        firsts = groups[::GROUP]
        halves = [each[:, start:end].t()[:, firsts].half().contiguous() for each in (scales, zeros)]
        found = [half.view(torch.uint8).view(end - start, -1, 2) for half in halves]
        return torch.cat((*found, quants[:, :, 0] | quants[:, :, 1] << 4), dim=2).flatten(1)


def _unpacked(words: Tensor, order: Iterable[int]) -> Tensor:
    """Quants [n, 8 * m] of words [n, m], whose nibbles are in some order."""
    shifts = 4 * torch.tensor(tuple(order))
    return (words[:, :, None].long() >> shifts & 15).flatten(1)


Quantised = Floats | Packed | FourBitFloats


def in_slices(stored: Quantised, call: Callable[..., Tensor]) -> Iterator[Tensor]:
    """What `call` gives of all outputs, some at a time."""
    num_out, num_in = stored.shape
    at_once = max(_PACKED, _VALUES_AT_ONCE // num_in // _PACKED * _PACKED)
    more = {"read": stored.parts()} if isinstance(stored, Packed) else {}
    for start in range(0, num_out, at_once):
        yield call(start, min(start + at_once, num_out), **more)


def method_of(config: Fields) -> str | None:
    """How a configuration says that weights are quantised; None: not at all. One that is not known is an error."""
    if not config.has("quantization_config"):
        return None
    stated = config.nested("quantization_config")
    method = stated.text("quant_method", "unknown")
    if method not in METHODS:
        raise ModelError(
            f"{config.origin}: weights quantised by {method!r} are not supported, only by {', '.join(METHODS)}; use "
            "the original weights or a GGUF file"
        )
    if method in ("awq", "gptq") and stated.integer("bits", 4) != 4:
        raise stated.unsupported("bits", "only 4 is")
    if method == "awq" and stated.text("version", "gemm") != "gemm":
        raise stated.unsupported("version", 'only "gemm" is')
    return method


def combined(tensors: Mapping[str, Part], config: Fields) -> tuple[dict[str, Quantised], set[str]]:
    """Tensors that are made of several, by the name of the weight that they are; and the names of all their parts."""
    method, found, parts = method_of(config), dict[str, Quantised](), set[str]()
    if method is None:
        return found, parts
    # What most tools write is less by one.
    is_second = (
        method == "gptq" and config.nested("quantization_config").text("checkpoint_format", "") == "gptq_v2"
    )
    for name in tensors:
        base, _, kind = name.rpartition(".")
        if kind == "weight" and tensors[name].dtype == "F8_E4M3":
            scale = next(
                (
                    f"{base}.{end}"
                    for end in ("weight_scale_inv", "weight_scale")
                    if f"{base}.{end}" in tensors
                ),
                "",
            )
            if not scale:
                raise ModelFileError(f"tensor {name} has 8-bit floats, and no scales")
            found[name] = Floats(tensors[name], tensors[scale])
            parts |= {name, scale, f"{base}.input_scale"}
        elif kind == "qweight":
            zeros, scales = f"{base}.qzeros", f"{base}.scales"
            if not {zeros, scales} <= {*tensors}:
                raise ModelFileError(f"tensor {name} is without {zeros} or {scales}")
            groups = f"{base}.g_idx"
            found[f"{base}.weight"] = Packed(
                tensors[name],
                tensors[zeros],
                tensors[scales],
                tensors.get(groups),
                "awq" if method == "awq" else "gptq",
                int(method == "gptq" and not is_second),
            )
            parts |= {name, zeros, scales, groups}
        elif kind == "weight_packed":
            shape, scales, zeros, groups = (
                f"{base}.weight_{each}" for each in ("shape", "scale", "zero_point", "g_idx")
            )
            if not {shape, scales} <= {*tensors}:
                raise ModelFileError(f"tensor {name} is without {shape} or {scales}")
            packed = Packed(
                tensors[name], tensors.get(zeros), tensors[scales], tensors.get(groups), "compressed-tensors"
            )
            if tuple(tensors[shape].read().tolist()) != packed.shape:
                raise ModelFileError(f"tensor {name}: only 4 bits of whole words are supported")
            found[f"{base}.weight"] = packed
            parts |= {name, shape, scales, zeros, groups}
    for name, stored in found.items():
        stored.check(name)
    return found, parts & {*tensors, *found}
