"""Balance: from a load to the layout that fits it, and from a layout to where each token goes.

There are two time scales. The slow one: ``LoadHistory`` predicts a load from those that were, and ``plan_layout``
chooses who holds what. The fast one, in every micro-batch: ``split_tokens`` divides the current tokens over the
replicas. Everything is a pure function on integers: equal inputs give equal bytes, on every rank and in every run.
"""
