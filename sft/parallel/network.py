"""Which network interface leads to the other machines. Imports no torch."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_with(address: str) -> str | None:
    """The network interface that has an IPv4 address, such as `eth0`; None where none has, or it is a loopback's."""
    if ipaddress.ip_address(address).is_loopback:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def address_towards(host: str) -> str | None:
    """This machine's own IPv4 address on the way to a host; None where there is no way. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((host, 9))
        except OSError:
            return None
        return str(asked.getsockname()[0])


def use_reachable_interface() -> None:
    """Have gloo use the interface that leads to the first machine, where there are several machines and nothing else was said.

    It would otherwise use the address that this machine's own name stands for, which in /etc/hosts is often 127.0.1.1: nobody
    else reaches that.
    """
    ranks, here = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE")
    master = os.environ.get("MASTER_ADDR")
    if "GLOO_SOCKET_IFNAME" in os.environ or master is None or here is None or here == ranks:
        return
    address = address_towards(master)
    interface = interface_with(address) if address else None
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
