"""An artefact on this machine's device: is it right, what do rounds cost, how near the memory's limit are kernels.

    python -m benchmarks.device ARTEFACT --json device.json

Builds nothing and needs no compiler: take the script and an artefact to the machine that has the device. Times are of
this device alone; see README.md for what the figures mean.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks import machine
from benchmarks.kernels import KernelTime, profile_on, round_launches, run_launches
from benchmarks.report import Bar, bar_table
from dflashc.compiler.tables import Table, pairs, show
from dflashc.runtime.artefact import Artefact, load_artefact
from dflashc.runtime.device.base import Device
from dflashc.runtime.device.gpu import GpuDevice
from dflashc.runtime.device.opening import open_device
from dflashc.runtime.errors import DflashError
from dflashc.runtime.measuring import PARTS, Costs, measure_costs
from dflashc.runtime.processors import choose_threads
from dflashc.runtime.selftest import run as run_self_test
from dflashc.runtime.session import Session

_DEPTHS = (0, 2048, 8192)
_LARGE_BYTES = 8 << 20  # of a launch: smaller ones are over before the memory is busy
_BAR_WIDTH = 7
_DECODE = "decode."  # begins the names of the programs that take tokens


@click.command()
@click.argument("directory", metavar="ARTEFACT", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--device", "gpu", help="Number of the GPU, or a part of its name.")
@click.option("--allow-ptx", is_flag=True, help="Compile the artefact's PTX where its CUDA code is not for the GPU.")
@click.option("--threads", type=int, help="Threads of a CPU [available cores].")
@click.option("--depths", default=",".join(map(str, _DEPTHS)), show_default=True, help="Tokens of context.")
@click.option("--seconds", default=5.0, show_default=True, help="Time for the rounds of each depth.")
@click.option("--json", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write all values there.")
def main(directory: Path, gpu: str | None, allow_ptx: bool, threads: int | None, depths: str, seconds: float,
         output: Path | None) -> None:
    """Test and measure ARTEFACT on the device that it was built for."""
    try:
        wanted = sorted({int(depth) for depth in depths.split(",")})
    except ValueError as error:
        raise click.BadParameter(f"{depths!r} found, numbers with commas between expected", param_hint="--depths") \
            from error
    try:
        artefact = load_artefact(directory)
        with closing(open_device(artefact, threads=threads, gpu=gpu, allow_ptx=allow_ptx)) as device:
            found = measure(artefact, device, wanted, seconds, threads)
    except DflashError as error:
        raise click.ClickException(str(error)) from error
    show(tables(found))
    if output:
        output.write_text(json.dumps(found, indent=1, default=asdict))


def measure(artefact: Artefact, device: Device[Any], depths: Sequence[int], seconds: float,
            threads: int | None) -> dict[str, Any]:
    """All figures: the self-test first, so that no wrong result is ever timed."""
    for note in device.notes:
        click.echo(f"note: {note}", err=True)
    click.echo("self-test", err=True)
    verdict = run_self_test(artefact, device)
    click.echo("bandwidth", err=True)
    bandwidth = device.copy_bandwidth() if isinstance(device, GpuDevice) \
        else machine.read_bandwidth(choose_threads(threads))
    width = artefact.manifest.drafter.get("width", 0)
    fitting = [d for d in depths if d + width + 1 <= artefact.plan.max_context]
    session = Session(artefact, device, artefact.plan.max_context)
    costs = measure_costs(session, fitting, seconds, lambda what, done, of: click.echo(what, err=True))
    kernels = {w: profile_on(device, artefact, 0, w + 1, round_launches(artefact, w), 8)
               for w in sorted({0, min(_BAR_WIDTH, width), width})}
    rows = max(int(name[len(_DECODE) :]) for name in artefact.plan.programs if name.startswith(_DECODE))
    prefill = profile_on(device, artefact, 0, rows, run_launches(artefact, rows, "ids"), 8)
    return {"prefill_rows": rows, "prefill": prefill,
            "artefact": artefact.directory.name, "target": artefact.manifest.target, "device": device.identity,
            "machine": machine.describe(), "bandwidth": bandwidth, "self_test": verdict, "costs": costs,
            "kernels": kernels, "kind": device.info.kind if isinstance(device, GpuDevice) else "cpu"}


def tables(found: dict[str, Any]) -> list[Table]:
    """Everything for people, to be pasted."""
    kernels: dict[int, list[KernelTime]] = found["kernels"]
    kind = "read from memory" if found["kind"] == "cpu" else "copied inside device memory, reads and writes"
    facts = [("artefact", f"{found['artefact']}, target {found['target']}"), ("device", found["device"]),
             ("bandwidth", f"{found['bandwidth'] / 1e9:.1f} GB/s {kind}"), ("self-test", found["self_test"]),
             *found["machine"].items()]
    return [pairs("Device", facts), *_costs(found["costs"]),
            *(_kernels(f"Kernels of a round of width {w} at depth 0, one by one" if w else "Kernels of a plain step",
                       times, found["bandwidth"]) for w, times in kernels.items()),
            _prefill(found),
            *([bar_table("device", bars(found))] if found["kind"] not in ("cpu", "software") else [])]


def bars(found: dict[str, Any]) -> list[Bar]:
    """What a GPU has to reach: large matmuls of up to 8 rows near the memory's limit, cheap rounds."""
    costs: Costs = found["costs"]
    rounds = costs.parts["rounds"][0]
    shares = [t.bytes_read / t.seconds / found["bandwidth"] for w, times in found["kernels"].items() if w < 8
              for t in times if t.bytes_read >= _LARGE_BYTES * t.launches]
    reached = [Bar("share of the bandwidth in the slowest large matmul", 0.85, min(shares))] if shares else []
    if len(rounds) > _BAR_WIDTH:
        reached.append(Bar(f"round of width {_BAR_WIDTH}, in plain steps", 1.25, rounds[_BAR_WIDTH] / rounds[0], True))
    return reached


def _costs(costs: Costs) -> list[Table]:
    columns = ["width", *(f">{part}, ms" for part in PARTS), ">in plain steps"]
    return [Table(f"Rounds at depth {depth:,}", columns, [
        [str(w), *(f"{costs.parts[part][i][w] * 1e3:.3f}" for part in PARTS),
         f"{costs.parts['rounds'][i][w] / costs.parts['rounds'][i][0]:.2f}"]
        for w in range(len(costs.parts["rounds"][i]))]) for i, depth in enumerate(costs.depths)]


def _prefill(found: dict[str, Any]) -> Table:
    rows, times = found["prefill_rows"], found["prefill"]
    speed = rows / sum(t.seconds for t in times)
    return _kernels(f"Kernels of a prefill of {rows} tokens, {speed:,.0f} tokens/s", times, found["bandwidth"])


def _kernels(title: str, times: Sequence[KernelTime], bandwidth: float) -> Table:
    whole = sum(t.seconds for t in times)
    rows = [[t.part, t.kernel, str(t.launches), f"{t.seconds * 1e3:.3f}", f"{t.seconds / whole:.1%}",
             *([f"{t.bytes_read / t.seconds / 1e9:.1f}", f"{t.bytes_read / t.seconds / bandwidth:.0%}",
                f"{t.flops / t.seconds / 1e9:.0f}"] if t.bytes_read else ["", "", ""])] for t in times]
    columns = ("part", "kernel", ">launches", ">ms", ">share", ">GB/s", ">of the bandwidth", ">GFLOP/s")
    return Table(title, columns, rows)


if __name__ == "__main__":
    main()
