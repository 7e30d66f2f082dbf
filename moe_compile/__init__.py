"""moe_compile: fused MXFP8 mixture-of-experts for torch.compile (``backend="moe_rocm"``)."""

from moe_compile._version import __version__

__all__ = ["__version__"]
