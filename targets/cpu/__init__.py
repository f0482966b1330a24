"""Kernels for x86-64 CPUs, built with the TVM IR builder and LLVM."""
