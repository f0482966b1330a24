"""The pair check: whether a drafter belongs to a target, said before any weight is read.

Owns every rule that needs both files. Knows nothing of dialects or of how models compute.
"""

from __future__ import annotations

import os
from dataclasses import replace

from dflashc.compiler.drafter import Drafter, DrafterConfig, is_drafter, normalise
from dflashc.compiler.gguf import GgufFile, open_gguf
from dflashc.compiler.gguf.cursor import shown
from dflashc.compiler.models import check_model, read_model_config
from dflashc.compiler.models.config import ModelConfig
from dflashc.compiler.models.tensor_list import check_formats
from dflashc.compiler.pair.overrides import Overrides
from dflashc.compiler.pair.report import PairReport
from dflashc.compiler.pair.vocabulary import check_vocabulary
from dflashc.compiler.tokenizer import build_tokenizer
from dflashc.runtime.errors import PairError

_PUBLISHED_FIRST_TAPS = (1, 5)
_HEAD_UNIT = 16
_CAUSAL = {"none": (False, False), "swa": (True, False), "all": (True, True)}


def check(target_path: str | os.PathLike[str], drafter_path: str | os.PathLike[str],
          overrides: Overrides | None = None) -> PairReport:
    """Check two files as a pair, and the target's tokenizer; see `check_pair`."""
    with open_gguf(target_path) as target_gguf, open_gguf(drafter_path) as drafter_gguf:
        check_order(target_gguf, drafter_gguf)
        config = read_model_config(target_gguf)
        build_tokenizer(target_gguf)
        return check_pair(target_gguf, config, drafter_gguf, normalise(drafter_gguf), overrides)


def inspect_drafter(path: str | os.PathLike[str]) -> Drafter:
    """Read a drafter alone, to show it; its tensors cannot be read afterwards."""
    with open_gguf(path) as gguf:
        return normalise(gguf)


def check_order(target_gguf: GgufFile, drafter_gguf: GgufFile) -> None:
    """Raise `PairError` unless the first file is a model and the second a drafter."""
    target_is, drafter_is = (is_drafter(f.get_str("general.architecture")) for f in (target_gguf, drafter_gguf))
    target, drafter = target_gguf.paths[0], drafter_gguf.paths[0]
    if target_is and drafter_is:
        raise PairError(f"{target} and {drafter} are both drafters; give the target first, then its drafter")
    if target_is:
        raise PairError(f"{target} is a drafter and {drafter} is none; give them the other way round")
    if not drafter_is:
        raise PairError(f"{drafter} is a model of architecture {shown(drafter_gguf.get_str('general.architecture'))}, "
                        "not a DFlash drafter; give a DFlash drafter")


def check_pair(target_gguf: GgufFile, target: ModelConfig, drafter_gguf: GgufFile, drafter: Drafter,
               overrides: Overrides | None = None) -> PairReport:
    """Check that a drafter belongs to a target, and that a build can take their tensors.

    Reads metadata, shapes and the map of a reduced vocabulary; no weights. What a build refuses after this depends on
    its target and options.

    Parameters
    ----------
    target
        The target's configuration; that it could be read means that its layers can be tapped.
    overrides
        Statements of the user, which win over the files.

    Raises
    ------
    PairError
        The models do not belong together; one line with both values and what to do.
    BuildError, GgufError
        A tensor is missing, or of a shape or format that no target takes.
    """
    overrides = overrides or Overrides()
    check_order(target_gguf, drafter_gguf)
    config, assumed = resolve(drafter.config, target, overrides)
    _check_sizes(config, target)
    _check_taps(config, target)
    warnings = [*drafter.warnings, *assumed]
    warnings += [text for name, text in drafter.assumptions.items() if name not in overrides.given()]
    if overrides.taps_offset is None:
        warnings += _doubtful_numbering(config, target)
    vocabulary, mask_token, more = check_vocabulary(target_gguf, target.vocabulary, drafter_gguf, drafter)
    warnings += [*more, *_thinking(target_gguf)]
    proposed = config.draft_vocabulary or vocabulary
    if config.selector_top_k > proposed:
        raise PairError(f"the selector takes {config.selector_top_k} candidates of {proposed} tokens; "
                        "use a drafter made for this target")
    if config.context_length and config.context_length < target.context_length:
        warnings.append(f"the drafter was trained for contexts of {config.context_length} tokens, the target for "
                        f"{target.context_length}; expect fewer accepted proposals beyond")
    notes = [*check_model(target_gguf, target), *drafter.notes]
    _check_tensors(drafter)
    return PairReport(
        " ".join(target_gguf.get_str("general.name", default=target_gguf.paths[0].stem).split()),
        target.architecture, target.layers, target.vocabulary, config, vocabulary, mask_token, overrides,
        tuple(notes), tuple(warnings))


def resolve(c: DrafterConfig, target: ModelConfig, overrides: Overrides) -> tuple[DrafterConfig, list[str]]:
    """The configuration with the user's statements and what follows from the target, and warnings."""
    p, warnings = c.provenance, []
    if overrides.taps_offset is not None:
        c = replace(c, taps=tuple(stored + overrides.taps_offset for stored in p.stored_taps))
        p = replace(p, taps_offset=overrides.taps_offset, taps_rule=f"{overrides.taps_offset:+d} as given")
    if overrides.draft_causal != "auto":
        causal_sliding, causal_full = _CAUSAL[overrides.draft_causal]
        c = replace(c, causal_sliding=causal_sliding, causal_full=causal_full)
        p = replace(p, causality_rule="as given")
    if overrides.embedding_scale is not None:
        c = replace(c, embedding_scale=overrides.embedding_scale)
        p = replace(p, embedding_scale_rule="as given")
    elif p.embedding_scale_rule == "no key" and c.embedding == "shared" and target.embedding_scale != 1:
        c = replace(c, embedding_scale=target.embedding_scale)
        p = replace(p, embedding_scale_rule="the target's")
        warnings.append(f"the drafter does not say how its input is scaled; the target's {target.embedding_scale:g} is "
                        "assumed, compare the acceptance with --embedding-scale 1")
    return replace(c, provenance=p), warnings


def _check_sizes(c: DrafterConfig, target: ModelConfig) -> None:
    if c.target_hidden != target.hidden:
        raise PairError(f"the drafter reads hidden states of size {c.target_hidden}, the target has {target.hidden}; "
                        "use a drafter made for this target")
    shared = [what for what in ("embedding", "head") if getattr(c, what) == "shared"]
    if shared and c.hidden != target.hidden:
        raise PairError(f"the drafter of hidden size {c.hidden} has no {' and no '.join(shared)} of its own and cannot "
                        f"share the target's of {target.hidden}; use a drafter with its own tables")


def _check_tensors(drafter: Drafter) -> None:
    """Raise unless a build can take the drafter's tensors, whose names and shapes are already checked."""
    size = drafter.config.head_size
    if size % _HEAD_UNIT:
        raise PairError(f"{drafter.path}: attention heads of {size} elements found; every target needs a multiple of "
                        f"{_HEAD_UNIT} in a drafter")
    check_formats(tensor for name, tensor in drafter.tensors.items() if name != "d2t")


def _check_taps(c: DrafterConfig, target: ModelConfig) -> None:
    last, told = target.layers - 1, _told(c)
    if not 0 <= min(c.taps) <= max(c.taps) <= last:
        raise PairError(f"{told}, the target has layers 0 to {last}; use a drafter made for this target, or give "
                        "--taps-offset if the numbering is misread")
    if max(c.taps) == last:
        raise PairError(f"{told}, but the target's last layer, {last}, cannot be tapped (its output may be normed or "
                        "not); give --taps-offset if the numbering is misread")


def _told(c: DrafterConfig) -> str:
    return (f"the drafter's target layers are {list(c.provenance.stored_taps)} in the file and {list(c.taps)} counted "
            "from 0")


def _doubtful_numbering(c: DrafterConfig, target: ModelConfig) -> list[str]:
    """A wrong offset shows in no shape, only in the acceptance; all published drafters read layers of one pattern."""
    offset = -1 - c.provenance.taps_offset
    other = [stored + offset for stored in c.provenance.stored_taps]
    if _as_published(other, target.layers) and not _as_published(c.taps, target.layers):
        return [f"{_told(c)}; published drafters read {other} of a target of {target.layers} layers: if few proposals "
                f"are accepted, give --taps-offset {offset}"]
    return []


def _as_published(taps: list[int] | tuple[int, ...], layers: int) -> bool:
    """Whether taps run from layer 1 or 5 to the third last, as all published drafters have them."""
    return taps[0] in _PUBLISHED_FIRST_TAPS and taps[-1] == layers - 3


def _thinking(target_gguf: GgufFile) -> list[str]:
    template = target_gguf.get_str("tokenizer.chat_template", default="")
    if "enable_thinking" not in template and "<think>" not in template:
        return []
    return ["the target can think, and the drafter does not say whether it was trained on thinking; "
            "compare the acceptance in both modes"]
