"""Proofs on whole artefacts: built by the real compiler, run by the real runtime, held against others and themselves."""
