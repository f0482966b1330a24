"""The devices that artefacts are meant for, and what limits them: figures of their makers, and measured bandwidth.

For predictions alone: no kernel and no choice depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceLimits:
    """A device's roof.

    Attributes
    ----------
    target : str
        What to build for.
    bandwidth : float
        Bytes per second that a copy reaches (read side of a stream); about 0.92 of the nominal figure on discrete
        cards, on Strix Halo as measured by its users.
    dot_rate : float
        Multiply-adds per second of four-byte dot products (dp4a, v_dot4), without matrix units.
    memory : float
        Bytes.
    launch_seconds : float
        Least time of a launch inside a recorded graph.
    """

    name: str
    target: str
    bandwidth: float
    dot_rate: float
    memory: float
    launch_seconds: float


DEVICES = (
    # 1008 GB/s; 128 SMs x 64 dp4a a clock x 4 at 2.52 GHz
    DeviceLimits("RTX 4090", "cuda-sm89", 0.92 * 1008e9, 128 * 64 * 4 * 2.52e9, 24e9, 1.5e-6),
    # 256 GB/s, 212 measured; 40 CUs x 64 v_dot4 a clock x 4 at 2.9 GHz
    DeviceLimits("Strix Halo", "vulkan-gfx1151", 212e9, 40 * 64 * 4 * 2.9e9, 96e9, 3e-6),
    # 960 GB/s; 96 CUs x 64 v_dot4 a clock x 4 at 2.5 GHz
    DeviceLimits("RX 7900 XTX", "rocm-gfx1100", 0.92 * 960e9, 96 * 64 * 4 * 2.5e9, 24e9, 3e-6),
)
