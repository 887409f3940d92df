"""Wheels that are built from this tree: the whole one works in an environment that has nothing else, and one without
the studies (simulator, tuner, lab) trains.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STUDIES = ("simulator", "tuner", "lab")


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command elsewhere than in the tree, whose package would be imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_wheel_installs_into_an_empty_environment_and_runs_the_demo(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    commands = tmp_path / "empty" / "bin"
    # The version of this environment, as the newest one may be a build for CUDA of several gigabytes.
    run(commands / "pip", "install", f"torch=={version('torch').partition('+')[0]}", cwd=tmp_path)
    run(commands / "pip", "install", f"{wheel}[hf]", cwd=tmp_path)
    assert run(commands / "moesys", "--version", cwd=tmp_path).strip().endswith(version("moesys"))
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    printed = run(commands / "python", "-m", "experiments.demo", cwd=tmp_path)
    assert "MEASURED: demo" in printed
    assert "SIMULATED: demo-cluster" in printed
    [trained, replayed] = (tmp_path / "runs").glob("demo-*/report.html")
    assert trained.stat().st_size > 10_000 < replayed.stat().st_size


# Two ranks train a layer of moesys, and then a model of transformers, until their losses have fallen.
TRAIN = """
import importlib.util
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig
import moesys as ms

for study in {studies}:
    assert importlib.util.find_spec("moesys." + study) is None, study
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
strategy = ms.Strategy(
    name="core", sharding=ms.Fsep(slots_per_rank=3), balance=ms.Eplb(), split=ms.EvenSplit(),
    overlap=ms.Pipelined(chunks=2),
)

def train(module, loss_of, num_steps, sync=lambda module: None):
    optimizer, losses = torch.optim.Adam(module.parameters(), lr=0.02), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        sync(module)
        ms.clip_grad_norm_(module, 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses

layer = ms.MoELayer(ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2), strategy)
x_TH = torch.randn(32, 16)
train(layer, lambda: (layer(x_TH) - x_TH.roll(1, dims=1)).square().mean(), 20, ms.sync_gradients)
config = Qwen3MoeConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
)
if dist.get_rank() == 0:
    Qwen3MoeForCausalLM(config).save_pretrained("model")
dist.barrier()
distributed = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation=ms.hf.register(strategy))
model = AutoModelForCausalLM.from_pretrained("model", distributed_config=distributed)
runtime = ms.link(model)
ids = torch.arange(64).view(2, 32) % 32
train(model, lambda: model(input_ids=ids, labels=ids).loss, 10)
ms.hf.save_pretrained(model, "trained")
runtime.close()
dist.destroy_process_group()
"""
# The same in torchtitan's trainer, by the code that tests/torchtitan shares.
TRAIN_TITAN = """
import torch.distributed as dist
dist.init_process_group("gloo")
from titan_runs import STRATEGIES, Run, ours, train
losses = train(Run(ours(STRATEGIES["fsep"]))).losses
assert losses == sorted(losses, reverse=True), losses
assert losses[-1] < 0.95 * losses[0], losses
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with a wheel without the studies, and with the packages of this environment."""
    folder = tmp_path_factory.mktemp("core")
    tree, environment = folder / "tree", folder / "environment"
    shutil.copytree(ROOT / "moesys", tree / "moesys", ignore=shutil.ignore_patterns(*STUDIES, "__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, tree, cwd=folder)
    [wheel] = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    [packages] = environment.glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", packages, wheel, cwd=folder)
    # A path alone: what a .pth file there would add, such as this tree, is not added.
    others = (sysconfig.get_path("purelib"), str(Path(sys.prefix) / "hosts"))
    (packages / "others.pth").write_text("\n".join(others))
    return environment / "bin" / "python"


def on_two_ranks(python: Path, program: str, cwd: Path) -> None:
    (cwd / "train.py").write_text(program)
    run(python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", cwd=cwd)


# tests/test_floors.py always shows that no file of the core imports a study.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_without_the_studies_trains_a_layer_and_a_model_of_transformers(core: Path, tmp_path: Path) -> None:
    on_two_ranks(core, TRAIN.format(studies=STUDIES), tmp_path)
    assert (tmp_path / "trained" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_without_the_studies_trains_in_torchtitan(core: Path, tmp_path: Path) -> None:
    shared = ("benchmarks/__init__.py", "benchmarks/harness/__init__.py", "benchmarks/harness/cpu_torchtitan.py")
    for name in shared:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("titan_runs.py", "cpu_trainer.py"):
        shutil.copy(ROOT / "tests" / "torchtitan" / name, tmp_path)
    on_two_ranks(core, TRAIN_TITAN, tmp_path)
