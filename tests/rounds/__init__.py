"""Pairs in rounds: what speculation may and may not change, on real artefacts."""
