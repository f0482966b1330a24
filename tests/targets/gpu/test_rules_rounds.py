"""The rules of drafter and round: programs lowered and run on a Vulkan device, against interpreter and host sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from dflashc.compiler.lower.program import ARENA, LoweredProgram, Lowering
from dflashc.compiler.lower.programs import choice_functions
from dflashc.passes import operators as op
from dflashc.passes.operators import Expr
from dflashc.runtime.device_sampling import Word, sampling_words
from dflashc.runtime.errors import BuildError
from dflashc.runtime.kv_types import kv_bytes
from dflashc.runtime.plan import Buffer, Operand
from dflashc.runtime.sampling import SamplingParameters, sample
from dflashc.targets.context import Cache, PackedWeight, Parts
from dflashc.targets.gpu.kernels.candidates import SEGMENT
from dflashc.targets.gpu.kernels.codes import LANES
from dflashc.targets.gpu.kernels.row_groups import activation_form
from dflashc.targets.gpu.rules_layers import layer_rules
from dflashc.targets.gpu.rules_rounds import round_rules
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import pack_rows, packed_format
from tests.caches import GPU, by_slot, decode
from tests.reference.relax_numpy import evaluate
from tests.targets import samples
from tests.targets.cpu.test_rejection import SEED, expected
from tests.targets.gpu.lowered import run_program

TRAITS = Traits("vulkan", "generic")
HIDDEN, VOCABULARY, CONTEXT, START = 64, SEGMENT + 100, 512, 230
TAPS, GROUP_SIZE, RANK = 2, 16, 32
HEADS, SIZE, PAIRS = 2, 32, 16
BROKEN = 0xFF  # every byte of memory that is not an input: NaN as a float


def graph(shapes: dict[str, tuple[tuple[Any, ...], str]], body: Callable[..., list[Expr]]) -> relax.Function:
    """A function of parameters of these shapes ("m" and "context" are symbolic) that returns what `body` gives."""
    symbols = {name: tvm.tirx.Var(name, "int64") for name in ("m", "context")}
    p = {name: relax.Var(name, relax.TensorType(tuple(symbols.get(d, d) for d in shape), dtype))
         for name, (shape, dtype) in shapes.items()}
    builder = relax.BlockBuilder()
    with builder.function("main", list(p.values())):
        with builder.dataflow():
            results = body(builder.emit, **{name.replace(".", "_"): v for name, v in p.items()})
            output = builder.emit_output(relax.Tuple([builder.emit(r) for r in results]))
        builder.emit_func_output(output)
    return builder.get()["main"]


class Program:
    """A function lowered for some rows, with random weights and inputs."""

    def __init__(self, function: relax.Function, rows: int, types: dict[str, str],
                 caches: dict[str, Cache] | None = None, buffers: tuple[Buffer, ...] = ()) -> None:
        self.function, self.rows, self.types = function, rows, types
        self.random = np.random.default_rng(rows)
        self.inputs, self.packed = {}, {}
        for p in function.params:
            self._add_input(p.name, self._shape(p.ty), str(p.ty.dtype))
        self.inputs["state"] = np.array([START, *[0] * 7])
        weights = {n: self._describe(n) for n in types}
        known = {p.name: Buffer(p.name, "scratch", self.inputs[p.name].nbytes) for p in function.params
                 if p.name not in types}
        known |= {b.name: b for b in buffers}
        outputs: list[Parts] = []
        returned = function.ret_ty.fields if isinstance(function.ret_ty, relax.TupleType) else [function.ret_ty]
        for i, result in enumerate(returned):
            fields = result.fields if isinstance(result, relax.TupleType) else [result]
            names = [f"result.{i}.{j}" for j in range(len(fields))]
            known |= {n: Buffer(n, "output", self._bytes(f)) for n, f in zip(names, fields, strict=True)}
            outputs.append([Operand("buffer", n) for n in names] if len(names) > 1 else Operand("buffer", names[0]))
        lowering = Lowering("test", round_rules(TRAITS) | layer_rules(TRAITS), weights, caches or {}, known)
        self.lowered: LoweredProgram = lowering.lower(function, "main", rows, {}, outputs)
        self.outputs, self.buffers = outputs, known

    def _shape(self, of_type: relax.TensorType) -> tuple[int, ...]:
        sizes = {"m": self.rows, "m + T.int64(1)": self.rows + 1, "context": CONTEXT}
        return tuple(int(d) if isinstance(d, tvm.tirx.IntImm) else sizes[str(d)] for d in of_type.shape.values)

    def _bytes(self, of_type: relax.TensorType) -> int:
        return int(np.prod(self._shape(of_type))) * np.dtype(str(of_type.dtype)).itemsize

    def _add_input(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        if name in self.types:
            blocks = samples.random_blocks(self.types[name], *shape, self.random)
            self.inputs[name] = samples.dequantise(self.types[name], blocks)
            self.packed[name] = pack_rows(self.types[name], blocks, shape[1], LANES)
        elif dtype == "int32":
            self.inputs[name] = self.random.integers(0, VOCABULARY, shape).astype(np.int32)
        else:
            self.inputs[name] = self.random.standard_normal(shape).astype(dtype)

    def _describe(self, name: str) -> PackedWeight:
        layout = packed_format(self.types[name]).format
        return PackedWeight(name, layout.name, activation_form(layout), *self.inputs[name].shape,
                            self.packed[name].nbytes)

    def run(self) -> dict[str, np.ndarray]:
        """The memory after the program, uint8 by buffer."""
        memory = {n: np.full(-(-b.size(CONTEXT) // 64) * 64, BROKEN, np.uint8) for n, b in self.buffers.items()}
        memory[ARENA] = np.full(max(self.lowered.arena_bytes, 64), BROKEN, np.uint8)
        memory |= {n: _padded(v) for n, v in {**self.inputs, **self.packed}.items() if n in memory or n in self.types}
        for names in self.lowered.adjacent:
            memory[names[0]] = np.concatenate([_padded(self.packed.get(n, self.inputs[n])) for n in names])
        run_program(self.lowered, memory, TRAITS, CONTEXT)
        return memory

    def results(self, memory: dict[str, np.ndarray], like: tuple[Any, ...]) -> list[list[np.ndarray]]:
        """Every result's parts, in the shapes and types of a reference."""
        found = []
        for parts, reference in zip(self.outputs, like, strict=True):
            references = list(reference) if isinstance(reference, tuple) else [reference]
            places = parts if isinstance(parts, list) else [parts]
            dtypes = [np.dtype(str(f.dtype)) for f in self._types_of(parts)]
            found.append([memory[p.name][: r.size * t.itemsize].view(t).reshape(r.shape)
                          for p, r, t in zip(places, references, dtypes, strict=True)])
        return found

    def _types_of(self, parts: Parts) -> list[relax.TensorType]:
        result = self.function.ret_ty.fields[self.outputs.index(parts)]
        return list(result.fields) if isinstance(result, relax.TupleType) else [result]

    def launches(self, operation: str) -> list[Any]:
        return [x for x in self.lowered.program.launches if x.operation == operation]


def _padded(values: np.ndarray) -> np.ndarray:
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return np.concatenate([data, np.full(-len(data) % 64, BROKEN, np.uint8)])


# DFlash2's operators -----------------------------------------------------------------------------------------------


def version_2(taps: int = TAPS, group_size: int = GROUP_SIZE, logits: int = VOCABULARY) -> relax.Function:
    """`logits` fewer than the vocabulary are those of a drafter with a reduced one."""
    groups = HIDDEN // group_size
    shapes = {
        "u": (("m", HIDDEN), "float32"), "x": (("m", HIDDEN), "float32"), "z": (("m", HIDDEN), "float32"),
        "base": ((2, taps, HIDDEN), "float32"), "norm": ((HIDDEN,), "float32"),
        "projection": ((2 * taps * groups, HIDDEN), "float32"), "logits": (("m", logits), "float32"),
        "d2t": ((logits,), "int32"),
        "projected": (("m", RANK), "float32"), "block": (("m",), "int32"), "state": ((8,), "int64"),
        "sampling": ((len(Word),), "int64"),
        "predecessor": ((VOCABULARY, RANK), "float32"), "successor": ((VOCABULARY, RANK), "float32")}

    def body(emit: Callable[..., Expr], **p: Expr) -> list[Expr]:
        x, z, base = p["x"], p["z"], p["base"]
        first = emit(op.convolution_linear(p["u"], emit(op.quantise(p["u"], "q8_32s")), p["projection"], base, "q8_32s",
                                           "q8_32s"))
        y, dynamic = (emit(relax.TupleGetItem(first, i)) for i in range(2))
        second = emit(op.norm_convolution(x, z, dynamic, base, p["norm"], 1e-6, ["f32"]))
        last = emit(op.norm_convolution(x, z, dynamic, base, None, 1e-6, []))
        d2t = [p["d2t"]] if logits < VOCABULARY else []
        walk = emit(op.select_candidates(p["logits"], d2t, p["projected"], p["block"], p["state"], p["sampling"],
                                         p["predecessor"], p["successor"], 10))
        best = emit(op.best_candidate(p["logits"], d2t, 10))
        proposals = [*(relax.TupleGetItem(walk, i) for i in range(4)), *(relax.TupleGetItem(best, i) for i in range(2))]
        return [y, dynamic, *(relax.TupleGetItem(second, i) for i in range(2)), relax.TupleGetItem(last, 0), *proposals]

    return graph(shapes, body)


@pytest.mark.parametrize(("rows", "logits"), [(1, VOCABULARY), (7, 100), (16, VOCABULARY)])
def test_operators_of_version_2(rows: int, logits: int) -> None:
    program = Program(version_2(logits=logits), rows, {"projection": "Q8_0", "predecessor": "F16", "successor": "Q4_0"})
    program.inputs["projected"] *= 20
    program.inputs["sampling"][:] = 0
    expected = evaluate(program.function, program.inputs)
    quantised, *others = program.results(program.run(), expected)
    step = 1.5 * np.abs(samples.values_of(list(expected[0]), "q8_32s")).max() / 127
    np.testing.assert_allclose(samples.values_of(quantised, "q8_32s"), samples.values_of(list(expected[0]), "q8_32s"),
                               rtol=0, atol=step)
    for (found,), reference in zip(others, expected[1:], strict=True):
        assert found.dtype.kind == reference.dtype.kind
        np.testing.assert_allclose(found, reference, rtol=1e-5, atol=1e-5 * np.abs(reference).max())


def test_convolutions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BuildError, match="a convolution of 8 taps in groups of 1 channels found"):
        Program(version_2(8, 1), 1, {"projection": "Q8_0", "predecessor": "F16", "successor": "Q4_0"})


# KV injection ------------------------------------------------------------------------------------------------------


def injection(layers: int, size: int = SIZE) -> relax.Function:
    width = HEADS * size
    names = [f"{layer}.{which}" for layer in range(layers) for which in "kv"]
    shapes = {
        "x": (("m", HIDDEN), "float32"), "tokens": (("m",), "int32"), "state": ((8,), "int64"),
        "frequencies": ((size // 2,), "float64"),
        **{f"w.{n}": ((width, HIDDEN), "float32") for n in names}, **{f"b.{n}": ((width,), "float32") for n in names},
        **{f"n.{layer}": ((size,), "float32") for layer in range(layers)},
        **{f"cache.{n}": ((HEADS, "context", size), "float16") for n in names}}

    def body(emit: Callable[..., Expr], **p: Expr) -> list[Expr]:
        table = emit(op.rope_table(p["tokens"], p["state"], p["frequencies"], 1.0))
        names_here = [n.replace(".", "_") for n in names]
        emit(op.kv_injection(
            [p["x"], emit(op.quantise(p["x"], "q8_32s"))], [p[f"w_{n}"] for n in names_here],
            [p[f"b_{n}"] for n in names_here], [p[f"n_{layer}"] for layer in range(layers)], table,
            [p[f"cache_{n}"] for n in names_here], p["state"], HEADS, size, "neox", 1e-6, ["f32", "q8_32s"]))
        return [table]

    return graph(shapes, body)


@pytest.mark.parametrize(("rows", "layers", "types", "launches", "kv"), [
    (2, 3, ["Q8_0"], 1, "f16"), (64, 1, ["Q8_0"], 1, "q8_0"), (3, 3, ["Q4_0", "F16", "F16"], 2, "q8_0"),
    (1, 17, ["Q8_0"], 1, "f16"), (1, 17, ["Q8_0", "F16"], 4, "f16")])
def test_injection(rows: int, layers: int, types: list[str], launches: int, kv: str) -> None:
    """One launch for any depth where the projections share a block format, else one per format."""
    size = {"f16": SIZE, "q8_0": 64}[kv]
    function, row_bytes = injection(layers, size), HEADS * kv_bytes(kv, size)
    names = [f"{layer}.{which}" for layer in range(layers) for which in "kv"]
    caches = {f"cache.{n}": Cache(kv, Operand("buffer", f"cache.{n[-1]}", 0, int(n[:-2]) * row_bytes),
                                  Operand("context")) for n in names}
    buffers = tuple(Buffer(f"cache.{which}", "cache", 0, layers * row_bytes) for which in "kv")
    kinds = {f"w.{n}": types[i % len(types)] for i, n in enumerate(names)}
    program = Program(function, rows, kinds, caches, buffers)
    program.inputs["frequencies"] = 1e4 ** (-np.arange(size // 2) / (size // 2))
    forms = {n: activation_form(packed_format(t).format) for n, t in kinds.items()}
    assert len(program.launches("KV injection")) == launches
    for n in names:
        program.inputs[f"cache.{n}"][:] = np.nan
    memory = program.run()
    evaluate(function, program.inputs, forms)
    for n in names:
        bytes_of = memory[f"cache.{n[-1]}"].view(np.uint8).reshape(layers, HEADS, -1)[int(n[:-2])]
        found, expected = decode(by_slot(bytes_of, kv, n[-1], size, GPU), kv, n[-1], GPU), program.inputs[f"cache.{n}"]
        rounding = {"f16": 1e-3, "q8_0": 5e-3}[kv]
        np.testing.assert_allclose(found[:, START : START + rows], expected[:, START : START + rows], rtol=2**-9,
                                   atol=rounding * np.nanmax(np.abs(expected)))


@pytest.mark.parametrize(("size", "kv", "multiple"), [
    (40, "f16", "16 up to 256"), (96, "q8_0", "64 up to 256: use f16")])
def test_head_sizes_without_a_kernel_are_refused(size: int, kv: str, multiple: str) -> None:
    kinds = {f"w.0.{which}": "Q8_0" for which in "kv"}
    caches = {f"cache.0.{which}": Cache(kv, Operand("buffer", f"cache.{which}"), Operand("context")) for which in "kv"}
    message = f"drafter heads of {size} elements found; K/V type {kv} on GPU targets needs a multiple of {multiple}"
    with pytest.raises(BuildError, match=message):
        Program(injection(1, size), 1, kinds, caches)


# The end of a round ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [200, VOCABULARY])
@pytest.mark.parametrize("rows", [1, 5])
def test_draw_and_accept(rows: int, vocabulary: int) -> None:
    """Tokens of the host's sampler; what they accept is committed."""
    functions = choice_functions(vocabulary)
    parameters = SamplingParameters(temperature=0.9, repeat_penalty=1.2, frequency_penalty=0.2, seed=5)
    drawing = Program(functions["draw"], rows, {})
    tokens, history = drawing.inputs["tokens"], drawing.inputs["history"]
    tokens %= vocabulary
    history %= vocabulary
    drawing.inputs["logits"] *= 3
    drawing.inputs["sampling"] = sampling_words(parameters, vocabulary)
    ids = drawing.run()["result.0.0"].view(np.int32)[:rows]
    text = [*history[:START].tolist(), *tokens.tolist()]
    assert ids.tolist() == [
        sample(logits, text[: START + row + 1], START + row + 1, parameters)
        for row, logits in enumerate(drawing.inputs["logits"])]

    accepting = Program(functions["accept"], rows, {})
    accepting.inputs["tokens"] = np.array([7, *ids[:-1]], np.int32)  # every proposal is right
    accepting.inputs["ids"] = ids
    memory = accepting.run()
    assert memory["result.0.0"].view(np.int32)[: rows + 1].tolist() == [rows - 1, *ids]
    assert memory["state"].view(np.int64)[0] == START + rows
    assert memory["history"].view(np.int32)[START : START + rows].tolist() == [7, *ids[:-1]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rejection(temperature: float) -> None:
    """Proposals of an unlikely token, for which the drafter was sure."""
    rows, candidates = 5, 10
    parameters = SamplingParameters(temperature=0.9, seed=SEED)
    program = Program(choice_functions(200, candidates)["draw"], rows, {})
    program.inputs["sampling"] = sampling_words(parameters, 200, temperature)
    program.inputs["tokens"] %= 200
    proposals = program.inputs["tokens"][1:].tolist()
    program.inputs["proposals.candidates"][: rows - 1, 3] = proposals
    program.inputs["proposals.probabilities"][:] = np.eye(candidates)[3]
    found = program.run()["result.0.0"].view(np.int32)[:rows].tolist()
    drawn = [sample(logits, [], START + row + 1, parameters) for row, logits in enumerate(program.inputs["logits"])]
    judged = [expected(logits, proposal, np.eye(200)[proposal], START + row + 1, parameters)
              for row, (logits, proposal) in enumerate(zip(program.inputs["logits"], proposals, strict=False))]
    assert found == ([*judged, drawn[-1]] if temperature else drawn)
    assert judged != drawn[:-1]
