"""The command line of the benchmarks: ``python -m benchmarks NAME`` in the root of a checkout.

``--help`` does not wait for torch: the module of a command is imported when the command is called.
"""

from __future__ import annotations

from moesys.lab.commands.options import CommandPage, command_line
from moesys.lab.ranks.process_start import sigterm_as_ctrl_c

COMPUTING, LINKS = "Computing, measured here", "Links, measured here"

PAGES = {
    "layer": CommandPage(
        "benchmarks.one_layer:bench_layer",
        COMPUTING,
        "Compare one rank of MoELayer with transformers' blocks.",
        "Exit code 1: an output is wrong.",
        ("python -m benchmarks layer --shape qwen3-30b --dtype float32 --out found",),
    ),
    "kernels": CommandPage(
        "benchmarks.kernels.command:bench_kernels",
        COMPUTING,
        "Check, time, tune or compile the kernels of one GPU.",
        "Other implementations are timed beside them.\n\nExit code 1: a check fails.",
        (
            "python -m benchmarks kernels --size olmoe,30b --routing zipf --out found",
            "python -m benchmarks kernels --aot --size olmoe",
        ),
    ),
    "models": CommandPage(
        "benchmarks.whole_models:bench_models",
        COMPUTING,
        "Train transformers' models on ranks, by strategy.",
        "Transformers' own all_to_all is timed beside them.\n\nExit code 1: a gradient differs.",
        ("python -m benchmarks models --model olmoe --routing skewed --sequences 2",),
    ),
    "hosts": CommandPage(
        "benchmarks.hosts:bench_hosts",
        COMPUTING,
        "Train in torchtitan or Megatron-Core, by strategy.",
        "The trainer's own experts are timed beside them; `make hosts` installs both trainers.\n\n"
        "Exit code 1: a gradient differs.",
        ("python -m benchmarks hosts --out found", "python -m benchmarks hosts --routing skewed --ranks 4 --share 0.5"),
    ),
    "optimizers": CommandPage(
        "benchmarks.optimizers:bench_optimizers",
        COMPUTING,
        "Time steps of Muon and of AdamW on ranks.",
        "Muon that each rank computes as a whole is timed beside them.",
        ("python -m benchmarks optimizers --ranks 4 --out found",),
    ),
    "simulate": CommandPage(
        "benchmarks.simulator_speed:bench_simulate",
        COMPUTING,
        "Time the simulator.",
        "The cases are one layer on 32 ranks, and 32 layers on up to 1,024 ranks.",
        ("python -m benchmarks simulate --most-ranks 128",),
    ),
    "leaderboard": CommandPage(
        "benchmarks.leaderboard.command:bench_leaderboard",
        COMPUTING,
        "Rank all planners by the simulated time of a layer.",
        "The planners run on recorded and generated routing. The default settings take about an hour on one core. "
        "A planner of yours is a class that extends ms.Balance or ms.Split (docs/planners.md).",
        (
            "python -m benchmarks leaderboard --quick --planner my_planners:Heaviest",
            "python -m benchmarks leaderboard --trace run.npz --model mixtral-8x7b",
        ),
    ),
    "planner-scale": CommandPage(
        "benchmarks.planner_scale:bench_planner_scale",
        COMPUTING,
        "Time planners and splits for 8 to 1,024 ranks.",
        "Which planner is best is the question of the leaderboard.",
        ("python -m benchmarks planner-scale --seeds 1 --out found",),
    ),
    "certificates": CommandPage(
        "benchmarks.certificates:bench_certificates",
        COMPUTING,
        "Compare Greedy's layers with their bounds.",
        "No layout with as many slots can take less time than a bound. LAER-MoE's planner is simulated beside it.",
        ("python -m benchmarks certificates --seeds 1 --out found",),
    ),
    "planners": CommandPage(
        "benchmarks.planners:bench_planners",
        COMPUTING,
        "Test Greedy for regressions on drawn loads.",
        "300 sequences of 32 micro-batches are judged by the closed form by which Greedy judges its own candidates, so "
        "this is no evidence against others. A run that was stopped goes on with what its folder has, by default "
        "planners; where only Greedy has changed, fixed planners are not scored again.",
        ("python -m benchmarks planners --sequences 60 --out found",),
    ),
    "record-routing": CommandPage(
        "benchmarks.record_routing:bench_record_routing",
        COMPUTING,
        "Record the routing that the leaderboard replays.",
        "It trains five small models, in six minutes on one core.",
        ("python -m benchmarks record-routing recorded",),
    ),
    "calibration-check": CommandPage(
        "benchmarks.calibration_check:bench_calibration_check",
        COMPUTING,
        "Compare measured steps with those of a calibration.",
        "Steps of layers and of small models on CPU ranks are measured, and simulated with the calibration.",
        (
            "moesys calibrate --ranks 2 --out here",
            "python -m benchmarks calibration-check here/cluster.toml --out found",
        ),
    ),
    "overlap": CommandPage(
        "benchmarks.paced_overlap:bench_overlap",
        LINKS,
        "Compare overlapped and sequential steps on paced links.",
        "Exit code 1: a bit differs.",
        (
            "python -m benchmarks overlap --part chunks --out found",
            "python -m benchmarks overlap --part mega --size qwen3-30b --gb-per-s 100",
        ),
    ),
    "shaped": CommandPage(
        "benchmarks.shaped.bench:bench_shaped",
        LINKS,
        "Compare measured with simulated steps between hosts.",
        "Hosts are network namespaces of this machine with slow links, which needs Linux and root. All cases take "
        "about ten minutes on 2 cores. The case models, training steps of transformers' small models, takes half an "
        "hour.\n\nExit code 1: a result is wrong.",
        (
            "python -m benchmarks shaped --case overlap --hosts 2 --mbit 100 --mbit 500",
            "python -m benchmarks shaped --case models --out found",
        ),
    ),
}

app = command_line("benchmarks", "Measure on this machine.", PAGES)


def main() -> None:
    """Runs a command; SIGTERM ends it as Ctrl-C does."""
    with sigterm_as_ctrl_c():
        app()


if __name__ == "__main__":
    main()
