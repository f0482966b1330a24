"""Writes an artefact: everything into a temporary directory, which takes its name only when it is whole.

Knows the artefact's files and their hashes, and nothing of what is in them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dflashc.runtime.artefact import sha256_file
from dflashc.runtime.errors import BuildError
from dflashc.runtime.manifest import NAME, File, Manifest


@contextmanager
def new_artefact(output: Path) -> Iterator[Path]:
    """A temporary directory beside `output` that becomes `output` when the block ends well, and is removed otherwise.

    Raises `BuildError` when `output` exists and is no artefact; an artefact is replaced.
    """
    if output.exists() and not (output / NAME).is_file():
        raise BuildError(f"{output} exists and is not an artefact; choose another output or remove it")
    if not output.parent.is_dir():
        raise BuildError(f"directory {output.parent} does not exist; create it first")
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise BuildError(f"cannot write into {output.parent}: {error.strerror}") from error
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())
        if output.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
            output.rename(old / output.name)
            folder.rename(output)
            shutil.rmtree(old)
        else:
            folder.rename(output)
    except OSError as error:
        raise BuildError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Hash every file in `folder` and write the manifest that lists them."""
    files = {str(p.relative_to(folder)): File(p.stat().st_size, sha256_file(p))
             for p in sorted(folder.rglob("*")) if p.is_file() and p.name != NAME}
    document = replace(manifest, files=files).to_json()
    (folder / NAME).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
