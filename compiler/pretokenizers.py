"""How byte-level models cut text into words before they merge bytes, by the names GGUF files use.

Owns the regular expressions (Oniguruma syntax, applied one after the other). Knows nothing of vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """One value of `tokenizer.ggml.pre`.

    Attributes
    ----------
    split_patterns : matches become words, and so do the stretches between matches; each pattern refines the last.
    ignore_merges : a word that is a token as a whole is not taken apart.
    add_bos : whether the begin token is put first, where the file does not say.
    """

    split_patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# Parts of the patterns, as the models' own tokenizer files define them.
_CONTRACTION = r"'s|'t|'re|'ve|'m|'ll|'d"
_CONTRACTION_ANY_CASE = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"

_GPT2 = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTION_ANY_CASE}|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_LINES}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION_ANY_CASE}|{_LETTERS}|\p{{N}}|{_SYMBOLS_AND_LINES}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION_ANY_CASE}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION_ANY_CASE}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
)
# Also the scripts that happen to lie between these bounds: so the models were trained.
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# DeepSeek's first language models keep together the letters of scripts with cases, in the Unicode of their time ...
_CASED_LETTERS = (
    "[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
# ... and ASCII, full-width, general and CJK punctuation.
_DEEPSEEK_PUNCTUATION = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"

_LLAMA3_RULE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_STARCODER_RULE = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?{_CASED_LETTERS}", rf"\s?{_DEEPSEEK_PUNCTUATION}", r"\s+$", _CJK, r"\p{N}+")
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama-bpe": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "qwen2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "refact": _STARCODER_RULE,
    "starcoder": _STARCODER_RULE,
}
