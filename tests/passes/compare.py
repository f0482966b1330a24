"""Before and after of a pass, as TVMScript functions."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

Pass = Callable[[tvm.IRModule], tvm.IRModule]


def module_of(function: relax.Function) -> tvm.IRModule:
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main")})


def assert_rewrites(rewrite: Pass, before: relax.Function, after: relax.Function) -> None:
    """`rewrite` makes `after` of `before`, up to names and to variables that only rename others."""
    plain = relax.transform.CanonicalizeBindings()
    tvm.ir.assert_structural_equal(plain(rewrite(module_of(before))), plain(module_of(after)))


def assert_keeps(rewrite: Pass, function: relax.Function) -> None:
    assert_rewrites(rewrite, function, function)
