"""What ranks of tests have from their start beside modules: the planners' machine code, which takes each a second. What
is loaded is frozen, so that no collection of garbage walks through it, or copies it from the server that ranks share.
"""

import atexit
import gc

from moesys.balance.run_planner import warm_up

# For problems of any size, and for small ones, which are all that most tests have.
for load_size in (None, 1):
    for late_slots in (False, True):
        warm_up(late_slots=late_slots, load_size=load_size)
gc.collect()
gc.freeze()
# At the end of the server, what is left would be reported as leaked.
atexit.register(gc.unfreeze)
