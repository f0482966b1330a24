"""The plan: what a model pair became after compilation. Buffers, kernels, and per program an ordered list of launches.

Plain data, written by the compiler and replayed by a device; JSON on disk. Knows nothing of TVM, of models, or of how a
device runs a launch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflashc.runtime.errors import ArtefactError

PLAN_VERSION = 2


CONTEXT_STEP = 256
"""Tokens; a context capacity is a multiple of it, and so is that of a ring."""

DRAFTER = "drafter."
"""Begins the names of a drafter's buffers."""


@dataclass(frozen=True)
class Buffer:
    """Device memory of a given role.

    Attributes
    ----------
    role : str
        "scratch" (contents live inside one run), "cache" (K/V, lives with the session), "state" (the state block),
        "output" (read by the host), "view" (part of another buffer, chosen when a run is recorded).
    bytes : int
        Size that does not depend on the context capacity.
    bytes_per_token : int
        Further bytes per token of context capacity.
    window, slots : int
        Of a cache that is a ring (see `rings`): the latest tokens that a row sees, and how many it holds; else 0.
    """

    name: str
    role: str
    bytes: int
    bytes_per_token: int = 0
    window: int = 0
    slots: int = 0

    def size(self, context: int) -> int:
        """Bytes at a context capacity of `context` tokens."""
        return self.bytes + self.bytes_per_token * context


@dataclass(frozen=True)
class Operand:
    """One entry of a launch's argument table.

    kind "weight": `name` is a packed tensor, `value` a byte offset into it; "buffer": `name` is a buffer, `value` +
    `per_token` * context capacity a byte offset; "i64", "f32": the scalar `value`; "context": the context capacity in
    tokens, known when the plan is bound.
    """

    kind: str
    name: str = ""
    value: float = 0
    per_token: int = 0

    def offset(self, context: int) -> int:
        """Byte offset at a context capacity of `context` tokens."""
        return int(self.value) + self.per_token * context


@dataclass(frozen=True)
class Units:
    """Independent units of a launch: `multiple * ceil((n + addend) / divisor)`, or `multiple` where divisor is 0.

    n is the committed length in tokens at the time of the run.
    """

    multiple: int
    addend: int = 0
    divisor: int = 0

    def at(self, length: int) -> int:
        """Units with `length` tokens committed."""
        return self.multiple * -(-(length + self.addend) // self.divisor) if self.divisor else self.multiple


@dataclass(frozen=True)
class Launch:
    """One kernel call.

    Attributes
    ----------
    operation : str
        What it does in the model's terms, e.g. "blk.3 attention"; for people.
    grain : int
        Units that a thread claims at a time.
    barrier : bool
        Whether later launches wait for this one and those before it; launches up to a barrier run at the same time.
    bytes_read : int
        Weight bytes read, for reports.
    flops : int
        Arithmetic operations (two per multiply-add), for reports.
    choice : str
        All launches of one choice have to take the variant of the same name; "" where there is nothing to choose.
    variants : tuple of (name, kernel)
        Kernels that may be called, the default first; their results need not be the same bits.
    """

    kernel: str
    operation: str
    units: Units
    grain: int
    operands: tuple[Operand, ...]
    barrier: bool = True
    bytes_read: int = 0
    flops: int = 0
    choice: str = ""
    variants: tuple[tuple[str, str], ...] = ()

    def variant(self, name: str) -> Launch:
        """The launch with the kernel of that name. Raises `ArtefactError` where there is none."""
        kernel = dict(self.variants).get(name)
        if kernel is None:
            raise ArtefactError(f"kernel variant {name!r} of {self.choice!r} was chosen, which the plan does not have")
        return replace(self, kernel=kernel)


@dataclass(frozen=True)
class Program:
    """Launches of one role at a fixed number of rows."""

    role: str
    rows: int
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class Plan:
    """Everything a device needs, but for kernels and weights themselves.

    Attributes
    ----------
    adjacent : tuple
        Runs of weights that some launch reads as one: they lie one behind the other, the operand names the first.
    """

    buffers: dict[str, Buffer]
    programs: dict[str, Program]
    max_context: int
    adjacent: tuple[tuple[str, ...], ...] = ()

    def memory(self, context: int) -> dict[str, int]:
        """Bytes per buffer role at a context capacity of `context` tokens."""
        total: dict[str, int] = {}
        for buffer in self.buffers.values():
            if buffer.role == "view":
                continue
            total[buffer.role] = total.get(buffer.role, 0) + buffer.size(context)
        return total

    def choose(self, names: Mapping[str, str]) -> Plan:
        """The plan with the variants chosen, by choice; the others stay. Raises `ArtefactError` for unknown ones."""
        programs = {key: replace(program, launches=tuple(x.variant(names[x.choice]) if x.choice in names else x
                                                         for x in program.launches))
                    for key, program in self.programs.items()}
        return replace(self, programs=programs)

    def to_json(self) -> dict[str, Any]:
        return {"version": PLAN_VERSION, "max_context": self.max_context, "adjacent": self.adjacent,
                "buffers": [asdict(b) for b in self.buffers.values()],
                "programs": {name: _program_json(p) for name, p in self.programs.items()}}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Plan:
        """The plan of a parsed JSON document; raises `ArtefactError` when it is not one."""
        try:
            if document["version"] != PLAN_VERSION:
                raise ArtefactError(f"plan version {document['version']} found, {PLAN_VERSION} expected: build again")
            buffers = {b["name"]: Buffer(**b) for b in document["buffers"]}
            programs = {name: _program(p) for name, p in document["programs"].items()}
            adjacent = tuple(tuple(str(name) for name in names) for names in document["adjacent"])
            plan = Plan(buffers, programs, int(document["max_context"]), adjacent)
            plan.check()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ArtefactError(f"the plan is damaged ({type(error).__name__}: {error}): build again") from error
        return plan

    def check(self) -> None:
        """Raise `ArtefactError` unless every buffer has a size and every buffer operand lies inside its buffer."""
        for buffer in self.buffers.values():
            sizes = (buffer.bytes, buffer.bytes_per_token, buffer.window, buffer.slots)
            if not all(type(size) is int and size >= 0 for size in sizes) or buffer.window > buffer.slots:
                raise ArtefactError(f"the plan is damaged: buffer {buffer.name} has no valid size: build again")
        for name, program in self.programs.items():
            for launch in program.launches:
                for operand in launch.operands:
                    if operand.kind == "buffer":
                        named = self.buffers.get(operand.name)
                        if named is None or not 0 <= operand.offset(self.max_context) <= named.size(self.max_context):
                            raise ArtefactError(f"the plan is damaged: program {name} names buffer {operand.name!r} "
                                                f"at {operand.value}, which does not exist: build again")


def load_plan(path: Path) -> Plan:
    """Read a plan from a JSON file; raises `ArtefactError`."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtefactError(f"cannot read the plan {path}: {error}") from error
    return Plan.from_json(document)


# On disk a launch is a short list, and an operand a string or a number with a tag: programs hold thousands of them.


def _program_json(program: Program) -> dict[str, Any]:
    return {"role": program.role, "rows": program.rows, "launches": [
        [x.kernel, x.operation, [x.units.multiple, x.units.addend, x.units.divisor], x.grain, int(x.barrier),
         x.bytes_read, x.flops, [_operand_json(o) for o in x.operands],
         *([x.choice, *x.variants] if x.variants else [])] for x in program.launches]}


def _operand_json(operand: Operand) -> list[Any]:
    entry = [operand.kind, operand.name, operand.value]
    return [*entry, operand.per_token] if operand.per_token else entry


def _program(document: dict[str, Any]) -> Program:
    launches = tuple(
        Launch(kernel, operation, Units(*units), grain, tuple(Operand(*o) for o in operands), bool(barrier), read,
               flops, choice[0] if choice else "", tuple((str(name), str(symbol)) for name, symbol in choice[1:]))
        for kernel, operation, units, grain, barrier, read, flops, operands, *choice in document["launches"])
    return Program(document["role"], document["rows"], launches)
