"""The tuner searches for the fastest strategy by successive halving in the cost model, and then on the clock where
strategies can be timed. The caller provides the workload and the timer.
"""
