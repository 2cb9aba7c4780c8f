"""Compiles for a GPU, on a machine that has none, every kernel that the CUDA kernels launch: the interpreter accepts
programs that the compiler does not. Run as a program, since the interpreter must not be on in its process; its
argument is one of the names in `every_kernel.LAUNCHES`."""

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_TARGET = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
_compiled: set[tuple[object, ...]] = set()


def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: Any) -> None:
    """In place of a launch."""
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    given = dict(zip(self.arg_names, args, strict=False)) | kwargs
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(self.params):
        value = given.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    key = (self.__name__, tuple(signature.items()), repr(constants), repr(options))
    if key in _compiled:
        return
    _compiled.add(key)
    source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=_TARGET, options=options)
    shared = made.metadata.shared
    print(f"{self.__name__}: {shared} bytes of shared memory", flush=True)
    assert shared <= 232_448, f"{self.__name__} takes {shared} bytes of shared memory, more than an H200 has"


def main() -> int:
    JITFunction.run = compile_only
    from penstock.kernels.cuda import kernels, launch_sizes, quantised
    from tests.kernels import every_kernel

    for module in (kernels, launch_sizes, quantised):  # as on Hopper
        vars(module)["early"] = lambda device, num_rows: {"IS_EARLY": True, "launch_pdl": True}

    every_kernel.LAUNCHES[sys.argv[1]]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
