"""Do the figures of ``moesys calibrate`` predict training steps? Compares measured steps of MoE layers and of small
models with the steps that the simulator predicts for a ``ClusterSpec``, on the CPU ranks that it describes.

Neither the layers' nor the models' sizes are among those that a calibration is fitted to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist

from benchmarks.harness.model_steps import VOCABULARY, E, K, ModelSteps
from benchmarks.harness.options import Repeats, machine_line
from benchmarks.harness.stopwatch import interleave, repeated_ms, wall_ms
from moesys.config import ClusterSpec, ModelRun, ModelShape, ModelSpec, Parallelism, Strategy
from moesys.config.overlap import Pipelined
from moesys.lab.commands.options import AsJson, OutFolder, Wide, argument, refusing
from moesys.lab.ranks.process_start import writes
from moesys.lab.ranks.torchrun_ranks import Ranks, start_ranks
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.sheets import Column, CommandOutput, Report, Sheet, publish
from moesys.layout import TokenPlan
from moesys.moe.layer import MoELayer
from moesys.simulator.model.simulate_model import simulate_model
from moesys.simulator.step_program import run_step

TIMEOUT_S = 600.0
EP = Strategy(name="sequential")
STRATEGIES = (EP, EP.replace(name="pipelined 4", overlap=Pipelined(chunks=4)))
# H, I and tokens per rank.
LAYERS = ((384, 768, 256), (384, 768, 1024), (768, 384, 512))
HEAD_DIM = 64


@dataclass(frozen=True)
class ModelCase:
    """A Qwen3-MoE model of transformers, and the batch of each rank: ``sequences`` of ``seq_len`` tokens."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    seq_len: int
    sequences: int

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return {
            "model_type": "qwen3_moe",
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads // 2,
            "head_dim": HEAD_DIM,
            "moe_intermediate_size": self.intermediate_size,
            "num_experts": E,
            "num_experts_per_tok": K,
            "norm_topk_prob": True,
            "max_position_embeddings": self.seq_len,
        }


MODELS = (ModelCase(256, 512, 3, 4, 256, 8), ModelCase(384, 384, 2, 6, 384, 4))


@dataclass(frozen=True)
class StepCheck:
    """One step. measured_ms: of the slowest rank, by repetition."""

    step: Annotated[str, Column("step")]
    measured_ms: Annotated[Quantiles, Column("measured, ms [p20, p80]", ".1f")]
    simulated_ms: Annotated[float, Column("simulated, ms", ".1f")]

    @property
    def error(self) -> Annotated[float, Column("error", "+.0%")]:
        """Simulated divided by measured, less 1."""
        return self.simulated_ms / self.measured_ms.median - 1


@refusing()
def bench_calibration_check(
    file: Annotated[
        Path, argument("FILE", "ClusterSpec that moesys calibrate wrote here.", exists=True, dir_okay=False)
    ],
    repeats: Repeats = 7,
    out: OutFolder = None,
    as_json: AsJson = False,
    wide: Wide = False,
) -> None:
    """Measures as many ranks as the ``ClusterSpec`` in ``file`` has, and writes and prints the comparison."""
    text = file.read_text()
    cluster = ClusterSpec.from_json(text) if file.suffix == ".json" else ClusterSpec.from_toml(text)
    ranks, started = start_ranks(cluster.num_ranks)
    with closing(ranks):
        if started.num_ranks != cluster.num_ranks:
            raise ValueError(f"{file} has {cluster.num_ranks} ranks, but torchrun started {started.num_ranks}")
        layers = check_layers(ranks, cluster, repeats)
        models = check_models(ranks, cluster, repeats)
    if writes():
        sheets = [
            Sheet("MEASURED and SIMULATED: steps of one MoE layer, forward + backward", layers),
            Sheet("MEASURED and SIMULATED: steps of whole models, forward + backward + AdamW", models),
        ]
        data = {"machine": machine_line(1), "cluster": cluster, "layers": layers, "models": models}
        notes = [f"{machine_line(1)}; simulated with {file.name}."]
        report = Report("calibration-check", "Calibration check", "measured", sheets, notes, data=data)
        publish(report, CommandOutput(out, as_json, wide=wide))


def check_layers(ranks: Ranks, cluster: ClusterSpec, repeats: int) -> list[StepCheck]:
    """Compares each layer under ``STRATEGIES``; the simulator gets the tokens that the routers sent."""
    checks = []
    for hidden, width, num_tokens in LAYERS:
        shape = ModelShape(hidden_size=hidden, intermediate_size=width, num_experts=E, top_k=K)
        by_rank = ranks.run(layer_steps, shape, num_tokens, cluster, repeats, timeout_s=TIMEOUT_S)
        for strategy in STRATEGIES:
            measured_ms = _slowest([of_rank[strategy.name][0] for of_rank in by_rank])
            tokens = by_rank[0][strategy.name][1]
            simulated_s = run_step(strategy, shape, cluster, [[tokens]]).length_seconds
            name = f"H {hidden}, I {width}, {num_tokens} tokens per rank, {strategy.name}"
            checks.append(StepCheck(name, measured_ms, 1e3 * simulated_s))
    return checks


def layer_steps(
    shape: ModelShape, num_tokens: int, cluster: ClusterSpec, repeats: int
) -> dict[str, tuple[list[float], TokenPlan]]:
    """Times interleaved steps of all strategies on this rank; returns milliseconds and the last token plan of each."""
    x_TH, dy_TH = torch.randn(2, num_tokens, shape.hidden_size, generator=_generator())
    layers = {strategy.name: MoELayer(shape, strategy, cluster=cluster) for strategy in STRATEGIES}

    def step(layer: MoELayer) -> None:
        layer.zero_grad(set_to_none=True)
        layer(x_TH.detach().requires_grad_()).backward(dy_TH)

    works: dict[str, Callable[[], float]] = {of: partial(wall_ms, partial(step, layers[of])) for of in layers}
    samples_ms = interleave(works, repeats, before=dist.barrier)
    plans = {name: layer.last_plan.tokens for name, layer in layers.items() if layer.last_plan is not None}
    return {name: (samples_ms[name], plans[name]) for name in layers}


def check_models(ranks: Ranks, cluster: ClusterSpec, repeats: int) -> list[StepCheck]:
    """Compares each model; none if transformers is not installed."""
    checks = []
    for case in MODELS if find_spec("transformers") else ():
        by_rank = ranks.run(model_steps, case, repeats, timeout_s=TIMEOUT_S)
        run = ModelRun(
            model=ModelSpec.from_config(case.config, dtype="float32"),
            cluster=cluster,
            strategy=EP,
            # FSDP2, as ``parallelize`` has it.
            parallelism=Parallelism(dense="full"),
            seq_len=case.seq_len,
            micro_batch=case.sequences,
        )
        name = f"H {case.hidden_size}, I {case.intermediate_size}, {case.num_layers} layers, "
        name += f"{case.sequences} × {case.seq_len} tokens per rank"
        checks.append(StepCheck(name, _slowest(by_rank), 1e3 * simulate_model(run).seconds))
    return checks


def model_steps(case: ModelCase, repeats: int) -> list[float]:
    """Times steps of a model on this rank, ms; its routers choose evenly, as the simulator expects."""
    import transformers

    from moesys.hf.parallelize import parallelize

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**case.config)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    runtime = parallelize(model, EP)
    tokens_BC = torch.randint(VOCABULARY, (case.sequences, case.seq_len), generator=_generator())
    steps = ModelSteps(model, tokens_BC, "balanced")
    # As calibrations measure it.
    steps.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples_ms = repeated_ms(steps.step, repeats, before=dist.barrier)
    runtime.close()
    return samples_ms


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(dist.get_rank())


def _slowest(by_rank: Sequence[Sequence[float]]) -> Quantiles:
    return Quantiles.of([max(samples) for samples in zip(*by_rank, strict=True)])
