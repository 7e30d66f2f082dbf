# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""What the host compiles and calls: a launcher for each kernel; the grid and the stream are run-time arguments."""

# No postponed annotations: FlyDSL reads them.
import flydsl.compiler as flyc
import flydsl.expr as fx

from moe_compile.kernels.flydsl import kernels
from moe_compile.kernels.flydsl.limits import LANES

_BLOCK = (LANES, 1, 1)


@flyc.jit
def quantize(
    x: fx.Pointer,
    values: fx.Pointer,
    scales: fx.Pointer,
    words: fx.Int32,
    grid_x: fx.Int32,
    grid_y: fx.Int32,
    dtype: fx.Constexpr[str],
    stream: fx.Stream,
):
    kernels.quantize_kernel(x, values, scales, words, dtype).launch(
        grid=(grid_x, grid_y, 1), block=_BLOCK, stream=stream
    )


@flyc.jit
def gate_up(
    x: fx.Pointer,
    x_scale: fx.Pointer,
    w: fx.Pointer,
    w_scale: fx.Pointer,
    block_expert: fx.Pointer,
    block_slots: fx.Pointer,
    out: fx.Pointer,
    out_scale: fx.Pointer,
    grid_x: fx.Int32,
    grid_y: fx.Int32,
    h: fx.Constexpr[int],
    i: fx.Constexpr[int],
    top_k: fx.Constexpr[int],
    direct: fx.Constexpr[bool],
    alpha: fx.Constexpr[float],
    limit: fx.Constexpr[float],
    limit_after: fx.Constexpr[bool],
    up_offset: fx.Constexpr[float],
    stream: fx.Stream,
):
    kernels.gate_up_kernel(
        x,
        x_scale,
        w,
        w_scale,
        block_expert,
        block_slots,
        out,
        out_scale,
        h,
        i,
        top_k,
        direct,
        alpha,
        limit,
        limit_after,
        up_offset,
    ).launch(grid=(grid_x, grid_y, 1), block=_BLOCK, stream=stream)


@flyc.jit
def down(
    z: fx.Pointer,
    z_scale: fx.Pointer,
    w: fx.Pointer,
    w_scale: fx.Pointer,
    block_expert: fx.Pointer,
    block_slots: fx.Pointer,
    out: fx.Pointer,
    grid_x: fx.Int32,
    grid_y: fx.Int32,
    h: fx.Constexpr[int],
    i: fx.Constexpr[int],
    direct: fx.Constexpr[bool],
    stream: fx.Stream,
):
    kernels.down_kernel(z, z_scale, w, w_scale, block_expert, block_slots, out, h, i, direct).launch(
        grid=(grid_x, grid_y, 1), block=_BLOCK, stream=stream
    )


@flyc.jit
def reduce(
    partials: fx.Pointer,
    local_ids: fx.Pointer,
    weights: fx.Pointer,
    out: fx.Pointer,
    grid_x: fx.Int32,
    grid_y: fx.Int32,
    h: fx.Constexpr[int],
    top_k: fx.Constexpr[int],
    dtype: fx.Constexpr[str],
    stream: fx.Stream,
):
    kernels.reduce_kernel(partials, local_ids, weights, out, h, top_k, dtype).launch(
        grid=(grid_x, grid_y, 1), block=_BLOCK, stream=stream
    )
