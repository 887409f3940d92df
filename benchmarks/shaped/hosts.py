"""Hosts on one machine: network namespaces joined by a switch, each behind a link of declared bandwidth and latency.

The link of a host is a veth pair that ``tbf`` shapes in both directions. A bridge joins the links; where they have a
latency, a relay takes its place and holds each frame for that time (``delaying_relay``). A host may have a fixed share
of the processor (``processor_shares``).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.shaped import delaying_relay
from benchmarks.shaped.processor_shares import join, leftovers, own_name, processor_shares
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts
from moesys.lab.ranks.process import STORE_ADDRESS
from moesys.torch_private import default_store

_INTERFACE = "eth0"
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
# The kernel's limit for a packet that is not segmented yet, and for one that is.
_LARGEST_PACKET, _MTU = 65536, 1500
# Ranks load these modules once, together, before they share a processor.
_PRELOAD = ("benchmarks.shaped.models",)
# Senders fill a link, keep filling it after a pause, and keep ten milliseconds of it queued, because they may have to
# wait as long for a core. Every kernel has reno.
_TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_pacing_ss_ratio": "1000",
    "tcp_pacing_ca_ratio": "1000",
}
# Ranks keep the memory that they free; otherwise some steps would wait for pages.
_KEEPING_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}

Command = tuple[str, ...]


@dataclass(frozen=True)
class Hosts:
    """Hosts and their links.

    Attributes:
        names: the namespaces of the hosts.
        switch: the namespace of the switch.
        latency_us: the time from one host to another.
        shares: the control group of each host; empty if hosts compete for the processor.
    """

    names: tuple[str, ...]
    switch: str
    latency_us: float = 0.0
    shares: tuple[Path, ...] = ()

    def setup_commands(self) -> list[Command]:
        """Returns the commands that make namespaces, links and addresses, without limits of bandwidth."""
        commands: list[Command] = [("ip", "netns", "add", self.switch)]
        joined: Command = ()
        if not self.latency_us:
            joined = ("master", "data")
            commands += [
                ("ip", "-n", self.switch, "link", "add", "data", "type", "bridge"),
                ("ip", "-n", self.switch, "link", "set", "data", "up"),
            ]
        for place, (name, port) in enumerate(zip(self.names, self._ports, strict=True), 1):
            ends = (port, "type", "veth", "peer", "name", _INTERFACE, "netns", name)
            commands += [
                ("ip", "netns", "add", name),
                ("ip", "-n", self.switch, "link", "add", *ends, "address", f"02:00:00:00:00:{place:02x}"),
                ("ip", "-n", name, "addr", "add", f"198.18.0.{place}/24", "dev", _INTERFACE),
                ("ip", "-n", name, "link", "set", "lo", "up"),
                ("ip", "-n", name, "link", "set", _INTERFACE, "up"),
                ("ip", "-n", self.switch, "link", "set", port, *joined, "up"),
            ]
        return commands

    def shape_commands(self, mbit_per_s: float) -> list[Command]:
        """Returns the commands that give each link a bandwidth each way, headers included. Connections stay."""
        # The kernel would segment a packet that is larger than a burst in software, at the cost of the ranks.
        packet = str(max(_MTU, min(_LARGEST_PACKET, burst_bytes(mbit_per_s) // 2)))
        ends = [(name, _INTERFACE) for name in self.names] + [(self.switch, port) for port in self._ports]
        return [
            command
            for namespace, interface in ends
            for command in (
                ("ip", "-n", namespace, "link", "set", interface, "gso_max_size", packet),
                tbf_command(namespace, interface, mbit_per_s),
            )
        ]

    def relay_command(self) -> Command:
        program = (sys.executable, "-I", delaying_relay.__file__, f"{self.latency_us:g}")
        return ("ip", "netns", "exec", self.switch, *program, *self._ports)

    @property
    def _ports(self) -> tuple[str, ...]:
        """The switch's ends of the links."""
        return tuple(f"up{host}" for host in range(len(self.names)))


@contextmanager
def linked_hosts(
    num_hosts: int, mbit_per_s: float, latency_us: float = 0.0, *, cpus_per_host: float | None = None
) -> Iterator[Hosts]:
    """Makes hosts for the time of the block, where ``lacks_hosts`` is "". What a killed process has left behind is
    removed by the next call.

    Args:
        mbit_per_s: the bandwidth of each link, in each direction.
        latency_us: the time from one host to another.
        cpus_per_host: the processors that the ranks of a host may use; None if hosts compete for them.
    """
    hosts = Hosts(tuple(own_name(f"host{host}") for host in range(num_hosts)), own_name("switch"), latency_us)
    remove_leftovers()
    with ExitStack() as opened:
        for name in (*hosts.names, hosts.switch):
            opened.callback(_remove_namespace, name)
        if cpus_per_host is not None:
            hosts = replace(hosts, shares=opened.enter_context(processor_shares(hosts.names, cpus_per_host)))
        run_commands([*hosts.setup_commands(), *hosts.shape_commands(mbit_per_s)])
        if latency_us:
            relay = subprocess.Popen(hosts.relay_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            # At the end this closes the stdin of the relay, which then ends.
            opened.enter_context(relay)
            if not (relay.stdout and relay.stdout.readline().strip() == "ready"):
                raise RuntimeError(f"the delaying relay did not start; {' '.join(hosts.relay_command())} says why")
        yield hosts


@contextmanager
def ranks_on(hosts: Hosts, ranks_per_host: int = 1) -> Iterator[LocalRanks]:
    """Starts ranks inside the hosts, numbered host by host."""
    num_ranks, timeouts = len(hosts.names) * ranks_per_host, RankTimeouts(run_s=600.0, collective_s=300.0)
    with ExitStack() as opened:
        ranks = LocalRanks(num_ranks, timeouts=timeouts, environment=_KEEPING_MEMORY, preload=_PRELOAD)
        opened.enter_context(ranks)
        port = ranks.run(enter_host, hosts, ranks_per_host)[0]
        opened.enter_context(_store_in(hosts.names, port))
        yield ranks


@contextmanager
def _store_in(names: Sequence[str], port: int) -> Iterator[None]:
    """Lets processes in the namespaces ``names`` connect to the store, which listens at ``port`` outside."""

    def listen(name: str) -> socket.socket:
        enter_namespace(name)
        return socket.create_server((STORE_ADDRESS, port))

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        store_reader, store_writer = await asyncio.open_connection(STORE_ADDRESS, port)
        await asyncio.gather(_copy(reader, store_writer), _copy(store_reader, writer))

    async def serve(sockets: Sequence[socket.socket]) -> None:
        servers = [await asyncio.start_server(forward, sock=sock) for sock in sockets]
        try:
            await asyncio.gather(*(server.serve_forever() for server in servers))
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    # Another thread enters the namespaces, so that this one stays outside. A socket stays in its namespace.
    with ThreadPoolExecutor(1) as inside:
        sockets = list(inside.map(listen, names))
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve(sockets))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def enter_host(hosts: Hosts, ranks_per_host: int) -> int:
    """Moves the calling rank into its host, where its later process groups connect; its connection to the store, which
    it has already, stays outside. Returns the port of the store.
    """
    host = dist.get_rank() // ranks_per_host
    enter_namespace(hosts.names[host])
    for name, value in _TCP.items():
        (Path("/proc/sys/net/ipv4") / name).write_text(value)
    if hosts.shares:
        join(hosts.shares[host])
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
    store: Any = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    port: int = store.port
    return port


def enter_namespace(name: str) -> None:
    """Moves the calling thread, and threads that it starts, into a namespace; existing sockets stay where they are.

    Raises OSError if there is no such namespace or entering it is not allowed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NAMESPACES / name).open("rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter the network namespace {name}: {os.strerror(error)}; be root")


def lacks_hosts() -> str:
    """Returns why no hosts with shaped links can be made here, and what to do; "" where they can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}; use a Linux machine"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} of iproute2 not found; install iproute2"
    if os.geteuid():
        return "only root can make network namespaces; run the same command as root"
    name = own_name("probe")
    try:
        run_commands([("ip", "netns", "add", name), tbf_command(name, "lo", 100.0)])
    except OSError as error:
        return f"this kernel or container allows no shaped network namespace ({error}); use a machine of your own"
    finally:
        _remove_namespace(name)
    return ""


def run_commands(commands: Sequence[Command]) -> None:
    """Runs commands one after another. Raises OSError for the first that fails."""
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            output = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
            raise OSError(f"{' '.join(command)}: {output}")


def burst_bytes(mbit_per_s: float) -> int:
    """Returns what a link may send at once after a pause: four milliseconds' worth, so that a late timer costs no
    bandwidth and packets may be large. Each packet costs processor time that the network card of a real host spends.
    """
    return max(4096, round(mbit_per_s * 500))


def tbf_command(namespace: str, interface: str, mbit_per_s: float) -> Command:
    """Returns the command that limits what leaves ``interface``. The queue is so long that nothing is lost."""
    rate = ("rate", f"{round(mbit_per_s * 1000)}kbit", "burst", str(burst_bytes(mbit_per_s)), "limit", "64mb")
    return ("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", *rate)


def remove_leftovers() -> list[str]:
    """Removes the namespaces of dead processes and returns their names."""
    names = leftovers(_NAMESPACES.iterdir()) if _NAMESPACES.is_dir() else []
    for name in names:
        _remove_namespace(name)
    return names


def _remove_namespace(name: str) -> None:
    """Removes a namespace, if it is there; its interfaces end with it, once no process is in it."""
    subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)
