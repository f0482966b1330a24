"""Sections and symbols of 64-bit little-endian ELF files, as GPU code comes in. Knows no instruction set.

Layout: System V ABI, chapters 4 and 5 (gabi.xinuos.com). Everything is bounds-checked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dflashc.runtime.errors import TargetError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE, _NOTE = 2, 7


@dataclass(frozen=True)
class Section:
    """A section with its bytes (none for one that only takes memory) and its size in memory."""

    name: str
    kind: int
    info: int
    data: bytes
    size: int


@dataclass(frozen=True)
class Elf:
    """An ELF file.

    Attributes
    ----------
    machine, flags, abi_version : int
        Of the header: e_machine, e_flags, EI_ABIVERSION.
    symbols : tuple of str
        Names in the symbol table, in order.
    """

    machine: int
    flags: int
    abi_version: int
    sections: tuple[Section, ...]
    symbols: tuple[str, ...]

    def notes(self) -> dict[tuple[str, int], bytes]:
        """Contents of the notes by owner and type."""
        found = {}
        for section in self.sections:
            if section.kind != _NOTE:
                continue
            at = 0
            while at + 12 <= len(section.data):
                name_size, size, kind = struct.unpack_from("<III", section.data, at)
                start = at + 12 + -(-name_size // 4) * 4
                owner = section.data[at + 12 : at + 12 + name_size].rstrip(b"\0").decode("ascii", "replace")
                found[owner, kind] = section.data[start : start + size]
                at = start + -(-size // 4) * 4
        return found


def read_elf(data: bytes) -> Elf:
    """Raises `TargetError` for bytes that are no whole 64-bit ELF file."""
    try:
        (ident, _, machine, _, _, _, start, flags, _, _, _, entry_size, count, names_index) = _HEADER.unpack_from(data)
        if ident[:6] != b"\x7fELF\x02\x01" or entry_size != _SECTION.size:
            raise TargetError("the compiled code is no 64-bit little-endian ELF file")
        headers = [_SECTION.unpack_from(data, start + i * entry_size) for i in range(count)]
        names = _contents(data, headers[names_index])
        sections = tuple(Section(_text(names, h[0]), h[1], h[7], _contents(data, h), h[5]) for h in headers)
        symbols: tuple[str, ...] = ()
        for header, section in zip(headers, sections, strict=True):
            if section.kind == _SYMBOL_TABLE:
                strings = sections[header[6]].data
                symbols = tuple(_text(strings, s[0]) for s in _SYMBOL.iter_unpack(section.data))
    except (struct.error, IndexError, ValueError) as error:
        raise TargetError(f"the compiled code is a damaged ELF file: {error}") from error
    return Elf(machine, flags, ident[8], sections, symbols)


def _contents(data: bytes, header: tuple[int, ...]) -> bytes:
    kind, offset, size = header[1], header[4], header[5]
    if kind == 8:  # SHT_NOBITS
        return b""
    if offset + size > len(data):
        raise ValueError("a section reaches past the end")
    return data[offset : offset + size]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode("ascii", "replace")
