"""Expert blocks in Triton: MXFP8 weights decoded in registers, on any GPU that Triton compiles for.

``experts.experts`` is the entry point. Host code: ``experts`` and ``half`` (what is launched), ``routing`` (the sorted
order of the slots), ``config`` (tile sizes), ``launch`` (a kernel and its arguments), ``aot`` (compile a launch without
its GPU), ``tune`` (measure tile sizes on a new GPU). Device code: ``half_gemm``, ``*_kernels`` and the functions they
share, ``decode``, ``gate`` and ``overlap``. What was measured: NOTES.md.

Nothing outside this folder imports it at import time, because it needs Triton.
"""
