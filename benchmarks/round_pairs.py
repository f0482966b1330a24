"""The pairs whose rounds are measured, and their artefacts.

Shipped pairs, which accept what real text lets them, and the shape of Qwen3 0.6B with random weights, whose target
repeats its last token: a random drafter is never right about it, a copying one always.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

import dflashc.recipes
from dflashc.compiler.build import BuildOptions, build
from dflashc.recipes.drafter import DrafterShape, drafter_body, write_drafter
from dflashc.recipes.target import PRESETS, write_target
from dflashc.recipes.tensors import Formats
from dflashc.runtime.prompts import load_prompts
from dflashc.runtime.tokenizer import Tokenizer

CONTEXT = 1024
_SHIPPED = Path(next(iter(dflashc.recipes.__path__))) / "pycode-3m"
_SYNTHETIC = {
    "q4_k": (Formats("Q4_K", {"token_embd": "Q6_K"}), Formats("Q4_K")),
    "q8_0": (Formats("Q8_0"), Formats("Q8_0")),
}
_REPEATING = 0.05  # weight scale at which a tied target repeats its last token
_DRAFTER_LAYERS, _TAPS, _BLOCK = 5, (1, 7, 13, 19, 25), 16
_REPEATED_TOKEN, _PROMPT = 1000, 64


@dataclass(frozen=True)
class Pair:
    """Two files, and what is generated with them.

    Attributes
    ----------
    kind : str
        "code": real text and acceptance; "random", "copying": nothing or everything is accepted.
    tokens : int
        To generate after every prompt.
    """

    name: str
    kind: str
    target: Path
    drafter: Path
    tokens: int


def shipped_pairs() -> Iterator[Pair]:
    """The pairs that come with the package."""
    for quantisation in ("q8_0", "f16"):
        for version in ("dflash", "dflash2"):
            yield Pair(f"pycode-3m-{version}-{quantisation}", "code", _SHIPPED / f"pycode-3m-{quantisation}.gguf",
                       _SHIPPED / f"pycode-3m-{version}-{quantisation}.gguf", 128)


def synthetic_pairs(folder: Path) -> Iterator[Pair]:
    """Pairs of a middle size, whose files `write` makes in `folder`."""
    for quantisation in _SYNTHETIC:
        target = folder / f"repeating-qwen3-0.6b-{quantisation}.gguf"
        for kind, tokens in (("random", 8), ("copying", 64)):
            name = f"{target.stem}-{kind}"
            yield Pair(name, kind, target, folder / f"{name}.gguf", tokens)


def choose(pairs: Sequence[Pair], patterns: Sequence[str]) -> list[Pair]:
    """Those whose name matches one of `patterns`, or all without any; raises `click.BadParameter` where none does."""
    found = [p for p in pairs if not patterns or any(fnmatch.fnmatch(p.name, pattern) for pattern in patterns)]
    if not found:
        raise click.BadParameter(f"no pair matches {' '.join(patterns)}; there are {' '.join(p.name for p in pairs)}")
    return found


def write(pair: Pair) -> None:
    """Write the files of a synthetic pair that are not there yet."""
    if pair.kind == "code":
        return
    target_formats, drafter_formats = _SYNTHETIC[pair.target.stem.rpartition("-")[2]]
    if not pair.target.exists():
        click.echo(f"writing {pair.target}", err=True)
        write_target(pair.target, dataclasses.replace(PRESETS["qwen3-0.6b"], weight_scale=_REPEATING), target_formats)
    if not pair.drafter.exists():
        click.echo(f"writing {pair.drafter}", err=True)
        shape = DrafterShape(drafter_body(pair.target, _DRAFTER_LAYERS), _TAPS, _BLOCK)
        write_drafter(pair.drafter, pair.target, shape, drafter_formats, 1, copying=pair.kind == "copying")


def build_artefact(target: Path, drafter: Path | None, device: str, folder: Path, reuse: bool) -> Path:
    """The artefact of a pair, or of its target alone, in `folder`; an earlier one is taken only with `reuse`."""
    output = folder / f"{(drafter or target).stem}.round.{device}.dflash"
    if not (reuse and output.exists()):
        click.echo(f"building {output}", err=True)
        build(BuildOptions(target, device, output, drafter=drafter, context=CONTEXT))
    return output


def prompts(pair: Pair, artefact: Path) -> list[list[int]]:
    """Token ids to go on from: Python code for real pairs, one token over and over for synthetic ones."""
    if pair.kind != "code":
        return [[_REPEATED_TOKEN] * _PROMPT]
    tokenizer = Tokenizer.load(artefact / "tokenizer")
    return [tokenizer.encode(text) for text in load_prompts()["code"]]
