"""Runs an artefact. Imports neither compiler, passes, targets nor TVM."""
