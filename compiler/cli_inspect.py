"""`dflashc inspect`, `check`, `verify` and `targets`: descriptions as tables or JSON, checks as lines.

Knows nothing of where the numbers come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflashc.compiler.plan_tables import launch_table, overview_tables, round_tables
from dflashc.compiler.tables import Table, pairs, show, size
from dflashc.runtime.artefact import load_artefact, verify_hashes
from dflashc.runtime.manifest import NAME

if TYPE_CHECKING:
    from dflashc.compiler.pair import Overrides

CPU = "x86_64"
"""The machine that targets for the CPU require."""
ROLES = ("model", "drafter")
"""Of the sources of an artefact, in order."""


def inspect(path: Path, context: int | None, program: str | None, tensors: bool, kernels: bool, as_json: bool) -> None:
    """Print what `path` is; `program` is None without --plan, and empty for a list of programs."""
    from dflashc.compiler.inspect import describe_artefact, describe_gguf

    is_artefact = path.is_dir() and ((path / NAME).exists() or not any(path.glob("*.gguf")))
    if not is_artefact and (program is not None or context is not None or kernels):
        raise click.UsageError(f"{path} is no artefact: --plan, --kernels and --ctx need one (see also "
                               "`build --dry-run`)")
    if kernels:
        _print_kernels(path, as_json)
        return
    if program:
        _print_program(path, program, context, as_json)
        return
    described = describe_artefact(path, context) if is_artefact else describe_gguf(path)
    if program is not None:
        tables = overview_tables(described["programs"], described["rounds"])
    elif tensors:
        tables = [tensor_table(described["tensors"])]
    else:
        tables = list(artefact_tables(described) if is_artefact else gguf_tables(described))
    _print(described, tables, as_json)


def _print_program(path: Path, name: str, context: int | None, as_json: bool) -> None:
    """The launches of a program or of a round."""
    from dflashc.compiler.inspect_plan import describe_program, describe_round

    artefact = load_artefact(path)
    if not name.startswith("round."):
        launches = describe_program(artefact.plan, name)
        _print(launches, [launch_table(name, launches)], as_json)
        return
    described = describe_round(artefact, name, artefact.plan.max_context if context is None else context)
    _print(described, list(round_tables(described)), as_json)


def _print_kernels(path: Path, as_json: bool) -> None:
    from dflashc.compiler.inspect_kernels import describe_kernels

    described = describe_kernels(load_artefact(path))
    _print(described, [kernel_table(described)], as_json)


def check(target: Path, drafter: Path, overrides: Overrides, as_json: bool) -> None:
    """Print how a pair is read; raises `PairError` for one that does not fit."""
    from dflashc.compiler import pair

    report = pair.check(target, drafter, overrides)
    _print(report.to_json(), [pairs("Pair", report.describe())], as_json)
    if not as_json:
        print("the pair fits" + (", with warnings" if report.warnings else ""))


def targets(as_json: bool) -> None:
    """Print the targets, the GPUs of this machine, and why there are none of a kind."""
    from dflashc.compiler.inspect import describe_devices, describe_targets
    from dflashc.runtime.device.survey import survey

    surveys = survey()
    described = {"targets": describe_targets(surveys), **describe_devices(surveys)}
    tables = [target_table(described["targets"]), missing_table(described["targets"]),
              device_table(described["devices"])]
    _print(described, tables, as_json)


def verify(directory: Path, gpu: str | None, allow_ptx: bool) -> None:
    """Print one line per check that passes; raises a `DflashError` at the first that does not."""
    from dflashc.runtime import selftest
    from dflashc.runtime.device.opening import open_device

    artefact = load_artefact(directory)
    manifest = artefact.manifest
    print(f"manifest   ok: {manifest.sources[0].name} for {manifest.target}, context {manifest.context}")
    verify_hashes(artefact)
    print(f"files      ok: {len(manifest.files)} files, {size(sum(f.bytes for f in manifest.files.values()))}")
    with closing(open_device(artefact, gpu=gpu, allow_ptx=allow_ptx)) as device:
        print(f"machine    ok: {manifest.requirements.machine}, {manifest.requirements.level}; {device.identity}")
        for note in device.notes:
            print(f"note: {note}")
        print(f"self-test  ok: {selftest.run(artefact, device)}")


def _print(described: Any, tables: list[Table], as_json: bool) -> None:
    if as_json:
        print(json.dumps(described, indent=1))
    else:
        show(tables)


def gguf_tables(d: dict[str, Any]) -> Iterator[Table]:
    """A GGUF file, without its list of tensors."""
    buildable = "with its target, as --drafter" if d["drafter"] else "yes"
    yield pairs("Model", [
        ("files", ", ".join(d["files"])), ("size", size(d["bytes"])), ("GGUF version", d["gguf_version"]),
        ("architecture", d["architecture"]), ("can be built", d["unsupported"] or buildable)])
    if d["drafter"]:
        yield pairs("Drafter", d["drafter"]["summary"])
    yield pairs("Metadata", [(key, _short(value)) for key, value in d["metadata"].items()])
    if d["config"]:
        yield _config(d["config"])
    yield types_table("Tensors by type", d["types"])


def artefact_tables(d: dict[str, Any]) -> Iterator[Table]:
    """An artefact, without its lists of weights and programs."""
    need = d["requirements"]
    yield pairs("Artefact", [
        ("directory", d["directory"]), ("size", size(d["bytes"])), ("built by", f"dflashc {d['dflashc']}"),
        *((role, f"{s['name']} ({s['architecture']})") for role, s in zip(ROLES, d["sources"], strict=False)),
        *(("from", f"{name} sha256:{digest}") for s in d["sources"] for name, digest in s["sha256"].items()),
        *([("drafts", f"up to {d['drafter']['width']} tokens a round")] if d["drafter"] else []),
        ("target", d["target"]), ("needs", " ".join([need["machine"], need["level"], *need["features"]])),
        ("context", f"{d['max_context']} tokens"), ("K and V", kv_types_line(d["kv_types"])),
        *(("windows", f"{r['window']} tokens in the {r['model']}, whose caches hold {r['slots']}") for r in d["rings"]),
        ("self-tests", d["self_tests"]),
        *(("note", note) for note in d["notes"])])
    yield _config(d["config"])
    yield types_table("Weights by format", d["types"])
    yield pairs("Files", [(name, size(nbytes)) for name, nbytes in d["files"].items()])
    yield memory_table(d["memory"], d["context"])


def kv_types_line(kv_types: dict[str, str]) -> str:
    return ", ".join(f"{kind} of the {model}" for model, kind in kv_types.items())


def memory_table(memory: dict[str, int], context: int) -> Table:
    rows = [(role, size(nbytes)) for role, nbytes in [*memory.items(), ("total", sum(memory.values()))]]
    return Table(f"Memory at a context of {context} tokens", ("role", ">size"), rows)


def tensor_table(tensors: list[dict[str, Any]]) -> Table:
    return Table("Tensors", ("name", "type", ">shape", ">bytes"), [
        (t["name"], t["type"], " x ".join(map(str, t["shape"])), f"{t['bytes']:,}") for t in tensors])


def target_table(targets: list[dict[str, Any]]) -> Table:
    return Table("Targets", ("name", "level", "can build", "runs here"), [
        (t["name"], t["level"], "no" if t["cannot_build"] else "yes", "no" if t["missing_to_run"] else "yes")
        for t in targets])


def missing_table(targets: list[dict[str, Any]]) -> Table:
    """What each "no" of the targets is for; those that stand one behind the other for the same reason share a row."""
    groups: dict[tuple[str, str], list[str]] = {}
    for target in targets:
        if target["cannot_build"]:
            groups.setdefault(("build", target["cannot_build"]), []).append(target["name"])
        if target["missing_to_run"]:
            lacks = target["missing_to_run"]
            reason = f"this CPU lacks {', '.join(lacks)}" if target["machine"] == CPU else "; ".join(lacks)
            groups.setdefault(("run", reason), []).append(target["name"])
    rows = [(verb, names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}", reason)
            for (verb, reason), names in groups.items()]
    return Table("Missing", ("to", "for", "what"), rows)


def device_table(devices: list[dict[str, Any]]) -> Table:
    return Table("Devices", ("for", ">number", "name", "kind", "level", ">memory", "driver", "limits"), [
        (d["machine"], str(d["number"]), d["name"], d["kind"], d["level"] or "-", size(d["memory"]), d["driver"],
         d["unfit"] or _limits(d["limits"])) for d in devices])


def _limits(limits: dict[str, Any]) -> str:
    return (f"{limits['threads_in_all']} threads, {size(limits['shared'])} shared, {limits['groups']:,} workgroups, "
            f"{size(limits['binding'])} a buffer")


def kernel_table(kernels: list[dict[str, Any]]) -> Table:
    """Kernels of a GPU; what only the driver knows stays empty."""
    columns = ("kernel", ">launches", ">threads", ">shared memory", ">registers", ">spilled", ">code")
    return Table("Kernels", columns, [
        (k["name"], str(k["launches"]), str(k["threads"]), size(k["shared"]),
         "" if k["registers"] is None else str(k["registers"]), "" if k["spilled"] is None else size(k["spilled"]),
         "" if k["bytes"] is None else size(k["bytes"])) for k in kernels])


def _config(config: dict[str, Any]) -> Table:
    ropes = ", ".join(f"{r['name']} ({r['pairing']}, {2 * len(r['frequencies'])} dimensions)" for r in config["ropes"])
    return pairs("Configuration", [
        (key, ropes if key == "ropes" else _short(value)) for key, value in config.items()])


def types_table(title: str, types: list[dict[str, Any]]) -> Table:
    return Table(title, ("type", ">tensors", ">elements", ">size"), [
        (t["type"], str(t["tensors"]), f"{t['elements']:,}", size(t["bytes"])) for t in types])


def _short(value: Any) -> str:
    """A value in a line: long text cut, long arrays by their beginning."""
    if isinstance(value, dict):
        if "unreadable" in value:
            return f"unreadable: {value['unreadable']}"
        return f"{value['count']} of {value['type'].removeprefix('array of ')}: {_cut(str(value['first'])[1:-1])}"
    if isinstance(value, list | tuple) and len(set(value)) == 1 and len(value) > 1:
        return f"{value[0]} ({len(value)} times)"
    return _cut(f"{value:.6g}" if isinstance(value, float) else str(value))


def _cut(text: str, length: int = 100) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
