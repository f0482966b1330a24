"""From rewritten Relax functions to launch plans, and from GGUF tensors to packed weights."""
