"""A kernel to compile, before it is built. Knows no target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

_SCALARS = {"i64": "i64", "i32": "i64", "f32": "f32"}
"""What launches call the scalars that kernels declare: a GPU takes a plan's integers as 32 bits."""


@dataclass(frozen=True)
class KernelRequest:
    """One kernel to compile: `builder(traits, *arguments)` returns a `Kernel`, which gets the symbol `name`.

    `operands`, where given, are the kinds of the entries that its launches pass ("buffer", "i64", "f32"), which must be
    those that the kernel declares: launches are untyped, and a slip would read a number as an address.

    Requests travel to worker processes, since this TVM cannot serialise TIR: a builder is a module-level function.
    """

    name: str
    builder: Callable[..., Any]
    arguments: tuple[Any, ...]
    operands: tuple[str, ...] | None = None

    def build(self, traits: Any) -> Any:
        """The target's `Kernel`, named and checked."""
        kernel = self.builder(traits, *self.arguments)
        declared = tuple(_SCALARS.get(a.kind, "buffer") for a in kernel.arguments)
        if self.operands is not None and self.operands != declared:
            raise AssertionError(f"kernel {self.name} declares {declared}, its launch passes {self.operands}")
        return replace(kernel, name=self.name, function=kernel.function.with_attr("global_symbol", self.name))


def request(builder: Callable[..., Any], *arguments: Any) -> KernelRequest:
    """A kernel by its builder; the symbol is spelt from the arguments."""
    words = [builder.__name__, *(_word(a) for a in arguments)]
    return KernelRequest("_".join(words), builder, arguments)


def _word(argument: Any) -> str:
    if argument is None:
        return "rows"
    if isinstance(argument, bool):
        return "norm" if argument else "plain"
    if isinstance(argument, tuple):
        return "_".join(map(str, argument)) or "none"
    return str(argument)


def distinct(requests: Sequence[KernelRequest]) -> list[KernelRequest]:
    """Every kernel once: equal names mean equal code."""
    return list({r.name: r for r in requests}.values())


def batches(requests: Sequence[KernelRequest], workers: int) -> Iterator[list[KernelRequest]]:
    """Small batches, so that the processes finish together; at least one, if empty."""
    size = max(1, min(4, len(requests) // (4 * workers)))
    for start in range(0, max(1, len(requests)), size):
        yield list(requests[start : start + size])
