"""Calls of the Vulkan loader, `libvulkan.so.1`: structures that own what they point to, and results as errors.

Knows the shape of the API; nothing of what is done with it.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

from dflashc.runtime.device.vulkan import definitions as vk
from dflashc.runtime.errors import TargetError

LIBRARY = "libvulkan.so.1"

_HINTS = {
    vk.OUT_OF_DEVICE_MEMORY: "use a smaller --ctx, or close what else uses the device",
    vk.OUT_OF_HOST_MEMORY: "use a smaller --ctx, or close what else uses memory",
    vk.DEVICE_LOST: "the driver gave the device up; start again",
    vk.TIMEOUT: "the device hangs; end what else uses it, or restart it",
    -9: "install a driver for your device (Debian: apt install mesa-vulkan-drivers)",
}


class Api:
    """The loader's functions.

    Parameters
    ----------
    ffi : cffi.FFI
        With the declarations of `definitions`.
    library
        What has the functions as attributes.
    """

    def __init__(self, ffi: Any, library: Any) -> None:
        self.ffi = ffi
        self.library = library
        self._owned: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def struct(self, name: str, **members: Any) -> Any:
        """A structure of that type with its `sType`; it keeps alive what its members point to."""
        made = self.ffi.new(f"{name} *")
        if name in vk.STRUCTURE_TYPES:
            made.sType = vk.STRUCTURE_TYPES[name]
        for member, value in members.items():
            setattr(made, member, value)
        self._owned[made] = list(members.values())
        return made

    def array(self, of: str, values: list[Any]) -> Any:
        """A C array; structures are copied into it, and what they point to is kept alive."""
        made = self.ffi.new(f"{of}[]", len(values))
        for index, value in enumerate(values):
            made[index] = value[0] if of.startswith("Vk") and self._is_struct(value) else value
        self._owned[made] = values
        return made

    def call(self, function: str, *arguments: Any) -> int:
        """Call a function that returns a `VkResult`; raises `TargetError` for an error."""
        result: int = getattr(self.library, function)(*arguments)
        if result < 0:
            raise failure(function, result)
        return result

    def create(self, function: str, of: str, parent: Any, info: Any) -> Any:
        """Call `function(parent, info, NULL, &handle)` and return the handle."""
        handle = self.ffi.new(f"{of} *")
        self.call(function, parent, info, self.ffi.NULL, handle)
        return handle[0]

    def enumerate(self, function: str, of: str, *arguments: Any) -> Any:
        """All elements that a function of (..., count, elements) lists."""
        count = self.ffi.new("uint32_t *")
        self.call(function, *arguments, count, self.ffi.NULL)
        elements = self.ffi.new(f"{of}[]", count[0])
        self.call(function, *arguments, count, elements)
        return elements

    def text(self, characters: Any) -> str:
        """A C string from a driver."""
        raw: bytes = self.ffi.string(characters)
        return raw.decode(errors="replace")

    def _is_struct(self, value: Any) -> bool:
        return isinstance(value, self.ffi.CData) and self.ffi.typeof(value).kind == "pointer"


def failure(function: str, result: int) -> TargetError:
    """A result as an error."""
    reason = vk.RESULTS.get(result, f"error {result}")
    hint = _HINTS.get(result, "see `dflashc targets`")
    return TargetError(f"Vulkan: {function} failed: {reason}: {hint}")


@cache
def load_api() -> Api:
    """The loader of this machine. Raises `TargetError` where it or cffi is missing."""
    try:
        from cffi import FFI
    except ImportError as error:
        raise TargetError("Vulkan devices need the Python package cffi: pip install 'dflashc[vulkan]'") from error
    ffi = FFI()
    ffi.cdef(vk.declarations())
    try:
        return Api(ffi, ffi.dlopen(LIBRARY))
    except OSError as error:
        raise TargetError(f"{LIBRARY} was not found: install the Vulkan loader and a driver (Debian: apt install "
                          "libvulkan1 mesa-vulkan-drivers)") from error
