"""Proofs on whole artefacts, built by the real compiler and run by the real runtime."""
