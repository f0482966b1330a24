"""Which keys a row sees, and which of the fixed slots of a long context they fall into.

The context is cut into parts of 256 keys, and part p belongs to slot p mod P. Both are fixed by position, so the order
in which a row's keys are added up does not depend on how many rows there are. Knows nothing of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from dflashc.targets.gpu.builder import Expr, bind, i32, select

PART = 256
"""Keys of a part."""


@dataclass(frozen=True)
class Reach:
    """The keys that the rows of a program see.

    Attributes
    ----------
    position : int32
        Of row 0.
    rows : int32
        Rows of the program.
    window : int32
        Keys that a row sees, itself the last of them; 0 is no limit.
    block : int32
        Not 0 where all rows see each other (a drafted block), 0 where they see what is before them.
    slots : int
        P.
    """

    position: Expr
    rows: Expr
    window: Expr
    block: Expr
    slots: int

    def first(self, row: Expr) -> Expr:
        """The first key that a row sees."""
        limited = tirx.max(self.position + row - self.window + 1, i32(0))
        return bind(select(self.window > i32(0), limited, i32(0)))

    def last(self, row: Expr) -> Expr:
        """The last key that a row sees."""
        return bind(self.position + select(self.block != i32(0), self.rows - 1, row))

    def ahead(self, slot: Expr, key: Expr) -> Expr:
        """How many parts after that of `key` the next part of `slot` comes, 0 to P - 1."""
        distance = slot - tirx.truncmod(tirx.truncdiv(key, i32(PART)), i32(self.slots))
        return bind(tirx.truncmod(distance + self.slots, i32(self.slots)))
