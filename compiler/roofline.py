"""What a pair can reach on a device, on paper: bytes and multiply-adds of plain steps and rounds against its limits.

    python -m dflashc.compiler.roofline > docs/roofline.md

Counts matrices, K and V, and recurrent state from the shapes in `recipes/pairs`; norms, activations and logits are left
out. Knows no kernel: an artefact's own figures are `dflashc inspect --plan`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflashc.targets.devices import DEVICES, DeviceLimits

_BITS = {"Q4_K": 4.5, "Q6_K": 6.5625, "Q8_0": 8.5, "F16": 16.0}
"""Bits per weight of the block formats (ggml-common.h)."""

_FLOAT_STEPS = {"Q4_K": 4, "Q6_K": 6, "Q8_0": 3}
"""Float operations per block of 32 multiply-adds of codes: to a float, the product of both scales, one or two
multiply-adds; twice where halves have scales of their own."""

_CACHE_BYTES = 2  # of an element of K or V, float16
_DEPTHS = (0, 8192, 32768)
_PAIRS = Path(__file__).parents[1] / "recipes" / "pairs"


@dataclass(frozen=True)
class Matrix:
    """`count` weights of (rows, columns) in a block format."""

    rows: int
    columns: int
    format: str
    count: float = 1

    @property
    def elements(self) -> float:
        return self.rows * self.columns * self.count

    @property
    def bytes(self) -> float:
        return self.elements * _BITS[self.format] / 8


@dataclass(frozen=True)
class Work:
    """What a part of a round moves and computes: bytes, multiply-adds, launches."""

    bytes: float
    operations: float
    launches: int

    def seconds(self, device: DeviceLimits) -> float:
        """The least time: whichever limit is met first, and launches that nothing hides."""
        return max(self.bytes / device.bandwidth, self.operations / device.dot_rate,
                   self.launches * device.launch_seconds)


@dataclass(frozen=True)
class Body:
    """A transformer's shape; see the TOML files. `formats` are those of most matrices and of the sensitive ones."""

    hidden: int
    layers: int
    feed_forward: int
    query_heads: int
    kv_heads: int
    head_size: int
    window: int = 0
    windowed_layers: int = 0
    gated_query: bool = False
    recurrent_layers: int = 0
    recurrent_key: int = 0
    recurrent_value: int = 0
    formats: tuple[str, str] = ("Q4_K", "Q6_K")

    def matrices(self) -> Iterator[Matrix]:
        """All matrices of the layers. V and down projections are in the sensitive format in half of the layers, as
        llama.cpp's Q4_K_M has them."""
        common, sensitive = self.formats
        attention = self.layers - self.recurrent_layers
        query, kv = self.query_heads * self.head_size, self.kv_heads * self.head_size
        yield Matrix(query * (1 + self.gated_query), self.hidden, common, attention)
        yield Matrix(kv, self.hidden, common, 1.5 * attention)
        yield Matrix(kv, self.hidden, sensitive, 0.5 * attention)
        yield Matrix(self.hidden, query, common, attention)
        if self.recurrent_layers:
            mixed = 2 * self.recurrent_key + 2 * self.recurrent_value  # q, k, v and the gate z
            yield Matrix(mixed, self.hidden, common, self.recurrent_layers)
            yield Matrix(self.hidden, self.recurrent_value, common, self.recurrent_layers)
        yield Matrix(2 * self.feed_forward, self.hidden, common, self.layers)
        yield Matrix(self.hidden, self.feed_forward, common, 0.5 * self.layers)
        yield Matrix(self.hidden, self.feed_forward, sensitive, 0.5 * self.layers)

    def cache_bytes(self, depth: int) -> float:
        """K and V read by one pass at `depth` tokens of context."""
        per_token = 2 * self.kv_heads * self.head_size * _CACHE_BYTES
        full = self.layers - self.recurrent_layers - self.windowed_layers
        return per_token * (full * depth + self.windowed_layers * min(depth, self.window))

    def state_bytes(self) -> float:
        """Recurrent state read and written: a float32 matrix of 128 x 128 per value head (Gated DeltaNet)."""
        return 2 * self.recurrent_layers * self.recurrent_value * 128 * 4


@dataclass(frozen=True)
class Pair:
    """A target and a drafter that shares its head."""

    name: str
    vocabulary: int
    target: Body
    drafter: Body
    version: int
    taps: int
    block_size: int
    selector_rank: int = 0
    convolution: tuple[int, int] = (0, 0)
    tied_head: bool = False

    @property
    def head(self) -> Matrix:
        return Matrix(self.vocabulary, self.target.hidden, self.target.formats[1])

    def decode(self, rows: int, depth: int) -> Work:
        """The target over `rows` tokens, its head included."""
        matrices = [*self.target.matrices(), self.head]
        size = sum(m.bytes for m in matrices) + self.target.cache_bytes(depth) + self.target.state_bytes()
        attention = rows * self.target.cache_bytes(depth) / (2 * _CACHE_BYTES) * 2 * self.target.query_heads \
            / self.target.kv_heads
        return Work(size, rows * sum(m.elements for m in matrices) + attention, 8 * self.target.layers + 4)

    def draft(self, width: int, depth: int) -> Work:
        """The drafter over a block of width + 1 rows, its proposals from `width` of them."""
        body, head = list(self.drafter.matrices()), self.head
        extra = []
        if self.version == 2:
            taps, group = self.convolution
            convolved = Matrix(2 * taps * self.drafter.hidden // group, self.drafter.hidden, "Q4_K",
                               2 * self.drafter.layers)
            extra = [convolved, Matrix(self.selector_rank, self.drafter.hidden, "Q4_K")]
        size = sum(m.bytes for m in [*body, *extra, head]) + self.drafter.cache_bytes(depth)
        work = (width + 1) * sum(m.elements for m in [*body, *extra]) + width * head.elements
        return Work(size, work, (8 if self.version == 1 else 10) * self.drafter.layers + 6)

    def inject(self, rows: int) -> Work:
        """The fusion of the taps, and K and V of every drafter layer."""
        kv = self.drafter.kv_heads * self.drafter.head_size
        matrices = [Matrix(self.drafter.hidden, self.taps * self.target.hidden, "Q4_K"),
                    Matrix(2 * kv, self.drafter.hidden, "Q4_K", self.drafter.layers)]
        return Work(sum(m.bytes for m in matrices), rows * sum(m.elements for m in matrices), 3)

    def step_seconds(self, device: DeviceLimits, depth: int) -> float:
        """The least time of a plain step."""
        return self.decode(1, depth).seconds(device)

    def round_seconds(self, device: DeviceLimits, width: int, depth: int) -> float:
        """The least time of a round of `width` proposals."""
        parts = (self.draft(width, depth), self.decode(width + 1, depth), self.inject(width + 1))
        return sum(part.seconds(device) for part in parts)

    def prefill_seconds(self, device: DeviceLimits) -> float:
        """The least time of arithmetic for a token of a prompt, attention left out; a chunk needs one head."""
        return sum(m.elements / device.prefill_rate(_FLOAT_STEPS[m.format]) for m in self.target.matrices())

    def bytes(self) -> float:
        """Weights of both models."""
        inject = self.inject(1).bytes
        drafter = sum(m.bytes for m in self.drafter.matrices())
        embedding = 0 if self.tied_head else Matrix(self.vocabulary, self.target.hidden, self.target.formats[0]).bytes
        return sum(m.bytes for m in self.target.matrices()) + self.head.bytes + embedding + drafter + inject


def read_pair(path: Path) -> Pair:
    """A pair's shapes from a file of `recipes/pairs`."""
    document = tomllib.loads(path.read_text())
    target, drafter = document["target"], document["drafter"]
    names = set(Body.__dataclass_fields__)
    return Pair(document["name"], document["vocabulary"], Body(**target),
                Body(**{k: v for k, v in drafter.items() if k in names}), drafter["version"], drafter["taps"],
                drafter["block_size"], drafter.get("selector_rank", 0),
                (drafter.get("convolution_taps", 0), drafter.get("convolution_group", 0)),
                document.get("tied_head", False))


_HEADER = """# Rooflines

Generated by `python -m dflashc.compiler.roofline` from the shapes in `recipes/pairs` and the devices in
`targets/devices.py`. **On paper**: the least time that memory bandwidth, four-byte dot products and launches allow, and
nothing measured on these devices. Q4_K_M weights, K and V in float16, one sequence.

A plain step reads every weight once; a round reads the target once, the drafter and the head once more, and the
injection's matrices. A round must give as many tokens as it takes plain steps to break even; tokens per second
are at 4 tokens a round, or at another number in proportion.
"""

_PREFILL = """
## Prompts

Arithmetic is their limit: products of bytes, and the float operations that every block of 32 takes, since results must
not depend on how many rows are computed together. Kernels use the matrix unit on CUDA (from sm_80 on) and ROCm, and
four-byte dot products elsewhere: RDNA 3's WMMA multiplies bytes no faster than its dot products, and saves loads only.

| pair | device | products by | tok/s at most | by dot products |
| --- | --- | --- | --- | --- |
"""

_PUBLISHED = """
## Beside published figures

| device, engine | pair | reported | the roof says |
| --- | --- | --- | --- |
"""


def _table(pair: Pair, device: DeviceLimits) -> Iterator[str]:
    yield f"\n### {pair.name} on {device.name} (`--target {device.target}`)\n"
    yield (f"Weights of both models: {pair.bytes() / 1e9:.1f} GB of {device.memory / 1e9:.0f} GB; a drafted round "
           f"reads {_round_bytes(pair) / 1e9:.2f} GB, a plain step {pair.decode(1, 0).bytes / 1e9:.2f} GB.\n")
    yield ("| depth | plain step, ms | plain, tok/s | width | round, ms | in plain steps, and break-even tokens | "
           "tok/s at 4 a round | limited by |")
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for depth in _DEPTHS:
        step = pair.step_seconds(device, depth)
        for width in sorted({3, 7, pair.block_size - 1}):
            seconds = pair.round_seconds(device, width, depth)
            verify = pair.decode(width + 1, depth)
            bound = verify.bytes / device.bandwidth >= verify.operations / device.dot_rate
            limit = "bandwidth" if bound else "arithmetic"
            yield (f"| {depth:,} | {step * 1e3:.1f} | {1 / step:.0f} | {width} | {seconds * 1e3:.1f} | "
                   f"{seconds / step:.2f} | {4 / seconds:.0f} | {limit} |")


def _prefill(pair: Pair, device: DeviceLimits) -> str:
    unit = "matrix unit" if device.matrix_rate else "dot products"
    seconds, by_dots = pair.prefill_seconds(device), pair.prefill_seconds(replace(device, matrix_rate=0))
    return _row(pair.name, device.name, unit, f"{1 / seconds:,.0f}", f"{1 / by_dots:,.0f}")


def _round_bytes(pair: Pair) -> float:
    width = pair.block_size - 1
    return pair.draft(width, 0).bytes + pair.decode(width + 1, 0).bytes + pair.inject(width + 1).bytes


def _published(pairs: Sequence[Pair]) -> Iterator[str]:
    """Reports of users (llama.cpp #27342, hipfire #754) with the roof at the same width."""
    by_name = {p.name: p for p in pairs}
    devices = {d.name: d for d in DEVICES}
    pair, device = by_name["Qwen3.8-27B"], devices["RTX 4090"]
    near, far = pair.round_seconds(device, 4, 2048), pair.round_seconds(device, 4, 32768)
    yield _row("RTX 4090, llama.cpp #27342", "Qwen3.8-27B + DFlash2, width 4, q4_0 K/V",
               "100 tok/s, 20 to 30 past 30k tokens",
               f"a round of width 4 takes {near * 1e3:.1f} ms at 2k and {far * 1e3:.1f} ms at 32k (f16 K/V): 100 tok/s "
               f"are {100 * near:.1f} tokens a round; plain decoding {1 / pair.step_seconds(device, 32768):.0f} tok/s "
               "at 32k")
    pair, device = by_name["Qwen3.6-27B"], devices["Strix Halo"]
    step, seven = pair.step_seconds(device, 0), pair.round_seconds(device, 7, 0)
    yield _row("gfx1151, hipfire #754", "a 27B target with DFlash",
               "13 tok/s plain, 6 with DFlash; llama.cpp on Vulkan at most 30",
               f"plain {1 / step:.0f} tok/s; a round of width 7 takes {seven / step:.2f} plain steps, so 4 tokens a "
               f"round give {4 / seven:.0f} tok/s")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def render() -> str:
    """The whole page, Markdown."""
    pairs = [read_pair(path) for path in sorted(_PAIRS.glob("*.toml"))]
    lines = [_HEADER]
    for pair in pairs:
        lines.append(f"\n## {pair.name}")
        for device in DEVICES:
            lines += _table(pair, device)
    lines.append(_PREFILL.rstrip("\n"))
    lines += [_prefill(pair, device) for pair in pairs for device in DEVICES]
    lines.append(_PUBLISHED.rstrip("\n"))
    lines += _published(pairs)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
