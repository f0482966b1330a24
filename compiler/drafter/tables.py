"""A drafter's tables with a row per token, fitted to its target's vocabulary, which may be padded to another size.

Knows nothing of what the rows hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dflashc.compiler.drafter.config import DrafterConfig
from dflashc.compiler.gguf import GgufTensor

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_CODEBOOKS = ("selector_predecessor.weight", "selector_successor.weight")


def fit_tables(drafter: DrafterConfig, tensors: Mapping[str, GgufTensor],
               vocabulary: int) -> tuple[DrafterConfig, dict[str, GgufTensor]]:
    """The drafter for a target of `vocabulary` tokens, whatever number of rows its own tables have.

    The target may choose any of its tokens, so rows that an embedding or a codebook lacks are zeros; and it knows no
    others, so a head of the drafter's is cut, and never proposes those. A tied head becomes one of its own where it has
    other rows than the embedding.
    """
    rows, fitted = drafter.vocabulary, dict(tensors)
    if rows in (0, vocabulary):
        return drafter, fitted
    if drafter.head == "tied":
        fitted[_HEAD] = fitted[_EMBEDDING]
        drafter = replace(drafter, head="own")
    sizes = {_EMBEDDING: max(rows, vocabulary), **dict.fromkeys(_CODEBOOKS, vocabulary)}
    if not drafter.draft_vocabulary:
        sizes[_HEAD] = min(rows, vocabulary)
    fitted |= {name: fitted[name].with_rows(count) for name, count in sizes.items() if name in fitted}
    return drafter, fitted
