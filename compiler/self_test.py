"""The self-test that a build stores: recorded here, or for a GPU as another artefact of the same target recorded it.

Greedy text is the target's, so the other may have another drafter, or none.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from dflashc.runtime.artefact import load_artefact
from dflashc.runtime.device.opening import GPU_MODULES, open_device
from dflashc.runtime.errors import ArtefactError, BuildError
from dflashc.runtime.manifest import Manifest, Requirements, SelfTest, load_manifest
from dflashc.runtime.selftest import record

if TYPE_CHECKING:
    from dflashc.compiler.build import Progress


def read_other(directory: Path, requirements: Requirements, kv_type: str) -> Manifest:
    """The manifest of the artefact whose self-test is to be taken over; raises `BuildError` where it cannot be."""
    if requirements.machine not in GPU_MODULES:
        raise BuildError("--self-test-of is for GPUs, which a build does not look at; an artefact for a CPU records "
                         "its own: leave the option out")
    other = load_manifest(directory)
    if not other.self_test:
        raise BuildError(f"{directory} has no recorded self-test; expected an artefact that was built where it can run")
    if other.kv_types["target"] != kv_type:
        raise BuildError(f"{directory} has K and V caches of {other.kv_types['target']}, this build of {kv_type}: "
                         "build one with the other's --kv-type")
    return other


def taken_over(other: Manifest, manifest: Manifest) -> tuple[SelfTest, ...]:
    """The other's prompts that fit into the context. Raises `BuildError` unless it was built from the same target."""
    ours, theirs = manifest.sources[0].sha256, other.sources[0].sha256
    if sorted(ours.values()) != sorted(theirs.values()):
        raise BuildError(f"--self-test-of is an artefact of another model ({', '.join(theirs)}) than this one "
                         f"({', '.join(ours)}): the files differ")
    return tuple(t for t in other.self_test if len(t.prompt) + len(t.expected) <= manifest.context)


def recorded_here(folder: Path, progress: Progress) -> tuple[SelfTest, ...]:
    """Run the fresh artefact on fixed prompts; nothing where this machine cannot run it."""
    artefact = load_artefact(folder)
    if artefact.manifest.requirements.machine in GPU_MODULES:
        return ()
    try:
        device = open_device(artefact)
    except ArtefactError:
        return ()
    with closing(device):
        progress.start("self-test", 1)
        result = record(artefact, device)
        progress.advance("self-test", 1)
    return result
