"""Tokens of a reduced vocabulary: the target's ids of a drafter's."""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Kernel, KernelBuilder, bind, load, store
from dflashc.targets.gpu.traits import Traits

THREADS = 64


def look_up(traits: Traits) -> Kernel:
    """output[first + i] = table[indices[i]]. Workgroup = 64 indices.

    Arguments: indices, table, output int32; then the scalars count, first.
    """
    k = KernelBuilder("look_up", traits)
    arguments = [("indices", "int32"), ("table", "int32"), ("output", "int32"), ("count", "i32"), ("first", "i32")]
    with k.build(arguments) as (indices, table, output, count, first), k.workgroups(THREADS) as (group, thread):
        i = bind(group * THREADS + thread)
        with T.If(i < count), T.Then():
            store(output, first + i, load(table, load(indices, i)))
    return k.kernel
