"""Runs AMD gfx950 (CDNA4: MI350, MI355X) code objects on the CPU, on numpy arrays.

The very binary that a compiler made for gfx950 is executed: scaled MFMA, loads into LDS, buffer instructions, atomics.
It says nothing about speed. Of tinygrad only the instruction decoder is used.

    code_object, metadata = compile_for_gfx950(kernel, {"x": "*fp32", "n": "i32"}, {"BLOCK": 1024}, num_warps=4)
    stats = run_kernel(code_object, metadata, (3,), [x, n], strict=True)  # x: a numpy array, updated in place
    assert stats["slack_ok"] and not stats["races"]

Types that numpy lacks travel as bytes of the same size: fp8 and e8m0 as uint8, bf16 as uint16. For FlyDSL:
`write_rocm_path` before it compiles, `read_code_object` of its dump, and structs by value as bytes.

A wave is 64 lanes, the last axis of every vector register. Each instruction is turned once, per address, into a closure
``execute(wave)``; running a program means calling those.

Checks: exact bounds of every access to memory; LDS conflicts between waves inside one barrier interval (``races``);
vector-memory loads that land only at the s_waitcnt vmcnt that covers them, poison until then (``strict``). A removed
``lgkmcnt`` wait or ``s_nop`` is not noticed, and a removed barrier not always.

Not modelled: time, caches, traps, hazards, lgkmcnt waits, the order and rounding of the sums inside an MFMA (float64
here, then one rounding to float32), the approximation error of v_exp, v_rcp, v_log, v_rsq, v_sqrt (correctly rounded
here), hardware registers other than MODE, memory order between workgroups (they run one after the other).

Refused, not guessed (`EmuError` or NotImplementedError): scratch memory, fp32 flush-to-zero, workgroups of more than
one dimension, relocations, ds_read_b64_tr_*, LDS atomics, SMFMAC, int8 and fp64 MFMA, packed 16-bit math, and any other
opcode that is missing.

No hardware was used. The register layouts of the scaled MFMA follow AMD's published ones; which lane group holds the
scale of which block of K, and the op_sel bits, rest on the encoding and on the results of code that Triton generates.
"""

from gfx950.code_object import CodeObject, KernelDescriptor, read_code_object
from gfx950.linker import write_rocm_path
from gfx950.machine import Race
from gfx950.run import RunStats, run_kernel
from gfx950.triton_kernels import compile_for_gfx950, scaled_mfma_count
from gfx950.wave import EmuError

__all__ = [
    "CodeObject",
    "EmuError",
    "KernelDescriptor",
    "Race",
    "RunStats",
    "compile_for_gfx950",
    "read_code_object",
    "run_kernel",
    "scaled_mfma_count",
    "write_rocm_path",
]
