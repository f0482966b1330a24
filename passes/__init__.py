"""Rewrites of the Relax module, one a file; `pipeline` lists all of them in order."""
