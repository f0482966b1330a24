"""The rules of a layer's operators: a program of each, lowered and run on a Vulkan device, against the interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from dflashc.compiler.lower.program import ARENA, Lowering
from dflashc.passes import operators as op
from dflashc.runtime.errors import BuildError
from dflashc.runtime.plan import Buffer, Operand
from dflashc.targets.context import Cache, PackedWeight, Parts
from dflashc.targets.gpu.kernels.codes import LANES
from dflashc.targets.gpu.rules_layers import layer_rules
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import pack_rows, packed_format
from tests.reference.relax_numpy import evaluate
from tests.targets import samples
from tests.targets.gpu.lowered import run_program

TRAITS = Traits("vulkan", "generic")
HIDDEN, VOCABULARY, CONTEXT, START = 96, 50, 512, 230
HEADS = (4, 2, 32)
WEIGHTS = {"norm": (HIDDEN,), "post_norm": (HIDDEN,), "q_norm": (HEADS[2],), "k_norm": (HEADS[2],),
           "sinks": (HEADS[0],)}
ROWS = [1, 2, 5, 8, 16, 64, 256]
CASES = [*((rows, "causal", window) for rows in ROWS for window in (0, 40)),
         *((rows, "block", 0) for rows in ROWS[1:5])]


def graph(mask: str, window: int, size: int = HEADS[2]) -> relax.Function:
    """Every operator once, all of their results returned."""
    m, context = tvm.tirx.Var("m", "int64"), tvm.tirx.Var("context", "int64")
    kv_heads = HEADS[1]
    columns = (HEADS[0] + 2 * kv_heads) * size
    shapes = {"tokens": ((m,), "int32"), "state": ((8,), "int64"), "frequencies": ((size // 2,), "float64"),
              "embedding": ((VOCABULARY, HIDDEN), "float32"), "delta": ((m, HIDDEN), "float32"),
              "qkv": ((m, columns), "float32"), **{n: (s, "float32") for n, s in WEIGHTS.items()},
              "cache.0.k": ((kv_heads, context, size), "float16"), "cache.0.v": ((kv_heads, context, size), "float16")}
    p = {name: relax.Var(name, relax.TensorType(*spec)) for name, spec in shapes.items()}
    builder = relax.BlockBuilder()
    with builder.function("layer", list(p.values())):
        with builder.dataflow():
            x = builder.emit(op.embed(p["tokens"], p["embedding"], 2.5))
            table = builder.emit(op.rope_table(p["tokens"], p["state"], p["frequencies"], 1.25))
            normed = builder.emit(op.norm(x, p["delta"], p["post_norm"], p["norm"], 1e-5, ["f32", "q8_32s"]))
            total, *forms = (builder.emit(relax.TupleGetItem(normed, i)) for i in range(3))
            plain = builder.emit(op.norm(x, None, None, p["norm"], 1e-5, ["f32"]))
            attended = builder.emit(op.attention_block(
                p["qkv"], [p["q_norm"], p["k_norm"]], [p["sinks"]], table, [p["cache.0.k"], p["cache.0.v"]], p["state"],
                (HEADS[0], kv_heads, size), "neox", window, size**-0.5, mask, 1e-6, "q8_32s"))
            results = [x, table, total, *forms, builder.emit(relax.TupleGetItem(plain, 1)), attended,
                       builder.emit(op.features([total, x], "q8_32s")), builder.emit(op.quantise(x, "q8_32s")),
                       builder.emit(op.gated(p["qkv"], "gelu_tanh", "q8_32s")), builder.emit(op.scale(x, 0.5)),
                       builder.emit(op.softcap(x, 2.0))]
            output = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(output)
    return builder.get()["layer"]


def lower(function: relax.Function, rows: int, kv: str = "f16") -> tuple[Any, list[Parts], dict[str, Buffer]]:
    """The lowered program, where its results are, and its buffers."""
    packed = packed_format("Q8_0").format
    weights = {"embedding": PackedWeight("embedding", "q8_0", "q8_32s", VOCABULARY, HIDDEN,
                                         packed.packed_bytes(VOCABULARY, HIDDEN, LANES))}
    buffers = {p.name: Buffer(p.name, "scratch", _bytes(p.ty, rows)) for p in function.params if p.name not in weights}
    outputs: list[Parts] = []
    for i, result in enumerate(function.ret_ty.fields):
        fields = result.fields if isinstance(result, relax.TupleType) else [result]
        names = [f"result.{i}.{j}" for j in range(len(fields))]
        buffers |= {n: Buffer(n, "scratch", _bytes(f, rows)) for n, f in zip(names, fields, strict=True)}
        operands = [Operand("buffer", n) for n in names]
        outputs.append(operands if len(operands) > 1 else operands[0])
    caches = {n: Cache(kv, Operand("buffer", n), Operand("context")) for n in buffers if n.startswith("cache.")}
    lowering = Lowering("test", layer_rules(TRAITS), weights, caches, buffers)
    return lowering.lower(function, "layer", rows, {}, outputs), outputs, buffers


def _bytes(of_type: relax.TensorType, rows: int) -> int:
    sizes = {"m": rows, "context": CONTEXT}
    count = np.prod([int(d) if isinstance(d, tvm.tirx.IntImm) else sizes[d.name] for d in of_type.shape.values])
    return int(count) * np.dtype(str(of_type.dtype)).itemsize


def inputs_of(function: relax.Function, rows: int) -> dict[str, np.ndarray]:
    """Random inputs; the cache is random up to START, then NaN."""
    random = np.random.default_rng(rows)
    inputs: dict[str, np.ndarray] = {}
    for p in function.params:
        shape = [int(d) if isinstance(d, tvm.tirx.IntImm) else {"m": rows, "context": CONTEXT}[d.name]
                 for d in p.ty.shape.values]
        inputs[p.name] = random.standard_normal(shape).astype(str(p.ty.dtype))
        if p.name.startswith("cache"):
            inputs[p.name][:, START:] = np.nan
    inputs["tokens"] = random.integers(0, VOCABULARY, rows).astype(np.int32)
    inputs["state"] = np.array([START, *[0] * 7])
    inputs["frequencies"] = 1e4 ** (-np.arange(HEADS[2] // 2) / (HEADS[2] // 2))
    blocks = samples.random_blocks("Q8_0", VOCABULARY, HIDDEN, random)
    inputs["embedding"] = samples.dequantise("Q8_0", blocks)
    inputs["embedding.packed"] = pack_rows("Q8_0", blocks, HIDDEN, LANES)
    return inputs


def memory_of(inputs: Mapping[str, np.ndarray], buffers: Mapping[str, Buffer], arena: int) -> dict[str, np.ndarray]:
    """Contents of all buffers; what is not an input holds NaN in any float type."""
    memory = {n: np.full(-(-b.bytes // 64) * 64, 0xFF, np.uint8) for n, b in buffers.items()}
    memory[ARENA] = np.full(max(arena, 64), 0xFF, np.uint8)
    memory |= {name: _padded(inputs[name]) for name in buffers if name in inputs}
    keys = inputs["cache.0.k"]
    split = (keys.shape[0], CONTEXT // 32, 32, keys.shape[2] // 2, 2)
    memory["cache.0.k"] = _padded(keys.reshape(split).swapaxes(2, 3))
    memory["embedding"] = _padded(inputs["embedding.packed"])
    return memory


def _padded(values: np.ndarray) -> np.ndarray:
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return np.concatenate([data, np.full(-len(data) % 64, 0xFF, np.uint8)])


@pytest.mark.parametrize(("rows", "mask", "window"), CASES)
def test_every_operator(rows: int, mask: str, window: int) -> None:
    function = graph(mask, window)
    lowered, outputs, buffers = lower(function, rows)
    inputs = inputs_of(function, rows)
    memory = memory_of(inputs, buffers, lowered.arena_bytes)
    run_program(lowered, memory, TRAITS, CONTEXT)
    expected = evaluate(function, {k: v.copy() for k, v in inputs.items()})
    for parts, reference in zip(outputs, expected, strict=True):
        found = [memory[p.name] for p in (parts if isinstance(parts, list) else [parts])]
        if not isinstance(reference, tuple):
            values = found[0][: reference.size * 4].view(np.float32).reshape(reference.shape)
            np.testing.assert_allclose(values, reference, rtol=2e-6, atol=4e-6)
            continue
        stored = [f[: r.size * n].view(t).reshape(r.shape) for f, r, n, t in zip(
            found, reference, (1, 4, 4), (np.int8, np.float32, np.int32), strict=True)]
        samples.assert_nearly_same_codes(stored, reference)


@pytest.mark.parametrize(("rows", "launches"), [(1, 2), (16, 2), (64, 3), (256, 9)])
def test_launches_of_attention(rows: int, launches: int) -> None:
    """Verify programs run the attention and its merge; the slots' scratch does not grow beyond 64 rows."""
    lowered, _, buffers = lower(graph("causal", 0), rows)
    named = [x for x in lowered.program.launches if x.operation.startswith("blk.0 ")]
    assert len(named) == launches
    heads, _, size = HEADS
    assert buffers["attention.values"].bytes == TRAITS.attention_slots * min(rows, 64) * heads * size * 4


@pytest.mark.parametrize(("size", "kv", "multiple"), [
    (40, "f16", "16 up to 256"), (40, "q8_0", "64 up to 256"), (96, "q8_0", "64 up to 256: use f16"),
    (512, "f16", "16 up to 256"), (512, "q8_0", "64 up to 256")])
def test_head_sizes_without_a_kernel_are_refused(size: int, kv: str, multiple: str) -> None:
    message = f"attention heads of {size} elements found; K/V type {kv} on GPU targets needs a multiple of {multiple}$"
    with pytest.raises(BuildError, match=message):
        lower(graph("causal", 0, size), 1, kv)
