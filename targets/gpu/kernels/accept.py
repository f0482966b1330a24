"""Acceptance: which drafted tokens the target agrees with, and what that makes of the state.

Knows nothing of logits or caches.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.gpu.builder import Kernel, KernelBuilder, barrier, bind, i32, load, local, state_word, store
from dflashc.targets.gpu.traits import Traits

MOST_ROWS = 32
"""Rows of an acceptance; a thread each."""


def accept(traits: Traits) -> Kernel:
    """Accept the longest prefix of proposals that the target would have chosen, and its next token. One workgroup.

    k = the largest number with tokens[i + 1] == ids[i] for all i < k; the next anchor is ids[k].

    Arguments
    ---------
    tokens : int32 (rows,); the anchor and the proposals that were verified; tokens[0] becomes the next anchor
    ids : int32 (rows,); the target's choice after each of them
    state : the state block; word 0, the committed length, grows by k + 1
    block : int32; block[0] becomes the next anchor
    history : int32; the committed tokens by position; tokens[: k + 1] are added to them
    emitted : int32 (rows + 1,); k, the k accepted proposals, the next anchor; the rest is left as it was
    rows : i32, at most 32
    """
    k = KernelBuilder("accept", traits)
    names = ("tokens", "ids", "state", "block", "history", "emitted")
    with k.build([*((name, "int32") for name in names), ("rows", "i32")]) as arguments:
        tokens, ids, state, block, history, emitted, rows = arguments
        with k.workgroups(MOST_ROWS) as (_, thread):
            agrees = k.shared(MOST_ROWS, "int32")
            token, choice, accepted = local(1, "int32"), local(1, "int32"), local(1, "int32")
            store(agrees, thread, i32(0))
            store(token, 0, i32(0))
            store(choice, 0, i32(0))
            with T.If(thread < rows), T.Then():
                store(token, 0, load(tokens, thread))
                store(choice, 0, load(ids, thread))
            with T.If(thread + 1 < rows), T.Then():
                store(agrees, thread, tirx.Cast("int32", load(tokens, thread + 1) == load(choice, 0)))
            committed = state_word(state, 0)
            barrier()  # all is read; from here on it is overwritten
            store(accepted, 0, i32(0))
            with T.serial(i32(0), rows) as row, T.If(load(accepted, 0) == row), T.Then():
                store(accepted, 0, row + load(agrees, row))
            count = bind(load(accepted, 0))
            with T.If(thread <= count), T.Then():
                store(emitted, thread + 1, load(choice, 0))
                store(history, committed + thread, load(token, 0))
            with T.If(thread == count), T.Then():
                store(tokens, 0, load(choice, 0))
                store(block, 0, load(choice, 0))
            with T.If(thread == 0), T.Then():
                store(emitted, 0, count)
                store(state, 0, committed + count + 1)
    return k.kernel
