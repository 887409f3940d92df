"""Load balance: layouts of experts for a load, and splits of tokens over the replicas of a layout.

Layouts change slowly: ``LoadHistory`` predicts a load from earlier ones, and ``plan_layout`` chooses the rank of each
replica. Splits change in every micro-batch: ``split_tokens`` divides the current tokens over the replicas. All of these
are pure functions on integers: equal inputs give equal bytes, on every rank and in every run.
"""
