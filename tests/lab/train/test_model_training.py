"""Training a model of transformers in the lab: its losses are those of plain transformers, under every strategy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refusal
from torch.nn import functional

import moesys as ms
from moesys.config.model_spec import model_names, read_config
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.train.loop import train
from moesys.lab.train.text import load_text

CLUSTER = ms.ClusterSpec(ranks_per_node=2)
EP = ms.Strategy(name="ep")
LENT = EP.replace(name="lent", sharding=ms.Ep(slots_per_rank=6), balance=ms.Greedy(), split=ms.FlowSplit())
FSEP = LENT.replace(name="fsep", sharding=ms.Fsep(slots_per_rank=6), overlap=ms.Pipelined(chunks=2))


def workload(model: str, **changes: Any) -> ms.models.ModelTraining:
    small = {"context": 32, "batch": 2, "warmup": 1, "steps": 2, "learning_rate": 3e-4}
    return ms.models.ModelTraining(model=model, **small | changes)


def losses(trainings: list[tuple[ms.Strategy, ms.models.ModelTraining]], seed: int = 3) -> list[list[float]]:
    return [
        [result.loss for result in train(strategy, how.shape, CLUSTER, how, seed=seed)] for strategy, how in trainings
    ]


def plain_losses(model: Any, how: ms.models.ModelTraining, seed: int = 3) -> list[float]:
    """Of transformers alone, on one rank that has both ranks' batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=how.learning_rate)
    text = load_text().training_part()
    found = []
    for step in range(how.warmup + how.steps):
        optimizer.zero_grad()
        nats = 0.0
        for rank in range(2):
            inputs_BC, targets_BC = text.batch(step, 0, rank, seed=seed, batch=how.batch, context=how.context)
            outputs = model(input_ids=inputs_BC)
            loss = functional.cross_entropy(outputs.logits.flatten(0, 1), targets_BC.flatten())
            nats += loss.item() / 2
            aux_loss = getattr(outputs, "aux_loss", None)
            coefficient = 0.0 if aux_loss is None else model.config.router_aux_loss_coef
            ((loss + coefficient * (0.0 if aux_loss is None else aux_loss)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), how.max_grad_norm)
        optimizer.step()
        found.append(nats)
    return found


def drawn(name: str, seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    fields = read_config(name)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float32
    )


# Always the one with shared experts and groups of experts; other tests here train OLMoE.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "deepseek" in name else pytest.mark.slow) for name in model_names()]
)
def test_every_strategy_learns_what_plain_transformers_learns(ranks: LocalRanks, name: str) -> None:
    how = workload(name)
    expected = plain_losses(drawn(name, seed=3), how)
    found, result = ranks.run(losses_and_a_step, [(strategy, how) for strategy in (EP, LENT, FSEP)], num_ranks=2)[0]
    assert len(set(expected)) == 3
    for of_strategy in found:
        assert of_strategy == pytest.approx(expected, rel=1e-5)
    # 2 ranks x 2 sequences x 32 tokens x the choices of a token, in layers that are not dense.
    assert [sum(tokens_E) for tokens_E in result.tokens_LE] == [128 * how.shape.top_k] * how.num_layers
    assert 1 <= result.load_max_over_mean < 1.5
    assert result.step_ms > 0


def losses_and_a_step(trainings: list[tuple[ms.Strategy, ms.models.ModelTraining]]) -> tuple[list[list[float]], Any]:
    strategy, how = trainings[-1]
    return losses(trainings), next(train(strategy, how.shape, CLUSTER, how, seed=0))


@pytest.mark.slow
def test_recomputation_changes_no_bit_micro_batches_only_the_last_and_bfloat16_learns_too(ranks: LocalRanks) -> None:
    how = workload("olmoe-small", warmup=0)
    halved = how.replace(batch=1, micro_batches=2)
    trainings = [(FSEP, how), (FSEP, how.replace(recompute=True)), (FSEP, how.replace(dtype="bfloat16"))]
    trainings += [(FSEP, halved), (LENT, halved)]
    plain, recomputed, narrow, *halves = ranks.run(losses, trainings, num_ranks=2)[0]
    assert recomputed == plain
    # Two draws of one sequence are other text than one of two.
    assert halves[0] == pytest.approx(halves[1], rel=1e-6)
    assert halves[0] != pytest.approx(plain, rel=1e-4)
    assert narrow != plain
    assert narrow == pytest.approx(plain, rel=1e-2)


def test_a_folder_with_weights_goes_on_from_them(ranks: LocalRanks, tmp_path: Path) -> None:
    model = drawn("olmoe-small", seed=11)
    model.save_pretrained(tmp_path / "model")
    how = workload(str(tmp_path / "model"))
    expected = plain_losses(model, how)
    assert ranks.run(losses, [(LENT, how)], num_ranks=2)[0][0] == pytest.approx(expected, rel=1e-5)


def test_dropout_is_the_same_for_every_strategy(ranks: LocalRanks, tmp_path: Path) -> None:
    model = drawn("olmoe-small", seed=11)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    of_ep, of_fsep = ranks.run(losses, [(each, workload(str(tmp_path))) for each in (EP, FSEP)], num_ranks=2)[0]
    assert of_ep == pytest.approx(of_fsep, rel=1e-5)


def test_weights_that_are_wanting_are_told_and_those_of_torch_are_read(ranks: LocalRanks, tmp_path: Path) -> None:
    model, file = drawn("olmoe-small", seed=11), tmp_path / "model.safetensors"
    model.save_pretrained(tmp_path)
    how = workload(str(tmp_path))
    narrow = how.replace(config=json.dumps(how.config_fields | {"intermediate_size": 128}))
    for told in ranks.run(refusal, losses, [(EP, narrow)], num_ranks=2):
        assert "experts.down_proj and 3 more of the model's weights are not in the folder, or" in told
    file.write_bytes(file.read_bytes()[:-4])
    for told in ranks.run(refusal, losses, [(EP, how)], num_ranks=2):
        assert re.search("its weights cannot be read: .*not fully covered", told)
    file.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    expected = plain_losses(model, how)
    assert ranks.run(losses, [(EP, how)], num_ranks=2)[0][0] == pytest.approx(expected, rel=1e-5)


def test_a_configuration_that_transformers_refuses_is_told_in_a_line(ranks: LocalRanks) -> None:
    config = json.dumps(read_config("olmoe-small") | {"num_attention_heads": "4"})
    for told in ranks.run(refusal, losses, [(EP, workload("olmoe-small", config=config))], num_ranks=2):
        assert re.search(r"transformers refuses its config\.json: .*'num_attention_heads'.*'4'", told)


def test_code_that_a_configuration_names_is_neither_run_nor_asked_about(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from moesys.lab.train.model_learner import ModelLearner

    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("transformers asked whether to run it"))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    code = {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(read_config("olmoe-small") | code))
    (tmp_path / "modeling.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ValueError, match=r"no language model of model_type='vit', and code that config\.json names is"):
        ModelLearner(EP, CLUSTER, workload(str(tmp_path)), 0, None, torch.device("cpu"))


def test_tokens_beyond_the_vocabulary_are_told_by_file_and_place(ranks: LocalRanks, tmp_path: Path) -> None:
    config = read_config("olmoe-small") | {"vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text("abc~" * 40)
    how = workload(str(tmp_path / "config.json"), data=str(tmp_path / "text.txt"))
    for told in ranks.run(refusal, losses, [(EP, how)], num_ranks=2):
        assert re.search(r"token 3 of .*text\.txt is 126, and the model's vocab_size is 100", told)


@pytest.mark.parametrize(
    ("changes", "num_layers"),
    [
        ({}, 2),
        ({"first_k_dense_replace": 1}, 1),
        ({"num_dense_layers": 1}, 1),
        ({"mlp_layer_types": ["dense", "sparse"]}, 1),
        ({"mlp_only_layers": [0]}, 1),
        ({"decoder_sparse_step": 2}, 1),
    ],
)
def test_dense_layers_are_not_counted(tmp_path: Path, changes: dict[str, Any], num_layers: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_config("olmoe-small") | changes))
    assert workload(str(tmp_path)).num_layers == num_layers


def test_another_model_brings_its_own_configuration() -> None:
    how = workload("olmoe-small").replace(model="qwen3-moe-small", steps=5)
    assert how == workload("qwen3-moe-small", steps=5)
    assert how.replace(steps=2).config == how.config
    for config in ("{", "[]"):
        with pytest.raises(ValueError, match=r"config (is not JSON|holds no JSON object)"):
            how.replace(config=config)


def test_an_experiment_takes_the_shape_of_the_model_it_trains() -> None:
    experiment = ms.Experiment(name="x", cluster=CLUSTER, strategies=(EP,), workload=workload("qwen3-moe-small"))
    assert (experiment.model.num_experts, experiment.model.top_k, experiment.workload.num_layers) == (8, 2, 2)
    assert ms.Experiment.from_json(experiment.to_json()) == experiment
    assert ms.Experiment.from_toml(experiment.to_toml()) == experiment
    assert experiment.source == "measured"


def test_an_edited_configuration_is_another_experiment(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    found = []
    for num_layers in (2, 2, 4):
        path.write_text(json.dumps(read_config("olmoe-small") | {"num_hidden_layers": num_layers}))
        found.append(workload(str(path)).fingerprint())
    assert found[0] == found[1] != found[2]
