"""The hardware a block will run on and the kernel packages found here: plain data that selection reads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """``arch`` is ``gfx950``, ``sm_90``, ... on a GPU and ``cpu`` (or the device type) elsewhere."""

    device_type: str
    arch: str

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The target behind a torch device. A CUDA or ROCm device is asked for its architecture."""
        if device.type != "cuda":
            return cls(device.type, device.type)
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            return cls("cuda", properties.gcnArchName.split(":")[0])
        return cls("cuda", f"sm_{properties.major}{properties.minor}")

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def sm_version(self) -> int | None:
        """90 for ``sm_90``; None off NVIDIA."""
        return int(self.arch.removeprefix("sm_")) if self.arch.startswith("sm_") else None

    @property
    def has_block_scaled_mma(self) -> bool:
        """Matrix instructions that take E8M0 block scales: gfx950, and NVIDIA sm_100 and newer."""
        return self.arch == "gfx950" or (self.sm_version is not None and self.sm_version >= 100)


@dataclass(frozen=True)
class Package:
    """A kernel package as found here: a version, or the reason why it cannot be used."""

    version: str | None = None
    problem: str | None = None

    @property
    def usable(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class Capabilities:
    """What is installed. ``triton_interpreted``: ``TRITON_INTERPRET=1``, kernels run on the CPU, slowly."""

    triton: Package = Package()
    aiter: Package = Package(problem="not looked for")
    flydsl: Package = Package(problem="not looked for")
    triton_interpreted: bool = False

    @classmethod
    def detect(cls) -> Capabilities:
        """Look at this environment without importing Triton, AITER or FlyDSL."""
        return cls(
            triton=_triton(),
            aiter=_aiter(),
            flydsl=_installed("flydsl", "pip install flydsl"),
            triton_interpreted=os.environ.get("TRITON_INTERPRET") == "1",
        )

    def versions(self) -> dict[str, str | None]:
        return {"triton": self.triton.version, "aiter": self.aiter.version, "flydsl": self.flydsl.version}


def _installed(name: str, remedy: str) -> Package:
    if importlib.util.find_spec(name) is None:
        return Package(problem=f"{name} is not installed ({remedy})")
    try:
        return Package(version=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Package(version="unknown")


def _triton() -> Package:
    return _installed("triton", "pip install 'triton>=3.6'")


def _aiter() -> Package:
    """The `aiter` on the package index is an unrelated async-iterator package: tell it from AMD's by its files."""
    found = importlib.util.find_spec("aiter")
    if found is None:
        return Package(problem="aiter is not installed (build ROCm/aiter from source)")
    folders = list(found.submodule_search_locations or [])
    if not any(os.path.exists(os.path.join(folder, "fused_moe.py")) for folder in folders):
        return Package(problem="the installed 'aiter' is not AMD's (it has no aiter.fused_moe)")
    try:
        return Package(version=importlib.metadata.version("amd-aiter"))
    except importlib.metadata.PackageNotFoundError:
        return Package(version="unknown")
