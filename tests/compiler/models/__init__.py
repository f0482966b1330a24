"""Tests of the model graphs and their configuration."""
