"""Tests, laid out like the packages; `reference` holds the NumPy models that expected values come from."""
