"""The commands, one in each module. They are listed in ``moesys.__main__``, which imports a command when it is called.

Exit codes: 0, success; 1, a trial failed, or has different bits than it must have; 2, the arguments cannot be met, and
a message says why; 130, Ctrl-C; 143, SIGTERM.
"""
