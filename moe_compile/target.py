"""The hardware a block will run on and the kernel packages found here: plain data that selection reads."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from moe_compile import aiter_package
from moe_compile.packages import Package as Package
from moe_compile.packages import installed


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
class Capabilities:
    """What is installed. ``triton_interpreted``: ``TRITON_INTERPRET=1``, kernels run on the CPU, slowly."""

    triton: Package = Package()
    aiter: Package = Package(problem="not looked for")
    flydsl: Package = Package(problem="not looked for")
    triton_interpreted: bool = False

    @classmethod
    def detect(cls) -> Capabilities:
        """Look at this environment without importing Triton, AITER or FlyDSL; on a gfx950, AITER is imported."""
        return cls(
            triton=installed("triton", "pip install 'triton>=3.6'"),
            aiter=aiter_package.find(import_it=_needs_import()),
            flydsl=installed("flydsl", "pip install flydsl"),
            triton_interpreted=os.environ.get("TRITON_INTERPRET") == "1",
        )

    def versions(self) -> dict[str, str | None]:
        return {"triton": self.triton.version, "aiter": self.aiter.version, "flydsl": self.flydsl.version}


def _needs_import() -> bool:
    """Whether this machine could run AITER: only then is importing it worth its time."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return False
    devices = range(torch.cuda.device_count())
    return any(Target.of(torch.device("cuda", index)).arch == "gfx950" for index in devices)
