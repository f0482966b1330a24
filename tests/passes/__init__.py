"""Tests of the rewrites, one module a pass."""
