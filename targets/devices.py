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
    float_rate : float
        Additions, multiplications or multiply-adds per second in float32.
    matrix_rate : float
        Multiply-adds of bytes per second of the matrix unit that kernels use; 0 where they use none.
    floats_beside : bool
        Whether floats have units of their own beside dot products and matrices, or take turns with them.
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
    float_rate: float
    matrix_rate: float = 0
    floats_beside: bool = False

    def prefill_rate(self, float_steps: float) -> float:
        """Multiply-adds per second at most, with `float_steps` float operations for every block of 32 of them."""
        products, floats = 1 / (self.matrix_rate or self.dot_rate), float_steps / 32 / self.float_rate
        return 1 / (max(products, floats) if self.floats_beside else products + floats)


DEVICES = (
    # 1008 GB/s; 128 SMs at 2.52 GHz: a clock 64 dp4a of 4, 128 floats, tensor cores 1024 multiply-adds
    DeviceLimits("RTX 4090", "cuda-sm89", 0.92 * 1008e9, 128 * 64 * 4 * 2.52e9, 24e9, 1.5e-6, 128 * 128 * 2.52e9,
                 128 * 1024 * 2.52e9, floats_beside=True),
    # 256 GB/s, 212 measured; 40 CUs at 2.9 GHz: a clock 64 v_dot4 of 4, 128 floats in pairs
    DeviceLimits("Strix Halo", "vulkan-gfx1151", 212e9, 40 * 64 * 4 * 2.9e9, 96e9, 3e-6, 40 * 128 * 2.9e9),
    # 960 GB/s; 96 CUs at 2.5 GHz: a clock 64 v_dot4 of 4, 128 floats in pairs, WMMA 256 multiply-adds of bytes
    DeviceLimits("RX 7900 XTX", "rocm-gfx1100", 0.92 * 960e9, 96 * 64 * 4 * 2.5e9, 24e9, 3e-6, 96 * 128 * 2.5e9,
                 96 * 256 * 2.5e9),
)
