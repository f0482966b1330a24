"""The command line: parses, prints, and turns errors into one line and an exit code.

No logic here. What a command needs is imported when it runs, so that `run` never loads the compiler.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dflashc.runtime.errors import DflashError
from dflashc.runtime.kv_types import KV_TYPES

if TYPE_CHECKING:
    from dflashc.compiler.pair import Overrides

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""


@dataclass
class Settings:
    """Options that stand before the command."""

    debug: bool = False
    verbose: bool = False


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    settings = Settings()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = cli.main(list(arguments) or ["--help"], "dflashc", standalone_mode=False, obj=settings)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (click.Abort, KeyboardInterrupt):
        code = _fail("interrupted", INTERRUPTED, settings)
    except click.ClickException as error:
        code = _fail(error.format_message(), error.exit_code, settings)
    except DflashError as error:
        code = _fail(str(error), error.exit_code, settings)
    except MemoryError:
        code = _fail("out of memory", 1, settings)
    except OSError as error:
        code = _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1, settings)
    except Exception as error:
        code = _fail(f"internal error, {type(error).__name__}: {error}; --debug shows where", 1, settings)
    sys.exit(code or 0)


def _fail(message: str, code: int, settings: Settings) -> int:
    if settings.debug:
        traceback.print_exc()
    print("dflashc: error: " + " ".join(message.splitlines()), file=sys.stderr)
    return code


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("-v", "--verbose", is_flag=True, help="Say more about what is done.")
@click.version_option(importlib.metadata.version("dflashc"), message="%(prog)s %(version)s")
@click.pass_obj
def cli(settings: Settings, debug: bool, verbose: bool) -> None:
    """Compile GGUF language models to artefacts of one device, and run them."""
    settings.debug, settings.verbose = debug, verbose


def _pair_options(command: Callable[..., None]) -> Callable[..., None]:
    """One option per field of `pair.Overrides`; their values are checked there."""
    for option in (
        click.option("--embedding-scale", type=float, help="Factor of the drafter's input embeddings [by the files]."),
        click.option("--draft-rows", default="short", show_default=True,
                     help="Rows of a draft: short, as many as are wanted, or full blocks."),
        click.option("--draft-causal", default="auto", show_default=True,
                     help="Causal layers: auto, none, swa (those with a window) or all."),
        click.option("--taps-offset", type=int,
                     help="Added to the drafter's target layers, to count from 0 [by the file]."),
    ):
        command = option(command)
    return command


def _overrides(options: dict[str, Any]) -> Overrides:
    """What `_pair_options` read, taken out of `options`."""
    from dflashc.compiler.pair import Overrides

    return Overrides(**{field.name: options.pop(field.name) for field in fields(Overrides)})


_KV_TYPE = click.Choice(list(KV_TYPES))


@cli.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--target", required=True, help="Device to build for; `dflashc targets` lists them.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Directory to write.")
@click.option("--ctx", "context", type=click.IntRange(min=1), help="Context capacity in tokens [model's own].")
@click.option("--drafter", type=click.Path(path_type=Path), help="GGUF file of a DFlash drafter for MODEL.")
@click.option("--kv-type", type=_KV_TYPE, default="f16", show_default=True, help="Type of MODEL's K and V caches.")
@click.option("--drafter-kv-type", type=_KV_TYPE, help="The same of the drafter's [f16].")
@_pair_options
@click.option("--self-test-of", type=click.Path(path_type=Path), metavar="ARTEFACT",
              help="For a GPU: take over what ARTEFACT, of MODEL for a CPU, recorded for `verify`.")
@click.option("--dump", type=click.Path(path_type=Path, file_okay=False), help="Write the IR after every pass there.")
@click.option("--dry-run", is_flag=True, help="Stop before anything is compiled or written, and say what would be.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def build(settings: Settings, as_json: bool, dry_run: bool, **options: Any) -> None:
    """Compile the GGUF file MODEL to an artefact, with a drafter to one that speculates."""
    from dflashc.compiler import cli_build
    from dflashc.compiler.build import BuildOptions

    if options["drafter"] is None and options["drafter_kv_type"] is not None:
        raise click.UsageError("--drafter-kv-type is for the caches of a drafter; it needs --drafter")
    options["overrides"] = _overrides(options)
    options["context"] = options["context"] or 0
    options["drafter_kv_type"] = options["drafter_kv_type"] or "f16"
    (cli_build.dry_run if dry_run else cli_build.build)(BuildOptions(**options), as_json, settings.verbose)


@cli.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("drafter", type=click.Path(path_type=Path))
@_pair_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(target: Path, drafter: Path, as_json: bool, **options: Any) -> None:
    """Say whether the GGUF files TARGET and DRAFTER belong together, and how the drafter is read. Builds nothing."""
    from dflashc.compiler import cli_inspect

    cli_inspect.check(target, drafter, _overrides(options), as_json)


class _Width(click.ParamType):
    """A number from 0, or "auto"."""

    name = "N|auto"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int | str:
        if value == "auto" or isinstance(value, int):
            return value
        if value.isascii() and value.isdigit():
            return int(value)
        self.fail(f"{value!r} is neither a number from 0 nor auto", parameter, context)


def _device_options(command: Callable[..., None]) -> Callable[..., None]:
    """Which device runs an artefact, and how."""
    for option in (
        click.option("--allow-ptx", is_flag=True, help="Compile the artefact's PTX where its CUDA code does not fit."),
        click.option("--device", "gpu", metavar="N|NAME",
                     help="GPU, by its number or name in `dflashc targets` [the first that fits]."),
    ):
        command = option(command)
    return command


def _sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """One option per field of `SamplingParameters`, with its default."""
    from dflashc.runtime.sampling import SamplingParameters

    helps = {
        "temperature": "Divides the logits; 0 takes the likeliest token.",
        "top_k": "Keep that many of the likeliest tokens; 0 keeps all.",
        "top_p": "Keep the likeliest tokens up to this probability; 1 keeps all.",
        "min_p": "Keep tokens at least this likely relative to the likeliest; 0 keeps all.",
        "repeat_penalty": "Makes recent tokens less likely; 1 is off.",
        "repeat_last_n": "Tokens that penalties look back on; 0 none, -1 all.",
        "frequency_penalty": "Taken off a recent token's logit per occurrence.",
        "presence_penalty": "Taken off a recent token's logit once.",
        "seed": "Of the random numbers; left out, another one each time.",
    }
    for field in reversed(fields(SamplingParameters)):
        name = "--temp" if field.name == "temperature" else "--" + field.name.replace("_", "-")
        kind = float if isinstance(field.default, float) else int
        command = click.option(name, field.name, type=kind, default=field.default, show_default=True,
                               help=helps[field.name])(command)
    return command


@cli.command()
@click.argument("artefact", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", help="Text to answer, or to continue where the model has no chat template.")
@click.option("-f", "--file", help="Read the prompt from a file, - for standard input; a last newline is left out.")
@click.option("--chat", is_flag=True, help="Converse: every line is a turn. Ctrl-C stops an answer, Ctrl-D ends.")
@click.option("--system", help="System message.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--special/--no-special", "parse_special", default=True, show_default=True,
              help="Whether control tokens written in a raw prompt are read as such.")
@click.option("--thinking/--no-thinking", default=True, show_default=True, help="Of models that can think first.")
@_sampling_options
@click.option("--stop", "stops", multiple=True, help="End before this text; may be given several times.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Tokens to generate at most [until the model ends].")
@click.option("--ctx", "context", type=click.IntRange(min=1), help="Context in tokens [4096, or what is needed].")
@click.option("--width", type=_Width(), default="auto", show_default=True,
              help="Tokens to draft per round, of a pair; 0 drafts none, auto as many as promise most speed.")
@click.option("--accept", default="auto", show_default=True,
              help="How sampled texts accept drafts: match (the text of a seed is that of plain decoding), reject (the "
                   "law is), auto (reject where the drafter gives probabilities).")
@click.option("--p-min", type=float, default=0.0, show_default=True,
              help="End a draft before a token that the drafter gives less than this probability.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads that compute on a CPU [available cores].")
@_device_options
@click.option("-q", "--quiet", is_flag=True, help="Print neither statistics nor notes and warnings.")
@click.pass_obj
def run(settings: Settings, prompt: str | None, file: str | None, chat: bool, **options: Any) -> None:
    """Generate text with an ARTEFACT. Text goes to standard output, statistics to standard error."""
    from dflashc.compiler import cli_run
    from dflashc.runtime.drafting import DraftParameters
    from dflashc.runtime.sampling import SamplingParameters

    if (prompt is not None) + (file is not None) + chat != 1:
        raise click.UsageError("expected one of -p TEXT, -f FILE and --chat")
    if chat and options["raw"]:
        raise click.UsageError("--chat needs the chat template, --raw leaves it out; give one of them")
    if file is not None:
        prompt = cli_run.read_prompt(file)
    seeded = options["seed"] is not None
    sampling = SamplingParameters(**{f.name: options.pop(f.name) for f in fields(SamplingParameters)})
    drafting = DraftParameters(**{f.name: options.pop(f.name) for f in fields(DraftParameters)})
    chosen = cli_run.RunOptions(parameters=sampling, seeded=seeded, drafting=drafting, verbose=settings.verbose,
                                **options)
    if prompt is None:
        cli_run.chat(chosen)
    elif not cli_run.answer(chosen, prompt):
        click.get_current_context().exit(INTERRUPTED)


@cli.command()
@click.argument("artefact", type=click.Path(path_type=Path))
@click.option("--threads", type=click.IntRange(min=1), help="Threads that compute on a CPU [available cores].")
@_device_options
@click.option("--ctx", "context", type=click.IntRange(min=1), help="Deepest context to time [artefact's].")
@click.option("--seconds", type=click.FloatRange(min=0), default=5, show_default=True,
              help="Time for each depth, and for each kind of text.")
@click.option("--max-tokens", "tokens", type=click.IntRange(min=2), default=128, show_default=True,
              help="Tokens to generate per prompt.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Picture to draw: .png, .svg or .pdf.")
@click.option("--in-artefact", is_flag=True, help="Store the record in ARTEFACT instead of the user's cache.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune(**options: Any) -> None:
    """Measure a pair's ARTEFACT on this machine, so that `run --width auto` need not learn what rounds cost."""
    from dflashc.compiler.cli_tune import TuneOptions
    from dflashc.compiler.cli_tune import tune as tune_artefact

    tune_artefact(TuneOptions(**options))


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--ctx", "context", type=click.IntRange(min=1), help="Tokens to count memory and K/V for [artefact's].")
@click.option("--plan", "program", is_flag=False, flag_value="", metavar="[NAME]",
              help="List the programs and rounds of an artefact, or the launches of one: decode.1, round.7.")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--kernels", is_flag=True, help="List the kernels of an artefact for a GPU, with what each takes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: Path, **options: Any) -> None:
    """Describe PATH: a GGUF model, supported or not, a drafter, or an artefact."""
    from dflashc.compiler import cli_inspect

    cli_inspect.inspect(path, **options)


@cli.command()
@click.argument("artefact", type=click.Path(path_type=Path))
@_device_options
def verify(artefact: Path, gpu: str | None, allow_ptx: bool) -> None:
    """Check the files of an ARTEFACT, whether this machine can run it, and that it computes what it should."""
    from dflashc.compiler import cli_inspect

    cli_inspect.verify(artefact, gpu, allow_ptx)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def targets(as_json: bool) -> None:
    """List targets and devices: what can be built here, what can run here, and what is missing."""
    from dflashc.compiler import cli_inspect

    cli_inspect.targets(as_json)
