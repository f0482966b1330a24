"""One architecture a file, found by name.

A module of this package whose name is an architecture ("qwen3") defines `config(gguf)` and `layer(graph, x, number,
table)`; adding an architecture adds one file and touches nothing else. Knows nothing of block formats or targets.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING

from dflashc.runtime.errors import BuildError

if TYPE_CHECKING:
    import tvm

    from dflashc.compiler.gguf import GgufFile
    from dflashc.compiler.models.config import ModelConfig

_SHARED = {"config", "graph", "relax_graph", "tensor_list"}


def architectures() -> list[str]:
    """Names of the supported architectures."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SHARED)


def _module(gguf: GgufFile) -> ModuleType:
    name = gguf.get_str("general.architecture")
    if name not in architectures():
        from dflashc.compiler.drafter import is_drafter

        if is_drafter(name):
            raise BuildError(f"{gguf.paths[0]} is a drafter; give the model that it was made for, and it as --drafter")
        raise BuildError(f"architecture {name!r} is not supported; supported: {', '.join(architectures())}")
    return importlib.import_module(f"{__name__}.{name}")


def read_model_config(gguf: GgufFile) -> ModelConfig:
    """The configuration of the model in `gguf`; raises `BuildError` or `GgufError`."""
    return _module(gguf).config(gguf)


def check_model(gguf: GgufFile, config: ModelConfig) -> list[str]:
    """Notes on a model whose tensors a build can take; raises `BuildError` or `GgufError` for one whose it cannot."""
    from dflashc.compiler.models.tensor_list import check_model

    return check_model(gguf, config, _module(gguf).layer)


def build_graph(gguf: GgufFile, config: ModelConfig, taps: tuple[int, ...] = ()) -> tvm.IRModule:
    """The model's Relax module, see `relax_graph.decoder`."""
    from dflashc.compiler.models.relax_graph import decoder

    return decoder(gguf, config, _module(gguf).layer, taps)
