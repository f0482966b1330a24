"""Kernels for NVIDIA GPUs: TIR to CUDA C++, compiled by NVRTC to a cubin and PTX."""
