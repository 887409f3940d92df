"""warm_up: compiling the planners' inner loops before they are waited for."""

from __future__ import annotations

import numpy as np

from moesys.balance.planners import plan_layout, split_tokens
from moesys.config import Balance, ClusterSpec, Ep, ModelShape, Split
from moesys.load import LoadMatrix


def warm_up(balance: Balance | None = None, split: Split | None = None, *, late_slots: bool = False) -> None:
    """Runs the compiled loops that a planner and a split need (``Greedy``'s and ``FlowSplit``'s, if none are given),
    and with ``late_slots`` the choice of what fills them.

    They are compiled when they first run on a machine, which takes half a minute, and kept on disk beside the source
    (or where NUMBA_CACHE_DIR says). Whoever starts several processes, or has others wait for a plan, calls this before;
    where everything is compiled it takes less than a second, most of it imports, and next to nothing the next time.
    """
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=2)
    load = LoadMatrix(np.array([[9, 1, 1, 1], [1, 9, 1, 1], [5, 2, 2, 2], [1, 1, 1, 7]]))
    planner = Balance.class_of("greedy" if balance is None or balance.is_compiled else "static")()
    model = ModelShape(hidden_size=1, intermediate_size=1, num_experts=4, top_k=1)
    layout = plan_layout(load, cluster, planner, 3)
    turned = LoadMatrix(load.tokens_RE[:, ::-1])
    layout = plan_layout(turned, cluster, planner, 3, model=model, previous=layout)
    if late_slots:
        from moesys.balance.late_slots import fill_late_slots

        layout = fill_late_slots(turned, layout, cluster, model, Ep(), late_slots=1, slots_R=(4,) * 4)
    # One's own may not be made for so small a problem, and has nothing of ours to compile.
    if split is None or split.own_code is None:
        config = Split.class_of("flow")() if split is None or split.follows_planner else split
        split_tokens(turned, layout, cluster, config, model=model)
