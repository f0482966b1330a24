"""Matmuls and gated units as tests run them: random weights of a GGUF type, quantised activations, NumPy's results."""

from __future__ import annotations

import numpy as np

from dflashc.targets.gpu.kernels.codes import LANES
from dflashc.targets.gpu.kernels.gated import gated_matmul
from dflashc.targets.gpu.kernels.matmul import matmul, matmul_argmax
from dflashc.targets.gpu.kernels.row_groups import ROWS, SLICES, activation_form
from dflashc.targets.gpu.kernels.shares import Share
from dflashc.targets.gpu.traits import Traits
from dflashc.targets.packing import pack_rows, packed_format
from tests.targets import samples
from tests.targets.gpu.emulation import run_anywhere
from tests.targets.gpu.running import GENERIC

WEIGHT_ROWS, COLUMNS = 37, 512  # rows that fill no workgroup; 16 blocks of K for 8 slices
LEADING, COLUMN = 50, 5

GATES = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


class Case:
    """A weight of a GGUF type and 64 rows of quantised activations."""

    def __init__(self, type_name: str, byte: int | None = None, weight_rows: int = WEIGHT_ROWS,
                 columns: int = COLUMNS, traits: Traits = GENERIC) -> None:
        rng = np.random.default_rng([4, weight_rows])
        self.traits = traits
        self.layout = packed_format(type_name).format
        self.form = activation_form(self.layout)
        self.columns, self.weight_rows = columns, weight_rows
        blocks = samples.random_blocks(type_name, weight_rows, columns, rng, byte)
        self.packed = pack_rows(type_name, blocks, columns, LANES).view(np.uint32)
        self.weights = samples.dequantise(type_name, blocks).astype(np.float64)
        values = rng.standard_normal((64, columns)).astype(np.float32)
        if byte is not None:
            values = np.sign(values[:, :1]) * np.ones_like(values)
        self.inputs = samples.quantise(values, self.form)
        self.bias = rng.standard_normal(weight_rows).astype(np.float32)

    def expected(self) -> np.ndarray:
        return samples.values_of(self.inputs, self.form) @ self.weights.T

    def operands(self, rows: int) -> list[np.ndarray]:
        """The activation's buffers for the first `rows` rows, codes as words of four."""
        first = [np.ascontiguousarray(b[:rows]) for b in self.inputs]
        return first if self.form == "f32" else [first[0].view(np.int32), *first[1:]]

    def run(self, share: Share, rows: int = 0, *, epilogue: str = "store", slices: int = SLICES) -> np.ndarray:
        """The outputs of `rows` rows, those of one workgroup if 0; checks that nothing around them is written."""
        rows = rows or share.rows
        kernel = matmul(self.traits, self.layout.name, share, epilogue, slices)
        output = np.full((rows + 1, max(LEADING, COLUMN + self.weight_rows)), 7, np.float32)
        bias = [self.bias] if epilogue == "store_bias" else []
        *_, output = run_anywhere(
            self.traits, kernel, [*self.operands(rows), self.packed, *bias, output, rows // share.rows, self.columns,
                                  self.weight_rows, output.shape[1], COLUMN],
            share.workgroups(rows, self.weight_rows))
        found = output[:rows, COLUMN : COLUMN + self.weight_rows].copy()
        output[:rows, COLUMN : COLUMN + self.weight_rows] = 7
        assert (output == 7).all()
        return found

    def best(self, share: Share, rows: int, slices: int = SLICES) -> tuple[np.ndarray, np.ndarray]:
        """The best product of each 32 weight rows and its weight row, (parts, rows)."""
        parts = -(-self.weight_rows // ROWS)
        kernel = matmul_argmax(self.traits, self.layout.name, share, slices)
        *_, value, index = run_anywhere(
            self.traits, kernel, [*self.operands(rows), self.packed, np.zeros((parts, rows), np.float32),
                                  np.zeros((parts, rows), np.int32), self.columns, self.weight_rows, rows],
            share.workgroups(rows, self.weight_rows))
        return value, index


class GatedCase:
    """Two weights of 96 rows, three units of 32, and the activations that both multiply."""

    OUTPUTS = 96

    def __init__(self, type_name: str, activation: str, form: str, traits: Traits = GENERIC) -> None:
        self.activation, self.form = activation, form
        self.gate = Case(type_name, weight_rows=self.OUTPUTS, traits=traits)
        self.up = Case(type_name, weight_rows=self.OUTPUTS + 32, traits=traits)
        self.up.inputs = self.gate.inputs

    def expected(self) -> np.ndarray:
        return GATES[self.activation](self.gate.expected()) * self.up.expected()[:, : self.OUTPUTS]

    def run(self, share: Share, rows: int = 0, slices: int = SLICES) -> list[np.ndarray]:
        """The output's buffers for `rows` rows, those of one workgroup if 0."""
        rows, gate = rows or share.rows, self.gate
        kernel = gated_matmul(gate.traits, gate.layout.name, share, self.activation, self.form, slices)
        buffers = samples.empty_form(self.form, rows, self.OUTPUTS)
        ran = run_anywhere(gate.traits, kernel,
                           [*gate.operands(rows), gate.packed, self.up.packed, *buffers, rows // share.rows,
                            gate.columns, self.OUTPUTS],
                           share.workgroups(rows, self.OUTPUTS))
        return ran[-len(buffers):]
