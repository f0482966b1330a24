"""The request's sampler, as `runtime.sampling` defines it: a draw per row; penalties have gone before.

A row's token depends on its logits, its position and the tokens before it alone, so a round draws what plain decoding
would. Knows nothing of proposals.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from dflashc.runtime.device_sampling import MOST_CANDIDATES
from dflashc.runtime.sampling import Purpose
from dflashc.targets.gpu.builder import Kernel, KernelBuilder, store
from dflashc.targets.gpu.kernels.law import RequestLaw
from dflashc.targets.gpu.kernels.sampling_state import position_of, random_number
from dflashc.targets.gpu.traits import Traits


def draw(traits: Traits) -> Kernel:
    """Draw the token of each row among its best logits: top-k, top-p, min-p, temperature, draw. Workgroup = a row.

    Arguments
    ---------
    best, token : float32, int32 (M, 64), of `candidates`
    state : the state block; see `sampling_state.position_of`
    sampling : uint64; see `runtime.device_sampling.Word`
    ids : int32 (M,), written; -1 where the largest logit is no finite number
    """
    k = KernelBuilder("draw", traits)
    with k.build([("best", "float32"), ("token", "int32"), ("state", "int32"), ("sampling", "uint64"),
                  ("ids", "int32")]) as (best, token, state, sampling, ids), \
            k.workgroups(MOST_CANDIDATES) as (row, thread):
        law = RequestLaw.declare(k, thread, row, best, token)
        law.filter(sampling)
        with T.If(thread == 0), T.Then():
            number = random_number(sampling, Purpose.SAMPLE, position_of(state, row))
            store(ids, row, law.unless_broken(law.draw(number)))
    return k.kernel
