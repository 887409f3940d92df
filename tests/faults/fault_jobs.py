"""Jobs as users run them, whose processes can strike themselves with one fault at a chosen moment.

``serve`` runs in a program that has imported what takes seconds, and forks the processes of each job that a test asks
for: the ranks of a training, or one command. Each process ends as a program does.

A moment is a number of ticks. The clock "file" ticks when the process opens, makes, renames or removes something below
the job's folder, and "user" when the user's own code is called: hooks of a model, a dataset, a planner.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import NUM_LAYERS, SAVE_EVERY, TRAININGS, Job, Strike
from harness import Stack, tokens_of, whole
from hf_models import drawn, loaded
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from watch_cases import write_run

import moesys as ms
from moesys import collectives
from moesys.__main__ import main
from moesys.hf.trainer import ResumableTrainer
from moesys.moe.experts import experts_of

EXPERTS = 4
SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=EXPERTS, top_k=2)
GREEDY: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
LINKED = {"linked": ms.Fsep(slots_per_rank=3, prefetch_layers=1, delay_reshard=True)}
STRATEGIES = {
    "ep": ms.Strategy(name="ep"),
    "lent": ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=3), **GREEDY),
    "fsep": ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=3), overlap=ms.Pipelined(chunks=2), **GREEDY),
    "linked": ms.Strategy(name="linked", sharding=LINKED["linked"], lag=2, **GREEDY),
}
# How long a failed collective looks for the ranks that do not answer, instead of 5 s.
GRACE_S = 1.5


@dataclass
class Clocks:
    """The clocks of a process, which is struck when the moment comes."""

    job: Job
    strike: Strike | None
    ticks: dict[str, int] = field(default_factory=lambda: {"user": 0, "file": 0})

    def tick(self, clock: str = "user") -> None:
        self.ticks[clock] += 1
        strike = self.strike
        if strike is not None and (clock, self.ticks[clock]) == (strike.clock, strike.moment):
            self.strike = None
            os.write(2, b"STRUCK\n")
            STRIKES[strike.kind](self.job, strike)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Is called by Python for each event of ``sys.audit``."""
        if event == "open" or event.startswith(("os.", "shutil.")):
            paths = (os.fsdecode(each) for each in arguments[:2] if isinstance(each, str | bytes | os.PathLike))
            if any(path.startswith(str(self.job.folder)) for path in paths):
                self.tick("file")


CLOCKS: list[Clocks] = []


def tick() -> None:
    """Is called by the user's code. Processes that a command started have no clocks."""
    for clocks in CLOCKS:
        clocks.tick()


# --- faults -----------------------------------------------------------------------------------------------------------


def send(number: int) -> Callable[[Job, Strike], None]:
    return lambda job, strike: os.kill(os.getpid(), number)


def send_to_all(number: int) -> Callable[[Job, Strike], None]:
    """To each process of the job, as a terminal and a batch system do."""
    return lambda job, strike: os.killpg(0, number)


def fail(job: Job, strike: Strike) -> None:
    raise ArithmeticError("planted")


def fill_disk(job: Job, strike: Strike) -> None:
    """No file grows beyond a few bytes from now on."""
    most = int(strike.size * 3000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def remove_folder(job: Job, strike: Strike) -> None:
    folders = sorted(path for path in (job.out, *job.out.rglob("*")) if path.is_dir())
    if folders:
        shutil.rmtree(folders[int(strike.size * len(folders))], ignore_errors=True)


STRIKES: dict[str, Callable[[Job, Strike], None]] = {
    "kill": send(signal.SIGKILL),
    "stop": send(signal.SIGSTOP),
    "hang": send(signal.SIGSTOP),
    "raise": fail,
    "full disk": fill_disk,
    "removed folder": remove_folder,
    "sigterm": send_to_all(signal.SIGTERM),
    "ctrl-c": send_to_all(signal.SIGINT),
}
NOT_FINITE = {"nan": math.nan, "inf": math.inf}


# --- a training of one's own ------------------------------------------------------------------------------------------


@dataclass
class Spoiler:
    """Puts NaN or infinity into one step and layer of a rank: of ``moment`` each layer of a step has one."""

    strike: Strike | None
    step: int = 0

    def is_due(self, layer: int, where: str) -> bool:
        strike = self.strike
        return strike is not None and (strike.moment, strike.where) == (self.step * NUM_LAYERS + layer + 1, where)

    def spoil(self, tensor: Tensor) -> Tensor:
        assert self.strike is not None
        spoilt = tensor.clone()
        spoilt[int(self.strike.size * len(tensor)), -1] = NOT_FINITE[self.strike.kind]
        return spoilt

    def watch(self, model: Stack) -> None:
        """Hooks on to the layers of a model."""
        for index, moe in enumerate(model.moe):
            moe.register_forward_pre_hook(lambda moe, x, index=index: self.input_of(index, x[0]))
            moe.register_forward_hook(lambda moe, x, y, index=index: self.output_of(index, y))

    def begin(self, step: int, masters: Sequence[Tensor]) -> None:
        """Begins a step. ``masters``: this rank's part of the experts of each layer."""
        self.step = step
        for index, each in enumerate(masters):
            if self.strike is not None and self.is_due(index, "weight"):
                each[0] = NOT_FINITE[self.strike.kind]

    def input_of(self, index: int, x: Tensor) -> Tensor:
        return self.spoil(x) if self.is_due(index, "input") else x

    def output_of(self, index: int, y: Tensor) -> None:
        if self.is_due(index, "gradient"):
            y.register_hook(self.spoil)


def train(job: Job, rank: int, clocks: Clocks) -> dict[str, Any]:
    """A loop with Watch that saves and resumes as the documentation of checkpoints says."""
    model = Stack(SHAPE, STRATEGIES[job.strategy], num_layers=NUM_LAYERS)
    runtime = ms.link(model) if job.strategy in LINKED else None
    for channel in [each for moe in model.moe for each in (moe.experts.token_channel, moe.experts.store.channel)]:
        channel.failure_grace_s = GRACE_S
    experts = [moe.experts.masters for moe in model.moe]
    others = [each for name, each in model.named_parameters() if not name.endswith(".experts.masters")]
    optimizer = torch.optim.Adam([{"params": experts}, {"params": others}], lr=1e-2)
    for mixer in model.mixers:
        mixer.register_forward_pre_hook(lambda *_: clocks.tick())
        mixer.register_full_backward_hook(lambda *_: clocks.tick())
    spoiler = Spoiler(job.strike if job.strike and job.strike.kind in NOT_FINITE and job.strike.rank == rank else None)
    spoiler.watch(model)
    checkpoint, mine = job.out / "checkpoint", f"losses of rank {rank}"
    losses: list[float] = []
    if checkpoint.exists():
        state = state_of(model, optimizer) | {mine: losses}
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        losses = state[mine]
    finite: list[list[bool]] = []
    with ms.Watch(model, job.out / "watched") as watch:
        for step in range(len(losses), job.steps):
            clocks.tick()
            spoiler.begin(step, [each.detach().to_local() for each in experts])
            loss = model(tokens_of(step, SHAPE.hidden_size)).square().mean()
            loss.backward()
            ms.sync_gradients(model)
            ms.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            clocks.tick()
            losses = [*losses, loss.item()]
            finite.append([bool(whole(each).isfinite().all()) for each in model.parameters()] if spoils(job) else [])
            watch.step(step, loss=loss)
            if (step + 1) % SAVE_EVERY == 0 and not spoils(job):
                with ms.whole_folder(checkpoint) as new:
                    dcp.save(state_of(model, optimizer) | {mine: losses}, checkpoint_id=new)
    if runtime is not None:
        runtime.close()
    return {"losses": losses, "parameters": digest(model), "finite": finite}


def train_in_plain_torch(job: Job, rank: int, clocks: Clocks) -> dict[str, Any]:
    """The same training in one process, whose layers are a few lines of torch: the losses of all ranks by step."""
    model = Stack(SHAPE, STRATEGIES["ep"], num_layers=NUM_LAYERS)
    layers = [{name: tensor.requires_grad_() for name, tensor in moe.full_state_dict().items()} for moe in model.moe]
    parameters = [*model.mixers.parameters(), *(tensor for layer in layers for tensor in layer.values())]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    assert job.strike is not None
    # The first expert that the rank has a part of.
    expert = 0 if isinstance(STRATEGIES[job.strategy].sharding, ms.Fsep) else job.strike.rank * EXPERTS // job.num_ranks
    spoiler = Spoiler(job.strike)
    losses: list[list[float]] = []
    finite: list[list[bool]] = []
    for step in range(job.steps):
        spoiler.begin(step, [layer["experts.down_proj"].detach()[expert:] for layer in layers])
        losses.append([])
        for of_rank in range(job.num_ranks):
            x = tokens_of(step, SHAPE.hidden_size, of_rank)
            spoils_this = spoiler if of_rank == job.strike.rank else Spoiler(None)
            for index, (mixer, layer) in enumerate(zip(model.mixers, layers, strict=True)):
                y = plain_layer(spoils_this.input_of(index, torch.tanh(mixer(x))), layer)
                spoils_this.output_of(index, y)
                x = x + y
            loss = x.square().mean()
            loss.backward()
            losses[-1].append(loss.item())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        finite.append([bool(each.isfinite().all()) for each in parameters])
    return {"losses": losses, "finite": finite}


def plain_layer(x_TH: Tensor, layer: dict[str, Tensor]) -> Tensor:
    score_TE = (x_TH @ layer["gate.weight"].t()).softmax(1)
    weight_TK, expert_TK = score_TE.topk(SHAPE.top_k)
    weight_TK = weight_TK / weight_TK.sum(1, keepdim=True) if SHAPE.norm_topk_prob else weight_TK
    y_TH = torch.zeros_like(x_TH)
    for expert in range(EXPERTS):
        token, k = (expert_TK == expert).nonzero(as_tuple=True)
        gate, up = (x_TH[token] @ layer["experts.gate_up_proj"][expert].t()).chunk(2, dim=1)
        down = (functional.silu(gate) * up) @ layer["experts.down_proj"][expert].t()
        y_TH = y_TH.index_add(0, token, down * weight_TK[token, k, None])
    return y_TH


def spoils(job: Job) -> bool:
    return job.strike is not None and job.strike.kind in NOT_FINITE


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(whole(parameter).detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# --- transformers' Trainer --------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        tick()
        ids = torch.randint(96, (12,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": ids, "labels": ids}


class Ticks(TrainerCallback):
    def on_step_begin(self, *_: Any, **others: Any) -> None:
        tick()

    on_step_end = on_save = on_step_begin


def train_by_trainer(job: Job, rank: int, clocks: Clocks) -> dict[str, Any]:
    model = loaded(job.inputs / "hub", STRATEGIES[job.strategy], {"fsdp_size": job.num_ranks, "ep_size": job.num_ranks})
    for each in experts_of(model):
        each.token_channel.failure_grace_s = each.store.channel.failure_grace_s = GRACE_S
    arguments = TrainingArguments(
        output_dir=str(job.out),
        use_cpu=True,
        max_steps=job.steps,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        save_only_model=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        # A schedule that does not depend on where the training stops.
        lr_scheduler_type="constant",
    )
    watch = ms.hf.WatchCallback(job.out / "watched")
    trainer = ResumableTrainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Ticks(), watch])
    job.out.mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(job.out)))
    steps = [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
    return {"losses": steps, "parameters": digest(model)}


# --- commands ---------------------------------------------------------------------------------------------------------


class Ticking(ms.Balance):
    """A user's planner."""

    def layout(self, problem: ms.planning.PlanningProblem) -> ms.planning.ExpertLayout:
        tick()
        return ms.plan_layout(problem.load, problem.cluster, ms.Greedy(), problem.slots_R)


def experiment(workload: ms.Generated | ms.Training) -> ms.Experiment:
    users = ms.Strategy(name="users", sharding=ms.Fsep(slots_per_rank=5), balance=Ticking(), split=ms.FlowSplit())
    return ms.Experiment(
        name="struck",
        model=ms.ModelShape(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2),
        cluster=ms.ClusterSpec(ranks_per_node=2),
        strategies=(ms.Strategy(name="ep"), users),
        workload=workload,
        seeds=(0, 1),
    )


def simulated() -> ms.Experiment:
    return experiment(ms.Generated(warmup=1, steps=3, tokens_per_rank=64))


def trained() -> ms.Experiment:
    return experiment(ms.Training(num_layers=1, context=16, batch=1, warmup=1, steps=2))


def arguments_of(job: Job) -> list[str]:
    source, out = str(job.inputs), str(job.out)
    return {
        "run": ["run", f"{source}/simulated.py", "--out", out, "--jobs", "1", "--retry-failed"],
        "run on ranks": ["run", f"{source}/trained.py", "--out", out, "--retry-failed"],
        "tune": ["tune", f"{source}/simulated.py", "--out", out, "--budget", "4", "--jobs", "1"],
        "convert": ["convert", f"{source}/hub", f"{out}/converted"],
        "report": ["report", f"{source}/watched", "--out", f"{out}/report.html"],
    }[job.target]


def command(job: Job, rank: int, clocks: Clocks) -> dict[str, Any]:
    job.out.mkdir(exist_ok=True)
    sys.argv = ["moesys", *arguments_of(job)]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    return {}


def make_inputs(job: Job, rank: int, clocks: Clocks) -> dict[str, Any]:
    """Writes what commands read."""
    drawn("qwen3_moe", EXPERTS).save_pretrained(job.inputs / "hub")
    write_run(job.inputs / "watched", num_steps=12, num_layers=2, num_ranks=2)
    for name in ("simulated", "trained"):
        code = (
            f"import fault_jobs\nimport moesys as ms\n\ndef made() -> ms.Experiment:\n    return fault_jobs.{name}()\n"
        )
        (job.inputs / f"{name}.py").write_text(code)
    return {}


TARGETS = {
    "inputs": make_inputs,
    "loop": train,
    "saves": train,
    "plain": train_in_plain_torch,
    "trainer": train_by_trainer,
}


# --- processes --------------------------------------------------------------------------------------------------------


def serve(handle: int) -> None:
    """Runs the jobs that come through a connection, one after another: sends the ids of their processes, and then rank
    and exit code of each as it ends.
    """
    connection = Connection(handle)
    torch.set_num_threads(1)
    collectives.FAILURE_GRACE_S = GRACE_S
    prepare()
    gc.freeze()
    connection.send("ready")
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        pids: list[int] = []
        for rank in range(job.num_processes):
            pid = os.fork()
            if not pid:
                connection.close()
                end(partial(run, job, rank, pids[0] if pids else 0))
            pids.append(pid)
            os.setpgid(pid, pids[0])
        connection.send(pids)
        for _ in pids:
            pid, status = os.waitpid(-pids[0], 0)
            connection.send((pids.index(pid), os.waitstatus_to_exitcode(status)))


def end(call: Callable[[], None]) -> NoReturn:
    """Calls a function and ends the process, as Python ends a program: threads are waited for, and exit handlers run.
    It does not free what the server has loaded, which takes seconds.
    """
    code: Any = 0
    try:
        call()
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def prepare() -> None:
    """Loads and probes once what every process would."""
    for name in ("compare", "convert_checkpoint", "run", "tune"):
        __import__(f"moesys.lab.commands.{name}")
    for name in ("moesys.hf.convert", "moesys.lab.runs.environment", "transformers.models.qwen3_moe"):
        __import__(name)
    from moesys.balance.run_planner import warm_up

    warm_up()
    with torch.no_grad():
        ms.MoELayer(SHAPE, STRATEGIES["ep"])(torch.zeros(24, SHAPE.hidden_size))


def run(job: Job, rank: int, group: int) -> None:
    """Is a process of the job. Its output goes through pipes, which a full disk does not end."""
    os.setpgid(0, group)
    for handle, name in ((1, "stdout"), (2, "stderr")):
        end, pipe = os.pipe()
        with (job.folder / f"{name}-{rank}").open("wb") as file:
            subprocess.Popen(["cat"], stdin=end, stdout=file, start_new_session=True)
        os.close(end)
        os.dup2(pipe, handle)
        os.close(pipe)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(job.folder / "tmp")
    os.chdir(job.folder)
    struck = job.strike if job.strike and job.strike.rank == rank and job.strike.kind in STRIKES else None
    clocks = Clocks(job, struck)
    CLOCKS.append(clocks)
    if job.target in TRAININGS:
        local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.num_ranks, "LOCAL_WORLD_SIZE": job.num_ranks}
        os.environ |= {name: str(value) for name, value in local.items()}
        # A file outlives all ranks, as a launcher's store does.
        store = dist.FileStore(str(job.folder / "store"), job.num_ranks)
        limit = timedelta(seconds=job.collective_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.num_ranks, timeout=limit)
    sys.addaudithook(clocks.audit)
    result = TARGETS.get(job.target, command)(job, rank, clocks)
    print("RESULT", json.dumps({**result, "ticks": clocks.ticks}), flush=True)
