"""Agreement: the same bytes in every run, on any number of threads, in any process, whatever an array's layout."""

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from balance_cases import zipf_load

from moesys.balance.eplb import Eplb
from moesys.balance.flex_moe import FlexMoe
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.laer import Laer
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.balance.static import Static
from moesys.config import ClusterSpec
from moesys.load import LoadMatrix

CLUSTER = ClusterSpec(num_nodes=3, ranks_per_node=(4, 3, 5))
SLOTS = [3, 3, 4, 3, 3, 2, 3, 3, 4, 3, 3, 3]
BALANCES = [Static(), Eplb(), Laer(), FlexMoe(), Greedy(), Greedy(max_moves=4, move_tokens=3)]


def digest_of_plans(seed: int = 0) -> str:
    """Everything that ranks must agree on: layouts from scratch and from one in force, and all splits of them."""
    digest = hashlib.sha256()
    load, later = zipf_load(12, 22, 1.2), zipf_load(12, 22, 0.8)
    for balance in BALANCES:
        first = plan_layout(load, CLUSTER, balance, SLOTS)
        second = plan_layout(later, CLUSTER, balance, SLOTS, previous=first)
        for layout in (first, second):
            digest.update(layout.expert_RS.tobytes())
            for split in (FlowSplit(), FlowSplit(traffic="exact"), FlowSplit(max_inter_node=0.2)):
                digest.update(split_tokens(later, layout, CLUSTER, split, turn=seed).entries.tobytes())
    return digest.hexdigest()


def test_threads_give_the_same_bytes():
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(digest_of_plans, [0] * 3)) == {digest_of_plans()}


def test_other_processes_give_the_same_bytes():
    """With other hashes of strings, one thread of numba's, and numpy's sorts without vector instructions."""
    settings = {"PYTHONHASHSEED": "7", "NUMBA_NUM_THREADS": "1", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3"}
    program = "from test_agreement import digest_of_plans; print(digest_of_plans())"
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, **settings, "PYTHONPATH": os.path.dirname(__file__)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert told.strip() == digest_of_plans()


def test_an_array_in_another_order_of_memory_is_the_same_load():
    load = zipf_load(12, 22, 1.2)
    turned = LoadMatrix(np.asfortranarray(load.tokens_RE))
    layouts = [plan_layout(each, CLUSTER, Greedy(), SLOTS) for each in (load, turned)]
    assert layouts[0] == layouts[1]
    plans = [split_tokens(each, layouts[0], CLUSTER, FlowSplit()) for each in (load, turned)]
    assert plans[0] == plans[1]
