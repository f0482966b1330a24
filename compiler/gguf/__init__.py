"""Reading GGUF: a bounded reader and the block formats. Knows nothing of models."""
