"""What CUDA, Vulkan and ROCm share: the kernel language, the kernel families, the lowering rules."""
