"""Hosts in network namespaces: the commands that make them, the relay that delays, and, for root, hosts that are up."""

import gc
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_processor_shares import killed_inside

from benchmarks.shaped import hosts
from benchmarks.shaped.delaying_relay import by_last_byte, relay
from benchmarks.shaped.hosts import Hosts, lacks_hosts, linked_hosts, ranks_on
from benchmarks.shaped.processor_shares import leftovers, own_name
from moesys.torch_private import default_store

LACKS = lacks_hosts()
hosts_can_be_made = pytest.mark.skipif(bool(LACKS), reason=LACKS)

NAMES = ("host0", "host1", "host2")
HOSTS = Hosts(NAMES, "switch")


def test_every_link_is_shaped_both_ways_and_no_packet_is_larger_than_what_it_may_send_at_once() -> None:
    shaped = [command for command in HOSTS.shape_commands(200) if "tbf" in command]
    ends = [(command[2], command[command.index("dev") + 1]) for command in shaped]
    assert sorted(ends) == sorted([(name, "eth0") for name in NAMES] + [("switch", f"up{i}") for i in range(3)])
    assert all("rate 200000kbit burst 100000" in " ".join(command) for command in shaped)
    for mbit in (1, 10, 100, 500, 2000, 100_000):
        sizes = [int(command[-1]) for command in HOSTS.shape_commands(mbit) if "gso_max_size" in command]
        assert 1500 <= min(sizes) <= max(sizes) <= min(65536, max(1500, hosts.burst_bytes(mbit) // 2))
    for latency_us in (0.0, 300.0):
        joined = Hosts(NAMES, "switch", latency_us)
        on_bridge = [command for command in joined.setup_commands() if command[-3:-1] == ("master", "data")]
        assert len(on_bridge) == (0 if latency_us else 3)
        assert joined.relay_command()[-4:] == (f"{latency_us:g}", "up0", "up1", "up2")


def test_only_what_dead_processes_made_is_left_over() -> None:
    mine = own_name("host0")
    ended = subprocess.Popen(["true"])
    ended.wait()
    reused = f"moesys-{os.getpid()}-1-host0"
    names = [mine, f"moesys-{ended.pid}-5-switch", reused, "moesys-x-5-switch", "somebody-else"]
    assert leftovers(map(Path, names)) == sorted([f"moesys-{ended.pid}-5-switch", reused])


def test_other_systems_and_users_are_told_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is darwin; use a Linux machine" in lacks_hosts()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert lacks_hosts() == "ip and tc of iproute2 not found; install iproute2"
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "run the same command as root" in lacks_hosts()


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


def sent_bytes(of: Hosts) -> list[int]:
    """Returns what each host has sent over its link so far, headers included."""
    sent = []
    for name in of.names:
        command = ["ip", "-n", name, "-s", "-j", "link", "show", "dev", "eth0"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        sent.append(int(json.loads(output)[0]["stats64"]["tx"]["bytes"]))
    return sent


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


@pytest.mark.slow
@hosts_can_be_made
def test_bytes_of_ranks_take_as_long_as_the_links_allow() -> None:
    num_bytes = 250_000
    with linked_hosts(2, 100) as pair, ranks_on(pair) as ranks:
        slow = ranks.run(exchange, num_bytes, 2)
        before = sent_bytes(pair)
        hosts.run_commands(pair.shape_commands(1000))
        fast = ranks.run(exchange, num_bytes, 5)
        sent = [after - earlier for earlier, after in zip(before, sent_bytes(pair), strict=True)]
    assert [mean for mean, _ in (*slow, *fast)] == [0.5] * 4
    # Less what a link lets through at once after a pause.
    least_ms = (num_bytes - hosts.burst_bytes(100)) * 8 / 100e6 * 1e3
    assert all(taken_ms >= least_ms for _, taken_ms in slow)
    assert max(taken_ms for _, taken_ms in fast) < min(taken_ms for _, taken_ms in slow)
    assert all(num_bytes * 5 <= bytes_sent <= num_bytes * 5 * 1.2 + 1e5 for bytes_sent in sent)
    assert made_namespaces(os.getpid()) == []


def rank_and_address() -> tuple[int, str]:
    command = ["ip", "-4", "-o", "addr", "show", "dev", "eth0"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dist.get_rank(), output.split()[3]


CONNECTED: list[Any] = []


def connect_again() -> bool:
    """Connects to the store from inside the host, and stays connected."""
    store: Any = default_store()
    CONNECTED.append(store.clone())
    return bool(CONNECTED[-1].check([]))


@hosts_can_be_made
def test_ranks_live_host_by_host_their_messages_take_the_latency_and_their_connections_end_with_them() -> None:
    with linked_hosts(2, 500, latency_us=5000) as pair, ranks_on(pair, ranks_per_host=2) as ranks:
        found = ranks.run(rank_and_address)
        assert all(taken_ms >= 5.0 for _, taken_ms in ranks.run(exchange, 64, 3))
        assert all(ranks.run(connect_again))
    assert found == [(rank, f"198.18.0.{1 + rank // 2}/24") for rank in range(4)]
    # Tasks and sockets that are left would be told of here, which is an error.
    gc.collect()


def stay_inside() -> None:
    with linked_hosts(2, 100, latency_us=100):
        print("up", flush=True)
        time.sleep(60)


@hosts_can_be_made
def test_what_a_killed_process_leaves_the_next_one_removes() -> None:
    pid = killed_inside("test_shaped_hosts")
    left = made_namespaces(pid)
    assert len(left) == 3
    assert set(left) <= set(hosts.remove_leftovers())
    assert made_namespaces(pid) == []
