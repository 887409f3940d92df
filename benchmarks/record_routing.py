"""Records the routing that the leaderboard replays, from small models of transformers' code that it trains.

The models have the experts and top-k of a published model, and are small otherwise. At some steps of the training their
routers see further batches of the text, and their choices are counted. The packaged files were made by

    python -m benchmarks record-routing benchmarks/leaderboard/recorded

in six minutes on one core. The text is Python's standard library; weights are drawn.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from moesys.balance.predictors import measured_drift
from moesys.config.model_spec import read_config
from moesys.hf.routing_replay import record_routing
from moesys.lab.commands.options import Quiet, argument, folder_to_write, refusing
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
    """A model, the packaged configuration ``base`` with ``changes``, and the steps before which it is counted.

    quantiles: whether biases are set by quantile balancing instead of moved at a rate. annealed: the step from which on
    the learning rate is a twentieth, as quantiles of one step balance the next only where scores hardly move. domain: a
    folder of Python's standard library that is outside of the text; the model is trained on it from the first of
    ``steps`` on, and it is what is counted. about: the words by which the leaderboard tells the recording from others.
    """

    name: str
    base: str
    changes: dict[str, Any]
    steps: tuple[int, ...] = field(default=tuple(range(125, 281, 5)))
    quantiles: bool = False
    annealed: int | None = None
    domain: str = ""
    about: str = "while it was trained"


_NARROW = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts_per_tok": 8}
RECIPES = (
    Recipe("olmoe", "olmoe-small", _NARROW | {"num_experts": 64}),
    Recipe("qwen3-moe", "qwen3-moe-small", _NARROW | {"num_experts": 128, "head_dim": 16}),
    Recipe(
        "deepseek-v3",
        "deepseek-v3-small",
        _NARROW | {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "intermediate_size": 128},
        steps=tuple(range(218, 281, 2)),
    ),
    # The reference of Python, which is English, after the source code of modules.
    Recipe(
        "olmoe-fine-tuned",
        "olmoe-small",
        _NARROW | {"num_experts": 64},
        steps=tuple(range(120, 183, 2)),
        domain="pydoc_data",
        about="while it was fine-tuned on Python's reference, after training on source code",
    ),
    Recipe(
        "quantile-balanced",
        "deepseek-v3-small",
        _NARROW | {"n_routed_experts": 128, "n_group": 1, "topk_group": 1, "intermediate_size": 128},
        steps=tuple(range(140, 203, 2)),
        quantiles=True,
        annealed=120,
        about="while it was trained with quantile balancing",
    ),
)


def record(recipe: Recipe, text: Text, quiet: bool = False) -> Trace:
    """Trains from drawn weights, and counts the routers' choices before each of the recipe's steps."""
    # Not at the top: the help of the command needs no transformers.
    import transformers

    fields = read_config(recipe.base) | recipe.changes
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(SEED)
    learners: Any = transformers.AutoModelForCausalLM
    model = learners.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    num_experts = fields.get("num_experts") or fields["n_routed_experts"]
    domain = load_text(Path(sysconfig.get_path("stdlib"), recipe.domain)) if recipe.domain else text
    # The routers with biases, and the logits of the newest pass of each.
    routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
    logits: dict[Any, Tensor] = {}
    for router in routers:
        router.register_forward_hook(lambda router, _, output: logits.update({router: output[0].detach()}))
    counted = []
    with steps_told(recipe.name, recipe.steps[-1] + 1, quiet) as tell:
        for step in range(recipe.steps[-1] + 1):
            if step in recipe.steps:
                with torch.no_grad():
                    counted.append(_counts(model, _tokens(domain, step, COUNTED, micro_batch=1), num_experts))
            tokens = _tokens(domain if step >= recipe.steps[0] else text, step, TRAINED, micro_batch=0)
            optimizer.zero_grad()
            with record_routing(model) as chosen_LTK:
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            tell(f"loss {loss.item():.3f}")
            loss.backward()
            optimizer.step()
            if step + 1 == recipe.annealed:
                optimizer.param_groups[0]["lr"] /= 20
            for router, ids_TK in zip(routers, chosen_LTK[0], strict=False):
                if recipe.quantiles:
                    set_quantiles(router.e_score_correction_bias, logits[router].sigmoid(), config.num_experts_per_tok)
                else:
                    _move_bias(router.e_score_correction_bias, ids_TK)
    meta = {"source": "python -m benchmarks record-routing", "text": text.fingerprint[:16], "about": recipe.about}
    return Trace(np.stack(counted), config.num_experts_per_tok, recipe.name, meta)


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


def _move_bias(bias_E: Tensor, ids_TK: Tensor) -> None:
    """Moves a router's balancing bias towards experts with fewer tokens than the mean."""
    tokens_E = torch.bincount(ids_TK.flatten().long(), minlength=len(bias_E)).float()
    bias_E += BIAS_RATE * torch.sign(tokens_E.mean() - tokens_E)


@torch.no_grad()
def set_quantiles(bias_E: Tensor, score_TE: Tensor, top_k: int) -> None:
    """Sets a bias to that with which K / E of the tokens would have chosen each expert, less the mean over experts.

    Quantile balancing: an expert of score s is chosen from a bias of α - s on, where α is the (K+1)-th best score +
    bias of the token (Kimi K3's report, section 2.3.3; here with exact quantiles instead of histograms).
    """
    cutoff_T1 = (score_TE + bias_E).topk(top_k + 1, dim=1).values[:, -1:]
    quantile_E = torch.quantile(cutoff_T1 - score_TE, top_k / len(bias_E), dim=0)
    bias_E.copy_(quantile_E - quantile_E.mean())


@refusing()
def bench_record_routing(
    folder: Annotated[Path, argument("DIR", "Folder of the traces; it is created.", callback=folder_to_write)],
    quiet: Quiet = False,
) -> None:
    """Records all recipes, writes their traces into ``folder`` and prints facts."""
    text = load_text()
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in RECIPES:
        trace = record(recipe, text, quiet)
        save_trace(trace, folder / f"{recipe.name}.npz")
        print(*facts(trace), sep="\n")
    print(f"Written to {folder}: {', '.join(f'{recipe.name}.npz' for recipe in RECIPES)}")
