"""Simulated machines: network namespaces on a bridge, with cables to cut, or else the loopback."""

import os
import subprocess
from contextlib import suppress

from torchrun import Machine


class Network:
    """A context manager that makes machines with an address and a cable each.

    Where no namespaces may be made (root mostly may), all are on the loopback, and nothing can be
    cut.
    """

    def __init__(self, count: int) -> None:
        # Several clusters on one machine must not meet: the process says which subnet and names.
        number = os.getpid() % 60_000
        subnet = f"10.{200 + number // 250 % 50}.{number % 250}"
        self.can_cut = True
        # The address of what runs on none of the machines.
        self.outside = f"{subnet}.254"
        self._bridge = f"ab{number}"
        self._names = [f"adamae-{number}-{node}" for node in range(count)]
        self._cables = [f"a{number}n{node}" for node in range(count)]
        self.machines = [
            Machine(f"{subnet}.{node + 1}", "eth0", name) for node, name in enumerate(self._names)
        ]

    def __enter__(self) -> "Network":
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.outside}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for name, cable, machine in zip(self._names, self._cables, self.machines, strict=True):
                _ip("netns", "add", name)
                _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("link", "set", cable, "master", self._bridge, "up")
                _ip("-n", name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError):
            self.__exit__()
            self.can_cut = False
            self.outside = "127.0.0.1"
            self.machines = [Machine() for _ in self.machines]
        return self

    def __exit__(self, *_: object) -> None:
        commands = [["netns", "del", name] for name in self._names]
        commands.append(["link", "del", self._bridge])
        for command in commands:
            # If not all could be made, what is there goes.
            with suppress(OSError, subprocess.CalledProcessError):
                _ip(*command)

    def cut(self, node: int) -> None:
        """Pull a node's cable: nothing arrives, and nobody is told."""
        _ip("link", "set", self._cables[node], "down")

    def mend(self) -> None:
        for cable in self._cables:
            _ip("link", "set", cable, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
