"""Expert kernels: the MXFP8 format, the torch reference, the Triton kernels and the operators over them."""
