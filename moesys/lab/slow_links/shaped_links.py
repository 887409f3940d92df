"""Makes hosts on one machine: network namespaces joined by a switch, each behind a link of declared speed and latency.

A host's link is a veth pair, shaped in both directions by ``tbf``. What leaves one host for another is held for the
latency once, by ``netem`` on its way out of the switch, or, where the kernel has none, by a relay that is the switch
(``delaying_relay``). A second network, which nothing shapes, leads to the store at which ranks meet. A host may have a
share of the processor that nobody adds to and nobody takes from (``processor_shares``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moesys.lab.slow_links import delaying_relay
from moesys.lab.slow_links.namespaces import (
    Command,
    RankNetwork,
    burst_bytes,
    has_netem,
    in_namespace,
    lacks,
    namespace_name,
    remove_leftovers,
    remove_namespace,
    run_commands,
    tbf_command,
)
from moesys.lab.slow_links.processor_shares import processor_shares

INTERFACE = "eth0"
_STORE_ADDRESS = "198.19.0.254"
# The kernel's own limit of a packet that its stack has not cut yet.
_LARGEST_PACKET = 65536
_MTU = 1500

_TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_pacing_ss_ratio": "1000",
    "tcp_pacing_ca_ratio": "1000",
}

Delay = Literal["none", "netem", "relay"]


@dataclass(frozen=True)
class LinkPlan:
    """Hosts and their links, as commands: a pure function of its fields.

    names: of the hosts' namespaces, [hosts]; ``switch``: of the one that joins them.
    mbit_per_s: of each host's link, each way, headers included.
    latency_us: from host to host, one way.
    delay: what holds packets for the latency.
    cpus_per_host: processors that the ranks of a host have together, their communication included; None: as many as
        they can get. ``shares``: the control groups that see to it, [hosts].
    """

    names: tuple[str, ...]
    switch: str
    mbit_per_s: float
    latency_us: float = 0.0
    delay: Delay = "none"
    cpus_per_host: float | None = None
    shares: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if not 2 <= len(self.names) <= 250:
            raise ValueError(f"num_hosts={len(self.names)} must be between 2 and 250")
        if not 1 <= self.mbit_per_s <= 100_000:
            raise ValueError(f"mbit_per_s={self.mbit_per_s} must be between 1 and 100000")
        if not 0 <= self.latency_us <= 1e6:
            raise ValueError(f"latency_us={self.latency_us} must be between 0 and 1000000")
        if self.cpus_per_host is not None and not 0.01 <= self.cpus_per_host <= 1000:
            raise ValueError(f"cpus_per_host={self.cpus_per_host} must be between 0.01 and 1000, or None")

    @property
    def ports(self) -> tuple[str, ...]:
        """The switch's ends of the hosts' links."""
        return tuple(f"up{host}" for host in range(len(self.names)))

    def make(self) -> list[Command]:
        """Namespaces, links and addresses; nothing is shaped yet."""
        commands = [
            ("ip", "netns", "add", self.switch),
            *(("ip", "-n", self.switch, *rest) for rest in (_up("lo"), _bridge("meet"), _up("meet"))),
            ("ip", "-n", self.switch, "addr", "add", f"{_STORE_ADDRESS}/24", "dev", "meet"),
        ]
        if self.delay != "relay":
            commands += [("ip", "-n", self.switch, *rest) for rest in (_bridge("data"), _up("data"))]
        for host, name in enumerate(self.names):
            place = host + 1
            commands += [
                ("ip", "netns", "add", name),
                ("ip", "-n", name, *_up("lo")),
                self._cable(f"up{host}", INTERFACE, name, f"02:00:00:00:00:{place:02x}"),
                self._cable(f"meet{host}", "meet", name, f"02:00:00:00:01:{place:02x}"),
                ("ip", "-n", name, "addr", "add", f"198.18.0.{place}/24", "dev", INTERFACE),
                ("ip", "-n", name, "addr", "add", f"198.19.0.{place}/24", "dev", "meet"),
                ("ip", "-n", name, *_up(INTERFACE)),
                ("ip", "-n", name, *_up("meet")),
                ("ip", "-n", self.switch, "link", "set", f"meet{host}", "master", "meet", "up"),
                ("ip", "-n", self.switch, *_up(f"up{host}")),
            ]
            if self.delay != "relay":
                commands.append(("ip", "-n", self.switch, "link", "set", f"up{host}", "master", "data"))
        return commands

    def shape(self) -> list[Command]:
        """The links' bandwidth and latency; over links that are shaped already, anew."""
        # Larger than a burst, the kernel would cut a packet in software, at the cost of the ranks.
        packet = str(max(_MTU, min(_LARGEST_PACKET, burst_bytes(self.mbit_per_s) // 2)))
        commands: list[Command] = []
        for name, port in zip(self.names, self.ports, strict=True):
            commands += [
                ("ip", "-n", name, "link", "set", INTERFACE, "gso_max_size", packet),
                ("ip", "-n", self.switch, "link", "set", port, "gso_max_size", packet),
                tbf_command(name, INTERFACE, self.mbit_per_s),
            ]
            if self.delay == "netem":
                delay = ("netem", "delay", f"{self.latency_us:g}us", "limit", "100000")
                commands.append(
                    ("tc", "-n", self.switch, "qdisc", "replace", "dev", port, "root", "handle", "1:", *delay)
                )
                commands.append(tbf_command(self.switch, port, self.mbit_per_s, ("parent", "1:1")))
            else:
                commands.append(tbf_command(self.switch, port, self.mbit_per_s))
        return commands

    def relay(self) -> Command:
        """What starts the relay, in the switch's namespace."""
        program = (sys.executable, "-I", delaying_relay.__file__, f"{self.latency_us:g}")
        return ("ip", "netns", "exec", self.switch, *program, *self.ports)

    def network(self, ranks_per_host: int | Sequence[int]) -> RankNetwork:
        """Where ranks live, numbered host by host. Raises ValueError for other than one number a host."""
        sizes = [ranks_per_host] * len(self.names) if isinstance(ranks_per_host, int) else list(ranks_per_host)
        if len(sizes) != len(self.names):
            raise ValueError(f"ranks_per_host={sizes} names {len(sizes)} hosts of {len(self.names)}")
        homes = tuple(name for name, size in zip(self.names, sizes, strict=True) for _ in range(size))
        share_of = dict(zip(self.names, self.shares, strict=False))
        shares = tuple(share_of[home] for home in homes if home in share_of)
        return RankNetwork(homes, INTERFACE, self.switch, _STORE_ADDRESS, shares)

    def _cable(self, here: str, there: str, name: str, address: str) -> Command:
        ends = (here, "type", "veth", "peer", "name", there, "netns", name, "address", address)
        return ("ip", "-n", self.switch, "link", "add", *ends)


class ShapedLinks:
    """Hosts that are up. ``plan`` says what they are; ``delay`` of it what gives them their latency."""

    def __init__(self, plan: LinkPlan) -> None:
        self.plan = plan

    def reshape(self, mbit_per_s: float) -> None:
        """Gives all links another bandwidth, under the connections that they carry."""
        self.plan = replace(self.plan, mbit_per_s=mbit_per_s)
        run_commands(self.plan.shape())

    def sent_bytes(self) -> list[int]:
        """What each host has sent over its link so far, headers included, [hosts]."""
        sent = []
        for name in self.plan.names:
            command = ["ip", "-n", name, "-s", "-j", "link", "show", "dev", INTERFACE]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            sent.append(int(json.loads(said)[0]["stats64"]["tx"]["bytes"]))
        return sent


@contextmanager
def shaped_links(
    num_hosts: int, mbit_per_s: float, latency_us: float = 0.0, *, cpus_per_host: float | None = None
) -> Iterator[ShapedLinks]:
    """``num_hosts`` hosts behind links of ``mbit_per_s`` 10^6 bits a second each way, ``latency_us`` from each other,
    each with ``cpus_per_host`` of this machine's processors, or with as many as it can get.

    They end with the block. What a killed process has left, the next one that comes here removes.

    Raises ValueError for numbers out of range, and RuntimeError where this machine cannot do it, with the way out.
    """
    plan = LinkPlan(
        names=tuple(namespace_name(f"host{host}") for host in range(num_hosts)),
        switch=namespace_name("switch"),
        mbit_per_s=mbit_per_s,
        latency_us=latency_us,
        cpus_per_host=cpus_per_host,
    )
    if reason := lacks():
        raise RuntimeError(f"shaped links cannot be made: {reason}")
    remove_leftovers()
    with ExitStack() as opened:
        for name in (*plan.names, plan.switch):
            opened.callback(remove_namespace, name)
        if latency_us:
            plan = replace(plan, delay=_delay(plan.switch))
        if cpus_per_host is not None:
            plan = replace(plan, shares=opened.enter_context(processor_shares(plan.names, cpus_per_host)))
        run_commands([*plan.make(), *plan.shape()])
        for name in plan.names:
            in_namespace(name, _settle_tcp)
        if plan.delay == "relay":
            opened.enter_context(_relaying(plan))
        yield ShapedLinks(plan)


def _settle_tcp() -> None:
    """For the hosts of the calling thread: senders that fill a link, keep filling it after a pause, and keep ten
    milliseconds of it queued, as they may have to wait for a core for some. Reno is in every kernel.
    """
    for name, value in _TCP.items():
        (Path("/proc/sys/net/ipv4") / name).write_text(value)


def _delay(switch: str) -> Delay:
    run_commands([("ip", "netns", "add", switch)])
    try:
        return "netem" if has_netem(switch) else "relay"
    finally:
        remove_namespace(switch)


@contextmanager
def _relaying(plan: LinkPlan) -> Iterator[None]:
    relay = subprocess.Popen(plan.relay(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert relay.stdin is not None
    assert relay.stdout is not None
    try:
        if relay.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the delaying relay did not start; {' '.join(plan.relay())} says why")
        yield
    finally:
        relay.stdin.close()
        relay.wait()
        relay.stdout.close()


def _up(interface: str) -> tuple[str, ...]:
    return ("link", "set", interface, "up")


def _bridge(name: str) -> tuple[str, ...]:
    return ("link", "add", name, "type", "bridge")
