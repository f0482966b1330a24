"""Kernels for AMD GPUs under ROCm: TIR to LLVM IR, compiled and linked to a code object."""
