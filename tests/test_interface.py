"""gloo listens where other hosts can reach it. tests/test_hosts.py has two hosts whose names lead nowhere."""

import os
import socket

import pytest

from ringlearn.worlds.distributed import join as interface

TWO_HOSTS = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1"}


@pytest.fixture
def chosen(monkeypatch):
    """What is chosen for a job whose environment is given, on a host of some name."""

    def choose(environment, own_address):
        for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", interface.VARIABLE):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        def look_up(name, *_, **__):
            if own_address is None:
                raise socket.gaierror("Temporary failure in name resolution")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (own_address, 0))]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        monkeypatch.setattr(interface, "interface_to", lambda host: {"10.77.0.1": "ib7"}.get(host))
        interface.choose_interface()
        return os.environ.get(interface.VARIABLE)

    yield choose
    os.environ.pop(interface.VARIABLE, None)


@pytest.mark.parametrize("own", [None, "127.0.1.1", "::1"])
def test_a_name_that_misleads_is_made_good(chosen, own):
    assert chosen(TWO_HOSTS, own) == "ib7"


@pytest.mark.parametrize(
    "environment, own, wanted",
    [
        (TWO_HOSTS, "10.77.0.2", None),  # gloo's own choice is right
        (TWO_HOSTS | {interface.VARIABLE: "eth3"}, "127.0.1.1", "eth3"),  # the user's is
        (TWO_HOSTS | {"LOCAL_WORLD_SIZE": "4"}, "127.0.1.1", None),  # one host
        (TWO_HOSTS | {"MASTER_ADDR": "nowhere"}, "127.0.1.1", None),
        ({}, "127.0.1.1", None),
    ],
)
def test_else_nothing_is_chosen(chosen, environment, own, wanted):
    assert chosen(environment, own) == wanted


def test_the_interface_of_a_route():
    assert interface.interface_to("127.0.0.1") is None
    assert interface.interface_to("no such host") is None
    for name, address in interface._addresses().items():
        assert name in [known for _, known in socket.if_nameindex()]
        if not address.startswith("127."):
            assert interface.interface_to(address) == name
