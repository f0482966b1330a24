"""Reference models in plain NumPy, written from the published definitions; the compiler is tested against them."""
