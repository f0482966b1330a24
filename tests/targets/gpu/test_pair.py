"""Every kernel of the shipped pair, and those of other heads, caches and formats, for every kind of GPU: compiled, and
kept in registers.
"""

from contextlib import closing
from pathlib import Path

import pytest

from dflashc.compiler.build import BuildOptions, lower
from dflashc.runtime.artefact import GPU_CODE
from dflashc.runtime.manifest import Requirements
from dflashc.targets.cuda.cubin import read_cubin
from dflashc.targets.gpu.kernels.attention import attention
from dflashc.targets.gpu.kernels.gated import gated_matmul
from dflashc.targets.gpu.kernels.kv_cache import KV_TYPES
from dflashc.targets.gpu.kernels.kv_injection import kv_injection
from dflashc.targets.gpu.kernels.matmul import matmul
from dflashc.targets.gpu.kernels.row_groups import ROWS, SLICES
from dflashc.targets.gpu.kernels.shares import Share
from dflashc.targets.gpu.requests import share_of_matmul
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import PACKED_FORMATS
from dflashc.targets.registry import find_target
from dflashc.targets.requests import KernelRequest, distinct, request
from dflashc.targets.rocm.code_object import read_code_object
from tests.targets.gpu.building import require_toolchain
from tests.targets.vulkan import radv

pytestmark = pytest.mark.slow

SLICED = ("q8_0", "q4_k", "q6_k", "q2_k", "f16")


def heads(traits: Traits) -> list[KernelRequest]:
    share = share_of_matmul(traits, "q4_k", 16)
    return [x for size in (64, 128, 256) for kv in KV_TYPES for x in (
        request(attention, size, "neox", True, kv),
        request(kv_injection, "q4_k", share, size, "neox", "store", kv))]


def matmuls(traits: Traits) -> list[KernelRequest]:
    """Those of prefill and of 16 rows, of every format and end; of some formats with every number of slices. Where
    there is a matrix unit, also what tuning may put in its place.
    """
    ends = [(matmul, 1, ("store",)), (gated_matmul, 2, ("silu", "q8_32s"))]
    default = [request(builder, name, share_of_matmul(traits, name, rows, matrices), *rest,
                       *([] if slices == SLICES else [slices]))
               for name in PACKED_FORMATS for builder, matrices, rest in ends for slices in (4, 8, 16)
               for rows in (16, 64)
               if slices * ROWS <= traits.most_threads and (slices == SLICES or name in SLICED)]
    dots = [request(builder, name, Share(16, 1), *rest) for name in PACKED_FORMATS for builder, _, rest in ends]
    return distinct([*default, *dots])


def compile_pair(target: str, model: Path, folder: Path) -> Requirements:
    require_toolchain(target)
    drafter = model.with_name("pycode-3m-dflash2-q8_0.gguf")
    with closing(lower(BuildOptions(model, target, folder, drafter))) as lowered:
        gpu = find_target(target)
        return gpu.compile([*lowered.requests.values(), *heads(gpu.traits), *matmuls(gpu.traits)], folder,
                           lambda done: None)


def test_cuda(pycode_model: Path, tmp_path: Path) -> None:
    compile_pair("cuda-sm89", pycode_model, tmp_path)
    records = read_cubin((tmp_path / GPU_CODE).read_bytes())
    assert {name: r.stack for name, r in records.items() if r.stack} == {}


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1151", "gfx1201"])
def test_rocm(arch: str, pycode_model: Path, tmp_path: Path) -> None:
    compile_pair(f"rocm-{arch}", pycode_model, tmp_path)
    found = read_code_object((tmp_path / GPU_CODE).read_bytes())
    assert found.target == arch
    assert {k.name: (k.spills, k.private_bytes) for k in found.kernels.values() if k.spills or k.private_bytes} == {}


def test_vulkan_on_amds_compiler(pycode_model: Path, tmp_path: Path) -> None:
    """Each module has passed spirv-val, or there would be none."""
    need = compile_pair("vulkan-gfx1151", pycode_model, tmp_path)
    if not radv.ICD.exists():
        pytest.skip(f"{radv.ICD} is missing (Debian: mesa-vulkan-drivers)")
    spilled = radv.spilled_registers(tmp_path, list(need.features))
    assert {name: registers for name, registers in spilled.items() if registers} == {}
