"""How a process joins the others: its process group, its device, and its part of the job's key-value store."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .background import plain
from .faults import WorldError


def joined(group: dist.ProcessGroup | None, seconds: float) -> dist.ProcessGroup:
    """The given group, or that of all ranks; initialises torch.distributed if torchrun has started this process.

    seconds: how long the other ranks may take to arrive.
    """
    if not dist.is_initialized():
        if group is not None or not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
            raise RuntimeError(
                "DistributedWorld: torch.distributed is not initialised and this process was not started as one of "
                "several ranks. Run the file with `torchrun --nproc-per-node 4 file.py`, or call a function of it on 4 "
                'processes with rl.launch("file.py:function", 4); rl.SimulatedWorld(4) needs neither'
            )
        join(backend_for_this_host(), seconds)
    return group if group is not None else dist.group.WORLD


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks of a mesh of one or two axes as a single group, numbered row by row."""
    if mesh.ndim > 2:
        raise ValueError(
            f"DistributedWorld: expected a DeviceMesh of one or two axes, got {mesh}; take the axes that split the "
            f'sequence, such as mesh["outer", "inner"]'
        )
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"DistributedWorld: expected a DeviceMesh whose ranks rise row by row, got {mesh}")
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return dist.new_group(ranks, use_local_synchronization=True)


def inner_axis(size: int) -> int:
    """The default number of ranks of a node, in a world of ``size`` ranks and shape (nodes, ranks of a node).

    If the world is made of several whole hosts, as many as torchrun has started on each; else half of the ranks, or the
    next smaller number that divides them. The same on all ranks.

    >>> [inner_axis(size) for size in (1, 2, 3, 4, 6, 8, 9)]
    [1, 1, 1, 2, 3, 4, 3]
    """
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", 1))  # torchrun's; LOCAL_WORLD_SIZE may differ from host to host
    if hosts > 1:
        here = int(os.environ["WORLD_SIZE"]) // hosts
        if here < size and size % here == 0:
            return here
    return next((n for n in range(size // 2, 0, -1) if size % n == 0), 1)


def backend_for_this_host() -> str:
    """ "nccl" if every process of this host can have a GPU of its own, else "gloo"."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= here else "gloo"


def join(backend: str, seconds: float = 300.0) -> None:
    """Initialise torch.distributed from torchrun's environment, on this process's GPU if the backend is NCCL.

    Raises WorldError if the other ranks do not come within so many seconds. torch itself would wait for half an hour,
    and where no torchrun watches over the ranks, nobody ends those whose neighbour has refused its options.
    """
    device = None
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        torch.cuda.set_device(device)
    choose_interface()
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except dist.DistError as error:
        raise WorldError(
            f"the ranks did not find each other within {seconds:g} s ({plain(error)}); one that had an error of its "
            f"own has said so in its output, and one that is only slow needs a longer timeout"
        ) from None
    store.set_timeout(dist.default_pg_timeout)
    store = dist.PrefixStore("default_pg", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device)


def device_of(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    backends = str(dist.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
    nccl = "nccl" in backends
    if device is None:
        device = "cuda" if nccl else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda") != nccl and device.type != "cpu":
        raise ValueError(
            f"DistributedWorld: expected a CPU, or a CUDA device with an NCCL group, got {device} with {backends}"
        )
    if device.type == "cuda":
        local = os.environ.get("LOCAL_RANK")
        if device.index is not None:
            torch.cuda.set_device(device)
        elif local and torch.cuda.current_device() == 0 and int(local) < torch.cuda.device_count():
            torch.cuda.set_device(int(local))
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def stores(group: dist.ProcessGroup, rank: int) -> tuple[Any, Any]:
    """This world's part of the job's key-value store, and the store's root, over a connection of their own."""
    store = dist.distributed_c10d._get_default_store().clone()
    root = store._underlying_non_prefix_store if isinstance(store, dist.PrefixStore) else store
    members = dist.get_process_group_ranks(group)
    name = f"ringlearn/{crc32(repr(members).encode()):08x} {group.group_name}"
    number = store.add(f"{name}/{rank}", 1)  # the n-th world of this group on this rank is the n-th on every rank
    own = dist.PrefixStore(f"{name}/world {number}", store)
    if rank == 0:
        own.set("cause", "")
    return own, root


VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface() -> None:
    """Set GLOO_SOCKET_IFNAME for this process if it is unset, the job spans hosts and the host's name misleads gloo."""
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
    """The IPv4 address of each interface; empty where the system has no such call."""
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
