"""How inner loops of the planners are compiled: by numba, once a machine; the machine code is kept on disk."""

from numba import njit

compiled = njit(cache=True, nogil=True)

# For small functions in inner loops: a call counts references to every array of its arguments.
inlined = njit(cache=True, nogil=True, inline="always")
