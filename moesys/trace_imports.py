"""Reads what others record of routing, as traces.

Megatron-LM: ``--moe-routing-trace-path`` (NVIDIA/Megatron-LM, megatron/core/transformer/moe/router_trace.py, 2026).
vLLM: ``--enable-return-routed-experts`` (vllm-project/vllm, docs/training/routed_experts_replay.md, v0.21).

S micro-batches, L layers, R source ranks, E experts, T tokens, K top-k.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moesys.load import IntArray
from moesys.traces import Trace

_RANK_FILE = re.compile(r"router_trace_rank(\d+)\.jsonl")
T = TypeVar("T")
# Of a layer in Megatron: "decoder" or "mtp", which of the MTP blocks, and its number.
_Layer = tuple[str, int, int]


def megatron_trace(folder: str | Path, num_experts: int) -> Trace:
    """The trace in the folder that ``--moe-routing-trace-path`` named.

    It has a file for each rank, ``router_trace_rank0.jsonl`` and so on, and in it a line of JSON for each step and
    layer: ``step``, ``block`` ("decoder", or "mtp" with ``mtp_idx``), ``layer``, and ``top_indices``, K experts of each
    token. Several records of a step and layer, those of its micro-batches or of recomputation, are added up; layers of
    the decoder come first.

    Raises ValueError where files are missing or hold something else, and where ranks differ in steps or layers, as
    stages of a pipeline do.
    """
    files = {int(match[1]): path for path in Path(folder).glob("*") if (match := _RANK_FILE.fullmatch(path.name))}
    if not files:
        raise ValueError(f"{folder} has no router_trace_rank*.jsonl; give the folder of --moe-routing-trace-path")
    of_rank = {rank: _megatron_rank(path, num_experts) for rank, path in sorted(files.items())}
    first, places = next(iter(of_rank)), [set(counts) for counts in of_rank.values()]
    for rank, counts in of_rank.items():
        if different := sorted(set(counts) ^ places[0]):
            step, (block, _, layer) = different[0]
            raise ValueError(
                f"{folder}: of step {step}, {block} layer {layer} one of ranks {first} and {rank} has a record and the "
                "other none; keep the files of ranks that have the same layers, as those of one pipeline stage"
            )
    steps = sorted({step for step, _ in places[0]})
    layers = sorted({layer for _, layer in places[0]})
    if len(places[0]) != len(steps) * len(layers):
        raise ValueError(f"{folder}: not every step has all {len(layers)} layers; leave the steps out that were cut")
    tokens_SLRE = [[[counts[step, layer][0] for counts in of_rank.values()] for layer in layers] for step in steps]
    widths = {top_k for counts in of_rank.values() for _, top_k in counts.values()}
    top_k, name = _one_top_k(widths, folder), Path(folder).name
    return Trace(np.array(tokens_SLRE), top_k, name, {"from": "Megatron"}, tuple(steps))


def vllm_trace(path: str | Path, num_experts: int, num_ranks: int, responses_per_rank: int) -> Trace:
    """The trace in a file with one response of a vLLM server in each line, the JSON that it answered.

    ``prompt_routed_experts`` of a response and ``routed_experts`` of each of its choices are [tokens, L, K] expert ids,
    as lists (v0.21) or, as tests of later releases have them, in base64 of an .npy file. Tokens whose ids are -1 came
    from the prefix cache and count nowhere. A server knows no source ranks: ``responses_per_rank`` responses after
    another become those of a rank, and ``num_ranks`` times as many a micro-batch. What fills none is left out.

    Raises ValueError for a line without routed experts, and where there are too few responses for a micro-batch.
    """
    if num_ranks < 1 or responses_per_rank < 1:
        raise ValueError(f"num_ranks={num_ranks} and responses_per_rank={responses_per_rank}; use at least 1 of each")
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file; give one with a vLLM response in each line")
    responses = _read(path, lambda line: _vllm_response(json.loads(line), num_experts))
    counts_NLE = [counts_LE for counts_LE, _ in responses]
    if len({counts_LE.shape for counts_LE in counts_NLE}) > 1:
        raise ValueError(f"{path}: responses have different numbers of layers; give those of one model")
    size = num_ranks * responses_per_rank
    num_batches = len(counts_NLE) // size
    if not num_batches:
        raise ValueError(
            f"{path} has {len(counts_NLE)} responses, and a micro-batch takes num_ranks={num_ranks} times "
            f"responses_per_rank={responses_per_rank}; use fewer"
        )
    by_rank = np.array(counts_NLE[: num_batches * size]).reshape(
        num_batches, num_ranks, responses_per_rank, -1, num_experts
    )
    tokens_SLRE = by_rank.sum(axis=2).swapaxes(1, 2)
    return Trace(tokens_SLRE, _one_top_k({top_k for _, top_k in responses}, path), Path(path).stem, {"from": "vLLM"})


def _megatron_rank(path: Path, num_experts: int) -> dict[tuple[int, _Layer], tuple[IntArray, int]]:
    """Counts [E] of one rank by step and layer, each with the top-k."""
    found: dict[tuple[int, _Layer], tuple[IntArray, int]] = {}
    for place, counts_E, top_k in _read(path, lambda line: _megatron_record(json.loads(line), num_experts)):
        before_E, before_k = found.get(place, (0, top_k))
        _one_top_k({before_k, top_k}, path)
        found[place] = before_E + counts_E, top_k
    return found


def _megatron_record(record: dict[str, Any], num_experts: int) -> tuple[tuple[int, _Layer], IntArray, int]:
    ids_TK = _whole_numbers(record["top_indices"])
    if record["block"] not in ("decoder", "mtp"):
        raise ValueError(f"block={record['block']!r} is neither 'decoder' nor 'mtp'")
    layer = record["block"], int(record.get("mtp_idx", 0)), int(record["layer"])
    [counts_E] = _counts_LE(ids_TK[:, None, :], num_experts)
    return (int(record["step"]), layer), counts_E, ids_TK.shape[1]


def _vllm_response(response: dict[str, Any], num_experts: int) -> tuple[IntArray, int]:
    """Counts of all tokens of a response, [L, E], and the top-k."""
    parts = [response.get("prompt_routed_experts"), *(choice.get("routed_experts") for choice in response["choices"])]
    arrays = [_vllm_array(part) for part in parts if part is not None]
    if not arrays:
        raise ValueError("no routed_experts; start the server with --enable-return-routed-experts")
    ids_TLK = np.concatenate(arrays)
    return _counts_LE(ids_TLK, num_experts), ids_TLK.shape[2]


def _vllm_array(part: str | list[Any]) -> IntArray:
    ids: Any = part
    if isinstance(part, str):
        ids = np.lib.format.read_array(io.BytesIO(base64.b64decode(part, validate=True)), allow_pickle=False)
    ids_TLK = _whole_numbers(ids)
    if ids_TLK.ndim != 3:
        raise ValueError(f"routed_experts has shape {ids_TLK.shape}, and [tokens, layers, top-k] is three dimensions")
    return ids_TLK


def _whole_numbers(ids: Any) -> IntArray:
    array = np.asarray(ids)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"expert ids are {array.dtype}; give whole numbers")
    return array.astype(np.int64)


def _counts_LE(ids_TLK: IntArray, num_experts: int) -> IntArray:
    """Tokens of each expert, int64 [L, E]; those with an id of -1 are left out."""
    if ids_TLK.size and not -1 <= ids_TLK.min() <= ids_TLK.max() < num_experts:
        raise ValueError(
            f"expert ids from {ids_TLK.min()} to {ids_TLK.max()} do not fit num_experts={num_experts}; give the "
            "model's own number"
        )
    known = (ids_TK[(ids_TK >= 0).all(axis=1)] for ids_TK in ids_TLK.swapaxes(0, 1))
    return np.array([np.bincount(ids_TK.ravel(), minlength=num_experts) for ids_TK in known])


def _read(path: str | Path, parsed: Callable[[str], T]) -> list[T]:
    """What the lines of a file hold. Raises ValueError that names the line."""
    return [_checked(parsed, line, f"line {number} of {path}") for number, line in enumerate(_lines(path), start=1)]


def _lines(path: str | Path) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}; give the file as it was written") from None
    # not splitlines, for which some characters of a response end a line, too
    lines = text.split("\n")
    return lines[:-1] if not lines[-1] else lines


def _checked(parsed: Callable[[str], T], line: str, where: str) -> T:
    try:
        return parsed(line)
    except KeyError as error:
        raise ValueError(f"{where} has no {error.args[0]}") from None
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError, EOFError, RecursionError) as error:
        raise ValueError(f"{where} holds no routing: {error}") from None


def _one_top_k(widths: set[int], source: str | Path) -> int:
    if not widths:
        raise ValueError(f"{source} has no records; give a trace with some")
    if len(widths) != 1:
        raise ValueError(f"{source} has tokens of {sorted(widths)} experts; give records of one top-k")
    return widths.pop()
