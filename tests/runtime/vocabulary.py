"""Small tokenizers for tests, as GGUF files, and the one of the small example model."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from dflashc.compiler.gguf import open_gguf
from dflashc.compiler.tokenizer import TokenizerFiles, build_tokenizer
from dflashc.runtime.subword import BYTE_CHARACTERS
from tests.gguf.gguf_bytes import BOOL, FLOAT32, INT32, STRING, UINT32, array, entry, gguf_file, string, uint32
from tests.reference.shared import FOLDER

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "<tool>", "<|im_end|>"]
    + [f"<0x{byte:02X}>" for byte in range(256)],
    "scores": [0.0, 0, 0, -9, -9, -9, -9, -1, -2, -3, -4, 0, 0] + [0.0] * 256,
    "token_type": [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * 8 + [USER_DEFINED, CONTROL] + [BYTE] * 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}
BYTE_LEVEL: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": [*BYTE_CHARACTERS, "he", "ll", "hell", "Ġhe", "hello", "<|im_start|>", "<|im_end|>", "<think>"],
    "token_type": [NORMAL] * 261 + [CONTROL, CONTROL, USER_DEFINED],
    "merges": ["h e", "l l", "he ll", "Ġ he"],
    "eos_token_id": 262,
}


def build(path: Path, keys: dict[str, Any], **changes: Any) -> TokenizerFiles:
    """Write `keys`, with `changes` (None leaves one out), as a GGUF file below `path` and build its tokenizer."""
    changed = {key: value for key, value in {**keys, **changes}.items() if value is not None}
    file = path / "tokenizer.gguf"
    file.write_bytes(gguf_file([_entry(_full(key), value) for key, value in changed.items()]))
    with open_gguf(file) as gguf:
        return build_tokenizer(gguf)


def example_model() -> Path:
    """Path of the small example model; the calling test is skipped when it is nowhere."""
    for folder in (Path(__file__).parents[2] / "recipes" / "pycode-3m", FOLDER / "models"):
        found = sorted(path for path in folder.glob("pycode-3m-*.gguf") if "dflash" not in path.name)
        if found:
            return found[0]
    pytest.skip("no pycode-3m model in recipes/pycode-3m or the shared folder")


def _full(key: str) -> str:
    return key if "." in key else f"tokenizer.ggml.{key}"


def _entry(key: str, value: Any) -> bytes:
    if isinstance(value, list):
        if isinstance(value[0] if value else "", str):
            return array(key, STRING, len(value), b"".join(map(string, value)))
        kind, letter = (FLOAT32, "f") if any(isinstance(item, float) for item in value) else (INT32, "i")
        return array(key, kind, len(value), struct.pack(f"<{len(value)}{letter}", *value))
    if isinstance(value, bool):
        return entry(key, BOOL, bytes([value]))
    if isinstance(value, int):
        return entry(key, UINT32, uint32(value))
    return entry(key, STRING, string(value))
