"""NVIDIA's GPU architectures that NVRTC 13 compiles for, and products of each. Data only."""

ARCHITECTURES = {
    "sm_75": "Turing: RTX 20, GTX 16, T4",
    "sm_80": "Ampere: A100, A30",
    "sm_86": "Ampere: RTX 30, A10, A40",
    "sm_87": "Ampere: Jetson Orin",
    "sm_89": "Ada: RTX 40, L4, L40",
    "sm_90": "Hopper: H100, H200, GH200",
    "sm_100": "Blackwell: B200, GB200",
    "sm_103": "Blackwell: B300, GB300",
    "sm_110": "Blackwell: Jetson Thor",
    "sm_120": "Blackwell: RTX 50, RTX PRO 6000",
    "sm_121": "Blackwell: GB10 (DGX Spark)",
}
"""All have dp4a and at least 48 KiB of static shared memory per block."""
