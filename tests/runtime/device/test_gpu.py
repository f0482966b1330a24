"""A GPU as a device, on every driver: results, waits, transfers in pieces, lifetimes, interrupts, failing calls."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dflashc.runtime.device import gpu, staging
from dflashc.runtime.device.gpu import GpuDevice, GpuMemory, GpuReplay
from dflashc.runtime.device.memories import session_memories
from dflashc.runtime.errors import ArtefactError, TargetError
from dflashc.runtime.plan import Launch, Operand, Units
from tests.runtime.device.conftest import KINDS, Tiny
from tests.runtime.device.tiny import COUNT, EMITTED, PROGRAM, expected

Memories = dict[str, GpuMemory]
CONTEXT = 256


def values(seed: int = 1, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def prepare(device: GpuDevice, tiny: Tiny, launches: Sequence[Launch] = PROGRAM) -> tuple[Memories, GpuReplay]:
    """A session's memory, and the program recorded."""
    memories = session_memories(tiny.artefact, device, CONTEXT)
    return memories, device.record(launches, memories, CONTEXT)


def result(device: GpuDevice, memories: Memories) -> np.ndarray:
    return device.download(memories["y"], "float32", COUNT)


def test_a_run_computes_what_it_should_with_one_wait(tiny: Tiny) -> None:
    device = tiny.open()
    memories, replay = prepare(device, tiny)
    x = values()
    device.upload(memories["x"], values(2))
    device.upload(memories["x"], x)  # the later one counts
    replay.run()  # memory and weights are on their way until here
    before = device.synchronisations, device.downloaded
    device.upload(memories["x"], x)
    assert device.synchronisations == before[0], "an upload does not wait"
    replay.run()
    emitted = device.download(memories["emitted"], "float32", EMITTED)
    assert (device.synchronisations, device.downloaded) == (before[0] + 1, before[1] + 4 * EMITTED)
    assert np.array_equal(emitted, expected(x)[:EMITTED])
    assert np.array_equal(result(device, memories), expected(x))


def test_fresh_memory_is_zero(tiny: Tiny) -> None:
    device = tiny.open()
    for shared in (False, True):
        for nbytes in (0, 1, 5000):
            memory = device.alloc(nbytes, shared)
            assert not device.download(memory, "uint8", nbytes).any()


def test_transfers_of_any_size_go_in_pieces(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STAGING_BYTES", 256)
    monkeypatch.setattr(staging, "PIECE_BYTES", 100)
    device = tiny.open()
    memories, replay = prepare(device, tiny)
    memory, whole = device.alloc(10_000), np.zeros(10_000, np.uint8)
    random = np.random.default_rng(3)
    for offset, size in ((0, 10_000), (1, 255), (300, 256), (9_999, 1), (17, 4_001)):
        piece = random.integers(0, 256, size, np.uint8)
        device.upload(memory, piece, offset)
        whole[offset : offset + size] = piece
    assert np.array_equal(device.download(memory, "uint8", 10_000), whole)
    assert np.array_equal(device.download(memory, "uint8", 4_000, 301), whole[301:4_301])
    device.upload(memories["x"], values())
    replay.run()
    assert np.array_equal(result(device, memories), expected(values())), "weights come in pieces too"


def test_memory_is_copied_from_block_to_block(tiny: Tiny) -> None:
    device = tiny.open()
    one, other = device.alloc(4096), device.alloc(4096)
    device.upload(one, values(1, 1024))
    device._copy(one.block, 64, other.block, 128, 1024)
    device._wait()
    assert np.array_equal(device.download(other, "float32", 256, 128), values(1, 1024)[16:272])
    assert not device.download(other, "float32", 32).any()


def test_a_recording_can_be_run_often_and_beside_others(tiny: Tiny) -> None:
    device = tiny.open()
    one, replay_one = prepare(device, tiny)
    other, replay_other = prepare(device, tiny)
    for seed in range(50):
        device.upload(one["x"], values(seed))
        replay_one.run()
        replay_other.run()
    assert np.array_equal(result(device, one), expected(values(49)))
    assert np.array_equal(result(device, other), expected(np.zeros(COUNT, np.float32)))


def test_sessions_share_weights_and_give_their_memory_back(tiny: Tiny) -> None:
    device = tiny.open()
    prepare(device, tiny)
    counts = []
    for _ in range(4):
        memories, replay = prepare(device, tiny)
        replay.run()
        del memories, replay
        gc.collect()
        counts.append((len(tiny.watch.live), device.uploaded))
    assert len(set(counts)) == 1, counts


def test_the_launches_of_a_run_are_timed_one_by_one(tiny: Tiny) -> None:
    device = tiny.open()
    memories, replay = prepare(device, tiny)
    device.upload(memories["x"], values())
    for _ in range(2):
        seconds = replay.seconds()
        assert seconds.shape == (len(PROGRAM),)
        assert (seconds >= 0).all()
        assert 0 < seconds.sum() < 60
    assert np.array_equal(result(device, memories), expected(values()))


def test_bandwidth_is_that_of_copies_inside_the_device(tiny: Tiny) -> None:
    """Both directions count, and a copy takes some time; its memory is given back."""
    device = tiny.open()
    started = time.perf_counter()
    bandwidth = device.copy_bandwidth(1 << 20, repeats=3)
    assert bandwidth > 4 * 2 * (1 << 20) / (time.perf_counter() - started)
    device.copy_bandwidth(1 << 20, repeats=1)
    device.close()


def test_closing_gives_everything_back_and_ends_all_use(tiny: Tiny) -> None:
    device = tiny.open()
    memories, replay = prepare(device, tiny)
    replay.run()
    replay.seconds()
    device.close()
    assert not tiny.watch.live
    device.close()
    for use in (replay.run, replay.seconds, lambda: device.alloc(64), lambda: result(device, memories),
                lambda: device.upload(memories["x"], values())):
        with pytest.raises(TargetError, match="was closed"):
            use()


def test_an_interrupt_leaves_the_device_usable(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tiny.open()
    memories, replay = prepare(device, tiny)
    device.upload(memories["x"], values())
    driver = device._driver

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replay.run()
    waits = device.synchronisations
    device.upload(memories["x"], values(5))
    assert device.synchronisations == waits + 1, "the run that was left is waited for before its memory changes"
    replay.run()
    assert np.array_equal(result(device, memories), expected(values(5)))


def test_a_device_that_hangs_is_left_alone(tiny: Tiny) -> None:
    device = tiny.open()
    _, replay = prepare(device, tiny)
    device._driver._hang_seconds = 0.05  # type: ignore[attr-defined]
    tiny.watch.stuck = True
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(TargetError, match="hangs"):
            replay.run()
    device.close()
    assert time.monotonic() - started < 5
    assert tiny.watch.live, "the device may still use all of it"


def with_operand(index: int, operand: Operand) -> Launch:
    operands = list(PROGRAM[0].operands)
    operands[index] = operand
    return replace(PROGRAM[0], operands=tuple(operands))


@pytest.mark.parametrize(("launch", "message"), [
    (with_operand(0, Operand("buffer", "x", 4)), "'scale' uses x from byte 4 on, expected a multiple of 64 below 4,0"),
    (with_operand(0, Operand("buffer", "x", 4032)), "uses x from byte 4,032 on"),
    (with_operand(0, Operand("i64", "", 1)), r"takes \(buffer, f32, buffer, i32\), its launch 'scale' passes \(i32,"),
    (with_operand(3, Operand("i64", "", 1 << 31)), "passes 2147483648 to a kernel, which takes 32-bit numbers"),
    (replace(PROGRAM[0], units=Units(1, 0, 64)), "expected a fixed number of workgroups"),
    (replace(PROGRAM[0], units=Units(0)), "expected a fixed number of workgroups"),
    (replace(PROGRAM[0], kernel="other"), "lacks kernel other"),
])
def test_a_launch_that_does_not_fit_its_kernel(tiny: Tiny, launch: Launch, message: str) -> None:
    device = tiny.open()
    memories = session_memories(tiny.artefact, device, CONTEXT)
    with pytest.raises(ArtefactError, match=message):
        device.record([launch], memories, CONTEXT)


def test_too_little_memory_is_said_before_anything_is_allocated(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tiny.open()
    monkeypatch.setattr(device._driver, "available_memory", lambda: 20_000)
    live = set(tiny.watch.live)
    with pytest.raises(TargetError, match=r"caches .* at a context of 1,024 tokens\), .* free: use a smaller --ctx"):
        session_memories(tiny.artefact, device, 1024)
    assert tiny.watch.live == live
    session_memories(tiny.artefact, device, 0)


def test_weights_that_end_early(tiny: Tiny) -> None:
    device = tiny.open()
    data = tiny.artefact.weights.read_bytes()
    tiny.artefact.weights.write_bytes(data[:1000])
    with pytest.raises(ArtefactError, match="ended early"):
        prepare(device, tiny)
    tiny.artefact.weights.write_bytes(data)
    memories, replay = prepare(device, tiny)
    replay.run()
    assert np.array_equal(result(device, memories), expected(np.zeros(COUNT, np.float32)))


def story(tiny: Tiny) -> None:
    """Everything that a device does, once."""
    device = tiny.open()
    memories, replay = prepare(device, tiny)
    device.upload(memories["x"], values())
    replay.run()
    replay.seconds()
    result(device, memories)
    del memories, replay  # given back with the next allocation
    prepare(device, tiny)
    device.close()


@pytest.mark.parametrize("tiny", [kind for kind in KINDS if kind != "vulkan"], indirect=True)  # calls fewer functions
def test_any_call_that_fails_is_one_line_and_leaves_nothing(tiny: Tiny) -> None:
    story(tiny)
    calls = len(tiny.watch.names)
    assert not tiny.watch.live
    unheard = set()
    for number in range(1, calls + 1):
        tiny.watch.names.clear()
        tiny.watch.fail_at, tiny.watch.failed = number, ""
        said = ""
        try:
            story(tiny)
            unheard.add(tiny.watch.failed)
        except TargetError as error:
            said = str(error)
        assert not said or (tiny.watch.failed in said and len(said.splitlines()) == 1)
        for device in tiny.opened:
            device.close()
        tiny.opened.clear()
        assert not tiny.watch.live, (number, tiny.watch.failed)
    assert unheard <= tiny.watch.negligible, "all other failures are told"
