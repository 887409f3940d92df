"""Searches strategies: closed forms rule points out, the cost model ranks what is left, and clocks have the last
word where there are any. What comes from the lab, such as timed trials, is passed in.
"""
