"""Merges the slots of `attention`, in their order, and stores the heads' outputs in an activation form."""

from __future__ import annotations

from tvm import tirx

from dflashc.targets.gpu.builder import Expr, Kernel, KernelBuilder, bind, f32, fma, i32, load, select, state_word
from dflashc.targets.gpu.kernels.activation import THREADS, Staging, split_row
from dflashc.targets.gpu.kernels.attention_part import LOWEST
from dflashc.targets.gpu.kernels.attention_reach import PART, Reach
from dflashc.targets.gpu.kernels.elementary import LOG2_E, exp2
from dflashc.targets.gpu.kernels.quantised_rows import form_arguments
from dflashc.targets.gpu.kernels.reduction import tree
from dflashc.targets.gpu.traits import Traits


def attention_merge(traits: Traits, form: str, denominator: str = "keys") -> Kernel:
    """output[m, head * D + d] = sum over slots of 2^(maximum - M) * values / sum of 2^(maximum - M) * sums.

    M is the largest maximum. A slot with no key that the row sees is left out. Workgroup = up to 1024 columns of a row:
    attended * `activation.spans(query_heads * D)`. Compiled for form and denominator: "keys", or "sinks" where each
    query head has one more logit, without a value, in the denominator of its softmax.

    Arguments
    ---------
    state : state block
    partial_values, partial_sums : float32, of `attention`
    sinks : float32 (query_heads,); only of denominator "sinks"
    output_* : the form's buffers, from row first_row of the program on
    rows, first_row, attended, query_heads, size, window, block : i32; as in `attention`, size = D
    """
    k = KernelBuilder(f"attention_merge_{form}_{denominator}", traits)
    scalars = ("rows", "first_row", "attended", "query_heads", "size", "window", "block")
    arguments = [("state", "int32"), ("partial_values", "float32"), ("partial_sums", "float32"),
                 *([("sinks", "float32")] if denominator == "sinks" else []), *form_arguments(form, "output"),
                 *((name, "i32") for name in scalars)]
    with k.build(arguments) as values:
        state, partial_values, partial_sums, *outputs = values[: -len(scalars)]
        sinks = outputs.pop(0) if denominator == "sinks" else None
        rows, first_row, attended, query_heads, size, window, block = values[-len(scalars) :]
        with k.workgroups(THREADS) as (group, thread):
            staging = Staging.declare(k, [form])
            columns = bind(query_heads * size)
            attended_row, first = split_row(group, columns)
            row = bind(first_row + attended_row)
            reach = Reach(state_word(state, 0), rows, window, block, traits.attention_slots)
            first_key = reach.first(row)
            home = bind(tirx.truncmod(tirx.truncdiv(first_key, i32(PART)), i32(traits.attention_slots)))
            parts = bind(tirx.truncdiv(reach.last(row), i32(PART)) - tirx.truncdiv(first_key, i32(PART)))

            def merged(column: Expr) -> Expr:
                head, d = bind(tirx.truncdiv(column, size)), bind(tirx.truncmod(column, size))
                slots = range(traits.attention_slots)
                seen = [bind(reach.ahead(i32(s), first_key) <= parts) for s in slots]
                # a slot that is seen in place of one that nobody may have written: all loads can be under way at once
                read = [bind(select(seen[s], i32(s), home)) for s in slots]
                at = [bind((attended_row + attended * s) * query_heads + head) for s in read]
                maxima = [bind(select(seen[s], load(partial_sums, at[s] * 2), f32(LOWEST))) for s in slots]
                sums = [bind(load(partial_sums, at[s] * 2 + 1)) for s in slots]
                results = [bind(load(partial_values, at[s] * size + d)) for s in slots]
                sink = None if sinks is None else bind(load(sinks, head) * f32(LOG2_E))
                highest = tree(maxima if sink is None else [*maxima, sink], tirx.max)
                value, total = f32(0), f32(0) if sink is None else exp2(bind(sink - highest))
                for s in slots:
                    factor = bind(select(seen[s], exp2(bind(maxima[s] - highest)), f32(0)))
                    total, value = bind(fma(factor, sums[s], total)), bind(fma(factor, results[s], value))
                return value / total

            staging.store_row(thread, first, columns, bind(row * columns), merged, [form], [outputs])
    return k.kernel
