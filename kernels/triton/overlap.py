# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Programmatic dependent launch (NVIDIA since sm_90): a kernel starts before the previous one has ended.

Every kernel calls `wait_for_previous_kernel` before it reads what the previous one wrote, and only then lets the next
one start. So when a kernel starts, the one before the previous one has ended, and its results can be read at once.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous_kernel(OVERLAP: tl.constexpr):
    """The previous kernel of the stream has ended and its writes are visible. OVERLAP: see `Launch.overlap`."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
