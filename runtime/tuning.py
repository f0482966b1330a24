"""Tuning records: what rounds cost on a device and what a drafter's proposals are worth, kept between runs.

A record belongs to one artefact on one device; one of another is never used. Knows nothing of how it was measured.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dflashc.runtime.artefact import PLAN, WEIGHTS, Artefact, kernel_files
from dflashc.runtime.device.base import Device
from dflashc.runtime.errors import ArtefactError

SCHEMA = 2
_FOLDER = "tuning"
_MOST_BYTES = 1 << 20
_MOST_DEPTHS = 64
_FEW = 4  # rounds


@dataclass(frozen=True)
class Key:
    """What a record is valid for.

    Attributes
    ----------
    artefact : str
        SHA-256 over those of its kernels, plan and weights.
    device : str
        See `Device.identity`.
    dflashc, abi
        Version of this program, and of the executor in the artefact's kernels.
    """

    artefact: str
    device: str
    dflashc: str
    abi: int

    @staticmethod
    def of(artefact: Artefact, device: Device[Any]) -> Key:
        manifest = artefact.manifest
        hashes = " ".join(manifest.files[name].sha256 for name in (*kernel_files(manifest), PLAN, WEIGHTS))
        return Key(hashlib.sha256(hashes.encode()).hexdigest(), device.identity, importlib.metadata.version("dflashc"),
                   manifest.requirements.abi)

    def path(self, folder: Path) -> Path:
        """Where in `folder` the record is."""
        device = hashlib.sha256(json.dumps([self.device, self.dflashc, self.abi]).encode()).hexdigest()
        return folder / self.artefact[:16] / f"{device[:16]}.json"


@dataclass(frozen=True)
class Counts:
    """Rounds in which position 1.. of a proposal was kept, out of those in which it was made."""

    reached: tuple[int, ...]
    offered: tuple[int, ...]

    def per_position(self) -> list[float]:
        """Share of rounds that keep each position."""
        return [r / o if o else 0.0 for r, o in zip(self.reached, self.offered, strict=True)]

    def conditional(self) -> list[float]:
        """The same of the rounds that kept all positions before; where few did, drawn to the position before."""
        seen, estimates = (self.offered or (0,))[0], []
        before = self.reached[0] / seen if seen else 0.0
        for kept in self.reached:  # near the end of an answer drafts are narrower, which this takes for a refusal
            before = (kept + _FEW * before) / (seen + _FEW)
            estimates.append(before)
            seen = kept
        return estimates


@dataclass(frozen=True)
class Record:
    """Measurements of an artefact on a device.

    Attributes
    ----------
    depths : tuple of int
        Committed tokens, ascending.
    rounds, draft, verify, inject : tuple of tuple of float
        Seconds per depth and width: of the round as a session runs it, and of its parts alone.
    acceptance : dict of Counts
        By kind of text, at the widest draft.
    kernels : dict
        Variants by choice, see `Plan.choose`.
    """

    key: Key
    depths: tuple[int, ...]
    rounds: tuple[tuple[float, ...], ...]
    draft: tuple[tuple[float, ...], ...]
    verify: tuple[tuple[float, ...], ...]
    inject: tuple[tuple[float, ...], ...]
    acceptance: dict[str, Counts]
    kernels: dict[str, str] = field(default_factory=dict)

    @property
    def most_width(self) -> int:
        return len(self.rounds[0]) - 1

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_json(document: Any) -> Record:
        """Raises `ArtefactError` unless everything is there, of the right type and size, and finite."""
        try:
            if document["schema"] != SCHEMA:
                raise ArtefactError(f"a tuning record of schema {document['schema']!r}, {SCHEMA} expected")
            depths = tuple(_count(d) for d in document["depths"])
            if not 0 < len(depths) <= _MOST_DEPTHS or list(depths) != sorted(set(depths)):
                raise ValueError("depths are not ascending")
            width = len(document["rounds"][0])
            tables = {name: _table(document[name], len(depths), width, least=0.0 if name != "rounds" else 1e-9)
                      for name in ("rounds", "draft", "verify", "inject")}
            acceptance = {str(kind): _counts(c, width - 1) for kind, c in document["acceptance"].items()}
            kernels = {str(choice): str(variant) for choice, variant in document["kernels"].items()}
            return Record(_key(document["key"]), depths, acceptance=acceptance, kernels=kernels, **tables)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ArtefactError(f"a damaged tuning record ({type(error).__name__}: {error})") from error


def _key(document: Mapping[str, Any]) -> Key:
    key = Key(**{f.name: document[f.name] for f in fields(Key)})
    if not all(isinstance(v, str) for v in (key.artefact, key.device, key.dflashc)) or not isinstance(key.abi, int):
        raise TypeError("the key")
    return key


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _table(rows: Any, depths: int, width: int, least: float) -> tuple[tuple[float, ...], ...]:
    table = tuple(tuple(float(x) for x in row) for row in rows)
    if len(table) != depths or any(len(row) != width for row in table):
        raise ValueError(f"expected a table of {depths} depths and {width} widths")
    if not all(math.isfinite(x) and x >= least for row in table for x in row):
        raise ValueError("a time is not positive and finite")
    return table


def _counts(document: Mapping[str, Any], most: int) -> Counts:
    counts = Counts(tuple(map(_count, document["reached"])), tuple(map(_count, document["offered"])))
    if not len(counts.reached) == len(counts.offered) == most:
        raise ValueError(f"expected acceptance of {most} positions")
    if any(r > o for r, o in zip(counts.reached, counts.offered, strict=True)):
        raise ValueError("more proposals kept than made")
    return counts


# Where records are ---------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The user's records."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dflashc" / _FOLDER


def artefact_folder(artefact: Artefact) -> Path:
    """Records that travel with an artefact."""
    return artefact.directory / _FOLDER


def save(record: Record, folder: Path) -> Path:
    """Write a record; a reader never sees half of it. Returns where it is."""
    path = record.key.path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(record.to_json(), indent=1))
    unfinished.replace(path)
    return path


def find(artefact: Artefact, device: Device[Any]) -> tuple[Record | None, str]:
    """The record of an artefact on a device, the user's before the artefact's own; and where it is, or why none is."""
    key = Key.of(artefact, device)
    why = "never tuned on this machine"
    for folder in (cache_folder(), artefact_folder(artefact)):
        path = key.path(folder)
        if path.is_file():
            try:
                return _load(path, key, artefact), str(path)
            except ArtefactError as error:
                why = f"{path}: {error}"
        elif path.parent.is_dir() and any(path.parent.glob("*.json")):
            why = f"tuned, but not for {key.device}"
    return None, why


def with_kernels(artefact: Artefact, kernels: Mapping[str, str]) -> Artefact:
    """The artefact with the variants of its kernels chosen. Raises `ArtefactError` for ones that it does not have."""
    return replace(artefact, plan=artefact.plan.choose(kernels)) if kernels else artefact


def _load(path: Path, key: Key, artefact: Artefact) -> Record:
    if path.stat().st_size > _MOST_BYTES:
        raise ArtefactError(f"a tuning record of more than {_MOST_BYTES:,} bytes")
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtefactError(f"an unreadable tuning record ({error})") from error
    record = Record.from_json(document)
    if record.key != key:
        raise ArtefactError("a tuning record of another artefact or device")
    if record.most_width != artefact.manifest.drafter.get("width", 0):
        raise ArtefactError(f"a tuning record of widths up to {record.most_width}")
    artefact.plan.choose(record.kernels)
    return record
