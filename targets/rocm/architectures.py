"""AMD's GPU architectures that run these kernels, products of each, and the first ROCm that supports it. Data only."""

from typing import NamedTuple


class Architecture(NamedTuple):
    """A processor: products, and the first ROCm release (major, minor) whose HIP runtime loads code for it."""

    products: str
    rocm: tuple[int, int]


ARCHITECTURES = {
    "gfx1100": Architecture("RDNA 3: RX 7900, PRO W7900", (5, 7)),
    "gfx1101": Architecture("RDNA 3: RX 7800, 7700", (6, 2)),
    "gfx1102": Architecture("RDNA 3: RX 7600", (6, 2)),
    "gfx1150": Architecture("RDNA 3.5: Radeon 890M", (7, 0)),
    "gfx1151": Architecture("RDNA 3.5: Radeon 8060S (Ryzen AI Max)", (7, 2)),
    "gfx1200": Architecture("RDNA 4: RX 9060", (6, 4)),
    "gfx1201": Architecture("RDNA 4: RX 9070", (6, 4)),
}
"""All run 32 threads in step and have v_dot4_i32_iu8."""
