"""Does a calibration tell how long a step of a whole model takes? Small models of transformers, forward, backward and
AdamW, on the ranks that were measured, beside the simulator's step on the ``ClusterSpec`` that they became.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import torch.distributed as dist

from benchmarks.calibrate.calibrated_rows import RANGE, four_digits
from benchmarks.calibrate.grids import ModelCase
from benchmarks.calibrate.session import PART_TIMEOUT_S
from benchmarks.harness.layer_steps import rank_generator
from moesys.config import ClusterSpec, ModelRun, ModelSpec, Parallelism, Strategy
from moesys.lab.ranks.torchrun_ranks import Ranks
from moesys.lab.runs.stopwatch import Spread, repeated_ms
from moesys.lab.show.sheets import Column
from moesys.simulator.model.simulate_model import simulate_model

VOCABULARY, EXPERTS, TOP_K, HEAD_DIM = 512, 8, 2, 64
STRATEGY = Strategy(name="ep")


@dataclass(frozen=True)
class ModelCheck:
    """One model's step. measured_ms: of the slowest rank, by repetition. shares_ms: simulated, by what takes them."""

    case: Annotated[
        ModelCase,
        Column("H", lambda case: str(case.hidden_size)),
        Column("I", lambda case: str(case.intermediate_size)),
        Column("layers", lambda case: str(case.num_layers)),
        Column("tokens a rank", lambda case: f"{case.sequences} × {case.seq_len}"),
    ]
    measured_ms: Annotated[Spread, Column("measured, ms", lambda ms: four_digits(ms.median)), *RANGE]
    simulated_ms: Annotated[float, Column("simulated, ms", four_digits)]
    shares_ms: dict[str, float]

    @property
    def error(self) -> Annotated[float, Column("error", "+.0%")]:
        """Simulated over measured, less 1."""
        return self.simulated_ms / self.measured_ms.median - 1


def check_models(ranks: Ranks, cluster: ClusterSpec, cases: Sequence[ModelCase], repeats: int) -> list[ModelCheck]:
    """Every case on CPU ranks; none where transformers is not installed."""
    if find_spec("transformers") is None:
        return []
    checks = []
    for case in cases:
        by_rank = ranks.run(measured_steps, case, repeats, timeout_s=PART_TIMEOUT_S)
        slowest_ms = [max(times) for times in zip(*by_rank, strict=True)]
        run = ModelRun(
            model=ModelSpec.from_config(_config(case), dtype="float32"),
            cluster=cluster,
            strategy=STRATEGY,
            # FSDP2, as ``parallelize`` has it.
            parallelism=Parallelism(dense="full"),
            seq_len=case.seq_len,
            micro_batch=case.sequences,
        )
        step = simulate_model(run)
        shares_ms = {name: 1e3 * seconds for name, seconds in step.shares.items()}
        checks.append(ModelCheck(case, Spread.of(slowest_ms), 1e3 * step.seconds, shares_ms))
    return checks


def measured_steps(case: ModelCase, repeats: int) -> list[float]:
    """Milliseconds of a step by repetition, on every rank at once; routers choose evenly, as the simulator expects."""
    import transformers

    from moesys.hf.parallelize import parallelize
    from moesys.hf.routers import routers_of
    from moesys.hf.routing_replay import replay_routing

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    fields = _config(case)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    runtime = parallelize(model, STRATEGY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens_BC = torch.randint(VOCABULARY, (case.sequences, case.seq_len), generator=rank_generator())
    expert_TK = (torch.arange(tokens_BC.numel() * TOP_K) % EXPERTS).view(-1, TOP_K)
    expert_LTK = expert_TK.expand(len(routers_of(model)), -1, -1)

    def step() -> None:
        with replay_routing(model, expert_LTK):
            model(input_ids=tokens_BC, labels=tokens_BC).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    times_ms = repeated_ms(step, repeats, before=dist.barrier)
    runtime.close()
    return times_ms


def _config(case: ModelCase) -> dict[str, Any]:
    """As a config.json has it."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": case.hidden_size,
        "num_hidden_layers": case.num_layers,
        "num_attention_heads": case.num_heads,
        "num_key_value_heads": case.num_heads // 2,
        "head_dim": HEAD_DIM,
        "moe_intermediate_size": case.intermediate_size,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "max_position_embeddings": case.seq_len,
    }
