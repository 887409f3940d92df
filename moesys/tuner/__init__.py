"""The tuner searches for the fastest strategy: closed forms rule points out, the cost model ranks the others, and the
clock decides where strategies can be timed. The caller provides the workload and the timer.
"""
