"""Routing like that of LAER-MoE's two settings: 32 ranks in 4 nodes, from scratch, without an auxiliary loss.

Its artifact has no routing, only tokens that each rank received. Under the static layout those of rank r and r + 4 of a
node add up to what the node sent to the experts {e = r mod 4}: a group of 2 experts of 8, or of 4 of 16. The generator
is fitted to these groups' counts, published for 32 layers and 9 micro-batches, or 24 and 29; drawn ones are of as many,
over 12 seeds. Means are over a node's groups, but in the second row over nodes; a step is one micro-batch.

                                              e8k2               e16k4
                                              published  drawn   published  drawn
max / mean                                        1.513  1.508       1.637  1.654
standard deviation over nodes / mean              0.122  0.119       0.106  0.095
absolute change in one step / mean                0.155  0.159       0.113  0.118
correlation over one step                         0.868  0.866       0.954  0.956
the same, around each group's mean over time       0.07   0.04        0.83   0.69

What it is for: LAER-MoE's planner on the five micro-batches before, with its even split, has a busiest rank of 1.38 and
1.27 times the mean in its own log, and of 1.38 and 1.27 on what is drawn (p95: 1.67 and 1.59, drawn 1.64 and 1.48).
Source: scripts_ae/token_analysis_backup.csv of the artifact of arXiv 2602.11686.
"""

from __future__ import annotations

from moesys.config.workload import Generated

LAER_E8K2_ROUTING = Generated(skew=0.63, drift=0.011, spread=0.0, concentration=18.0, num_layers=32)
LAER_E16K4_ROUTING = Generated(skew=1.75, drift=0.009, spread=0.0, concentration=40.0, num_layers=24)
