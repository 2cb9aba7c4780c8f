"""Launches that begin while the one ahead of them ends, in Triton: what they do until then, and how they wait."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_others(IS_EARLY: tl.constexpr):
    """Let the next launch begin as well, and wait until those ahead are done. Nothing that they write may be read
    before, nothing that they read be written."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
