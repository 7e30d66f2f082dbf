"""The `aiter` backend: AITER's FlyDSL kernels for MXFP8 experts on gfx950, behind this package's operator.

`shuffle` is AITER's memory layout, `packed` the weights in it, `experts` the call, `limits` what it can run.
"""
