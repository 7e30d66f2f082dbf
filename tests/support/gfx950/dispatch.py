"""From a decoded instruction to the closure that executes it."""

from __future__ import annotations

from typing import Any

from gfx950.control import build_sopp
from gfx950.lds import build_lds, build_scalar_memory
from gfx950.operands import field, vector_source
from gfx950.packed import build_vop3p
from gfx950.scalar import build_sop1, build_sop2, build_sopc, build_sopk
from gfx950.vector import build_vector
from gfx950.vector_flags import build_carry, build_compare, build_vop3_sdst
from gfx950.vector_memory import build_buffer, build_global
from gfx950.vector_parts import build_dpp, build_sdwa
from gfx950.wave import VCC, VGPR0, Builder, EmuError, Execute

_BUILDERS: dict[str, Builder] = {
    "SOP1": build_sop1,
    "SOP2": build_sop2,
    "SOPC": build_sopc,
    "SOPK": build_sopk,
    "SOPP": build_sopp,
    "SMEM": build_scalar_memory,
    "DS": build_lds,
    "GLOBAL": build_global,
    "FLAT": build_global,
    "SCRATCH": build_global,
    "MUBUF": build_buffer,
    "VOP1": build_vector,
    "VOP2": build_vector,
    "VOP3": build_vector,
    "VOP3_SDST": build_vector,
    "VOP3SD": build_vop3_sdst,
    "VOP3P": build_vop3p,
    "VOP3P_MFMA": build_vop3p,
    "VOP3PX2": build_vop3p,
}


def build(inst: Any) -> Execute:
    """A decoded instruction as a closure on a wave."""
    name = inst.op.name.removesuffix("_E32").removesuffix("_E64")
    encoding = type(inst).__name__.replace("_LIT", "")
    if "_SDWA" in encoding:
        return build_sdwa(inst, name)
    if encoding.endswith("_DPP16"):
        return build_dpp(inst, name)
    if name.startswith("V_CMP") and encoding in ("VOPC", "VOP3", "VOP3_SDST"):
        return build_compare(inst, name)
    if encoding == "VOP2" and "_CO_U32" in name:
        sources = [vector_source(inst, field(inst, "src0")), vector_source(inst, VGPR0 + field(inst, "vsrc1"))]
        return build_carry(name, sources, field(inst, "vdst"), VCC, VCC)
    if encoding not in _BUILDERS:
        raise EmuError(f"encoding {encoding} of {name}")
    return _BUILDERS[encoding](inst, name)
