"""Recorded routing of others: files written by hand become the traces that one counts by hand; others are refused."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesys.traces import megatron_trace, vllm_trace

# --- Megatron ---


def record(step: int, layer: int, indices: list[list[int]], **more: Any) -> dict[str, Any]:
    """As ``RouterTracer`` of Megatron-LM writes it."""
    head = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0}
    return head | {"num_tokens": len(indices), "topk": 2, "top_indices": indices} | more


def write_ranks(folder: Path, *ranks: list[dict[str, Any]]) -> Path:
    for rank, records in enumerate(ranks):
        lines = "".join(json.dumps(one) + "\n" for one in records)
        (folder / f"router_trace_rank{rank}.jsonl").write_text(lines)
    return folder


RANK_0 = [
    record(10, 1, [[0, 1], [0, 2]]),
    record(10, 3, [[3, 2], [3, 1]]),
    record(12, 1, [[1, 2], [1, 3]]),
    record(12, 3, [[0, 1], [0, 1]]),
]
RANK_1 = [
    record(10, 1, [[2, 3]]),
    # a second micro-batch of the step
    record(10, 1, [[2, 0]]),
    record(10, 3, [[0, 3]]),
    record(12, 1, [[0, 1]]),
    record(12, 3, [[2, 3]]),
]


def test_a_folder_of_megatron_is_counted(tmp_path: Path) -> None:
    trace = megatron_trace(write_ranks(tmp_path, RANK_0, RANK_1), num_experts=4)
    assert trace.top_k == 2
    assert trace.tokens_SLRE.tolist() == [
        [[[2, 1, 1, 0], [1, 0, 2, 1]], [[0, 1, 1, 2], [1, 0, 0, 1]]],
        [[[0, 2, 1, 1], [1, 1, 0, 0]], [[2, 2, 0, 0], [0, 0, 1, 1]]],
    ]


FLAT: Any = [3, 1, 1]


@pytest.mark.parametrize(
    ("ranks", "top_k", "counted_LRE"),
    [
        # Layers of MTP come last, and are not those of the decoder.
        (
            [[record(0, 0, [[2, 3]], block="mtp", mtp_idx=0), record(0, 0, [[0, 1]])]],
            2,
            [[[1, 1, 0, 0]], [[0, 0, 1, 1]]],
        ),
        ([[record(0, 0, [[1, 2], [3, 1]])], [record(0, 0, [])]], 2, [[[0, 2, 1, 1], [0, 0, 0, 0]]]),
        ([[record(0, 0, FLAT, topk=1)]], 1, [[[0, 2, 0, 1]]]),
        # Ten ranks keep their order.
        ([[record(0, 0, [[rank, 11]])] for rank in range(11)], 2, [np.eye(12)[:11] + np.eye(12)[11]]),
    ],
    ids=["mtp", "a rank without tokens", "flat ids of top 1", "ten ranks"],
)
def test_records_of_every_kind_are_counted(tmp_path, ranks, top_k, counted_LRE):
    trace = megatron_trace(write_ranks(tmp_path, *ranks), num_experts=len(counted_LRE[0][0]))
    assert trace.top_k == top_k
    assert np.array_equal(trace.tokens_SLRE[0], counted_LRE)


# --- vLLM ---


def npy(array: list[Any]) -> str:
    file = io.BytesIO()
    np.save(file, np.array(array, dtype=np.int16))
    return base64.b64encode(file.getvalue()).decode()


def response(prompt: Any, *generated: Any) -> dict[str, Any]:
    return {"prompt_routed_experts": prompt, "choices": [{"text": "", "routed_experts": one} for one in generated]}


# Two layers, top 2; tokens x layers x ids.
FIRST = response([[[0, 1], [2, 3]], [[0, 2], [2, 1]]], [[[3, 1], [0, 1]]])
CACHED = response([[[-1, -1], [-1, -1]]], [[[1, 2], [3, 0]]], [[[1, 0], [3, 1]]])
PACKED = response(None, npy([[[3, 2], [1, 0]]]))


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_responses_of_vllm_are_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rollout.jsonl", FIRST, CACHED, PACKED, FIRST, PACKED)
    trace = vllm_trace(path, num_experts=4, num_ranks=2, responses_per_rank=1)
    assert (trace.top_k, trace.name, trace.num_micro_batches) == (2, "rollout", 2)
    first, cached = [[2, 2, 1, 1], [1, 2, 2, 1]], [[1, 2, 1, 0], [1, 1, 0, 2]]
    packed = [[0, 0, 1, 1], [1, 1, 0, 0]]
    wanted_SRLE = np.array([[first, cached], [packed, first]])
    assert (trace.tokens_SLRE == wanted_SRLE.swapaxes(1, 2)).all()
    both = vllm_trace(path, num_experts=4, num_ranks=1, responses_per_rank=2)
    assert (both.tokens_SLRE[:, :, 0] == wanted_SRLE.sum(axis=1)).all()


@pytest.mark.parametrize("dense", [(0,), (1, 3), (2,)])
def test_layers_of_vllm_without_experts_are_left_out(tmp_path: Path, dense: tuple[int, ...]) -> None:
    ids_NTLK = np.random.default_rng(0).permuted(np.tile(np.arange(6), (4, 5, 4, 1)), axis=-1)[..., :2]
    ids_NTLK[:, :, dense] = 0
    # All tokens of a response from the prefix cache, with or without what vLLM leaves in layers without experts.
    ids_NTLK[1] = -1
    ids_NTLK[2, 0] = -1
    path = tmp_path / "responses.jsonl"
    path.write_text("\n".join(json.dumps({"choices": [{"routed_experts": ids.tolist()}]}) for ids in ids_NTLK))
    trace = vllm_trace(path, num_experts=6, num_ranks=2, responses_per_rank=2)
    experts = [layer for layer in range(4) if layer not in dense]
    for row, layer in enumerate(experts):
        ids = ids_NTLK[:, :, layer]
        assert trace.tokens_SLRE[0, row].sum(axis=0).tolist() == np.bincount(ids[ids >= 0], minlength=6).tolist()
    assert trace.num_layers == len(experts)


def test_layers_of_vllm_are_kept_where_zeros_may_be_experts(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text(json.dumps({"choices": [{"routed_experts": [[[0], [1]], [[0], [0]]]}]}))
    assert vllm_trace(path, 2, 1, 1).tokens_SLRE.tolist() == [[[[2, 0]], [[1, 1]]]]
    # A response of padding in a layer with experts, and no layer with any.
    for lines in ([[[0, 0], [0, 1]]], [[[1, 2], [0, 1]]]), ([[[0, 0], [0, 0]]],):
        path.write_text("\n".join(json.dumps({"choices": [{"routed_experts": ids}]}) for ids in lines))
        with pytest.raises(ValueError, match=r"all ids of layers? 0(, 1)? are 0, as those of layers without experts"):
            vllm_trace(path, num_experts=3, num_ranks=1, responses_per_rank=1)


def test_a_response_may_hold_what_else_ends_lines(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    spoken = FIRST | {"choices": [{"text": "a\u2028b", "routed_experts": None}]}
    path.write_text(json.dumps(spoken, ensure_ascii=False) + "\n", encoding="utf-8")
    assert vllm_trace(path, num_experts=4, num_ranks=1, responses_per_rank=1).tokens_SLRE.shape == (1, 2, 1, 4)
