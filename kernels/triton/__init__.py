"""Expert blocks in Triton: MXFP8 weights decoded in registers, on any GPU that Triton compiles for.

``experts.experts`` is the entry point. Host code: ``experts`` (what is launched), ``routing`` (the sorted order of the
slots), ``config`` (tile sizes), ``launch`` (a kernel and its arguments), ``aot`` (compile a launch without its GPU).
Device code: ``*_kernels`` and the functions they share, ``decode`` and ``gate``.

Nothing outside this folder imports it at import time, because it needs Triton.
"""
