"""Acceptance: which drafted tokens the target agrees with, and what that makes of the state.

Knows nothing of logits or caches.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from dflashc.targets.cpu.builder import Kernel, KernelBuilder, bind, cast, i64, load, local, store
from dflashc.targets.cpu.traits import Traits


def accept(traits: Traits) -> Kernel:
    """Accept the longest prefix of proposals that the target would have chosen, and its next token. Unit = all; 1 unit.

    k = the largest number with tokens[i + 1] == ids[i] for all i < k; the next anchor is ids[k].

    Arguments
    ---------
    tokens : int32 (rows,); the anchor and the proposals that were verified; tokens[0] becomes the next anchor
    ids : int32 (rows,); the target's choice after each of them
    state : int64; state[0], the committed length, grows by k + 1
    block : int32; block[0] becomes the next anchor
    history : int32; the committed tokens by position; tokens[: k + 1] are added to them
    emitted : int32 (rows + 1,); k, the k accepted proposals, the next anchor; the rest is left as it was
    rows : i64
    """
    kernel = KernelBuilder("accept", traits)
    with kernel.build():
        tokens, ids = kernel.buffer("tokens", "int32"), kernel.buffer("ids", "int32")
        state, block = kernel.buffer("state", "int64"), kernel.buffer("block", "int32")
        history, emitted = kernel.buffer("history", "int32"), kernel.buffer("emitted", "int32")
        rows = kernel.scalar("rows")
        with kernel.units():
            accepted = local(1, "int64")
            store(accepted, 0, i64(0))
            with T.serial(i64(0), rows - 1) as i:
                equal = load(tokens, i + 1) == load(ids, i)
                with T.If(tirx.all(load(accepted, 0) == i, equal)), T.Then():
                    store(accepted, 0, i + 1)
                    store(emitted, i + 1, load(ids, i))
            count = bind(load(accepted, 0))
            anchor = bind(load(ids, count))
            store(emitted, 0, cast("int32", count))
            store(emitted, count + 1, anchor)
            committed = bind(load(state, 0))
            with T.serial(i64(0), count + 1) as i:
                store(history, committed + i, load(tokens, i))
            store(state, 0, committed + count + 1)
            store(tokens, 0, anchor)
            store(block, 0, anchor)
    return kernel.kernel
