"""What a device can do and how its kernels are made."""
