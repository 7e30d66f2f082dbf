"""AMDGPU code objects: the ELF file, its metadata note, kernel descriptors."""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

PAGE = 4096


class _MsgpackReader:
    """The part of msgpack that AMDGPU metadata notes use."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def _take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def _integer(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(count), "big", signed=signed)

    def _array(self, count: int) -> list[Any]:
        return [self.value() for _ in range(count)]

    def _map(self, count: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(count)}

    def value(self) -> Any:
        """The next value."""
        tag = self._integer(1)
        if tag <= 0x7F or tag >= 0xE0:
            return tag if tag <= 0x7F else tag - 256
        if tag <= 0x8F:
            return self._map(tag & 15)
        if tag <= 0x9F:
            return self._array(tag & 15)
        if tag <= 0xBF:
            return self._take(tag & 31).decode()
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        if 0xC4 <= tag <= 0xC6:
            return self._take(self._integer(1 << (tag - 0xC4)))
        if 0xCC <= tag <= 0xCF:
            return self._integer(1 << (tag - 0xCC))
        if 0xD0 <= tag <= 0xD3:
            return self._integer(1 << (tag - 0xD0), signed=True)
        if 0xD9 <= tag <= 0xDB:
            return self._take(self._integer(1 << (tag - 0xD9))).decode()
        if tag in (0xDC, 0xDD):
            return self._array(self._integer(2 << (tag - 0xDC)))
        if tag in (0xDE, 0xDF):
            return self._map(self._integer(2 << (tag - 0xDE)))
        raise ValueError(f"msgpack tag {tag:#x}")


class _Segment(NamedTuple):
    """A program header."""

    type: int
    flags: int
    offset: int
    vaddr: int
    paddr: int
    file_size: int
    memory_size: int
    align: int


class _Section(NamedTuple):
    """A section header."""

    name: int
    type: int
    flags: int
    vaddr: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


class KernelDescriptor(NamedTuple):
    """The fields of a kernel descriptor (amdhsa ABI) that matter here."""

    group_size: int  # static LDS bytes
    private_size: int  # scratch bytes per lane
    kernarg_size: int
    entry: int  # address in the image
    rsrc1: int
    rsrc2: int
    properties: int  # which user SGPRs are set up
    preload_length: int  # kernarg preloading: how many dwords,
    preload_offset: int  # starting with which

    @property
    def flushes_fp32_denormals(self) -> bool:
        """FLOAT_DENORM_MODE_32 is flush."""
        return (self.rsrc1 >> 16) & 3 == 0

    @property
    def mode(self) -> int:
        """The initial MODE register: rounding, denormals, IEEE, FP16_OVFL."""
        return (self.rsrc1 >> 12 & 0xFF) | (self.rsrc1 >> 23 & 1) << 9 | (self.rsrc1 >> 26 & 1) << 23


class CodeObject:
    """A parsed AMDGPU ELF.  kernels: name to metadata; symbols: name to (address, size)."""

    def __init__(self, data: bytes) -> None:
        if data[:5] != b"\x7fELF\x02":
            raise ValueError("not a 64-bit ELF file")
        header = struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
        _, machine, _, _, segments_at, sections_at, _, _, segment_size, segments, section_size, sections, _ = header
        if machine != 224:
            raise ValueError(f"ELF machine {machine} is not AMDGPU")
        self._data = data
        self._segments = [
            _Segment(*struct.unpack_from("<IIQQQQQQ", data, segments_at + i * segment_size)) for i in range(segments)
        ]
        self._sections = [
            _Section(*struct.unpack_from("<IIQQQQIIQQ", data, sections_at + i * section_size)) for i in range(sections)
        ]
        self.symbols: dict[str, tuple[int, int]] = {}
        metadata: dict[str, Any] = {}
        for section in self._sections:
            if section.type in (2, 11):  # SYMTAB, DYNSYM
                self._read_symbols(section)
            elif section.type == 7:  # NOTE
                metadata = self._read_metadata(section) or metadata
            elif section.type in (4, 9) and section.size:
                raise NotImplementedError("code object with relocations")
        self.kernels: dict[str, dict[str, Any]] = {k[".name"]: k for k in metadata.get("amdhsa.kernels", [])}

    def _read_symbols(self, section: _Section) -> None:
        strings = self._sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, section.entry_size):
            name_at, _, _, _, value, size = struct.unpack_from("<IBBHQQ", self._data, at)
            name = self._data[strings + name_at : self._data.index(b"\0", strings + name_at)].decode()
            self.symbols[name] = value, size

    def _read_metadata(self, section: _Section) -> Any:
        at = section.offset
        while at < section.offset + section.size:
            name_size, size, note_type = struct.unpack_from("<III", self._data, at)
            name = self._data[at + 12 : at + 12 + name_size].rstrip(b"\0")
            at += 12 + (name_size + 3 & ~3)
            if name == b"AMDGPU" and note_type == 32:
                return _MsgpackReader(self._data[at : at + size]).value()
            at += size + 3 & ~3
        return None

    def _loaded(self) -> list[_Segment]:
        return [segment for segment in self._segments if segment.type == 1]

    def read(self, vaddr: int, count: int) -> bytes:
        """Bytes of the image."""
        for segment in self._loaded():
            if segment.vaddr <= vaddr < segment.vaddr + segment.memory_size:
                start = segment.offset + vaddr - segment.vaddr
                return self._data[start : start + count]
        raise KeyError(hex(vaddr))

    def descriptor(self, name: str) -> KernelDescriptor:
        """The descriptor of a kernel."""
        address = self.symbols[name + ".kd"][0]
        raw = self.read(address, 64)
        group_size, private_size, kernarg_size, _, entry = struct.unpack_from("<IIIIq", raw, 0)
        rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIHH", raw, 48)
        return KernelDescriptor(
            group_size,
            private_size,
            kernarg_size,
            address + entry,
            rsrc1,
            rsrc2,
            properties,
            preload_length=preload & 0x7F,
            preload_offset=preload >> 7,
        )

    def load(self) -> mmap.mmap:
        """The image in memory of this process, with a spare page for reading ahead."""
        size = max(segment.vaddr + segment.memory_size for segment in self._loaded())
        image = mmap.mmap(-1, (size + 0x3FFF) & ~(PAGE - 1))
        for segment in self._loaded():
            content = self._data[segment.offset : segment.offset + segment.file_size]
            image[segment.vaddr : segment.vaddr + segment.file_size] = content
        return image


def read_code_object(path: str | Path) -> bytes:
    """An ELF file, or the ELF inside FlyDSL's dump NN_gpu_module_to_binary.mlir (FLYDSL_DUMP_IR=1)."""
    data = Path(path).read_bytes()
    if data.startswith(b"\x7fELF"):
        return data
    found = re.search(rb'"(\\7FELF(?:[^"\\]|\\.)*)"', data, re.DOTALL)
    if found is None:
        raise ValueError(f"{path}: neither an ELF file nor an MLIR module with a binary")

    def unescape(escape: re.Match[bytes]) -> bytes:
        text = escape.group(1)
        return bytes([int(text, 16)]) if len(text) == 2 else {b"n": b"\n", b"t": b"\t"}.get(text, text)

    return re.sub(rb"\\([0-9A-Fa-f]{2}|.)", unescape, found.group(1), flags=re.DOTALL)
