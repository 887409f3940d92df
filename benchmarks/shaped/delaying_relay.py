"""A switch between network interfaces that holds each frame for a fixed time, as `netem` does.

Run as ``python -I delaying_relay.py LATENCY_US INTERFACE...``, it forwards a frame to the interface that the
destination address of the frame names. It prints ``ready`` once it listens, and ends when its stdin is closed, hence
with the process that started it. It needs Linux and root.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

# Constants of <linux/if_packet.h>, <linux/if_ether.h> and <asm-generic/socket.h> that the socket module lacks.
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_ETH_P_ALL = 3
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
# The virtio-net header says how the kernel would have segmented and checksummed a frame; it is passed on unchanged.
_VNET_HEADER_BYTES = 10
# 64 KiB of payload, and headers.
_LARGEST_FRAME = _VNET_HEADER_BYTES + (1 << 17)
# This holds the frames in flight at 2 Gbit/s for a quarter of a second.
_BUFFER_BYTES = 1 << 26
# The number of frames that are read before due frames are sent.
_BATCH = 64

Route = Callable[[bytes, int], Sequence[int]]


def relay(ports: Sequence[socket.socket], route: Route, latency_us: float, stop_fd: int) -> int:
    """Passes frames between ``ports`` until ``stop_fd`` can be read or is closed; returns the number of frames.

    A frame for which the destination port has no room is lost, as on any switch.

    Args:
        ports: datagram sockets, one frame per datagram.
        route: maps a frame and the index of its source port to the indices of its destination ports.
        latency_us: the minimum time for which each frame is held; frames leave in the order of their arrival.
    """
    latency_ns = round(latency_us * 1e3)
    for port in ports:
        port.setblocking(False)
    held: deque[tuple[int, bytes, Sequence[int]]] = deque()
    index_of = {port.fileno(): index for index, port in enumerate(ports)}
    passed = 0
    while True:
        wait_s = max(0, held[0][0] - time.monotonic_ns()) * 1e-9 if held else None
        # The other calls of this kind round their time-out to milliseconds.
        readable, _, _ = select.select([stop_fd, *index_of], [], [], wait_s)
        if stop_fd in readable:
            return passed
        for fd in readable:
            source = index_of[fd]
            for _ in range(_BATCH):
                try:
                    frame = ports[source].recv(_LARGEST_FRAME)
                except BlockingIOError:
                    break
                held.append((time.monotonic_ns() + latency_ns, frame, route(frame, source)))
        now_ns = time.monotonic_ns()
        while held and held[0][0] <= now_ns:
            _, frame, destinations = held.popleft()
            for destination in destinations:
                with suppress(BlockingIOError, OSError):
                    ports[destination].send(frame)
            passed += 1


def by_last_byte(num_ports: int) -> Route:
    """Returns the route that sends a frame for the address 02:00:00:00:00:n to port n - 1, and a broadcast to all."""

    def route(frame: bytes, source: int) -> Sequence[int]:
        destination = frame[_VNET_HEADER_BYTES : _VNET_HEADER_BYTES + 6]
        if destination[0] & 1:
            return [port for port in range(num_ports) if port != source]
        port = destination[5] - 1
        return [port] if port < num_ports and port != source else []

    return route


def _open_interface(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    port.bind((name, _ETH_P_ALL))
    return port


def main(arguments: Sequence[str]) -> None:
    latency_us, interfaces = float(arguments[0]), arguments[1:]
    with suppress(OSError):
        # A real switch does not wait for the ranks' computation. Where real-time priority is not allowed, frames may
        # be late.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    with ExitStack() as opened:
        ports = [opened.enter_context(_open_interface(name)) for name in interfaces]
        print("ready", flush=True)
        relay(ports, by_last_byte(len(ports)), latency_us, sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
