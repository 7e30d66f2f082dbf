"""MXFP8 expert kernels in FlyDSL for gfx950. None of them has run on hardware yet."""
