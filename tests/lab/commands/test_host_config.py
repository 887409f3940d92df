"""Commands of other frameworks, from which ``simulate`` and ``tune`` read what a training declares."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from lab_cases import PRETRAIN
from typer.testing import CliRunner

import moesys as ms
from moesys.__main__ import app
from moesys.config.model import Mla
from moesys.lab.commands.host_config import HostConfig, read_host

HOSTS = Path(__file__).with_name("hosts")
BRIDGE = (HOSTS / "bridge.yaml").read_text()
TITAN = "torchrun --nproc-per-node 4 -m torchtitan.train --module qwen3 --config qwen3_moe_debug "


def from_of(host: HostConfig) -> dict[str, tuple[str, str]]:
    return {row.field: (row.value, row.source) for row in host.rows}


def test_latent_attention_dense_layers_and_stages_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        "pretrain_gpt.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 --swiglu --disable-bias-linear "
        "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
        "--v-head-dim 16 --ffn-hidden-size 1024 --num-experts 16 --moe-ffn-hidden-size 128 --moe-router-topk 4 "
        "--moe-layer-freq '([0]*2+[1]*10)' --moe-shared-expert-intermediate-size 256 --seq-length 1024 "
        "--micro-batch-size 1 --global-batch-size 32 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 --expert-model-parallel-size 4"
    )
    run = read_host(str(tmp_path / "train.sh")).run_on("h100:2")
    assert run.model.moe_layers == tuple(range(2, 12))
    assert run.model.layers[2].mlp.shared_intermediate_size == 256
    assert isinstance(run.model.layers[0].attention, Mla)
    parallel = run.parallelism
    assert (parallel.tp, parallel.pp, parallel.vp, parallel.ep, run.model.dtype) == (2, 2, 2, 4, "float32")


def test_a_script_with_variables_defaults_and_options_in_strings_is_read() -> None:
    host = read_host(str(HOSTS / "train_mixtral.sh"))
    run = host.run_on("h100:4")
    published = ms.models.ModelSpec.from_config("mixtral-8x7b")
    assert (run.model.num_layers, run.model.num_parameters) == (published.num_layers, published.num_parameters)
    assert run.shape == ms.ModelShape(
        hidden_size=4096, intermediate_size=14336, num_experts=8, top_k=2, dtype="bfloat16"
    )
    assert (run.parallelism.pp, run.parallelism.vp, run.parallelism.ep) == (4, 1, 8)
    assert (run.model.dtype, run.global_batch, run.groups.expert) == ("bfloat16", 256, 8)
    assert run.parallelism.recompute == "selective"
    assert from_of(host)["global_batch"] == ("256", "--global-batch-size")
    assert from_of(host)["tp"] == ("1", "--tensor-model-parallel-size")
    unread = {"use-mcore-models", "no-masked-softmax-fusion", "moe-token-dispatcher-type", "overlap-grad-reduce"}
    assert host.unread == unread | {"master-addr", "tokenizer-model", "wandb-project"}
    with pytest.raises(ValueError, match="has 16 ranks, and the command starts 4 nodes of 8"):
        host.run_on("h100:2")


def test_a_file_of_bridge_declares_what_the_command_does(tmp_path: Path) -> None:
    (tmp_path / "conf.yaml").write_text(BRIDGE)
    of_file = read_host(str(tmp_path / "conf.yaml"))
    command = PRETRAIN.replace(" --bf16", "") + " --group-query-attention --num-query-groups 2 --vocab-size 1000"
    command += " --untie-embeddings-and-output-weights --global-batch-size 32 --use-distributed-optimizer"
    of_command = read_host(command)
    assert of_file.run_on("h100:1") == of_command.run_on("h100:1")
    assert from_of(of_file)["num_experts"] == ("8", "num_moe_experts")
    assert of_file.unread == {"moe-permute-fusion"}
    (tmp_path / "conf.yaml").write_text(BRIDGE.replace("add_bias_linear: false", "add_bias_linear: true"))
    with pytest.raises(ValueError, match="without add_bias_linear experts have biases"):
        read_host(str(tmp_path / "conf.yaml"))
    overrides = BRIDGE.partition("  num_layers")[0] + "  expert_model_parallel_size: 4\n"
    (tmp_path / "conf.yaml").write_text(overrides)
    with pytest.raises(ValueError, match=r"give .* the run_config.yaml of a checkpoint, as overrides have no model"):
        read_host(str(tmp_path / "conf.yaml"))
    (tmp_path / "conf.yaml").write_text("{model: [")
    with pytest.raises(ValueError, match="is no YAML or JSON of options"):
        read_host(str(tmp_path / "conf.yaml"))


def test_the_file_that_bridge_writes_beside_a_checkpoint_is_read() -> None:
    host = read_host(str(HOSTS / "run_config.yaml"))
    run = host.run_on("h100:2")
    assert run.model.moe_layers == (1, 2, 3)
    latent = Mla(
        num_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert {layer.attention for layer in run.model.layers} == {latent}
    assert (run.model.dtype, run.seq_len, run.global_batch, run.parallelism.tp) == ("bfloat16", 4096, 64, 2)
    assert from_of(host)["bfloat16"] == ("true", "mixed_precision")
    assert from_of(host)["vp"] == ("0", "assumed: there is no virtual_pipeline_model_parallel_size")
    unread = {"sequence-length", "overlap-grad-reduce", "mean", "std", "kv-channels", "moe-token-dispatcher-type"}
    assert host.unread == unread | {"num-query-groups", "recompute-modules", "lr", "train-iters"}


def test_arguments_of_a_trainer_declare_a_run(tmp_path: Path) -> None:
    arguments = {
        "model_name_or_path": "qwen3-30b-a3b",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "gradient_checkpointing": True,
        "max_length": 1024,
        "learning_rate": 1e-4,
    }
    (tmp_path / "sft.json").write_text(json.dumps(arguments))
    host = read_host(str(tmp_path / "sft.json"))
    run = host.run_on("h100:1")
    assert run.model == ms.models.ModelSpec.from_config("qwen3-30b-a3b")
    assert (run.seq_len, run.micro_batch, run.num_micro_batches, run.groups.expert) == (1024, 2, 3, 8)
    assert (run.parallelism.recompute, run.parallelism.dense, run.optimizer) == ("full", "full", "adam")
    assert from_of(host)["optimizer"] == ("adamw_torch", "assumed: there is no optim")
    assert host.unread == {"learning-rate"}
    assert "ms.parallelize(model, strategy)" in host.lines(Path("tuned.toml"))


def test_simulate_reads_a_command(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(PRETRAIN)
    command = ["simulate", "--from", str(tmp_path / "train.sh"), "--cluster", "h100:1", "--strategy", "fsep:3", "-q"]
    printed = CliRunner().invoke(app, command).stdout
    assert "Read from what is given to Megatron" in printed
    assert "assumed: there is no --vocab-size" in " ".join(printed.split())
    (found,) = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert found["run"]["seq_len"] == 512
    assert {"field": "micro_batch", "value": "2", "source": "--micro-batch-size"} in found["read"]


def test_tune_offers_what_the_host_runs_and_writes_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    experiment, space, layers = read_host(PRETRAIN).experiment("h100:1", 1.0)
    assert layers == 2
    assert {each.delay_reshard for each in space.values("sharding")} == {False}
    # A space of one point is searched at once.
    monkeypatch.setattr(HostConfig, "experiment", lambda *_: (experiment, ms.Space(), layers))
    options = ["--cluster", "h100:1", "--budget", "4", "--seeds", "1", "--write", "lines.py", "-q"]
    result = CliRunner().invoke(app, ["tune", "--from", PRETRAIN, *options])
    assert result.exit_code == 0, result.stderr
    names: dict[str, object] = {"transformer_layer_spec": "spec"}
    lines = Path("lines.py").read_text().replace("from moesys.megatron import experts", "experts = lambda *of: of")
    exec(lines, names)
    spec, strategy = names["transformer_layer_spec"]
    assert (spec, strategy) == ("spec", names["strategy"])
    assert strategy.fingerprint() in {one.fingerprint() for one in experiment.strategies}


@pytest.mark.slow
def test_torchtitan_makes_its_configuration_and_takes_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(sys.prefix, "hosts")))
    host = read_host(TITAN + "--parallelism.expert_parallel_degree 4 --training.seq_len 1024")
    run = host.run_on("h100:1")
    assert (run.model.num_layers, run.shape.num_experts, run.shape.top_k) == (8, 64, 8)
    assert (run.model.hidden_size, run.seq_len, run.micro_batch, run.groups.expert) == (256, 1024, 8, 4)
    assert from_of(host)["ep"] == ("4", "parallelism.expert_parallel_degree")
    from torchtitan.config import ConfigManager

    words = shlex.split(host.lines(Path("tuned.toml")))
    config = ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
    assert config.parallelism.spmd_backend == "partial_dtensor"
    assert config.override.imports == [("moesys.torchtitan.experts", {"strategy": "tuned.toml"})]
