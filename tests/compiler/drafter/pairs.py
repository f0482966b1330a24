"""Tiny pairs with their graphs in one module, and that module run by the NumPy interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from dflashc.compiler.drafter import normalise
from dflashc.compiler.drafter.graph import drafter_module
from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.models import build_graph, read_model_config
from dflashc.compiler.pair import Overrides, check
from dflashc.passes.choose_forms import choose_forms
from dflashc.passes.merge_projections import merge_projections
from dflashc.passes.pipeline import optimise
from dflashc.recipes.drafter import DrafterShape, drafter_body, write_drafter
from dflashc.recipes.target import TargetShape, write_target
from dflashc.recipes.tensors import Formats as FileFormats
from tests.compiler.models.interpreted import InterpretedModule, caches
from tests.passes.formats import Formats, form_of, plain
from tests.reference.config import Weights, read_drafter, read_model
from tests.reference.dflash import ReferenceDrafter
from tests.reference.relax_numpy import quantise
from tests.reference.transformer import ActivationQuantisation, ReferenceModel

PREFIX, INJECTED = "drafter.", "drafter.inject."
CAPACITY = 128


def write_pair(folder: Path, width: int = 64, layers: int = 2, version: int = 1, copying: bool = False) -> list[Path]:
    """A target of 3 layers and a drafter of `layers`; a copying pair accepts much of what it proposes."""
    paths = [folder / "target.gguf", folder / "drafter.gguf"]
    shape = TargetShape("qwen3", 3, width, 4, 2, width // 4, 2 * width, 300, context_length=CAPACITY,
                        weight_scale=0.05 if copying else 1.0)
    write_target(paths[0], shape, FileFormats("F32"))
    drafter = DrafterShape(drafter_body(paths[0], layers), (0, 1), 8, version=version, selector_rank=32,
                           selector_candidates=4)
    write_drafter(paths[1], paths[0], drafter, FileFormats("F32"), copying=copying)
    return paths


class BuiltPair:
    """A written pair with its graph, and the formats that its weights are taken to have."""

    def __init__(self, paths: Sequence[Path], overrides: Overrides | None = None, formats: Formats = plain) -> None:
        target_path, drafter_path = paths
        self.config = check(target_path, drafter_path, overrides).config
        with open_gguf(target_path) as target, open_gguf(drafter_path) as file:
            self.target_config = read_model_config(target)
            self.graph: tvm.IRModule = build_graph(target, self.target_config, self.config.taps)
            self.graph.update(drafter_module(self.config, normalise(file).tensors, target.tensors))
        reference_target, target_weights = read_model(target_path)
        reference_config, weights = read_drafter(drafter_path)
        self.target_reference = (reference_target, _in_formats(target_weights, formats))
        self.drafter_reference = (
            replace(reference_config, causal_sliding=self.config.causal_sliding, causal_full=self.config.causal_full)
            if overrides else reference_config, _in_formats(weights, formats))
        self.weights: Weights = {**self.target_reference[1],
                                 **{prefix + name: w for prefix in (PREFIX, INJECTED)
                                    for name, w in self.drafter_reference[1].items()}}
        self.formats = {name: weight.format for name, weight in self.weights.items()}
        self.forms = {name: form_of(block_format) for name, block_format in self.formats.items()}

    @cached_property
    def optimised(self) -> tvm.IRModule:
        return optimise(self.graph, self.formats, self.forms)

    @cached_property
    def unfused(self) -> tvm.IRModule:
        """The graph with its inputs quantised, as the optimised one has them, and nothing else."""
        return choose_forms(merge_projections(self.graph), self.forms)

    def references(self, quantisation: ActivationQuantisation | None = None) -> tuple[ReferenceModel, ReferenceDrafter]:
        target = ReferenceModel(*self.target_reference, activation_quantisation=quantisation)
        return target, ReferenceDrafter(*self.drafter_reference, target, activation_quantisation=quantisation)


def _in_formats(weights: Weights, formats: Formats) -> Weights:
    return {name: replace(w, format=formats(name) if w.values.ndim == 2 else "F32") for name, w in weights.items()}


class InterpretedPair:
    """A pair's module with its caches, the counterpart of `ReferenceModel` and `ReferenceDrafter`."""

    def __init__(self, built: BuiltPair, module: tvm.IRModule, dtype: type[np.floating] = np.float64) -> None:
        target, drafter = built.target_config, built.config
        inputs: dict[str, np.ndarray] = {
            **{name: weight.values for name, weight in built.weights.items()},
            **{f"rope.{rope.name}.frequencies": np.array(rope.frequencies) for rope in target.ropes},
            **{f"rope.{rope.name}.frequencies": np.array(rope.frequencies)
               for rope in (drafter.rope, drafter.context_rope)},
            **caches(target.layers, (target.kv_heads, CAPACITY, target.head_size), dtype),
        }
        injected = caches(drafter.layers, (drafter.kv_heads, CAPACITY, drafter.head_size), dtype)
        self.caches = {PREFIX + name: cache for name, cache in injected.items()}
        self.committed = 0
        self._mask = drafter.mask_id
        self._weighing = "weigh" if drafter.version == 1 else "propose"
        self._run = InterpretedModule(module, {**inputs, **self.caches}, built.forms, dtype).run
        (features,) = (p for p in module["inject"].params if p.name == "features")
        self._form = "f32" if isinstance(features.ty, tvm.relax.TensorType) else built.forms[PREFIX + "fc.weight"]

    def verify(self, tokens: Sequence[int], start: int) -> tuple[Any, np.ndarray]:
        """Features of the tokens, as the injection takes them, and the target's best ids."""
        residual, *taps = self._run("decode", len(tokens), start, tokens=np.array(tokens, np.int32))
        one_by_one = isinstance(taps[0], np.ndarray)
        features = np.concatenate(taps, axis=-1) if one_by_one else taps[0]
        return features, self._run("ids", len(tokens), hidden=residual)

    def inject(self, features: Any, start: int) -> None:
        """Features in float, or already in the form that the module wants."""
        features = quantise(features, self._form) if isinstance(features, np.ndarray) else features
        rows = len(features[0] if isinstance(features, tuple) else features)
        self._run("inject", rows, start, features=features)
        self.committed = start + rows

    def block(self, anchor: int, rows: int) -> np.ndarray:
        """The residual stream (rows, hidden) after the last layer."""
        return self._run("draft", rows, self.committed, block=self._block(anchor, rows))

    def propose(self, anchor: int, width: int) -> list[int]:
        proposed = self._proposed("propose", anchor, width)
        return (proposed[0] if isinstance(proposed, tuple) else proposed).tolist()

    def weigh(self, anchor: int, width: int) -> tuple[list[int], np.ndarray]:
        """Proposals with their confidence."""
        ids, confidence, *_ = self._proposed(self._weighing, anchor, width)
        return ids.tolist(), confidence

    def _proposed(self, function: str, anchor: int, width: int) -> Any:
        hidden = self.block(anchor, width + 1)[1:]
        return self._run(function, width, hidden=hidden, block=self._block(anchor, width))

    def _block(self, anchor: int, rows: int) -> np.ndarray:
        return np.array([anchor] + [self._mask] * (rows - 1), np.int32)
