"""Launches of a Triton kernel by its compiled form: finding that anew takes the host longer than the launch."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any


class KeptKernel:
    """A kernel, and the forms of it that were compiled."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def launch(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        args: Sequence[object],
        constants: Mapping[str, object],
        **options: int,
    ) -> None:
        """`args` and then `constants` are in the order of the kernel's own. Calls with the same key differ in nothing
        that Triton compiles a kernel anew for: constants, types, alignment, numbers that it takes for constants."""
        found = self._compiled.get(key)
        if found is None:
            # The interpreter gives nothing to keep.
            self._compiled[key] = self._kernel[grid](*args, **constants, **options)
        else:
            found[grid](*args, *constants.values())
