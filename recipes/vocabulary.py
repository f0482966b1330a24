"""A small byte-level vocabulary of any size that can spell every text, as the `tokenizer.ggml` keys of a GGUF file.

Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf

from dflashc.runtime.errors import RequestError
from dflashc.runtime.subword import BYTE_CHARACTERS

MASK = "<|mask|>"
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", MASK)
_MERGES = ("Ġ Ġ", "ĠĠ ĠĠ", "Ġ t", "h e", "i n", "r e", "o n", "Ġ a", "e r", "Ġt he", "a t", "i s", "Ġ s", "in g", "o r")
MINIMUM_SIZE = 256 + len(_MERGES) + len(_SPECIALS)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens with their types (`gguf.TokenType`) and the merges of byte-pair encoding, in order."""

    tokens: list[str]
    types: list[int]
    merges: list[str]

    def id_of(self, token: str) -> int:
        return self.tokens.index(token)


def synthetic_vocabulary(size: int) -> Vocabulary:
    """256 bytes, a few merges, the special tokens of a chat model, and unused tokens up to `size`."""
    if size < MINIMUM_SIZE:
        raise RequestError(f"a vocabulary of {size} is too small, expected at least {MINIMUM_SIZE}")
    plain = [*BYTE_CHARACTERS, *(merge.replace(" ", "") for merge in _MERGES)]
    unused = [f"<|unused_{i}|>" for i in range(size - MINIMUM_SIZE)]
    types = (
        [gguf.TokenType.NORMAL] * len(plain)
        + [gguf.TokenType.CONTROL] * len(_SPECIALS)
        + [gguf.TokenType.UNUSED] * len(unused)
    )
    return Vocabulary([*plain, *_SPECIALS, *unused], [int(kind) for kind in types], list(_MERGES))


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary, pre_tokenizer: str) -> None:
    """Write the tokenizer keys of a target."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.id_of("<|endoftext|>"))
    writer.add_eos_token_id(vocabulary.id_of("<|endoftext|>"))
    writer.add_eot_token_id(vocabulary.id_of("<|im_end|>"))
    writer.add_pad_token_id(vocabulary.id_of("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
