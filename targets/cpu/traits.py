"""What an x86-64 CPU can do, as the kernel builders need it: lanes, integer dot products, conversions.

One `Traits` object per feature level. The builders ask it for `dot4`, `fma` and friends and never name an intrinsic.
Knows nothing of models or block formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tvm import tirx

from dflashc.runtime.errors import TargetError


def intrinsic(dtype: str, name: str, *arguments: tirx.Expr) -> tirx.Expr:
    """A call of the LLVM intrinsic `name` that returns `dtype`."""
    return tirx.call_llvm_pure_intrin(dtype, name, *arguments)


def broadcast(value: tirx.Expr, lanes: int) -> tirx.Expr:
    return tirx.Broadcast(value, lanes)


@dataclass(frozen=True)
class Traits:
    """A feature level of x86-64.

    Attributes
    ----------
    name : str
        Name of the level, written to the manifest.
    features : tuple of str
        CPU flags the code needs, as `/proc/cpuinfo` spells them.
    mcpu : str
        LLVM's name of the level.
    mattr : tuple of str
        Further LLVM features.
    lanes : int
        32-bit lanes of a vector; also the output rows that one weight vector interleaves.
    dot : str
        "vnni512" | "vnni256" (u8 x s8 dot products that accumulate in int32), "maddubs" (int16 pairs), "none".
    """

    name: str
    features: tuple[str, ...]
    mcpu: str
    mattr: tuple[str, ...]
    lanes: int
    dot: str

    @property
    def f32(self) -> str:
        return f"float32x{self.lanes}"

    @property
    def i32(self) -> str:
        return f"int32x{self.lanes}"

    def fma(self, a: tirx.Expr, b: tirx.Expr, c: tirx.Expr) -> tirx.Expr:
        """a * b + c on float32 lanes; rounded once where the CPU has FMA, else twice (a libm call would be slow)."""
        if self.dot == "none":
            return a * b + c
        return intrinsic(str(a.ty.dtype), "llvm.fma", a, b, c)

    def llvm_target(self) -> dict[str, object]:
        target: dict[str, object] = {"kind": "llvm", "mcpu": self.mcpu}
        if self.mattr:
            target["mattr"] = list(self.mattr)
        return target


GENERIC = Traits("x86-64", (), "x86-64", (), 8, "none")
AVX2 = Traits("x86-64-v3", ("avx2", "fma", "f16c", "bmi2"), "x86-64-v3", (), 8, "maddubs")
AVX_VNNI = Traits("x86-64-v3-vnni", (*AVX2.features, "avx_vnni"), "x86-64-v3", ("+avxvnni",), 8, "vnni256")
AVX512_VNNI = Traits(
    "x86-64-v4-vnni",
    ("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    "x86-64-v4", ("+avx512vnni", "-prefer-256-bit"), 16, "vnni512",
)

LEVELS: dict[str, Traits] = {t.name: t for t in (AVX512_VNNI, AVX_VNNI, AVX2, GENERIC)}
"""Feature levels, best first."""


def host_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """CPU flags of this machine. Raises `TargetError` where the system does not tell them."""
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError as error:
        raise TargetError(f"cannot read the CPU's features from {cpuinfo}: {error.strerror}") from error
    raise TargetError(f"{cpuinfo} lists no CPU flags; expected an x86-64 Linux machine")


def best_level(features: frozenset[str]) -> Traits:
    """The best level whose features are all among `features`."""
    return next(t for t in LEVELS.values() if features.issuperset(t.features))
