"""The manifest: what an artefact is, what it needs, and what every file in it must hash to.

A schema of frozen dataclasses, JSON on disk, refused as a whole when anything is missing or unknown. Shared by the
compiler, which writes it, and the runtime, which believes nothing else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from dflashc.runtime.errors import ArtefactError

SCHEMA = 2
NAME = "manifest.json"


@dataclass(frozen=True)
class Weight:
    """A packed tensor inside `weights.bin`.

    `rows` and `columns` are logical; `format` names the packed layout ("raw float32" for norms and tables).
    """

    name: str
    format: str
    rows: int
    columns: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class Requirements:
    """What a machine must offer: processor family, instruction set level and CPU flags, executor ABI."""

    machine: str
    level: str
    features: tuple[str, ...]
    abi: int


@dataclass(frozen=True)
class Source:
    """A model an artefact was built from: its files with their hashes."""

    name: str
    architecture: str
    sha256: dict[str, str]
    bytes: int


@dataclass(frozen=True)
class SelfTest:
    """A prompt and the greedy continuation that the artefact must reproduce, as token ids."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True)
class File:
    """Size and hash of a file inside the artefact."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """See the module.

    Attributes
    ----------
    sources : tuple of Source
        The target and, of a pair, the drafter.
    config, drafter : dict
        The target's configuration; of a pair the widest draft, the mask token and what the pair check found.
    kv_types : dict
        Types of the K and V caches, of the "target" and, of a pair, the "drafter".
    notes : tuple of str
        What the user should know: a block format stored as a wider one, an assumption about the drafter.
    """

    dflashc: str
    target: str
    requirements: Requirements
    sources: tuple[Source, ...]
    config: dict[str, Any]
    drafter: dict[str, Any]
    kv_types: dict[str, str]
    context: int
    weights: tuple[Weight, ...]
    self_test: tuple[SelfTest, ...]
    notes: tuple[str, ...]
    files: dict[str, File] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_json(document: Any) -> Manifest:
        """Raises `ArtefactError` for another schema, and for missing, unknown or ill-typed fields."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            found = document.get("schema") if isinstance(document, dict) else type(document).__name__
            raise ArtefactError(f"manifest schema {found!r} found, {SCHEMA} expected: build the artefact again")
        values = {k: v for k, v in document.items() if k != "schema"}
        try:
            values["requirements"] = _record(Requirements, values["requirements"])
            values["sources"] = tuple(_record(Source, s) for s in values["sources"])
            values["weights"] = tuple(_record(Weight, w) for w in values["weights"])
            values["self_test"] = tuple(_record(SelfTest, t) for t in values["self_test"])
            values["notes"] = tuple(values["notes"])
            values["files"] = {name: _record(File, f) for name, f in values["files"].items()}
            return _record(Manifest, values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ArtefactError(f"the manifest is damaged ({type(error).__name__}: {error}): build again") from error


def _record(kind: type, values: dict[str, Any]) -> Any:
    hints = get_type_hints(kind)
    if set(values) != set(hints):
        raise TypeError(f"{kind.__name__} fields {', '.join(sorted(set(values) ^ set(hints)))}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise TypeError(f"{kind.__name__}.{name} is {value!r:.40}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type; integers count or measure, so none is negative."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, arguments[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, arguments[1]) for v in value.values())
    if hint is int:
        return type(value) is int and value >= 0
    return hint is Any or isinstance(value, hint)


def load_manifest(directory: Path) -> Manifest:
    """Read `manifest.json` of an artefact; raises `ArtefactError`."""
    path = directory / NAME
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        found = "it is a file" if directory.exists() else "it does not exist"
        why = f"it has no {NAME}" if directory.is_dir() else found
        raise ArtefactError(f"{directory} is not an artefact (a folder written by `dflashc build`): {why}") from error
    except (OSError, ValueError) as error:
        raise ArtefactError(f"cannot read {path}: {error}") from error
    return Manifest.from_json(document)
