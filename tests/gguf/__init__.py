"""Tests of dflashc.compiler.gguf."""
