"""Models of transformers on batches with padding: what each sequence alone makes in one process, without padding."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import VOCABULARY, drawn, loaded, whole
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import moesys as ms
from moesys.hf.padding import FOLLOWED, real_tokens
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of

ms.hf.register()

E, K, L, S = 8, 3, 2, 12
# Each micro-batch has one for each rank; in the second, one rank has no padding.
LENGTHS = [[[5, 12, 7], [3, 1, 9]], [[12, 12, 12], [2, 11, 6]]]
COEFFICIENT = 0.05
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=5), balance=ms.Greedy(), split=ms.FlowSplit())
LENT = FSEP.replace(name="lent", sharding=ms.Ep(slots_per_rank=5), overlap=ms.Pipelined(chunks=2))


def sequences(micro_batch: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * micro_batch + rank)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS[micro_batch][rank]]


def other_experts(micro_batch: int, rank: int) -> list[Tensor]:
    """Ids [L, T, K] of each sequence that no router would choose."""
    generator = torch.Generator().manual_seed(100 * micro_batch + rank)
    lengths = LENGTHS[micro_batch][rank]
    return [torch.rand(L, length, E, generator=generator).topk(K, dim=2).indices for length in lengths]


def filled(rows: list[Tensor], side: str, value: int) -> Tensor:
    """Rows [length] or [length, ...] in a batch [B, S, ...]."""
    batch = rows[0].new_full((len(rows), S, *rows[0].shape[1:]), value)
    for row, tokens in zip(batch, rows, strict=True):
        row[: len(tokens)] = tokens
        if side == "left":
            row[:] = row.roll(S - len(tokens), dims=0)
    return batch


def padded(micro_batch: int, rank: int, side: str) -> dict[str, Tensor]:
    rows = sequences(micro_batch, rank)
    # In front of the first token stands another in each of the two ways, so it is no label.
    labels = filled([torch.cat([row.new_full((1,), -100), row[1:]]) for row in rows], side, -100)
    mask = filled([torch.ones_like(row) for row in rows], side, 0)
    position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return {"input_ids": filled(rows, side, 7), "attention_mask": mask, "position_ids": position_ids, "labels": labels}


def model_on_ranks(folder: Path | None, strategy: ms.Strategy, sizes: dict[str, int]) -> Any:
    if folder is None:
        model = drawn("qwen3_moe", E)
        # As if it had been made before anything of moesys was imported.
        del model.model.__dict__[FOLLOWED]
        model.model._forward_pre_hooks.clear()
        model.model._forward_hooks.clear()
        ms.parallelize(model, strategy)
    else:
        model = loaded(folder, strategy, sizes)
    # To record or replay would do it too.
    assert FOLLOWED in model.model.__dict__
    return model


def trained(
    folder: Path | None, strategy: ms.Strategy, side: str, checkpointed: bool, replayed: bool, sizes: dict[str, int]
) -> dict[str, Any]:
    """Two micro-batches, both under way before the first backward."""
    model = model_on_ranks(folder, strategy, sizes)
    model.router_aux_loss_coef = COEFFICIENT
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    rank = dist.get_rank() // sizes.get("tp_size", 1)
    told = []
    for micro_batch in range(2):
        rows = [ids.transpose(0, 1) for ids in other_experts(micro_batch, rank)]
        told.append(filled(rows, side, -1).flatten(0, 1).transpose(0, 1))
    outputs, loads, real = [], [], []

    def run() -> None:
        for micro_batch in range(2):
            batch = padded(micro_batch, rank, side)
            ids, mask = batch.pop("input_ids"), batch.pop("attention_mask")
            # Arguments by position too.
            outputs.append(model(ids, mask, **batch, output_router_logits=True))
            loads.append([experts.last_plan.load.tokens_RE.tolist() for experts in experts_of(model)])
            real.append(mask.bool())

    with ms.replay_routing(model, told) if replayed else ms.record_routing(model) as recorded:
        run()
    told = told if replayed else recorded
    for output in outputs:
        output.loss.backward()
    return {
        "losses": [output.loss.item() for output in outputs],
        "aux": [output.aux_loss.item() for output in outputs],
        "logits": [output.logits[mask].detach() for output, mask in zip(outputs, real, strict=True)],
        "gradients": {name: whole(p.grad) for name, p in model.named_parameters()},
        "loads": loads,
        "counts": [experts.take_counts().tolist() for experts in experts_of(model)],
        "ids": [
            [ids[:, row].tolist() for row in (~mask.flatten(), mask.flatten())]
            for ids, mask in zip(told, real, strict=True)
        ],
    }


def alone(replayed: bool) -> list[dict[str, Any]]:
    """What one process makes of all ranks' sequences, one after the other, with transformers' own experts."""
    model = drawn("qwen3_moe", E)
    counts = torch.zeros(2, L, 2, E, dtype=torch.int64)
    found: list[dict[str, Any]] = [{name: [] for name in ("losses", "aux", "logits", "ids")} for _ in range(2)]
    for micro_batch in range(2):
        for rank in range(2):
            losses, logits, router_logits, chosen = [], [], [], []
            for row, ids in zip(sequences(micro_batch, rank), other_experts(micro_batch, rank), strict=True):
                with ms.replay_routing(model, ids) if replayed else ms.record_routing(model) as recorded:
                    output = model(row[None], output_router_logits=True)
                [ids] = [ids] if replayed else recorded
                logits.append(output.logits[0])
                losses.append(torch.nn.functional.cross_entropy(output.logits[0, :-1], row[1:], reduction="sum"))
                router_logits.append(output.router_logits)
                chosen.append(ids.long())
            ids_LTK = torch.cat(chosen, dim=1)
            num_labels = sum(length - 1 for length in LENGTHS[micro_batch][rank])
            aux = load_balancing_loss_func(tuple(map(torch.cat, zip(*router_logits, strict=True))), E, K)
            loss = sum(losses) / num_labels + COEFFICIENT * aux
            (loss / 2).backward()
            for layer in range(L):
                counts[micro_batch, layer, rank] = torch.bincount(ids_LTK[layer].flatten(), minlength=E)
            found[rank]["losses"].append(loss.item())
            found[rank]["aux"].append(aux.item())
            found[rank]["logits"].append(torch.cat(logits).detach())
            found[rank]["ids"].append(ids_LTK.tolist())
    same = {
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "loads": counts.tolist(),
        "counts": counts.sum(dim=(0, 2)).tolist(),
    }
    return [each | same for each in found]


@pytest.mark.parametrize(
    ("strategy", "own_loop", "side", "checkpointed", "replayed"),
    [
        (FSEP, True, "right", False, False),
        (LENT, True, "left", True, False),
        (LENT.replace(predictor=ms.Oracle()), True, "right", True, True),
        (FSEP, False, "left", True, False),
    ],
    ids=["fsep", "lent, recomputed", "lent, foreseen, recomputed", "from_pretrained, recomputed"],
)
def test_a_padded_batch_is_its_sequences_without_padding(
    ranks: LocalRanks,
    tmp_path: Path,
    strategy: ms.Strategy,
    own_loop: bool,
    side: str,
    checkpointed: bool,
    replayed: bool,
) -> None:
    """Losses, logits, every gradient; integer for integer loads, counts and recorded ids."""
    if not own_loop:
        drawn("qwen3_moe", E).save_pretrained(tmp_path)
    folder, sizes = None if own_loop else tmp_path, {"fsdp_size": 2, "ep_size": 2}
    arguments = (folder, strategy, side, checkpointed, replayed, sizes)
    for found, wanted in zip(ranks.run(trained, *arguments, num_ranks=2), alone(replayed), strict=True):
        assert_as_alone(found, wanted)


def assert_as_alone(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["loads"] == wanted["loads"]
    assert found["counts"] == wanted["counts"]
    for (of_padding, ids), alone_ids in zip(found["ids"], wanted["ids"], strict=True):
        assert ids == alone_ids
        assert {id for layer in of_padding for token in layer for id in token} <= {-1}
    for name in ("losses", "aux"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-5)
    torch.testing.assert_close(found["logits"], wanted["logits"], rtol=1e-4, atol=1e-5)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    torch.testing.assert_close(found["gradients"], wanted["gradients"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_padded_batch_that_ranks_share_is_cut_over_them(ranks: LocalRanks, tmp_path: Path) -> None:
    """Tensor parallelism: loads are of all ranks, wherever a rank's part has its padding."""
    drawn("qwen3_moe", E).save_pretrained(tmp_path)
    sizes = {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}
    arguments = (tmp_path, LENT.replace(sharding=ms.Ep(slots_per_rank=3)), "right", True, False, sizes)
    results = ranks.run(trained, *arguments)
    for found, wanted in zip(results, [each for each in alone(False) for _ in range(2)], strict=True):
        for loads in found["loads"]:
            loads[:] = [
                [[sum(pair) for pair in zip(*rows, strict=True)] for rows in (layer[:2], layer[2:])] for layer in loads
            ]
        assert_as_alone(found, wanted)


def experts_inputs(model: Any, **arguments: Any) -> Tensor | None:
    """The mask that the experts of a call see."""
    seen: list[Tensor | None] = []
    experts = model.model.layers[0].mlp.experts
    hook = experts.register_forward_pre_hook(lambda _, args: seen.append(real_tokens(args[0])))
    with torch.no_grad():
        model(**arguments)
    hook.remove()
    assert real_tokens(torch.zeros(24, 1)) is None
    return seen[0]


def test_masks_of_calls() -> None:
    model = drawn("qwen3_moe", E, experts_implementation="moesys").eval()
    ids, mask = torch.randint(VOCABULARY, (2, S)), torch.arange(2 * S).view(2, S) % 23 > 0
    for given in (mask, mask.long(), mask.float()):
        assert torch.equal(experts_inputs(model, input_ids=ids, attention_mask=given), mask.flatten())
    embeds = model.model.embed_tokens(ids)
    assert torch.equal(experts_inputs(model, inputs_embeds=embeds, attention_mask=mask), mask.flatten())
    four_dimensions = torch.zeros(2, 1, S, S)
    # Of a cache that has room for as many tokens again, which come first.
    of_a_cache = torch.cat([torch.ones_like(mask), torch.zeros_like(mask)], dim=1)
    for unknown in (None, torch.ones_like(mask), four_dimensions, of_a_cache):
        assert experts_inputs(model, input_ids=ids, attention_mask=unknown) is None
    # As in generate(), the mask is that of the cache too. Its name depends on the version.
    cache = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        before = {cache: model(ids[:, :-1], mask[:, :-1], use_cache=True)[cache]}
    seen = experts_inputs(model, input_ids=ids[:, -1:], attention_mask=mask, **before)
    assert seen.tolist() == mask[:, -1].tolist() == [True, False]


def test_an_error_in_a_model_ends_its_call() -> None:
    model = drawn("qwen3_moe", E, experts_implementation="moesys")
    mask = torch.arange(S)[None] > 3
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, S), VOCABULARY), attention_mask=mask)
    assert real_tokens(torch.zeros(S, 1)) is None


def test_a_call_that_ctrl_c_ended_has_no_mask_in_later_ones() -> None:
    model = drawn("qwen3_moe", E, experts_implementation="moesys")
    model.activation_checkpointing_enable({"use_reentrant": False})
    ids, mask = torch.arange(S)[None], torch.arange(S)[None] > 3

    def gradient(interrupted: bool) -> Tensor:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        if interrupted:
            hook = model.model.layers[1].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(input_ids=ids, attention_mask=mask)
            hook.remove()
        loss.backward()
        return model.model.layers[0].mlp.experts.down_proj.grad

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    wanted = gradient(interrupted=False)
    assert torch.equal(gradient(interrupted=True), wanted)
    model(input_ids=ids)
    assert real_tokens(torch.zeros(S, 1)) is None


def test_on_one_rank_padding_is_not_computed_either() -> None:
    """Gradients of tokens are those without a mask in the experts, to the bit, also where a block runs again."""
    results = []
    for checkpointed in (False, True):
        model = drawn("qwen3_moe", E, experts_implementation="moesys")
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        losses = [model(**padded(micro_batch, 1, "right")).loss for micro_batch in range(2)]
        for loss in losses:
            loss.backward()
        results.append([*losses, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    hidden, weight = torch.randn(4, 48), torch.rand(4, K)
    experts = model.model.layers[0].mlp.experts
    model.model.layers[0].mlp.experts.register_forward_hook(lambda *args: outputs.append(args[-1]))
    outputs: list[Tensor] = []
    model(**padded(0, 1, "right"))
    mask = padded(0, 1, "right")["attention_mask"].flatten()
    assert ((outputs[0].abs().sum(dim=1) > 0) == mask.bool()).all()
    assert (experts(hidden, torch.arange(K).expand(4, K), weight).abs().sum(dim=1) > 0).all()
