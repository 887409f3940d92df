"""Traces, watched trainings, run folders and journals, damaged and forged."""

from __future__ import annotations

import base64
import io
import json
import warnings
import zipfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import lab_cases
import numpy as np
import pytest
import watch_cases
from mutated_inputs import (
    SWEEPS,
    Attempt,
    Reader,
    every_reader,
    faults,
    json_bytes,
    json_lines,
    json_said,
    mangled,
    npy,
    other_counts,
    printed_by,
    refused,
    same,
)

import moesys as ms
from moesys.config.experiment import Experiment
from moesys.lab.commands.compare import compare_command, report_command
from moesys.lab.runs.environment import Environment, save_environment
from moesys.lab.runs.records import RunFolder, record_journal
from moesys.lab.runs.watched_run import read_watched_run
from moesys.step_lines import step_journal
from moesys.traces import Trace, load_trace, megatron_trace, save_trace, vllm_trace
from moesys.tuner.costs import Entry, TuneJournal

# --- traces -------------------------------------------------------------------------------------------------------

TRACE = ms.traces.generate(ms.Generated(num_layers=2, tokens_per_rank=40, warmup=0, steps=3), 2, 6, 2, seed=3)


def trace_of_moesys(folder: Path) -> Attempt:
    path, again = folder / "trace.npz", folder / "again.npz"
    save_trace(TRACE, path)
    whole = path.read_bytes()
    header = {"version": 1, "top_k": 2, "name": "x", "meta": {"from": "here"}}

    def attempt(draw: Random) -> None:
        tokens, fields = TRACE.tokens_SLRE, header
        if damaged := draw.random() < 0.4:
            path.write_bytes(mangled(draw, whole))
        else:
            text = json_bytes(draw, header) if draw.random() < 0.5 else json.dumps(header).encode()
            tokens = other_counts(draw, tokens)
            arrays = {"tokens_SLRE.npy": npy(draw, tokens)}
            arrays["header.npy"] = npy(draw, np.array(text.decode("utf-8", "surrogateescape")))
            if draw.random() < 0.1:
                del arrays[draw.choice(list(arrays))]
            write_zip(draw, path, arrays)
        with refused("trace.npz"):
            found = load_trace(path)
            if damaged:
                # Its parts have checksums.
                assert same_trace(found, TRACE)
            else:
                fields = json_said(text)
                assert (found.tokens_SLRE == tokens).all()
                assert same(vars(found), {name: fields[name] for name in ("top_k", "name", "meta")})
            save_trace(found, again)
            assert same_trace(load_trace(again), found)

    return attempt


def same_trace(one: Trace, other: Trace) -> bool:
    names = ("digest", "top_k", "name", "meta")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def write_zip(draw: Random, path: Path, members: dict[str, bytes]) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        # Of names that are there twice.
        warnings.simplefilter("ignore")
        for name, data in members.items():
            file.writestr(name, data)
        if draw.random() < 0.05:
            file.writestr(
                draw.choice((*members, "further.npy", "x.txt", "a/")), draw.choice((b"", b"x", *members.values()))
            )
    if draw.random() < 0.1:
        path.write_bytes(mangled(draw, path.read_bytes()))


def megatron_lines(rank: int) -> list[dict[str, Any]]:
    ids, lines = Random(rank), []
    for step in (3, 7):
        for block, layer in (("decoder", 1), ("decoder", 2), ("mtp", 0)):
            line = {"step": step, "block": block, "layer": layer, "rank": rank, "topk": 2}
            line |= {"mtp_idx": 0} if block == "mtp" else {}
            lines.append(line | {"top_indices": [ids.sample(range(6), 2) for _ in range(4)]})
    return lines


def trace_of_megatron(folder: Path) -> Attempt:
    paths = [folder / f"router_trace_rank{rank}.jsonl" for rank in range(2)]
    lines = [megatron_lines(rank) for rank in range(2)]
    wholes = ["".join(json.dumps(line) + "\n" for line in of_rank).encode() for of_rank in lines]

    def attempt(draw: Random) -> None:
        wrong = draw.randrange(2)
        for rank, path in enumerate(paths):
            path.write_bytes(json_lines(draw, lines[rank]) if rank == wrong else wholes[rank])
        with refused("rank", folder.name):
            found = megatron_trace(folder, 6)
            for rank, path in enumerate(paths):
                read = [json_said(line) for line in path.read_bytes().split(b"\n") if line]
                counted = Counter(
                    expert for line in read for ids in line["top_indices"] for expert in np.atleast_1d(ids)
                )
                counted.pop(-1, None)
                tokens_E = found.tokens_SLRE[:, :, rank].sum(axis=(0, 1))
                assert tokens_E.tolist() == [counted[expert] for expert in range(6)]
                assert found.num_micro_batches == len({line["step"] for line in read})
                assert found.num_layers == len(
                    {(each["block"], each.get("mtp_idx", 0), each["layer"]) for each in read}
                )

    return attempt


def trace_of_vllm(folder: Path) -> Attempt:
    path, ids = folder / "responses.jsonl", Random(0)
    routed = [[[ids.sample(range(6), 2) for _ in range(2)] for _ in range(3)] for _ in range(4)]

    def attempt(draw: Random) -> None:
        coded = [base64.b64encode(npy(draw, other_counts(draw, np.array(each, np.uint8)))).decode() for each in routed]
        parts: list[Any] = coded if draw.random() < 0.5 else routed
        lines = [{"prompt_routed_experts": part, "choices": [{"routed_experts": part, "text": "x"}]} for part in parts]
        path.write_bytes(json_lines(draw, lines))
        with refused("responses.jsonl"):
            found = vllm_trace(path, 6, 2, 1)
            counted: Counter[int] = Counter()
            for line in path.read_bytes().split(b"\n")[: found.num_micro_batches * 2]:
                read = json_said(line)
                for part in (
                    read.get("prompt_routed_experts"),
                    *(each.get("routed_experts") for each in read["choices"]),
                ):
                    counted.update(np.ravel(uncoded(part) if part is not None else []).tolist())
            counted.pop(-1, None)
            assert found.tokens_SLRE.sum(axis=(0, 1, 2)).tolist() == [counted[expert] for expert in range(6)]

    return attempt


def uncoded(part: Any) -> Any:
    return np.load(io.BytesIO(base64.b64decode(part))) if isinstance(part, str) else part


# --- watched trainings --------------------------------------------------------------------------------------------


def watched_training(folder: Path) -> Attempt:
    watch_cases.write_run(folder, 3, 2, 2)
    wholes = {path: path.read_bytes() for path in folder.iterdir()}

    def attempt(draw: Random) -> None:
        for path, whole in wholes.items():
            path.write_bytes(whole)
        wrong = draw.choice(list(wholes))
        lines = [json.loads(line) for line in wholes[wrong].splitlines()]
        wrong.write_bytes(json_lines(draw, lines))
        with refused("rank-000"):
            found = list(step_journal(wrong).read())
            said = [json_said(line) for line in wrong.read_bytes().split(b"\n")[:-1]]
            assert same([asdict(line) for line in found], said)
            if draw.random() < (0.1 if SWEEPS else 0.5):
                printed_by(report_command, folder, folder / "report.html")
                page = (folder / "report.html").read_text()
                assert "<script>" not in page
                assert not [each for each in page if not each.isprintable() and each not in "\n\t"]

    return attempt


# --- run folders --------------------------------------------------------------------------------------------------

PACKAGES = {"torch": "2.13", "numpy": "2.0"}
ENVIRONMENT = Environment("0123abcd", "3.11", PACKAGES, "Linux", "a processor", "AVX2", 2, 1, [], "", {"OMP_X": "1"})


def run_folder(folder: Path) -> Attempt:
    experiments = [lab_cases.experiment(), lab_cases.simulated(strategies=(lab_cases.EP, lab_cases.FSEP_WIDE))]
    paths: list[dict[Path, bytes]] = []
    for experiment in experiments:
        with RunFolder.open(experiment, folder / experiment.source) as run:
            environment = save_environment(ENVIRONMENT, run.path)
            for record in lab_cases.records(experiment, {"ep": 10.0, "fsep": 8.0, "fsep_wide|a&b": 9.0}):
                run.append(replace(record, environment=environment))
        paths.append({path: path.read_bytes() for path in run.path.iterdir() if path.suffix in (".json", ".jsonl")})

    def attempt(draw: Random) -> None:
        wholes = draw.choice(paths)
        for path, whole in wholes.items():
            path.write_bytes(whole)
        wrong = draw.choice(list(wholes))
        if wrong.suffix == ".jsonl":
            wrong.write_bytes(json_lines(draw, [json.loads(line) for line in wholes[wrong].splitlines()]))
        else:
            wrong.write_bytes(json_bytes(draw, json.loads(wholes[wrong])))
        run = RunFolder(wrong.parent)
        with refused(wrong.name):
            if wrong.suffix == ".jsonl":
                journal = record_journal(wrong.parent)
                found = [json.loads(journal.to_line(record)) for record in run.records()]
                assert same(found, [json_said(line) for line in wrong.read_bytes().split(b"\n")[:-1]])
            elif wrong.name == "experiment.json":
                read = run.experiment()
                assert same(read.model_dump(mode="json"), json_said(wrong.read_bytes()))
                assert Experiment.model_validate_json(read.to_json(), context={"recorded": True}) == read
        with refused(wrong.name, "seed", "strateg", "compar"):
            printed_by(compare_command, [wrong.parent], draw.choice((False, True)))

    return attempt


def tune_journal(folder: Path) -> Attempt:
    path, setting = folder / "journal.jsonl", {"model": "a", "moesys": "b"}
    journal = TuneJournal(path, setting)
    for seed in range(3):
        journal.add(Entry.about(lab_cases.FSEP, "measured", f"seed {seed}", 1.5 + seed))
    journal.add(Entry("0" * 64, "x", "simulated", "2 steps of seeds 0", 1.5, "", {}, {"0": [1.0, 2.0]}))
    journal.add(Entry.about(lab_cases.EP, "pruned", "memory 80 GB", None, "too large"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def attempt(draw: Random) -> None:
        path.write_bytes(json_lines(draw, lines))
        with refused("journal.jsonl"):
            found = TuneJournal(path, setting)
            said = [json_said(line) for line in path.read_bytes().split(b"\n")[1:-1]]
            newest = {(each["fingerprint"], each["of"], each["stage"] == "pruned"): each for each in said}
            assert same([vars(entry) for entry in found.entries()], list(newest.values()))

    return attempt


@every_reader(trace_of_moesys, trace_of_megatron, trace_of_vllm, watched_training, run_folder, tune_journal)
def test_what_others_wrote_is_read_rightly_or_refused(reader: Reader, seeds: range, tmp_path: Path) -> None:
    assert not faults(reader, seeds, tmp_path)


# --- faults that were found -----------------------------------------------------------------------------------------


def tokens_of_lines(folder: Path, *counts: tuple[int, ...]) -> None:
    lines = [replace(watch_cases.step_line(step, [0]), step=step) for step in range(len(counts))]
    layers = [replace(line.layers[0], tokens_E=tokens_E) for line, tokens_E in zip(lines, counts, strict=True)]
    watch_cases.write_lines(folder, [replace(line, layers=(layer,)) for line, layer in zip(lines, layers, strict=True)])
    read_watched_run(folder)


def test_steps_with_other_numbers_of_experts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rank-0000\.jsonl: step 1 has 1 experts in layer 0"):
        tokens_of_lines(tmp_path, (1, 2, 3), (1,))


def test_a_trace_of_an_earlier_release_has_whole_numbers(tmp_path: Path) -> None:
    header = np.array(json.dumps({"version": 1, "top_k": 2, "name": "", "meta": {}}))
    arrays = {"header": header, "tokens_SLRE": TRACE.tokens_SLRE}
    np.savez(tmp_path / "trace.npz", **arrays, iterations_S=np.array([0, 1, 2]))
    assert load_trace(tmp_path / "trace.npz").digest == TRACE.digest
    np.savez(tmp_path / "trace.npz", **arrays, iterations_S=np.array([0, 1, np.inf]))
    with pytest.raises(ValueError, match=r"trace\.npz is no trace: its top_k or iterations are no whole numbers"):
        load_trace(tmp_path / "trace.npz")


def test_an_environment_without_packages_names_none() -> None:
    assert "torch" not in replace(ENVIRONMENT, packages={}).machine_line
