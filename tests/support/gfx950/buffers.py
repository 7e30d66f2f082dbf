"""Arrays in memory of their own, between pages that cannot be accessed."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from gfx950.code_object import PAGE

_libc = ctypes.CDLL(None, use_errno=True)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class DeviceBuffer:
    """A copy of a numpy array in its own mapping; guarded, it ends at an inaccessible page and follows another one."""

    FILL, ALIGN = 0xA5, 16

    def __init__(self, array: np.ndarray, guard: bool = True) -> None:
        if not array.flags.c_contiguous:
            raise ValueError(f"array of shape {array.shape} is not C-contiguous")
        self.array, self.size = array, array.nbytes
        pages = -(-max(self.size, 1) // PAGE)
        self._memory = mmap.mmap(-1, (pages + 2) * PAGE)
        self._low = address_of(self._memory) + PAGE
        self._high = self._low + pages * PAGE
        slack = (pages * PAGE - self.size) // self.ALIGN * self.ALIGN if guard else 0
        self.address = self._low + slack
        ctypes.memset(self._low, self.FILL, pages * PAGE)
        ctypes.memmove(self.address, array.ctypes.data, self.size)
        if guard:
            for page in (self._low - PAGE, self._high):
                if _libc.mprotect(ctypes.c_void_p(page), PAGE, 0):
                    raise OSError(ctypes.get_errno(), "mprotect")

    def slack_is_untouched(self) -> bool:
        """The accessible bytes around the array were not written."""
        end = self.address + self.size
        around = ctypes.string_at(self._low, self.address - self._low) + ctypes.string_at(end, self._high - end)
        return around.count(self.FILL) == len(around)

    def copy_back(self) -> None:
        """Update the numpy array."""
        content = np.frombuffer(ctypes.string_at(self.address, self.size), np.uint8)
        self.array.reshape(-1).view(np.uint8)[:] = content
