"""On which network interface gloo listens, when a job spans hosts.

gloo takes the address that the host's own name resolves to. Many machines have 127.0.1.1 there, or nothing, and then it
listens where no other host can reach it. What surely leads to other hosts is the interface by which this one reaches
the job's key-value store.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface() -> None:
    """Set GLOO_SOCKET_IFNAME for this process, if nobody has, the job spans hosts and the host's own name misleads."""
    here, everywhere = (int(os.environ.get(name, 0)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if VARIABLE in os.environ or here == everywhere or "MASTER_ADDR" not in os.environ:
        return
    if not _misleads(socket.gethostname()):
        return
    if name := interface_to(os.environ["MASTER_ADDR"]):
        os.environ[VARIABLE] = name


def _misleads(name: str) -> bool:
    """Whether a host's own name leads nowhere, or to the loopback interface."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(place[0].partition("%")[0]).is_loopback for *_, place in found)


def interface_to(host: str) -> str | None:
    """The interface of the IPv4 address from which this host would reach another; None if it is not known, or loopback.

    >>> interface_to("127.0.0.1")
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: the kernel looks up the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    names = {address: name for name, address in _addresses().items()}
    return None if ipaddress.ip_address(own).is_loopback else names.get(own)


def _addresses() -> dict[str, str]:
    """The IPv4 address of each interface; empty where there is no such call."""
    try:
        import fcntl
    except ImportError:
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR of Linux
            except OSError:
                continue  # it has none
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
