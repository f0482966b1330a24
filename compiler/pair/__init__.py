"""The pair of a target and a drafter: checked before anything is built, with one line for every refusal."""

from dflashc.compiler.drafter import dialect_table
from dflashc.compiler.pair.check import check, check_order, check_pair, inspect_drafter
from dflashc.compiler.pair.overrides import Overrides
from dflashc.compiler.pair.report import PairReport

__all__ = ["Overrides", "PairReport", "check", "check_order", "check_pair", "dialect_table", "inspect_drafter"]
