"""Kernels for Vulkan devices: TIR to GLSL, GLSL to SPIR-V, SPIR-V checked."""
