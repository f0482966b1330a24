"""Typed access to metadata, so that a wrong type in a file is an error that names the key.

Owns the check of value and element types; knows nothing of how values are stored.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, cast

import numpy as np
from gguf.constants import GGUFValueType

from dflashc.runtime.errors import GgufError

from .cursor import shown
from .metadata import Metadata

V = TypeVar("V")
D = TypeVar("D")


class _Default(enum.Enum):
    MISSING = enum.auto()


_Missing = Literal[_Default.MISSING]
_MISSING: _Missing = _Default.MISSING


@dataclass(frozen=True)
class _Kind(Generic[V]):
    name: str
    types: frozenset[GGUFValueType]


_INTEGER: _Kind[int] = _Kind(
    "integer",
    frozenset(
        {
            GGUFValueType.UINT8,
            GGUFValueType.INT8,
            GGUFValueType.UINT16,
            GGUFValueType.INT16,
            GGUFValueType.UINT32,
            GGUFValueType.INT32,
            GGUFValueType.UINT64,
            GGUFValueType.INT64,
        }
    ),
)
_FLOAT: _Kind[float] = _Kind("float", frozenset({GGUFValueType.FLOAT32, GGUFValueType.FLOAT64}))
_BOOL: _Kind[bool] = _Kind("bool", frozenset({GGUFValueType.BOOL}))
_STRING: _Kind[str] = _Kind("string", frozenset({GGUFValueType.STRING}))


class TypedGetters:
    """Getters over the `metadata` of the class that takes them in.

    All raise `GgufError` naming the key: when it is missing and no `default` is given, and when the value is of
    another type. Integers may have any width. The plural getters take arrays; with `length`, the array must have
    that many items, and a scalar stands for that many equal ones (as in per-layer settings).
    """

    metadata: Metadata

    def get_int(self, key: str, default: D | _Missing = _MISSING) -> int | D:
        return self._scalar(key, _INTEGER, default)

    def get_float(self, key: str, default: D | _Missing = _MISSING) -> float | D:
        return self._scalar(key, _FLOAT, default)

    def get_bool(self, key: str, default: D | _Missing = _MISSING) -> bool | D:
        return self._scalar(key, _BOOL, default)

    def get_str(self, key: str, default: D | _Missing = _MISSING) -> str | D:
        return self._scalar(key, _STRING, default)

    def get_ints(self, key: str, default: D | _Missing = _MISSING, length: int | None = None) -> list[int] | D:
        return self._array(key, _INTEGER, default, length)

    def get_floats(self, key: str, default: D | _Missing = _MISSING, length: int | None = None) -> list[float] | D:
        return self._array(key, _FLOAT, default, length)

    def get_bools(self, key: str, default: D | _Missing = _MISSING, length: int | None = None) -> list[bool] | D:
        return self._array(key, _BOOL, default, length)

    def get_strings(self, key: str, default: D | _Missing = _MISSING, length: int | None = None) -> list[str] | D:
        return self._array(key, _STRING, default, length)

    def _scalar(self, key: str, kind: _Kind[V], default: D | _Missing) -> V | D:
        if key not in self.metadata:
            return self._absent(key, kind.name, default)
        field = self.metadata.fields[key]
        if field.kind not in kind.types or field.count is not None:
            raise self._mismatch(key, kind.name)
        return cast(V, self.metadata[key])

    def _array(self, key: str, kind: _Kind[V], default: D | _Missing, length: int | None) -> list[V] | D:
        if key not in self.metadata:
            return self._absent(key, f"array of {kind.name}", default)
        field = self.metadata.fields[key]
        if field.kind not in kind.types or (field.count is None and length is None):
            raise self._mismatch(key, f"array of {kind.name}")
        value = self.metadata[key]
        if field.count is None:
            return [cast(V, value)] * cast(int, length)
        if length is not None and field.count != length:
            raise self._error(f"key {shown(key)} has {field.count} items, expected {length}")
        return cast(list[V], value.tolist() if isinstance(value, np.ndarray) else list(cast(list[str], value)))

    def _absent(self, key: str, expected: str, default: D | _Missing) -> D:
        if default is _MISSING:
            raise self._error(f"key {shown(key)} ({expected}) is missing")
        return default

    def _mismatch(self, key: str, expected: str) -> GgufError:
        return self._error(f"key {shown(key)} holds {self.metadata.fields[key].type_name}, expected {expected}")

    def _error(self, message: str) -> GgufError:
        return GgufError(f"{self.metadata.path}: {message}")
