"""The order in which AITER's MXFP8 kernels read weights and block scales, and the way back.

Three steps, E experts, N rows, K the contracted dimension:

- **Gate and up rows alternate in blocks of 16**: 16 gate rows, the 16 up rows that belong to them, and so on.
- **Elements** go in tiles of 16 rows by 32 columns, each as two halves of 16 columns: the 16 bytes that one lane loads
  are 16 neighbouring columns of one row.
- **Scales** go in tiles of 32 rows by 8 columns, such that the four bytes of one lane's register are rows r and r + 16
  of columns c and c + 4. Rows are padded to 256 and columns to 8 with byte 0 (2**-127). AITER's own function leaves
  those bytes uninitialised, and a kernel may load them: NaN (byte 255) must not be there.

Every function works on bytes and writes through a strided view: nothing as large as a weight is allocated but the
result.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 16  # rows of gate that stand together
ROW_MULTIPLE, SCALE_ROW_MULTIPLE, SCALE_COLUMN_MULTIPLE = 16, 256, 8
COLUMN_MULTIPLE = 32
PAD_SCALE = 0


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """The padded shape of (rows, columns) scale bytes."""
    return _up(rows, SCALE_ROW_MULTIPLE), _up(columns, SCALE_COLUMN_MULTIPLE)


def interleave(rows: Tensor) -> Tensor:
    """(E, 2I, C), gate rows then up rows, to (E, 2I, C) in blocks of 16 rows. I must be a multiple of 16."""
    return _grouped(rows).transpose(1, 2).reshape(rows.shape)


def deinterleave(rows: Tensor) -> Tensor:
    """The inverse of `interleave`."""
    experts, count, columns = rows.shape
    grouped = rows.reshape(experts, count // (2 * GROUP), 2, GROUP, columns)
    return grouped.transpose(1, 2).reshape(rows.shape)


def shuffle_weight_into(out: Tensor, weight: Tensor, gate_and_up: bool) -> None:
    """Write a weight in AITER's order.

    Args:
        out: (E, N, K), contiguous, one byte an element.
        weight: (E, N, K), contiguous, one byte an element; N a multiple of 16 (32 with gate and up), K of 32.
        gate_and_up: gate rows and then up rows, which are to alternate.
    """
    experts, rows, columns = weight.shape
    source = _bytes(weight)
    if gate_and_up:
        grouped = source.view(experts, 2, rows // 32, GROUP, columns // 32, 2, 16).permute(0, 2, 1, 4, 5, 3, 6)
    else:
        grouped = source.view(experts, rows // 16, 16, columns // 32, 2, 16).permute(0, 1, 3, 4, 2, 5)
    _bytes(out).view(grouped.shape).copy_(grouped)


def unshuffle_weight(shuffled: Tensor, gate_and_up: bool) -> Tensor:
    """The inverse of `shuffle_weight_into`: (E, N, K) in the dtype of ``shuffled``, gate rows and then up rows."""
    experts, rows, columns = shuffled.shape
    tiles = _bytes(shuffled).view(experts, rows // 16, columns // 32, 2, 16, 16)
    plain = tiles.permute(0, 1, 4, 2, 3, 5).reshape(experts, rows, columns)
    return (deinterleave(plain) if gate_and_up else plain).view(shuffled.dtype)


def shuffle_scale_into(out: Tensor, scale: Tensor, gate_and_up: bool) -> None:
    """Write scale bytes in AITER's order, padding included.

    Args:
        out: `scale_shape` (E * N, C), contiguous, one byte an element.
        scale: (E, N, C), one byte an element; N a multiple of 32 with gate and up.
        gate_and_up: as for `shuffle_weight_into`.
    """
    experts, rows, columns = scale.shape
    source = _bytes(scale)
    flat = (interleave(source) if gate_and_up else source).reshape(experts * rows, columns)
    padded_rows, padded_columns = scale_shape(*flat.shape)
    padded = torch.full((padded_rows, padded_columns), PAD_SCALE, dtype=torch.uint8, device=scale.device)
    padded[: flat.shape[0], :columns] = flat
    tiles = padded.view(padded_rows // 32, 2, 16, padded_columns // 8, 2, 4).permute(0, 3, 5, 2, 4, 1)
    _bytes(out).view(tiles.shape).copy_(tiles)


def unshuffle_scale(shuffled: Tensor, experts: int, rows: int, columns: int, gate_and_up: bool) -> Tensor:
    """The inverse of `shuffle_scale_into`: (E, N, C) uint8 without the padding."""
    padded_rows, padded_columns = shuffled.shape
    tiles = _bytes(shuffled).view(padded_rows // 32, padded_columns // 8, 4, 16, 2, 2)
    plain = tiles.permute(0, 5, 3, 1, 4, 2).reshape(padded_rows, padded_columns)
    scale = plain[: experts * rows, :columns].reshape(experts, rows, columns)
    return deinterleave(scale) if gate_and_up else scale


def _grouped(rows: Tensor) -> Tensor:
    experts, count, columns = rows.shape
    return rows.reshape(experts, 2, count // (2 * GROUP), GROUP, columns)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
