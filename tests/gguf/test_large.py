"""A file of 20 GB with a vocabulary of 262,144: opening it must touch its header alone."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gguf.gguf_bytes import FLOAT32, INT32, STRING, array, gguf_file, string, tensor

VOCABULARY = 262_144
FILE_BYTES = 20 << 30
MEBIBYTE = 1 << 20

# Run in a process of its own, whose memory nothing else has grown. Prints bytes: how far the peak of what is resident
# has grown after opening, after streaming through 2 GB of a tensor, after decoding the vocabulary.
PROBE = """
import json, re, sys
from pathlib import Path
from dflashc.compiler.gguf import open_gguf

def status(field):
    return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

before = status("VmRSS")
model = open_gguf(sys.argv[1])
found = {"opened": status("VmHWM") - before}
tensor = model.tensors["w"]
for first in range(0, 1 << 19, 1 << 12):
    assert not tensor.read_rows(first, 1 << 12).any()
found["read"] = status("VmHWM") - before
found["tokens"] = len(model.get_strings("tokens"))
found["last"] = model.get_strings("tokens")[-1]
found["decoded"] = status("VmHWM") - before
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    if not Path("/proc/self/status").exists():
        pytest.skip("resident memory is read from /proc")
    tokens = b"".join(string(f"token{number}") for number in range(VOCABULARY))
    merges = b"".join(string(f"to ken{number}") for number in range(2 * VOCABULARY))
    content = gguf_file(
        [
            array("tokens", STRING, VOCABULARY, tokens),
            array("scores", FLOAT32, VOCABULARY, bytes(4 * VOCABULARY)),
            array("types", INT32, VOCABULARY, struct.pack("<i", 1) * VOCABULARY),
            array("merges", STRING, 2 * VOCABULARY, merges),
        ],
        [tensor("w", [1024, (FILE_BYTES - 64 * MEBIBYTE) // 4096])],
    )
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    with path.open("wb") as file:
        file.write(content)
        file.truncate(FILE_BYTES)  # sparse: takes no more space than the header
    found = subprocess.run([sys.executable, "-c", PROBE, str(path)], check=True, capture_output=True, text=True)
    path.unlink()
    return {"header": len(content), **json.loads(found.stdout)}


def test_opening_reads_the_header_alone(probe: dict[str, int]) -> None:
    assert probe["opened"] <= 2 * probe["header"] + 10 * MEBIBYTE


def test_vocabulary_is_decoded_in_little_memory(probe: dict[str, int]) -> None:
    assert probe["tokens"] == VOCABULARY
    assert probe["last"] == f"token{VOCABULARY - 1}"
    assert probe["decoded"] < 100 * MEBIBYTE


def test_streaming_through_a_tensor_holds_one_piece(probe: dict[str, int]) -> None:
    """Of 16 MB."""
    assert probe["read"] <= probe["opened"] + 40 * MEBIBYTE
