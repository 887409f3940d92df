"""Hosts in network namespaces: the commands that make them, the relay that delays, and, for root, hosts that are up."""

import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.slow_links import namespaces
from moesys.lab.slow_links.delaying_relay import by_last_byte, relay
from moesys.lab.slow_links.namespaces import in_namespace, leftovers, namespace_name
from moesys.lab.slow_links.shaped_links import LinkPlan, shaped_links

LACKS = namespaces.lacks()
hosts_can_be_made = pytest.mark.skipif(bool(LACKS), reason=LACKS)

PLAN = LinkPlan(("host0", "host1", "host2"), "switch", mbit_per_s=200, latency_us=300)


def qdiscs(plan: LinkPlan) -> list[str]:
    return [" ".join(command[4:]) for command in plan.shape() if command[0] == "tc"]


def test_every_link_is_shaped_both_ways() -> None:
    shaped = [(c[2], c[c.index("dev") + 1]) for c in PLAN.shape() if c[0] == "tc" and "tbf" in c]
    assert sorted(shaped) == sorted([(h, "eth0") for h in PLAN.names] + [("switch", f"up{i}") for i in range(3)])
    assert all("rate 200000kbit burst 100000" in line for line in qdiscs(PLAN))


def test_netem_delays_on_the_way_out_of_the_switch_alone() -> None:
    plan = LinkPlan(PLAN.names, PLAN.switch, PLAN.mbit_per_s, PLAN.latency_us, "netem")
    delayed = [c for c in plan.shape() if "netem" in c]
    assert [c[2] for c in delayed] == ["switch"] * 3
    assert all("300us" in c for c in delayed)
    below = [c for c in plan.shape() if "parent" in c]
    assert [c[c.index("dev") + 1] for c in below] == ["up0", "up1", "up2"]


@pytest.mark.parametrize("delay", ["none", "netem", "relay"])
def test_a_bridge_or_the_relay_joins_the_links(delay: str) -> None:
    plan = LinkPlan(PLAN.names, PLAN.switch, PLAN.mbit_per_s, PLAN.latency_us, delay)  # type: ignore[arg-type]
    on_bridge = [c for c in plan.make() if c[-2:] == ("master", "data")]
    assert len(on_bridge) == (0 if delay == "relay" else 3)
    assert plan.relay()[-4:] == ("300", "up0", "up1", "up2")


def test_a_packet_is_never_larger_than_what_a_link_may_send_at_once() -> None:
    for mbit in (1, 10, 100, 500, 2000, 100_000):
        plan = LinkPlan(PLAN.names, PLAN.switch, mbit)
        for command in plan.shape():
            if "gso_max_size" in command:
                assert 1500 <= int(command[-1]) <= min(65536, max(1500, namespaces.burst_bytes(mbit) // 2))


def test_ranks_live_host_by_host() -> None:
    network = PLAN.network((2, 1, 1))
    assert network.namespace_of_rank == ("host0", "host0", "host1", "host2")
    assert PLAN.network(2).namespace_of_rank == ("host0", "host0", "host1", "host1", "host2", "host2")
    with pytest.raises(ValueError, match=r"ranks_per_host=\[1, 1\] names 2 hosts of 3"):
        PLAN.network((1, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ("alone",)}, "num_hosts=1 must be between 2 and 250"),
        ({"mbit_per_s": 0.5}, r"mbit_per_s=0\.5"),
        ({"latency_us": -1.0}, r"latency_us=-1\.0"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {"names": PLAN.names, "switch": "switch", "mbit_per_s": 100.0, "latency_us": 0.0}
    with pytest.raises(ValueError, match=message):
        LinkPlan(**(fields | changes))  # type: ignore[arg-type]


def test_ranks_need_a_place_each() -> None:
    with pytest.raises(ValueError, match="places for 3 ranks but num_ranks=2"):
        LocalRanks(2, network=PLAN.network(1))


def test_only_what_dead_processes_made_is_left_over() -> None:
    mine = namespace_name("host0")
    ended = subprocess.Popen(["true"])
    ended.wait()
    reused = f"moesys-{os.getpid()}-1-host0"
    names = [mine, f"moesys-{ended.pid}-5-switch", reused, "moesys-x-5-switch", "somebody-else"]
    assert leftovers(names) == [f"moesys-{ended.pid}-5-switch", reused]


def test_other_systems_and_users_are_told_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is darwin; use a Linux machine" in namespaces.lacks()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert namespaces.lacks() == "ip and tc of iproute2 not found; install iproute2"
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "run the same command as root" in namespaces.lacks()
    with pytest.raises(RuntimeError, match="only root can make network namespaces"), shaped_links(2, 100):
        raise AssertionError


# --- the relay, between sockets of this process ------------------------------------------------------------


class Relaying:
    """A relay between the near ends of three socket pairs; ``ends`` are the far ones."""

    def __init__(self, latency_us: float) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
        self.ends = [far for _, far in pairs]
        self.ports = [near for near, _ in pairs]
        for end in self.ends:
            end.settimeout(10)
        self.stop_r, self.stop_w = os.pipe()
        self.passed: list[int] = []
        self.thread = threading.Thread(
            target=lambda: self.passed.append(relay(self.ports, by_last_byte(3), latency_us, self.stop_r))
        )

    def __enter__(self) -> "Relaying":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.stop_w)
        self.thread.join(10)
        os.close(self.stop_r)
        for end in (*self.ends, *self.ports):
            end.close()


def frame(destination: int, payload: bytes) -> bytes:
    return bytes(10) + bytes((2, 0, 0, 0, 0, destination + 1)) + payload


def test_the_relay_holds_frames_and_hands_them_on_as_they_came() -> None:
    sent = [frame(1 + index % 2, random.Random(index).randbytes(1 + 37 * index)) for index in range(8)]
    with Relaying(latency_us=20_000) as between:
        begin_s = time.monotonic()
        for data in sent:
            between.ends[0].send(data)
        for place in (1, 2):
            for data in sent[place - 1 :: 2]:
                assert between.ends[place].recv(1 << 17) == data
                assert time.monotonic() - begin_s >= 0.02
    assert between.passed == [8]
    assert not between.thread.is_alive()


def test_frames_do_not_wait_for_one_another() -> None:
    with Relaying(latency_us=300_000) as between:
        begin_s = time.monotonic()
        for _ in range(8):
            between.ends[0].send(frame(1, bytes(6_000)))
        for _ in range(8):
            assert len(between.ends[1].recv(1 << 17)) == len(frame(1, bytes(6_000)))
        taken_s = time.monotonic() - begin_s
    # One at a time they would take 2.4 s.
    assert 0.3 <= taken_s < 1.5


def test_the_relay_floods_and_drops_as_a_switch_does() -> None:
    everyone = bytes(10) + b"\xff" * 6 + b"who has"
    with Relaying(latency_us=0) as between:
        between.ends[1].send(everyone)
        assert between.ends[0].recv(99) == between.ends[2].recv(99) == everyone
        between.ends[1].send(frame(7, b"nobody"))
        between.ends[1].send(frame(1, b"myself"))
        between.ends[1].send(frame(0, b"after"))
        assert between.ends[0].recv(99) == frame(0, b"after")


# --- hosts, for root ---------------------------------------------------------------------------------------


def made_namespaces(pid: int) -> list[str]:
    folder = Path("/run/netns")
    return [path.name for path in folder.iterdir() if path.name.startswith(f"moesys-{pid}-")]


def exchange(num_bytes: int, repeats: int) -> tuple[float, float]:
    """(sum of what was received, milliseconds of the fastest all-to-all)."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    values = torch.full((num_ranks, num_bytes // 4), float(rank))
    received, taken_ms = torch.empty_like(values), []
    for _ in range(repeats):
        dist.barrier()
        begin_s = time.perf_counter()
        dist.all_to_all_single(received, values)
        taken_ms.append((time.perf_counter() - begin_s) * 1e3)
    return received.double().mean().item(), min(taken_ms)


@hosts_can_be_made
def test_bytes_of_ranks_take_as_long_as_the_links_allow() -> None:
    num_bytes = 250_000
    with shaped_links(2, 100) as links, LocalRanks(2, network=links.plan.network(1)) as ranks:
        assert links.plan.delay == "none"
        slow = ranks.run(exchange, num_bytes, 2)
        before = links.sent_bytes()
        links.reshape(1000)
        fast = ranks.run(exchange, num_bytes, 5)
        sent = [after - earlier for earlier, after in zip(before, links.sent_bytes(), strict=True)]
    assert [mean for mean, _ in (*slow, *fast)] == [0.5] * 4
    # Less what a link lets through at once after a pause.
    least_ms = (num_bytes - namespaces.burst_bytes(100)) * 8 / 100e6 * 1e3
    assert all(taken_ms >= least_ms for _, taken_ms in slow)
    assert max(taken_ms for _, taken_ms in fast) < min(taken_ms for _, taken_ms in slow)
    assert all(num_bytes * 5 <= bytes_sent <= num_bytes * 5 * 1.2 + 1e5 for bytes_sent in sent)
    assert made_namespaces(os.getpid()) == []


@hosts_can_be_made
def test_a_message_takes_the_declared_latency_each_way() -> None:
    with shaped_links(2, 500, latency_us=5000) as links, LocalRanks(2, network=links.plan.network(1)) as ranks:
        assert links.plan.delay in ("netem", "relay")
        assert all(taken_ms >= 5.0 for _, taken_ms in ranks.run(exchange, 64, 3))


def stay_inside() -> None:
    with shaped_links(2, 100, latency_us=100):
        print("up", flush=True)
        time.sleep(60)


@hosts_can_be_made
def test_what_a_killed_process_leaves_the_next_one_removes() -> None:
    script = "from test_shaped_links import stay_inside; stay_inside()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.kill()
    left = made_namespaces(child.pid)
    assert len(left) == 3
    assert set(left) <= set(namespaces.remove_leftovers())
    assert made_namespaces(child.pid) == []


@hosts_can_be_made
def test_a_namespace_that_is_not_there_cannot_be_entered() -> None:
    with pytest.raises(OSError, match="no-such-namespace"):
        in_namespace("no-such-namespace", time.monotonic)
