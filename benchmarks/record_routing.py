"""Records the routing that ``moesys leaderboard`` replays, from small models of transformers' code that it trains.

The models have the experts and top-k of a published model, and are small otherwise. At some steps of the training their
routers see further batches of the text, and their choices are counted. The packaged files were made by

    python -m benchmarks record-routing moesys/lab/leaderboard/recorded

in a quarter of an hour on two cores. The text is Python's standard library; weights are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from moesys.balance.predictors import measured_drift
from moesys.config.hub import read_config
from moesys.hf.routing_replay import record_routing
from moesys.lab.show.progress import steps_told
from moesys.lab.train.text import Text, load_text
from moesys.load import IntArray, LoadMatrix
from moesys.traces import Trace, save_trace

NUM_RANKS, CONTEXT, SEED = 32, 128, 0
# Sequences per rank that are trained on, and that are counted.
TRAINED, COUNTED = 1, 4
LEARNING_RATE = 2e-3
# Three times DeepSeek-V3's own (arXiv 2412.19437, section 4.2), because only a few hundred steps balance the experts.
# Popularity therefore changes faster, and it is counted more often. transformers' code does not update the biases.
BIAS_RATE = 3e-3


@dataclass(frozen=True)
class Recipe:
    """A model, the packaged configuration ``base`` with ``changes``, and the steps before which it is counted."""

    name: str
    base: str
    changes: dict[str, Any]
    steps: tuple[int, ...] = field(default=tuple(range(120, 281, 20)))


_NARROW = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts_per_tok": 8}
RECIPES = (
    Recipe("olmoe", "olmoe-small", _NARROW | {"num_experts": 64}),
    Recipe("qwen3-moe", "qwen3-moe-small", _NARROW | {"num_experts": 128, "head_dim": 16}),
    Recipe(
        "deepseek-v3",
        "deepseek-v3-small",
        _NARROW | {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "intermediate_size": 128},
        steps=tuple(range(248, 281, 4)),
    ),
)


def record(recipe: Recipe, text: Text, quiet: bool = False) -> Trace:
    """Trains from drawn weights, and counts the routers' choices before each of the recipe's steps."""
    fields = read_config(recipe.base) | recipe.changes
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(SEED)
    learners: Any = transformers.AutoModelForCausalLM
    model = learners.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    num_experts = fields.get("num_experts") or fields["n_routed_experts"]
    counted = []
    with steps_told(recipe.name, recipe.steps[-1] + 1, quiet) as tell:
        for step in range(recipe.steps[-1] + 1):
            if step in recipe.steps:
                with torch.no_grad():
                    counted.append(_counts(model, _tokens(text, step, COUNTED, micro_batch=1), num_experts))
            tokens = _tokens(text, step, TRAINED, micro_batch=0)
            optimizer.zero_grad()
            with record_routing(model) as chosen_LTK:
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            tell(f"loss {loss.item():.3f}")
            loss.backward()
            optimizer.step()
            _move_biases(model, chosen_LTK[0], num_experts)
    meta = {"source": "python -m benchmarks record-routing", "text": text.fingerprint[:16]}
    return Trace(np.stack(counted), config.num_experts_per_tok, recipe.name, meta, recipe.steps)


def facts(trace: Trace) -> Iterator[str]:
    """Yields how uneven the routing of each layer is and how fast it changes, as medians over the recorded steps."""
    for layer in range(trace.num_layers):
        loads = [LoadMatrix(tokens_RE) for tokens_RE in trace.tokens_SLRE[:, layer]]
        hottest = np.median([load.tokens_E.max() / load.tokens_E.mean() for load in loads])
        skew = np.median([np.log1p(load.tokens_E).std() for load in loads])
        drift = np.median([measured_drift(*pair) for pair in pairwise(loads)])
        unused = np.median([(load.tokens_E == 0).sum() for load in loads])
        yield (
            f"{trace.name}, layer {layer}: hottest expert {hottest:.2f} of the mean, skew {skew:.2f}, "
            f"drift {drift:.3f} from one to the next, {unused:.0f} experts unused"
        )


def _tokens(text: Text, step: int, batch: int, micro_batch: int) -> Tensor:
    """Returns the sequences of all ranks [R·B, C], rank by rank."""
    of_rank = (
        text.batch(step, micro_batch, rank, seed=SEED, batch=batch, context=CONTEXT)[0] for rank in range(NUM_RANKS)
    )
    return torch.cat(list(of_rank))


def _counts(model: Any, tokens: Tensor, num_experts: int) -> IntArray:
    """Returns the tokens that each rank routes to each expert, [L, R, E]."""
    with record_routing(model) as chosen_LTK:
        model(input_ids=tokens, use_cache=False)
    ids_LRN = chosen_LTK[0].long().reshape(len(chosen_LTK[0]), NUM_RANKS, -1)
    return np.array([[np.bincount(ids_N, minlength=num_experts) for ids_N in ids_RN] for ids_RN in ids_LRN.numpy()])


def _move_biases(model: Any, chosen_LTK: Tensor, num_experts: int) -> None:
    """Moves the routers' balancing biases, if they have any, towards experts with fewer tokens than the mean."""
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for bias_E, ids_TK in zip(biases, chosen_LTK, strict=False):
        tokens_E = torch.bincount(ids_TK.flatten().long(), minlength=num_experts).float()
        bias_E += BIAS_RATE * torch.sign(tokens_E.mean() - tokens_E)


def main(folder: Path, quiet: bool = False) -> int:
    """Records all recipes, writes their traces into ``folder`` and prints facts; returns the exit code."""
    text = load_text()
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in RECIPES:
        trace = record(recipe, text, quiet)
        save_trace(trace, folder / f"{recipe.name}.npz")
        print(*facts(trace), sep="\n")
    print(f"Written to {folder}: {', '.join(f'{recipe.name}.npz' for recipe in RECIPES)}")
    return 0
