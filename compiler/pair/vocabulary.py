"""Whether a drafter speaks the target's tokens.

The target's tokenizer is the one that is used; a drafter's own serves to compare. Owns what counts as unused padding;
knows nothing of layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflashc.compiler.drafter.config import Drafter, DrafterConfig
from dflashc.compiler.gguf import GgufFile
from dflashc.compiler.gguf.cursor import shown
from dflashc.runtime.errors import PairError
from dflashc.runtime.tokenizer import TokenType

MAX_PADDING = 128  # rows that two paddings of one vocabulary may differ by; llama.cpp's limit
_SPECIAL = 5  # the first ids may hold other special tokens in files of one family; llama.cpp compares from here on
_NO_TOKENIZER = ("none", "no_vocab")
_IDS = ("bos", "eos", "padding", "unknown")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file; `types` may be empty. `used` is the number of tokens up to the last that is not padding."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    used: int

    def type_of(self, token: int) -> int:
        return self.types[token] if token < len(self.types) else int(TokenType.UNUSED)


def read_vocabulary(gguf: GgufFile) -> Vocabulary | None:
    """The vocabulary of a file; None when it has none, or a stub."""
    model = gguf.get_str("tokenizer.ggml.model", default="none")
    tokens = gguf.get_strings("tokenizer.ggml.tokens", default=[])
    if model in _NO_TOKENIZER or len(tokens) <= _SPECIAL:
        return None
    types = gguf.get_ints("tokenizer.ggml.token_type", default=[])
    used = len(tokens)
    while used and used <= len(types) and types[used - 1] == TokenType.UNUSED:
        used -= 1
    return Vocabulary(model, gguf.get_str("tokenizer.ggml.pre", default=""), tokens, types, used)


def check_vocabulary(target_gguf: GgufFile, target_rows: int, drafter_gguf: GgufFile,
                     drafter: Drafter) -> tuple[int, str, list[str]]:
    """Compare vocabularies and the tables with a row per token.

    Parameters
    ----------
    target_rows
        Rows of the target's embedding.

    Returns
    -------
    tuple
        Tokens in common, the text of the mask token ("" when unknown), and warnings.

    Raises
    ------
    PairError
        A token of one model means something else to the other, or is unknown to it.
    """
    ours, theirs = read_vocabulary(target_gguf), read_vocabulary(drafter_gguf)
    c = drafter.config
    shared = _check_rows(target_rows, ours, theirs, c, drafter_gguf)
    warnings = _check_mask(c, target_rows, ours, target_gguf)
    if c.draft_vocabulary:
        _check_map(drafter, target_rows)
    if ours is not None and theirs is not None:
        _check_texts(ours, theirs, c.mask_id)
        warnings += _differing_settings(ours, theirs, target_gguf, drafter_gguf)
    text = ours.tokens[c.mask_id] if ours is not None and c.mask_id < len(ours.tokens) else ""
    return shared, text, warnings


def _check_rows(target_rows: int, ours: Vocabulary | None, theirs: Vocabulary | None, c: DrafterConfig,
                drafter_gguf: GgufFile) -> int:
    """Rows in common, when all others are padding."""
    sizes = {"tables have": c.vocabulary, "tokenizer has": len(theirs.tokens) if theirs else 0,
             "vocab_size says": drafter_gguf.get_int(f"{c.provenance.architecture}.vocab_size", default=0)}
    used = ours.used if ours is not None else target_rows
    for what, rows in sizes.items():
        theirs_used = theirs.used if theirs is not None else rows - MAX_PADDING
        if rows and not (rows >= used and min(rows, theirs_used) <= target_rows):
            raise PairError(f"the drafter's {what} {rows} tokens, the target {target_rows}, of which {used} are "
                            "used; use a drafter made for this target")
    return min(target_rows, c.vocabulary or target_rows)


def _check_mask(c: DrafterConfig, target_rows: int, ours: Vocabulary | None, target_gguf: GgufFile) -> list[str]:
    whose, rows = ("drafter", c.vocabulary) if c.embedding == "own" else ("target", target_rows)
    if c.mask_id >= rows:
        raise PairError(f"the mask token is {c.mask_id}, but the {whose}'s embedding has {rows} tokens; "
                        "use a drafter made for this target")
    if ours is None:
        return []
    for name in ("bos", "eos", "eot"):
        if target_gguf.get_int(f"tokenizer.ggml.{name}_token_id", default=None) == c.mask_id:
            return [f"the mask token {c.mask_id} is the target's {name} token; was the drafter converted rightly?"]
    if ours.types and ours.type_of(c.mask_id) in (TokenType.NORMAL, TokenType.BYTE):
        return [f"the mask token {c.mask_id} is the ordinary token {shown(ours.tokens[c.mask_id])} of the target; "
                "was the drafter converted rightly?"]
    return []


def _check_map(drafter: Drafter, target_rows: int) -> None:
    """The tokens of a reduced head: ids of the target, each once."""
    ids = drafter.tensors["d2t"].array()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target_rows:
        raise PairError(f"d2t names token {low if low < 0 else high}, the target has {target_rows}; "
                        "use a drafter made for this target")
    if len(set(ids.tolist())) != ids.size:
        raise PairError("d2t names a token twice; expected the target's ids, not offsets: convert the drafter again")


def _check_texts(ours: Vocabulary, theirs: Vocabulary, mask: int) -> None:
    if ours.model != theirs.model:
        raise PairError(f"the drafter's tokenizer is {shown(theirs.model)}, the target's {shown(ours.model)}; "
                        "use a drafter made for this target")
    common = min(len(ours.tokens), len(theirs.tokens))
    if ours.tokens[_SPECIAL:common] == theirs.tokens[_SPECIAL:common]:
        return
    unlike = [
        token for token in range(_SPECIAL, common)
        if ours.tokens[token] != theirs.tokens[token] and token != mask
        and TokenType.UNUSED not in (ours.type_of(token), theirs.type_of(token))
    ]
    if unlike:
        first = unlike[0]
        a, b = shown(theirs.tokens[first]), shown(ours.tokens[first])
        raise PairError(f"token {first} is {a} to the drafter and {b} to the target, and {len(unlike) - 1} more "
                        "differ; use a drafter made for this target")


def _differing_settings(ours: Vocabulary, theirs: Vocabulary, target_gguf: GgufFile,
                        drafter_gguf: GgufFile) -> list[str]:
    """Differences that do not matter here, as the target's tokenizer is used, but tell of an unlike origin."""
    pairs: list[tuple[str, str | int | None, str | int | None]] = [("pre-tokenizer", ours.pre, theirs.pre)]
    for name in _IDS:
        key = f"tokenizer.ggml.{name}_token_id"
        a, b = (f.get_int(key, default=None) for f in (target_gguf, drafter_gguf))
        pairs.append((f"{name} token", a, b))
    return [f"the {what} is {a!r} in the target and {b!r} in the drafter; the target's is used"
            for what, a, b in pairs if a != b and b is not None and b != ""]
