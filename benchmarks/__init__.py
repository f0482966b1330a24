"""Measurements of what dflashc builds, beside llama.cpp on the same file. Not part of the installed package."""
