"""Tests, laid out like the packages; `reference` holds the NumPy models that expected values come from."""

import os

# The matrices of tests are small: on a busy machine NumPy's threads wait for each other several times longer than they
# compute. Read when NumPy is imported, hence here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
