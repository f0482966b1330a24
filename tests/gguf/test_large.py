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

# Run in a process of its own, whose memory nothing else has grown. Prints bytes: resident size before and peak after
# opening, and what is resident of the map itself after opening, after reading a tensor, after its release.
PROBE = """
import json, re, sys
from pathlib import Path
from dflashc.compiler.gguf import open_gguf

def status(field):
    return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

def mapped():
    entry = Path("/proc/self/smaps").read_text().split(sys.argv[1], 1)[1]
    return int(re.search(r"Rss:\\s+(\\d+) kB", entry)[1]) << 10

before = status("VmRSS")
model = open_gguf(sys.argv[1])
found = {"growth": status("VmHWM") - before, "opened": mapped()}
tensor = model.tensors["w"]
total = int(tensor.data()[: 64 << 12].sum())
found["read"] = mapped()
tensor.release()
found["released"] = mapped()
found["tokens"] = len(model.get_strings("tokens"))
found["last"] = model.get_strings("tokens")[-1]
found["decoded"] = status("VmHWM") - before - found["read"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    if not Path("/proc/self/smaps").exists():
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


def test_opening_touches_the_header_alone(probe: dict[str, int]) -> None:
    assert probe["growth"] < 100 * MEBIBYTE
    assert probe["opened"] <= probe["header"] + MEBIBYTE


def test_vocabulary_is_decoded_in_little_memory(probe: dict[str, int]) -> None:
    assert probe["tokens"] == VOCABULARY
    assert probe["last"] == f"token{VOCABULARY - 1}"
    assert probe["decoded"] < 100 * MEBIBYTE


def test_release_gives_the_pages_of_a_tensor_back(probe: dict[str, int]) -> None:
    assert probe["read"] > 100 * MEBIBYTE
    assert probe["released"] <= probe["opened"] + MEBIBYTE
