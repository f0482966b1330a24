"""GGUF files in, one artefact per device out."""
