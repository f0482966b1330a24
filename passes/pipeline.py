"""All passes in order, on one page.

Every pass takes an IRModule and returns one; none knows a target beyond the forms its weights want. `dump` writes the
module after each phase, numbered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import tvm

from dflashc.passes.choose_forms import choose_forms
from dflashc.passes.fuse_argmax import fuse_argmax
from dflashc.passes.fuse_attention import fuse_attention
from dflashc.passes.fuse_denoise_block import fuse_denoise_block
from dflashc.passes.fuse_gated_unit import fuse_gated_unit
from dflashc.passes.fuse_kv_injection import fuse_kv_injection
from dflashc.passes.fuse_norm import fuse_norm
from dflashc.passes.fuse_quantise import fuse_quantise
from dflashc.passes.fuse_verify import fuse_verify
from dflashc.passes.hoist_positions import hoist_positions
from dflashc.passes.merge_projections import merge_projections
from dflashc.passes.separate_projections import separate_projections


def optimise(module: tvm.IRModule, formats: Mapping[str, str], forms: Mapping[str, str],
             dump: Path | None = None) -> tvm.IRModule:
    """The model's graph as written → the same model in fused operators, one or few launches each.

    Parameters
    ----------
    formats, forms : mapping
        Packed block format, and the activation form it reads, by weight name.
    dump : Path, optional
        Directory that receives `NN-<pass>.py`.
    """
    phases: list[tuple[str, Callable[[tvm.IRModule], tvm.IRModule]]] = [
        # Phase 1: fewer, wider calls.
        ("merge_projections", merge_projections),
        ("fuse_attention", fuse_attention),
        ("fuse_gated_unit", lambda m: fuse_gated_unit(m, formats)),
        ("fuse_argmax", fuse_argmax),
        ("fuse_kv_injection", fuse_kv_injection),
        ("separate_projections", separate_projections),
        # Phase 2: what the target's matmuls read.
        ("choose_forms", lambda m: choose_forms(m, forms)),
        ("fuse_verify", fuse_verify),
        # Phase 3: epilogues.
        ("fuse_denoise_block", fuse_denoise_block),
        ("fuse_quantise", fuse_quantise),
        ("fuse_norm", fuse_norm),
        # Phase 4: what all programs of a run share.
        ("hoist_positions", hoist_positions),
    ]
    _dump(module, dump, 0, "graph")
    for number, (name, phase) in enumerate(phases, start=1):
        module = phase(module)
        _dump(module, dump, number, name)
    return module


def _dump(module: tvm.IRModule, directory: Path | None, number: int, name: str) -> None:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:02d}-{name}.py").write_text(module.script() + "\n")
