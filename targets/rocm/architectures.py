"""AMD's GPU architectures that kernels are built for, products of each, and the HIP runtime it takes. Data only."""

from typing import NamedTuple


class Architecture(NamedTuple):
    """A processor: products, and the first HIP runtime known to run code for it; "" where any that finds the GPU does.

    gfx1151: earlier runtimes refuse code or crash at the first allocation, as reported by users; gfx1200 and gfx1201:
    AMD's system requirements of ROCm 6.4.1 are the first to list them.
    """

    products: str
    runtime: str = ""


ARCHITECTURES = {
    "gfx1100": Architecture("RDNA 3: RX 7900, PRO W7900"),
    "gfx1101": Architecture("RDNA 3: RX 7800, RX 7700"),
    "gfx1102": Architecture("RDNA 3: RX 7600"),
    "gfx1151": Architecture("RDNA 3.5: Radeon 8060S (Ryzen AI Max)", "HIP 7.2"),
    "gfx1200": Architecture("RDNA 4: RX 9060", "HIP 6.4"),
    "gfx1201": Architecture("RDNA 4: RX 9070", "HIP 6.4"),
}
"""All run 32 threads in step and have v_dot4_i32_iu8."""
