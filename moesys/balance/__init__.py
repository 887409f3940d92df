"""Balance: from a load to the layout that fits it, and from a layout to where each token goes.

Two time-scales. Slow: ``predict`` turns the history of loads into the one to plan for, ``plan_layout`` chooses who
holds what. Fast, every micro-batch: ``split_tokens`` divides the current tokens over the replicas. Everything is a
pure function on integers: equal inputs give equal bytes, on every rank and in every run.
"""

from moesys.balance.layouts import plan_layout
from moesys.balance.max_load import min_max_load
from moesys.balance.predictors import predict, window
from moesys.balance.splits import split_tokens

__all__ = ["min_max_load", "plan_layout", "predict", "split_tokens", "window"]
