"""Rounds on a Vulkan device, which may be Mesa's for the CPU: what holds on a CPU holds there.

The artefact takes a minute to compile, so these tests are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dflashc.compiler.build import BuildOptions, build
from dflashc.runtime import selftest
from dflashc.runtime.artefact import Artefact, load_artefact, verify_hashes
from dflashc.runtime.device.base import Device
from dflashc.runtime.device.opening import open_device
from dflashc.runtime.drafting import DraftParameters
from dflashc.runtime.session import Session
from dflashc.targets.registry import find_target
from tests.proof.comparing import recorded
from tests.rounds.inside import traffic
from tests.rounds.running import MATCH, REJECT, afresh
from tests.rounds.test_output import SAMPLERS
from tests.runtime.device.shaders import require_vulkan

pytestmark = pytest.mark.slow

CONTEXT = 512
PROMPT = recorded("golden-pycode-3m-q8_0")["greedy"][0]["prompt_ids"]


@pytest.fixture(scope="module")
def artefact(pycode_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    require_vulkan()
    if missing := find_target("vulkan").missing():
        pytest.skip(f"building for vulkan needs {'; '.join(missing)}")
    output = tmp_path_factory.mktemp("vulkan") / "pycode.dflash"
    drafter = pycode_model.with_name("pycode-3m-dflash2-q8_0.gguf")
    build(BuildOptions(pycode_model, "vulkan", output, drafter, context=CONTEXT))
    return load_artefact(output)


@pytest.fixture(scope="module")
def device(artefact: Artefact) -> Iterator[Device[Any]]:
    with closing(open_device(artefact)) as opened:
        yield opened


@pytest.fixture
def session(artefact: Artefact, device: Device[Any]) -> Session:
    return Session(artefact, device, CONTEXT)


def test_greedy_text_is_the_same_at_every_width(session: Session) -> None:
    expected = afresh(session, PROMPT, 24, 0)
    for width in (1, 2, 5, 7, 15, None):
        assert afresh(session, PROMPT, 24, width) == expected, width


@pytest.mark.parametrize("sampler", ["default", "penalties"])
def test_sampled_text_is_the_same_at_every_width(sampler: str, session: Session) -> None:
    expected = afresh(session, PROMPT, 16, 0, SAMPLERS[sampler])
    for width in (3, 7):
        assert afresh(session, PROMPT, 16, width, SAMPLERS[sampler], MATCH) == expected, width


def test_rejection_keeps_some_and_a_seed_decides(session: Session) -> None:
    text = afresh(session, PROMPT, 24, 7, SAMPLERS["default"], REJECT)
    assert session.statistics.rule == "reject"
    assert session.statistics.drafted > session.statistics.accepted > 0
    assert afresh(session, PROMPT, 24, 7, SAMPLERS["default"], REJECT) == text


def test_drafts_that_are_cut(session: Session) -> None:
    expected = afresh(session, PROMPT, 24, 0)
    assert afresh(session, PROMPT, 24, 7, drafting=DraftParameters(p_min=0.5)) == expected
    assert session.statistics.cut > 0


def test_a_round_is_one_wait_and_a_few_bytes(session: Session) -> None:
    session.prefill(PROMPT, "ids")
    anchor = session.round(int(session.ids(1)[0]), 7)[-1]
    with traffic(session) as counted:
        session.round(anchor, 7)
    assert (counted.synchronisations, counted.uploaded) == (1, 0)
    assert 0 < counted.downloaded <= 256


def test_the_first_version_with_caches_in_q8_0(pycode_model: Path, tmp_path: Path) -> None:
    """As on a CPU with the same caches, which round queries and keys alike; and drafts are worth as much."""
    drafter = pycode_model.with_name("pycode-3m-dflash-q8_0.gguf")
    texts = {}
    for target in ("cpu", "vulkan"):
        output = tmp_path / f"{target}.dflash"
        build(BuildOptions(pycode_model, target, output, drafter, context=CONTEXT, kv_type="q8_0",
                           drafter_kv_type="q8_0", self_test_of=tmp_path / "cpu.dflash" if texts else None))
        artefact = load_artefact(output)
        with closing(open_device(artefact)) as opened:
            assert "as recorded" in selftest.run(artefact, opened)
            session = Session(artefact, opened, CONTEXT)
            texts[target] = afresh(session, PROMPT, 24, 0)
            for width in (1, 7, 15):
                assert afresh(session, PROMPT, 24, width) == texts[target], (target, width)
                texts[target, width] = session.statistics.accepted
    assert texts["vulkan"] == texts["cpu"]
    assert [texts["vulkan", w] for w in (1, 7, 15)] == [texts["cpu", w] for w in (1, 7, 15)]


def test_verify_compares_widths_and_cuts(artefact: Artefact, device: Device[Any]) -> None:
    verify_hashes(artefact)
    assert selftest.run(artefact, device) == "3 prompts continued alike at every width and cut (none was recorded)"
