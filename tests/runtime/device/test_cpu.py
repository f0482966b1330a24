"""The CPU executor: every unit runs once per run, barriers hold, and no thread waits for one that is put aside.

Kernels are compiled where races should have a chance, and Python functions where a thread has to be held up.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashc.runtime.device.cpu import CpuDevice, HostMemory
from dflashc.runtime.errors import ArtefactError
from dflashc.runtime.plan import Launch, Operand, Units
from dflashc.targets.cpu.builder import Kernel, KernelBuilder, i64, load, store
from dflashc.targets.cpu.compile import compile_library
from dflashc.targets.cpu.traits import LEVELS, Traits
from dflashc.targets.requests import KernelRequest

UNITS = 37
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def shift(traits: Traits) -> Kernel:
    """to[u] = from[(u + 1) % units] + 1: a unit reads what another one, most often of another thread, wrote before."""
    k = KernelBuilder("shift", traits)
    with k.build():
        source, target, units = k.buffer("source", "int64"), k.buffer("target", "int64"), k.scalar("units")
        with k.units() as unit:
            store(target, unit, load(source, (unit + i64(1)) % units) + i64(1))
    return k.kernel


def count(traits: Traits) -> Kernel:
    """counts[u] += 1."""
    k = KernelBuilder("count", traits)
    with k.build():
        counts = k.buffer("counts", "int64")
        with k.units() as unit:
            store(counts, unit, load(counts, unit) + i64(1))
    return k.kernel


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("executor") / "kernels.so"
    requests = [KernelRequest(builder.__name__, builder, ()) for builder in (shift, count)]
    compile_library(LEVELS["x86-64"], requests, path, processes=1)
    return path


def memory(size: int) -> HostMemory:
    return HostMemory.allocate(8 * size)


def numbers(block: HostMemory) -> np.ndarray:
    return block.array.view(np.int64)


def launch(kernel: str, units: Units | int, *operands: str | int, grain: int = 4, barrier: bool = True) -> Launch:
    table = tuple(Operand("buffer", o) if isinstance(o, str) else Operand("i64", value=o) for o in operands)
    units = units if isinstance(units, Units) else Units(units)
    return Launch(kernel, kernel, units, grain, table, barrier, 0, 0)


def call(device: CpuDevice, name: str, function: Callable[[int, int], None]) -> Any:
    """Let `function` of (begin, end) be the kernel `name`; keep what it returns while that may run."""
    kernel = _KERNEL(lambda arguments, begin, end: function(begin, end))
    device._addresses[name] = ctypes.cast(kernel, ctypes.c_void_p).value or 0
    return kernel


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_each_launch_sees_all_of_the_one_before(library: Path, threads: int) -> None:
    runs, launches = 1500, 6
    blocks = {"state": memory(8), "a": memory(UNITS), "b": memory(UNITS)}
    chain = [launch("shift", UNITS, *pair, UNITS) for pair in [("a", "b"), ("b", "a")] * (launches // 2)]
    with CpuDevice(library, threads) as device:
        replay = device.record(chain, blocks, 0)
        for _ in range(runs):
            replay.run()
    assert (numbers(blocks["a"])[:UNITS] == runs * launches).all()
    assert (numbers(blocks["b"])[:UNITS] == runs * launches - 1).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_launches_without_a_barrier_between_them_are_done_at_the_next_one(library: Path, threads: int) -> None:
    """Two chains side by side; the run's last launch ends it whether or not it says so."""
    runs = 1500
    blocks = {"state": memory(8)} | {name: memory(UNITS) for name in "abcd"}
    side_by_side = [[launch("shift", UNITS, first, second, UNITS, barrier=False),
                     launch("shift", 5, third, fourth, 5, grain=1, barrier=last)]
                    for first, second, third, fourth, last in [("a", "b", "c", "d", True), ("b", "a", "d", "c", False)]]
    with CpuDevice(library, threads) as device:
        replay = device.record([x for group in side_by_side for x in group], blocks, 0)
        for _ in range(runs):
            replay.run()
    assert (numbers(blocks["a"])[:UNITS] == 2 * runs).all()
    assert (numbers(blocks["c"])[:5] == 2 * runs).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_units_follow_the_length_as_it_was_when_the_run_began(library: Path, threads: int) -> None:
    """The first launch already moves the length on, as acceptance does in the last one of a round."""
    runs = 600
    blocks = {"state": memory(8), "counts": memory(runs)}
    growing = [launch("count", 1, "state"), launch("count", Units(2, 3, 4), "counts", grain=1)]
    with CpuDevice(library, threads) as device:
        replay = device.record(growing, blocks, runs)
        for _ in range(runs):
            replay.run()
    units = np.array([2 * -(-(n + 3) // 4) for n in range(runs)])
    np.testing.assert_array_equal(numbers(blocks["counts"])[:runs], [(units > u).sum() for u in range(runs)])


@pytest.mark.parametrize("held", [0, 1])
def test_others_do_the_work_of_a_thread_that_is_put_aside(library: Path, held: int) -> None:
    """One of two threads is held in its first chunk: the other does all the rest, the held one's share included."""
    units, grain = 64, 4
    done: dict[str, list[int]] = {}
    both, rest = threading.Barrier(2), threading.Event()

    def hold(begin: int, end: int) -> None:
        thread = threading.current_thread().name
        if thread not in done:
            done[thread] = []
            both.wait(30)
            if (thread == "dflash-1") == bool(held):
                assert rest.wait(30)
        done[thread].extend(range(begin, end))
        if sum(map(len, done.values())) == units - grain:
            rest.set()

    with CpuDevice(library, 2) as device:
        keep = call(device, "hold", hold)
        device.record([launch("hold", units, grain=grain)], {"state": memory(8)}, 0).run()
        assert keep
    assert sorted(unit for found in done.values() for unit in found) == list(range(units))
    assert [len(found) for thread, found in done.items() if (thread == "dflash-1") == bool(held)] == [grain]


def test_a_share_lies_side_by_side(library: Path) -> None:
    """Each thread streams: without anyone to help it, it goes through neighbouring units."""
    units = 30
    done: dict[str, list[int]] = {}
    both = threading.Barrier(2)

    def note(begin: int, end: int) -> None:
        mine = done.setdefault(threading.current_thread().name, [])
        if not mine:
            both.wait(30)
        mine.extend(range(begin, end))

    with CpuDevice(library, 2) as device:
        keep = call(device, "note", note)
        device.record([launch("note", units, grain=16)], {"state": memory(8)}, 0).run()
        assert keep
    assert [found[:8] for found in sorted(done.values())] == [list(range(8)), list(range(15, 23))]


def test_sleeping_workers_wake(library: Path) -> None:
    blocks = {"state": memory(8), "counts": memory(UNITS)}
    with CpuDevice(library, 4) as device:
        replay = device.record([launch("count", UNITS, "counts")], blocks, 0)
        sleepers = device._pool.array.view(np.int32)[128 // 4 :]
        for _ in range(3):
            until = time.monotonic() + 30
            while sleepers[0] < 3:
                assert time.monotonic() < until, "the workers do not go to sleep"
                time.sleep(0.01)
            replay.run()
    assert (numbers(blocks["counts"])[:UNITS] == 3).all()


def test_tables_come_and_go_while_workers_are_late(library: Path) -> None:
    blocks = {"state": memory(8), "counts": memory(UNITS)}
    with CpuDevice(library, 8) as device:
        for _ in range(300):
            replay = device.record([launch("count", UNITS, "counts")] * 3, blocks, 0)
            replay.run()
            del replay
            gc.collect(0)
    assert (numbers(blocks["counts"])[:UNITS] == 900).all()


def test_a_table_stays_while_somebody_is_inside(library: Path) -> None:
    """The leader's word, which nothing else uses, stands for that of a late worker."""
    blocks = {"state": memory(8), "counts": memory(UNITS)}
    with CpuDevice(library, 2) as device:
        replay = device.record([launch("count", UNITS, "counts")], blocks, 0)
        inside = device._pool.array[192:].view(np.int64)[128 // 8 :]
        inside[0] = replay._table.ctypes.data
        left = threading.Timer(0.2, lambda: inside.__setitem__(0, 0))
        left.start()
        del replay
        assert inside[0] == 0
        left.join()


def test_callers_take_turns(library: Path) -> None:
    """No launch of one runs while another's does; tables that are retired in between wait as well."""
    active: list[int] = []
    seen: list[int] = []

    def busy(begin: int, end: int) -> None:
        active.append(begin)
        time.sleep(0.002)
        seen.append(len(active))
        active.pop()

    def call_often(device: CpuDevice) -> None:
        for _ in range(20):
            device.record([launch("busy", 1)], {"state": memory(8)}, 0).run()

    with CpuDevice(library, 3) as device:
        keep = call(device, "busy", busy)
        callers = [threading.Thread(target=call_often, args=(device,)) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
        assert keep
    assert seen == [1] * 60


def test_time_is_noted_by_launch(library: Path) -> None:
    with CpuDevice(library, 2) as device:
        keep = call(device, "wait", lambda begin, end: time.sleep(0.05))
        blocks = {"state": memory(8), "counts": memory(UNITS)}
        replay = device.record([launch("count", UNITS, "counts"), launch("wait", 1)], blocks, 0)
        seconds = replay.seconds()
        assert keep
    assert seconds.shape == (2,)
    assert seconds[1] > 0.04
    assert seconds[1] > seconds[0]


def test_more_units_than_a_claim_counts_are_refused(library: Path) -> None:
    blocks = {"state": memory(8), "counts": memory(1)}
    with CpuDevice(library, 1) as device, pytest.raises(ArtefactError, match="1,048,576 units at 262,143 tokens"):
        device.record([launch("count", Units(4, 1), "counts"), launch("count", Units(4, 1, 1), "counts")], blocks,
                      262143)


def test_every_launch_keeps_to_its_buffers(pycode_pair_artefact: Path) -> None:
    """See `every_program`."""
    done = subprocess.run([sys.executable, "-m", "tests.runtime.device.every_program", str(pycode_pair_artefact)],
                          capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("programs ran\n")
