"""Command line of the generator: random models of any shape for tests and benchmarks.

    python -m dflashc.recipes.synthetic target -o t.gguf --preset qwen3-0.6b --format Q4_K --override token_embd=Q6_K
    python -m dflashc.recipes.synthetic drafter -o d.gguf --target t.gguf --version 2 --format Q8_0

Weights are random, so the models say nothing; shapes, formats and metadata are those of real ones. Parses and prints;
the work is done in `target.py` and `drafter.py`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from dflashc.runtime.errors import DflashError, RequestError

from .drafter import DrafterShape, default_taps, drafter_body, write_drafter
from .quantise import FORMATS
from .target import ARCHITECTURES, PRESETS, TargetShape, write_target
from .tensors import Formats

_SIZE_OPTIONS = {
    "layers": "Layers.",
    "heads": "Attention heads.",
    "kv_heads": "Key-value heads.",
    "head_size": "Width of a head.",
    "feed_forward": "Width of the feed-forward part.",
}


def _sizes(command: Callable[..., None]) -> Callable[..., None]:
    for name, text in reversed(_SIZE_OPTIONS.items()):
        command = click.option(f"--{name.replace('_', '-')}", type=click.IntRange(min=1), help=text)(command)
    return command


def _output_options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write."),
        click.option(
            "--format",
            "default_format",
            type=click.Choice(FORMATS),
            default="Q8_0",
            show_default=True,
            help="Of weights.",
        ),
        click.option(
            "--override", multiple=True, metavar="ROLE=FORMAT", help="Format of one kind of tensor: ffn_down=Q6_K."
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random numbers."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def main() -> None:
    """Write random GGUF models of any shape, for tests and benchmarks."""


@main.command()
@_output_options
@click.option("--preset", type=click.Choice(list(PRESETS)), default="tiny-qwen3", show_default=True, help="Shape.")
@click.option("--architecture", type=click.Choice(ARCHITECTURES), help="Of another kind than the preset's.")
@_sizes
@click.option("--hidden", type=click.IntRange(min=1), help="Hidden size.")
@click.option("--vocabulary", type=click.IntRange(min=1), help="Tokens.")
@click.option("--tied/--untied", default=None, help="Whether the head is the embedding.")
@click.option("--bias", is_flag=True, default=None, help="Biases on q, k and v (llama; qwen2 always has them).")
@click.option("--rotated", type=click.IntRange(min=2), help="Dimensions of a head that are rotated.")
@click.option("--rope-scaling", type=float, help="Factor of Llama 3's rope_freqs; 1 for none.")
@click.option("--sliding-window", type=click.IntRange(min=0), help="Tokens (gemma3).")
@click.option("--weight-scale", type=float, help="0.05 gives a target that a copying drafter predicts.")
def target(
    output: Path, default_format: str, override: tuple[str, ...], seed: int, preset: str, **changes: Any
) -> None:
    """Write a target model: a preset with changes."""
    formats = Formats(default_format, _overrides(override))
    shape = dataclasses.replace(PRESETS[preset], **_given(changes))
    write_target(output, shape, formats, seed)
    _report(output, shape)


@main.command()
@_output_options
@click.option(
    "--target", "target_path", type=click.Path(path_type=Path, exists=True), required=True, help="Its target."
)
@click.option("--version", type=click.IntRange(1, 2), default=1, show_default=True, help="Of DFlash.")
@click.option("--copying", is_flag=True, help="Propose the most frequent token of the context.")
@_sizes
@click.option("--taps", help="Target layers to read, counted from 0: 1,7,13.")
@click.option("--block-size", type=int, help="Rows of a block with the anchor.")
@click.option("--sliding-window", type=click.IntRange(min=0), help="Of all layers but the last.")
@click.option("--convolution-taps", type=click.IntRange(min=1), help="Version 2.")
@click.option("--convolution-group", type=click.IntRange(min=1), help="Version 2.")
@click.option("--selector-rank", type=click.IntRange(min=1), help="Version 2.")
@click.option("--selector-candidates", type=click.IntRange(min=1), help="Version 2.")
@click.option("--bias", is_flag=True, default=None, help="Biases on q, k, v and the output of attention.")
@click.option("--context-rope-base", type=click.FloatRange(min=1), help="Rotary base of injected keys.")
@click.option("--draft-vocabulary", type=click.IntRange(min=1), help="Tokens of a reduced head (d2t).")
@click.option("--sinks", is_flag=True, default=None, help="Attention sinks.")
def drafter(
    output: Path,
    default_format: str,
    override: tuple[str, ...],
    seed: int,
    target_path: Path,
    copying: bool,
    taps: str | None,
    **changes: Any,
) -> None:
    """Write a DFlash drafter for a target; widths not given are the target's."""
    formats = Formats(default_format, _overrides(override))
    given = _given(changes)
    body_changes = {name: given.pop(name) for name in _SIZE_OPTIONS if name in given}
    body = dataclasses.replace(drafter_body(target_path), **body_changes)
    if taps is not None:
        given["taps"] = _numbers(taps)
    shape = DrafterShape(body, **{"taps": default_taps(target_path), **given})
    write_drafter(output, target_path, shape, formats, seed, copying)
    _report(output, shape)


def _given(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise RequestError(f"{text!r} is not a list of numbers like 1,7,13") from None


def _overrides(override: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(item.partition("=")[::2] for item in override)
    unknown = [item for item in override if pairs[item.partition("=")[0]] not in FORMATS]
    if unknown:
        raise RequestError(f"override {unknown[0]!r} is not ROLE=FORMAT with a format of {' '.join(FORMATS)}")
    return pairs


def _report(output: Path, shape: TargetShape | DrafterShape) -> None:
    click.echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB, {shape}")


if __name__ == "__main__":
    try:
        main()
    except DflashError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
