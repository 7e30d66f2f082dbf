"""A package `aiter` that holds its caller to the contract of AITER's MXFP8 experts, and computes the result on a CPU.

`install` writes it, and a `flydsl` beside it, into a folder of sys.path: real files, with the parameters and symbols of
a given release. Where AITER would crash, ignore its input or compute nonsense, this raises `Breach`. Weights and scales
are read by the address arithmetic of AITER's kernels, not by the inverse of the code under test.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_compile.kernels import reference
from moe_compile.kernels.aiter_flydsl import experts
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import GateFunction


class Breach(AssertionError):
    """The caller broke the contract."""


@dataclass(frozen=True)
class Release:
    """``route``: AITER's MXFP8 experts are in it; ``runtime_limit``: SwiGLU's limit is not fixed to 7."""

    parameters: tuple[str, ...]
    flydsl_kernels: bool = True
    route: bool = True
    runtime_limit: bool = True


_REQUIRED = ("hidden_states", "w1", "w2", "topk_weight", "topk_ids")
_QUANT = ("quant_type", "doweight_stage1", "w1_scale", "w2_scale", "a1_scale", "a2_scale")
_TUNING = ("block_size_M", "num_local_tokens", "moe_sorting_dispatch_policy", "dtype", "hidden_pad", "intermediate_pad")
_FIRST = (*_REQUIRED, "expert_mask", "activation", *_QUANT, *_TUNING, "bias1", "bias2", "splitk")
_SHARED = ("shared_w1", "shared_w2", "shared_w1_scale", "shared_w2_scale", "shared_expert_id")
_SITU = ("swiglu_limit", "beta", "linear_beta", "gate_mode")

RELEASES = {
    "v0.1.13.post1": Release(_FIRST, route=False, runtime_limit=False),
    "v0.1.16": Release((*_FIRST, "swiglu_limit", "gate_mode"), route=False, runtime_limit=False),
    "v0.1.16.post2": Release((*_FIRST, "swiglu_limit", "gate_mode"), runtime_limit=False),
    "v0.1.18": Release((*_FIRST, "swiglu_limit", "gate_mode")),
    "v0.1.19": Release((*_FIRST, *_SITU)),
    "v0.1.20.post1": Release((*_FIRST, *_SITU, *_SHARED)),
    "HEAD": Release((*_FIRST, *_SITU, *_SHARED, "stage2_scatter")),
}
_DEFAULTS = {
    "activation": "aiter.ActivationType.Silu",
    "quant_type": "aiter.QuantType.No",
    "doweight_stage1": "False",
    "moe_sorting_dispatch_policy": "0",
    "hidden_pad": "0",
    "intermediate_pad": "0",
    "splitk": "0",
    "gate_mode": "'separated'",
    "shared_expert_id": "-1",
}

# Attributes and nothing else, as pybind11's enums.
_INIT = """
class _Member:
    def __init__(self, name):
        self.name = name

class ActivationType:
    Silu, Gelu, Swiglu = map(_Member, ("Silu", "Gelu", "Swiglu"))

class QuantType:
    No, per_Token, per_1x32 = map(_Member, ("No", "per_Token", "per_1x32"))
"""
# MiniMax-M3 with the shared expert as one more expert, split over 4 and 8 GPUs; two of 16 token counts.
_TUNED = "cu_num,token,model_dim,inter_dim,expert,topk,act_type\n" + "".join(
    f"256,{tokens},6144,{size},129,5,ActivationType.Swiglu\n" for size in (384, 768) for tokens in (1, 2)
)
_RUNTIME_LIMIT = "\n\ndef runtime_swiglu_limit(swiglu_limit, act):\n    raise NotImplementedError\n"


def install(site: Path, release: str, flydsl: str | None = "0.3.1") -> None:
    """Write `aiter` of a release and `flydsl` of a version (None: not installed) into ``site``."""
    found = RELEASES[release]
    arguments = [name if name in _REQUIRED else f"{name}={_DEFAULTS.get(name, 'None')}" for name in found.parameters]
    files = {
        "aiter/__init__.py": _INIT,
        "aiter/fused_moe.py": "import aiter\nimport aiter_stand_in\n\n\n"
        f"def fused_moe({', '.join(arguments)}):\n"
        f"    return aiter_stand_in.fused_moe({release!r}, dict(locals()))\n",
        "aiter/ops/__init__.py": "",
    }
    if found.flydsl_kernels:
        files["aiter/ops/flydsl/__init__.py"] = ""
        files["aiter/ops/flydsl/utils.py"] = "from flydsl.utils.smem_allocator import SMEM_CAPACITY_MAP\n"
        files["aiter/ops/flydsl/moe_kernels.py"] = "from aiter.ops.flydsl import utils\n" + (
            _RUNTIME_LIMIT if found.runtime_limit else ""
        )
    if found.route:
        files["aiter/configs/model_configs/minimax_m3_mxfp8_tuned_fmoe.csv"] = _TUNED
    if flydsl is not None:
        moved = tuple(map(int, flydsl.split(".")[:2])) >= (0, 4)
        files["flydsl/__init__.py"] = ""
        files["flydsl/utils/__init__.py"] = ""
        files["flydsl/utils/smem_allocator.py"] = "" if moved else "SMEM_CAPACITY_MAP = {'gfx950': 163840}\n"
        files[f"flydsl-{flydsl}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: flydsl\nVersion: {flydsl}\n"
    version = release.removeprefix("v")
    files[f"amd_aiter-{version}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {version}\n"
    if release == "HEAD":
        files[f"amd_aiter-{version}.dist-info/METADATA"] += "Requires-Dist: flydsl==0.3.1\n"
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@contextlib.contextmanager
def importable(site: Path, release: str, flydsl: str | None = "0.3.1") -> Iterator[None]:
    """`install`, with ``site`` first on sys.path, and every trace of it gone from this process afterwards.

    A FlyDSL that is really installed is out of sight, and what was imported of it is there again afterwards: its native
    modules cannot be loaded twice.
    """
    install(site, release, flydsl)
    real = {name: module for name, module in sys.modules.items() if _is_ours(name)}
    _forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)  # first: it is undone last, to the path that it saw
        if flydsl is None:
            patch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "flydsl").is_dir()])
        yield
    _forget()
    sys.modules.update(real)


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in ("aiter", "flydsl")


def _forget() -> None:
    for name in filter(_is_ours, list(sys.modules)):
        del sys.modules[name]
    experts.fused_moe.cache_clear()
    experts._warm.clear()
    calls.clear()


calls: list[dict[str, Any]] = []  # the arguments of every call, for tests to look at


def fused_moe(release: str, arguments: dict[str, Any]) -> Tensor:
    """What ``aiter.fused_moe.fused_moe`` of the release does with MXFP8 weights."""
    calls.append(arguments)
    _check_modes(arguments)
    _check_tensors(arguments)
    x, mask, ids = arguments["hidden_states"], arguments["expert_mask"], arguments["topk_ids"].long()
    before = mask.cumsum(0) - mask
    local = torch.where(mask[ids] == 1, before[ids], -1)
    dtype = arguments["dtype"] or x.dtype
    _require(dtype in (torch.bfloat16, torch.float16), f"dtype {dtype}")
    out = reference.experts(
        x, local, arguments["topk_weight"], _unshuffled(arguments), _gate(release, arguments), activations="mxfp8"
    )
    return out.to(dtype)


def _check_modes(arguments: dict[str, Any]) -> None:
    _require(arguments["quant_type"].name == "per_1x32", "quant_type must be per_1x32 for MXFP8")
    _require(arguments["gate_mode"] == "interleave", f"gate_mode {arguments['gate_mode']!r}")
    _require(arguments["doweight_stage1"] is False, "doweight_stage1 leaves the FlyDSL kernels")
    for name in ("block_size_M", "a1_scale", "a2_scale", "num_local_tokens", "bias1", "bias2"):
        _require(arguments[name] is None, f"{name} must not be given")
    for name in ("splitk", "hidden_pad", "intermediate_pad"):
        _require(arguments[name] == 0, f"{name} must be 0")


def _check_tensors(arguments: dict[str, Any]) -> None:
    x, w1, w2 = (arguments[name] for name in ("hidden_states", "w1", "w2"))
    ids, weights, mask = (arguments[name] for name in ("topk_ids", "topk_weight", "expert_mask"))
    num_experts, hidden, intermediate = w2.shape
    _require(x.dim() == 2 and x.dtype in (torch.bfloat16, torch.float16), f"hidden_states {x.dtype} {x.shape}")
    _require(x.shape[0] > 0, "no tokens: the host divides by zero (SIGFPE)")
    _require(x.shape[1] == hidden, f"hidden size {x.shape[1]}, weights have {hidden}")
    _require(hidden % 256 == 0, f"hidden size {hidden} is not a multiple of 256")
    _require(intermediate % 128 == 0, f"intermediate size {intermediate}: stage 2 reads beyond the weights")
    for name, weight, shape in (
        ("w1", w1, (num_experts, 2 * intermediate, hidden)),
        ("w2", w2, (num_experts, hidden, intermediate)),
    ):
        _require(weight.dtype == torch.float8_e4m3fn, f"{name} is {weight.dtype}")
        _require(tuple(weight.shape) == shape, f"{name} has shape {tuple(weight.shape)}, not {shape}")
        _require(getattr(weight, "is_shuffled", False) is True, f"{name}.is_shuffled is missing: CK kernels would run")
        scale = arguments[f"{name}_scale"]
        _require(scale.dtype in (torch.uint8, torch.float8_e8m0fnu), f"{name}_scale is {scale.dtype}")
        rows, columns = shape[0] * shape[1], shape[2] // 32
        padded = (-(-rows // 256) * 256, -(-columns // 8) * 8)
        _require(tuple(scale.shape) == padded, f"{name}_scale has shape {tuple(scale.shape)}, not {padded}")
        data = scale.view(torch.uint8).flatten().clone()
        data[_scale_offsets(rows, columns).flatten()] = 0
        _require(not (data == 255).any(), f"{name}_scale: a padding byte is NaN")
    _require(ids.dtype == torch.int32, f"topk_ids are {ids.dtype}: the sort does nothing and says nothing")
    _require(weights.dtype == torch.float32, f"topk_weight is {weights.dtype}")
    _require(
        ids.shape == weights.shape and ids.shape[0] == x.shape[0], f"topk_ids {ids.shape}, weights {weights.shape}"
    )
    _require(ids.shape[1] <= 255, f"top-k {ids.shape[1]}")
    _require(mask.dtype == torch.int32 and mask.dim() == 1, f"expert_mask is {mask.dtype} {tuple(mask.shape)}")
    _require(set(mask.tolist()) <= {0, 1} and int(mask[-1]) == 0, "expert_mask must be 0/1 and end in 0")
    _require(int(mask.sum()) == num_experts, f"expert_mask has {int(mask.sum())} ones, E={num_experts}")
    fake = mask.numel() - 1
    _require(bool(((ids >= 0) & (ids <= fake)).all()), f"topk_ids outside [0, {fake}] index LDS out of bounds")
    for row in ids.tolist():
        real = [one for one in row if one != fake]
        _require(len(real) == len(set(real)), f"a row of topk_ids names an expert twice: {row}")
    _require(bool((ids[:, -1] == fake).all()), "with a mask, the last slot is the fake expert: the tuned key is k - 1")
    _require(bool((weights[ids == fake] == 0).all()), "slots of the fake expert have weights")
    for name in ("hidden_states", "w1", "w2", "w1_scale", "w2_scale", "topk_ids", "topk_weight", "expert_mask"):
        _require(arguments[name].is_contiguous(), f"{name} is not contiguous")


def _gate(release: str, arguments: dict[str, Any]) -> GateFunction:
    limit = arguments["swiglu_limit"] or None
    if arguments["activation"].name == "Swiglu":
        limit = 7.0 if limit is None or not RELEASES[release].runtime_limit else limit
        return GateFunction(alpha=1.702, limit=limit, up_offset=1.0)
    _require(arguments["activation"].name == "Silu", f"activation {arguments['activation'].name}")
    _require(limit is None or RELEASES[release].runtime_limit, "Silu has no limit in this release")
    return GateFunction(limit=limit)


def _unshuffled(arguments: dict[str, Any]) -> PackedExperts:
    w1, w2 = arguments["w1"], arguments["w2"]
    num_experts, hidden, intermediate = w2.shape
    # Row r of gate is row r // 16 * 32 + r % 16 of the weight, and the same row of up 16 further.
    gate = torch.arange(intermediate)
    gate = gate // 16 * 32 + gate % 16
    order = torch.cat([gate, gate + 16])
    values, scales = [], []
    for weight, scale in ((w1, arguments["w1_scale"]), (w2, arguments["w2_scale"])):
        rows, columns = weight.shape[1:]
        n, k = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        offset = n // 16 * 16 * columns + k // 32 * 512 + k // 16 % 2 * 256 + n % 16 * 16 + k % 16
        values.append(
            weight.view(torch.uint8).view(num_experts, -1)[:, offset.flatten()].view(num_experts, rows, columns)
        )
        plain = scale.view(torch.uint8).flatten()[_scale_offsets(num_experts * rows, columns // 32)]
        scales.append(plain.view(num_experts, rows, columns // 32))
    return PackedExperts(
        values[0][:, order].contiguous().view(torch.float8_e4m3fn),
        scales[0][:, order].contiguous(),
        values[1].view(torch.float8_e4m3fn),
        scales[1],
    )


def _scale_offsets(rows: int, columns: int) -> Tensor:
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tiles = -(-columns // 8)
    return r // 32 * tiles * 256 + c // 8 * 256 + c % 4 * 64 + r % 16 * 4 + c // 4 % 2 * 2 + r // 16 % 2


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise Breach(what)
