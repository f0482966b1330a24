"""Tests of the drafter's graph."""
