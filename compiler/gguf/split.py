"""Models split over several files, named `prefix-00001-of-00003.gguf`.

Owns finding the files of a set and checking that they belong together; knows nothing of what is in them.
"""

from __future__ import annotations

import re
from pathlib import Path

from dflashc.runtime.errors import GgufError

from .cursor import shown
from .shard import Shard, read_shard

_SHARD_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_SHARDS = 99_999  # five digits in the name


def read_set(path: Path) -> list[Shard]:
    """Open a file, the whole set of which it is one shard, or the one model of a folder; shards in order."""
    opened = read_shard(_model_in(path) if path.is_dir() else path)
    count = opened.get_int("split.count", 1)
    if count in (0, 1):
        return [opened]
    if not 1 < count <= _MAX_SHARDS:
        raise GgufError(f"{opened.path}: key 'split.count' is {count}, the limit is {_MAX_SHARDS}")
    names = _shard_names(opened.path, opened.get_int("split.no"), count)
    missing = sorted(set(names) - {file.name for file in _files_in(opened.path.parent)})
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise GgufError(f"{opened.path}: shard {missing[0]}{more} is missing; the model has {count} files")
    paths = [opened.path.with_name(name) for name in names]
    shards = [opened if path == opened.path else read_shard(path) for path in paths]
    _check_set(shards)
    return shards


def _files_in(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.suffix == ".gguf")
    except OSError as error:
        raise GgufError(f"{folder}: cannot be read: {error.strerror}") from error


def _model_in(folder: Path) -> Path:
    models: dict[str, Path] = {}
    for file in _files_in(folder):
        match = _SHARD_NAME.fullmatch(file.name)
        models.setdefault(f"{match['prefix']}-of-{match['count']}" if match else file.name, file)
    if not models:
        raise GgufError(f"{folder}: no .gguf file in this folder")
    if len(models) > 1:
        listed = ", ".join(file.name for file in list(models.values())[:4])
        raise GgufError(f"{folder}: {len(models)} models in this folder; name one of {listed}")
    return next(iter(models.values()))


def _shard_names(path: Path, number: int, count: int) -> list[str]:
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count or int(match["number"]) != number + 1:
        raise GgufError(
            f"{path}: is part {number + 1} of {count} and must be named "
            f"…-{number + 1:05}-of-{count:05}.gguf for the others to be found; rename it"
        )
    return [f"{match['prefix']}-{part + 1:05}-of-{count:05}.gguf" for part in range(count)]


def _check_set(shards: list[Shard]) -> None:
    owners: dict[str, Path] = {}
    for number, shard in enumerate(shards):
        for key, expected in (("split.no", number), ("split.count", len(shards))):
            found = shard.get_int(key)
            if found != expected:
                raise GgufError(f"{shard.path}: key '{key}' is {found}, expected {expected}; not of the same model?")
        for name in shard.tensors:
            if name in owners:
                raise GgufError(f"{shard.path}: tensor {shown(name)} is also in {owners[name].name}")
            owners[name] = shard.path
    total = shards[0].get_int("split.tensors.count", len(owners))
    if total != len(owners):
        raise GgufError(f"{shards[0].path}: the shards hold {len(owners)} tensors, expected {total}")
