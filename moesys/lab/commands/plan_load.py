"""``moesys plan``: one load's layout and split, with what proves how good they are."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.text import Text
from rich.tree import Tree

from moesys.balance.certificate import Certificate, certify
from moesys.balance.cp_sat import CpSat
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.greedy.numbering import num_moves
from moesys.balance.plan import LayerPlan
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.config import Balance, ClusterSpec, Split
from moesys.display import counted
from moesys.files import read_bytes, read_json, write_whole
from moesys.lab.commands.options import CLUSTER_HELP, AsJson, OutFile, option, refusing
from moesys.lab.runs.declarations import balance_of, cluster_of, split_of
from moesys.lab.show.sheets import add_head, add_line, print_full
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.traces import load_trace, read_array
from moesys.tuner.tuned_workload import value_words

MOST_RANKS_SHOWN = 128
MOST_EXPERTS_SHOWN = 16
LOAD_SUFFIXES = (".npz", ".npy", ".csv", ".json")


@refusing()
def plan_command(
    load: Annotated[Path, option("FILE", "Tokens of each rank for each expert, .npy, .csv or .json; or a .npz trace.")],
    cluster: Annotated[str, option("CLUSTER", CLUSTER_HELP)],
    slots: Annotated[int | None, option("N", "Slots per rank (default: one more than needed).", min=1)] = None,
    balance: Annotated[
        str, option("KIND", "Layout planner: a kind, fields in JSON, or a class of yours, my_planners:Heaviest.")
    ] = "greedy",
    split: Annotated[
        str, option("KIND", "Split: a kind, fields in JSON, or a class of yours, my_planners:Nearest.")
    ] = "flow",
    previous: Annotated[Path | None, option("FILE", "Plan that --out wrote, whose layout is in force.")] = None,
    out: OutFile = None,
    as_json: AsJson = False,
    micro_batch: Annotated[int | None, option("N", "Micro-batch of the trace, from 0 (default: the last).")] = None,
    layer: Annotated[int | None, option("N", "Layer of the trace (default: the first).")] = None,
) -> None:
    """Makes a plan of one layer, certifies it, writes and prints it."""
    spec, balance_config, split_config = cluster_of(cluster), balance_of(balance), split_of(split)
    wanted = read_load(load, micro_batch, layer)
    slots_per_rank = slots if slots is not None else -(-wanted.num_experts // spec.num_ranks) + 1
    before = None if previous is None else read_layout(previous)
    plan, certificate = make_plan(wanted, spec, slots_per_rank, balance_config, split_config, before)
    text = json.dumps({**json.loads(plan.to_json()), "certificate": certificate.to_dict()}) + "\n"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text)
    if as_json:
        print(text, end="")
        return
    title = f"{load.name}: {value_words(balance_config)} + {value_words(split_config)}"
    tree = plan_tree(plan, certificate, spec, title, before)
    print_full(tree, [] if out is None else [f"Written to {out}."])


def make_plan(
    load: LoadMatrix,
    cluster: ClusterSpec,
    slots_per_rank: int,
    balance: Balance,
    split: Split,
    previous: ExpertLayout | None = None,
) -> tuple[LayerPlan, Certificate]:
    """Returns the plan of ``load``, and its certificate among all layouts with these slots."""
    layout = plan_layout(load, cluster, balance, slots_per_rank, previous=previous)
    tokens = split_tokens(load, layout, cluster, split)
    bounds: dict[str, Any] = {}
    if isinstance(balance, Greedy | CpSat):
        bounds = {"min_replicas": balance.min_replicas, "replicas_within": balance.replicas_within}
    return LayerPlan(tokens, turn=0), certify(tokens, cluster, slots_per_rank=slots_per_rank, **bounds)


# --- files ------------------------------------------------------------------------------------------------------


def read_load(path: Path, micro_batch: int | None = None, layer: int | None = None) -> LoadMatrix:
    """Reads a matrix [R, E] of tokens from a .npy, .csv or .json file; or one layer of a trace, an .npz file, by
    default the first layer of the last micro-batch. Raises ValueError, which names the file, for anything else.
    """
    if path.suffix not in LOAD_SUFFIXES:
        raise ValueError(f"load {path} is of no known kind; give one of {', '.join(LOAD_SUFFIXES)}")
    if not path.is_file():
        raise ValueError(f"load {path} is not a file; give a trace, or a matrix of tokens with a row a rank")
    if path.suffix == ".npz":
        return _of_trace(path, micro_batch, layer)
    if micro_batch is not None or layer is not None:
        raise ValueError(f"load {path} is one matrix; give --micro-batch and --layer with a trace (.npz) only")
    try:
        match path.suffix:
            case ".npy":
                return LoadMatrix(read_array(read_bytes(path)))
            case ".csv":
                return LoadMatrix(np.loadtxt(io.BytesIO(read_bytes(path)), delimiter=",", dtype=np.int64, ndmin=2))
            case _:
                content = read_json(path)
                return LoadMatrix(content["tokens_RE"] if isinstance(content, dict) else content)
    except KeyError as error:
        raise ValueError(f"load {path} has no {error}; give a list of rows, or a plan that moesys wrote") from None
    except (ValueError, TypeError, EOFError) as error:
        # numpy goes on with advice for its callers.
        reason = str(error).partition("; use ")[0]
        raise ValueError(f"load {path}: {reason}; give integers, a row a rank and a column an expert") from None


def _of_trace(path: Path, micro_batch: int | None, layer: int | None) -> LoadMatrix:
    trace = load_trace(path)
    chosen: dict[str, int] = {}
    for name, number, count, default in (
        ("micro-batch", micro_batch, trace.num_micro_batches, trace.num_micro_batches - 1),
        ("layer", layer, trace.num_layers, 0),
    ):
        chosen[name] = default if number is None else number
        if not 0 <= chosen[name] < count:
            raise ValueError(f"{name} {number} is not in {path}; it has 0 to {count - 1}")
    return LoadMatrix(trace.tokens_SLRE[chosen["micro-batch"], chosen["layer"]])


def read_layout(path: Path) -> ExpertLayout:
    """Reads the layout of a plan that was written before. Raises ValueError, which names the file, for other files."""
    try:
        return LayerPlan.from_json(read_bytes(path).decode()).layout
    except FileNotFoundError:
        raise ValueError(f"previous {path} is not a file; give a plan that moesys plan --out wrote") from None
    except ValueError as error:
        raise ValueError(f"previous {path}: {error}; give a plan that moesys plan --out wrote") from None


# --- what is shown ----------------------------------------------------------------------------------------------


def plan_tree(
    plan: LayerPlan, certificate: Certificate, cluster: ClusterSpec, title: str, previous: ExpertLayout | None = None
) -> Tree:
    """Returns a tree of the cluster, its nodes and ranks with their experts and tokens; then the certificate.

    Of a cluster of more than 128 ranks only each node's busiest and idlest rank are shown.
    """
    load, layout = plan.load, plan.layout
    leaving = plan.tokens.inter_node_tokens(cluster.domain_of_rank)
    tree = Tree(Text(f"{title}, {load.total:,} tokens on {counted(cluster.num_ranks, 'rank')}", style="bold"))
    held = add_head(tree, f"layout: {int(layout.filled_R.sum()):,} replicas of {load.num_experts} experts")
    if previous is not None:
        moved = num_moves(previous.replicas_RE, layout.replicas_RE)
        add_line(held, "moves", f"{moved:,} replicas are on ranks that did not hold them before")
    add_line(held, "between nodes", f"{leaving:,} tokens ({leaving / max(1, load.total):.2%})")
    tokens_RE = plan.tokens.computed_RE
    first = 0
    for node, size in enumerate(cluster.node_sizes):
        ranks = list(range(first, first + size))
        first += size
        tokens_R = {rank: int(plan.tokens.tokens_R[rank]) for rank in ranks}
        branch = add_head(held, f"node {node}: {sum(tokens_R.values()):,} tokens")
        by_tokens = sorted(ranks, key=lambda rank: (-tokens_R[rank], rank))
        shown = ranks if cluster.num_ranks <= MOST_RANKS_SHOWN else sorted({by_tokens[0], by_tokens[-1]})
        for rank in shown:
            experts = sorted(set(layout.experts_of(rank)), key=lambda expert: (-tokens_RE[rank, expert], expert))
            words = ", ".join(f"expert {expert} {tokens_RE[rank, expert]:,}" for expert in experts[:MOST_EXPERTS_SHOWN])
            more = f" and {len(experts) - MOST_EXPERTS_SHOWN} more" if len(experts) > MOST_EXPERTS_SHOWN else ""
            add_line(branch, f"rank {rank}", f"{tokens_R[rank]:,} tokens: {words or 'no expert'}{more}")
    proof = add_head(tree, f"certificate: max/mean {certificate.max_over_mean:.4f}")
    for line in str(certificate).splitlines():
        name, _, words = line.partition(":")
        add_line(proof, name, words.strip())
    return tree
