"""The pairs of these tests as GGUF files, in formats that share their kernels with the shipped pair."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from dflashc.compiler.pair import Overrides
from dflashc.recipes.counting import successor, write_counting_drafter, write_counting_target
from dflashc.recipes.drafter import DrafterShape, drafter_body, drafter_tensors, write_drafter, write_drafter_of
from dflashc.recipes.target import TargetShape, write_target
from dflashc.recipes.tensors import Formats, Tensor

WINDOW = 24
_TARGET = TargetShape("qwen3", 3, 128, 4, 2, 64, 128, 300, context_length=4096)
_TAPS = (0, 1)
_SMALL = ("attn_conv_proj", "ffn_conv_proj", "selector_predecessor", "selector_successor", "selector_hidden")


@dataclass(frozen=True)
class Files:
    """A target, or a target and a drafter with what is stated about the two; types of the K and V caches of either."""

    model: Path
    drafter: Path | None = None
    overrides: Overrides = field(default_factory=Overrides)
    kv_types: tuple[str, str] = ("f16", "f16")


def _formats(default: str, version: int) -> Formats:
    """As the shipped drafters have them: what is small in version 2 is F16 where the rest is Q8_0."""
    return Formats(default, dict.fromkeys(_SMALL, "F16") if version == 2 and default == "Q8_0" else {})


def counted(first: int, count: int) -> list[int]:
    """A token of a counting target and those that follow."""
    tokens = [first]
    while len(tokens) < count:
        tokens.append(successor(tokens[-1]))
    return tokens


def counting_pairs(folder: Path, default: str) -> dict[str, Files]:
    """A target that counts, with drafters that are always right, in both versions, and one that never is."""
    target = folder / "counting.gguf"
    write_counting_target(target, Formats(default))
    drafters = {name: folder / f"{name}.gguf" for name in ("oracle-v1", "oracle-v2", "blind")}
    write_counting_drafter(drafters["oracle-v1"], target, _formats(default, 1), "oracle", 1)
    write_counting_drafter(drafters["oracle-v2"], target, _formats(default, 2), "oracle", 2, own_tables=True)
    write_counting_drafter(drafters["blind"], target, _formats(default, 1), "blind", 1)
    return {"counting": Files(target)} | {name: Files(target, path) for name, path in drafters.items()}


def random_pairs(folder: Path, default: str) -> dict[str, Files]:
    """A random target with random drafters.

    Both versions with a window in every layer, version 1 without, and its weights in version 2 with convolutions that
    change nothing and a selector without a say ("identity"); version 1 with all that dialect D5 has besides ("d5"),
    version 2 with a reduced vocabulary ("reduced"); both with tables of their own that are padded otherwise than the
    target's ("short", "padded").
    """
    target = folder / "random.gguf"
    write_target(target, _TARGET, Formats(default))
    full = DrafterShape(drafter_body(target), _TAPS)
    shapes = {"random": full, **{
        f"windowed-v{version}": replace(full, sliding_window=WINDOW, full_layers=0, version=version)
        for version in (1, 2)},
        "d5": replace(full, body=replace(full.body, rotated=32), sliding_window=WINDOW, bias=True, sinks=True,
                      draft_vocabulary=100, context_rope_base=1e4),
        "reduced": replace(full, version=2, draft_vocabulary=100)}
    drafters = {name: folder / f"{name}-drafter.gguf" for name in (*shapes, "identity", "short", "padded")}
    for name, shape in shapes.items():
        write_drafter(drafters[name], target, shape, _formats(default, shape.version))
    shape = replace(full, version=2)
    silent = ("conv_base", "conv_proj", "selector_predecessor", "selector_successor")
    tensors = [replace(t, deviation=0.0) if t.role.endswith(silent) else t for t in drafter_tensors(shape)]
    write_drafter_of(drafters["identity"], target, shape, tensors, _formats(default, 2))
    write_drafter_of(drafters["short"], target, full, _with_tables(full, 280, "token_embd"), _formats(default, 1))
    write_drafter_of(drafters["padded"], target, shape, _with_tables(shape, 340, "token_embd", "output"),
                     _formats(default, 2))
    pairs = {name: Files(target, path) for name, path in drafters.items()}
    return {"random-alone": Files(target), **pairs,
            "windowed-v1-q8": replace(pairs["windowed-v1"], kv_types=("f16", "q8_0"))}


def _with_tables(shape: DrafterShape, rows: int, *names: str) -> list[Tensor]:
    """The tensors of a drafter whose tables have `rows` rows."""
    body = replace(shape.body, vocabulary=rows)
    own = [Tensor(f"{name}.weight", (rows, body.hidden), body.hidden**-0.5) for name in names]
    return [*own, *drafter_tensors(replace(shape, body=body))]


def pycode_pairs(folder: Path, quantisation: str) -> dict[str, Files]:
    """The shipped model with its drafters, whose blocks are as short as a round needs or always whole; and with K and
    V in q8_0."""
    target = folder / f"pycode-3m-{quantisation}.gguf"
    pairs = {"pycode": Files(target)}
    for version, kind in ((1, "dflash"), (2, "dflash2")):
        drafter = target.with_name(f"pycode-3m-{kind}-{quantisation}.gguf")
        pairs[f"pycode-v{version}"] = Files(target, drafter)
        pairs[f"pycode-v{version}-whole"] = Files(target, drafter, Overrides(draft_rows="full"))
    return {**pairs, "pycode-q8": Files(target, kv_types=("q8_0", "f16")),
            "pycode-v1-q8": replace(pairs["pycode-v1"], kv_types=("q8_0", "f16")),
            "pycode-v2-q8": replace(pairs["pycode-v2"], kv_types=("q8_0", "q8_0"))}
