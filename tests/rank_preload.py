"""What ranks of tests have from their start beside modules: the planners' machine code, which takes each a second."""

from moesys.balance.planners import warm_up

warm_up()
