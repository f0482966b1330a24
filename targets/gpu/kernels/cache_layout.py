"""Where a layer's K and V caches hold what, and how numbers become float16 in them.

Both are uint32 words of two neighbouring dimensions, float16 each:
 - K: [kv_heads][capacity / 32][D / 2][32]: the same two dimensions of 32 keys side by side, a key per thread;
 - V: [kv_heads][capacity][D / 2]: the dimensions of a value side by side, two per thread.
The capacity in tokens is a multiple of 256; position p is in slot p mod capacity, so a cache that is smaller than the
context is a ring. Knows nothing of attention.
"""

from __future__ import annotations

from tvm import tirx

from dflashc.targets.gpu.builder import Expr, bind, cast, f32, i32, reinterpret, select, u32
from dflashc.targets.gpu.traits import Traits

KEYS = 32
"""Keys that lie side by side."""

_LARGEST = 65504.0  # of float16


def slot(position: Expr, capacity: Expr) -> Expr:
    """The slot of a position."""
    return bind(tirx.truncmod(position, capacity))


def key_word(size: int, capacity: Expr, head: Expr, key_slot: Expr, pair: Expr | int) -> Expr:
    """Index of dimensions 2 * pair and 2 * pair + 1 of the key in `key_slot`; head size D = `size`."""
    side_by_side = bind(tirx.truncmod(key_slot, i32(KEYS)))
    first = bind(head * capacity + key_slot - side_by_side)
    return first * (size // 2) + pair * KEYS + side_by_side


def value_word(size: int, capacity: Expr, head: Expr, value_slot: Expr, pair: Expr | int) -> Expr:
    """Index of dimensions 2 * pair and 2 * pair + 1 of the value in `value_slot`; head size D = `size`."""
    return (head * capacity + value_slot) * (size // 2) + pair


def pack(x: Expr, y: Expr) -> Expr:
    """The word of two float32. What float16 cannot hold becomes its largest number, and NaN too: a key that a row does
    not see has weight 0 there, and 0 times its value has to be 0, whatever a later row computed.
    """
    def half(value: Expr) -> Expr:
        value = bind(select(value < f32(_LARGEST), value, f32(_LARGEST)))
        value = bind(select(value > f32(-_LARGEST), value, f32(-_LARGEST)))
        return bind(cast("uint32", reinterpret("uint16", cast("float16", value))))

    return half(x) | tirx.shift_left(half(y), u32(16))


def unpack(traits: Traits, word: Expr) -> tuple[Expr, Expr]:
    """The two float16 of a word, as float32."""
    low = traits.half_to_float(word & u32(0xFFFF))
    return bind(low), bind(traits.half_to_float(tirx.shift_right(word, u32(16))))
