"""Two hosts and a Ray cluster over them, on this machine.

A host has its own network card and address, host name, shared memory and processes (Linux namespaces), and sees the same files.
Where namespaces may not be made (or ``OPD_TEST_HOSTS=shared``), a host is a Ray node with an address in 127.0.0.0/8 and its own
folder and ports. Neither sees another Ray of this machine, and both end with :meth:`Cluster.end`.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from tests.harness import free_port

ROOT = Path(__file__).parents[2]
#: Of each host: what one GPU asks for (3), the queue's two processes, and one that comes and goes.
CPUS = 6
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")

# The first process of a host: the parent of what loses its parent there, and gone, with all of them, when the tests are.
_INIT = """
set -e
if [ -n "$ISOLATED" ]; then
    mount -t proc proc /proc
    mount -t tmpfs tmpfs /dev/shm
    mount --bind "$HOSTS" /etc/hosts
    hostname "$1"
    ip link set lo up
fi
echo ready
while read -r _; do
    "${@:2}" </dev/null >>"$LOG" 2>&1 && echo started || echo failed
done
"""


@cache
def namespaces() -> bool:
    """Whether hosts can be separated here."""
    if os.environ.get("OPD_TEST_HOSTS") == "shared" or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    network = (
        "mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && ip link add name one type veth peer name two"
    )
    probe = [*_unshare("--user", "--map-root-user"), "sh", "-c", network]
    return subprocess.run(probe, capture_output=True).returncode == 0


def _unshare(*user: str) -> list[str]:
    return ["unshare", *user, *NAMESPACES, "--fork", "--kill-child"]


def _adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


class Host:
    """Started, not yet with a network.

    Args:
        folder: Its own, for Ray's files and its log.
        first: The host in whose user namespace this one lives.
        command: What it runs once it has a network; Ray's daemons stay behind.
    """

    def __init__(self, name: str, address: str, folder: Path, command: Sequence[str], env: dict, first: Host | None):
        self.name, self.address, self.log = name, address, folder / f"{name}.log"
        user: list[str] = []
        if namespaces():
            user = _unshare("--user", "--map-root-user") if first is None else [*first.enter("--user"), *_unshare()]
        variables = {**env, "HOSTS": str(folder / "hosts"), "LOG": str(self.log), "ISOLATED": "1" if user else ""}
        self._process = subprocess.Popen(
            [*user, "bash", "-c", _INIT, "init", name, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
            preexec_fn=_adopt_orphans,
            start_new_session=True,
        )
        assert self._answer() == "ready"
        self.pid = self._process.pid
        if user:  # unshare waits for its child, the host's first process
            self.pid = psutil.Process(self.pid).children()[0].pid

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def start(self) -> None:
        """Run the host's command, and wait for its end; after :meth:`crash` once more."""
        assert self._process.stdin
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        assert self._answer() == "started", self.log.read_text(errors="replace")

    def enter(self, *spaces: str) -> list[str]:
        """What to put before a command so that it runs on this host."""
        return ["nsenter", "--target", str(self.pid), "--preserve-credentials", *spaces] if namespaces() else []

    def run(self, command: Sequence[str], env: dict, **options) -> subprocess.CompletedProcess:
        inside = self.enter("--user", *NAMESPACES)
        return subprocess.run(
            [*inside, "env", "-C", str(ROOT), *command], env=env, text=True, capture_output=True, **options
        )

    def processes(self) -> dict[int, str]:
        """PID (of this machine) and name of everything that runs on the host now, dead children left out."""
        found = {}
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())[:300] or process.name()
            except psutil.NoSuchProcess:
                pass
        return found

    def crash(self) -> None:
        """kill -9 of everything that the command has started, at once."""
        for pid in self.processes():
            if pid != self.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for pid in [*self.processes(), self._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(timeout=30)


class Cluster:
    """Ray on two hosts, with one logical GPU each; a token guards it.

    Attributes:
        env: For commands on its hosts; nothing of this process's own environment but PATH is in it.
        dashboard: Where jobs are submitted.
    """

    def __init__(self, folder: Path):
        # A socket's path has at most 107 characters, and pytest's folders are long.
        self._ray = tempfile.mkdtemp(prefix="opd-ray-", dir="/tmp")
        addresses = ("10.77.0.1", "10.77.0.2") if namespaces() else ("127.0.0.2", "127.0.0.3")
        names = ("node1", "node2")
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(map("{} {}\n".format, addresses, names)))
        port, dashboard = free_port(), free_port()
        self.dashboard = f"http://{addresses[0]}:{dashboard}"
        self.env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": self.dashboard,
            "RAY_DASHBOARD": self.dashboard,
        }
        daemon = {key: value for key, value in self.env.items() if not key.endswith(("ADDRESS", "DASHBOARD"))}
        # Worker processes take whatever port is free.
        common = ("--num-gpus=1", f"--num-cpus={CPUS}", "--object-store-memory=300000000", "--disable-usage-stats")
        roles: tuple[Callable[[], list[str]], ...] = (
            lambda: [
                "--head",
                f"--port={port}",
                f"--dashboard-host={addresses[0]}",
                f"--dashboard-port={dashboard}",
                "--ray-client-server-port=" + str(free_port()),
            ],
            lambda: [f"--address={addresses[0]}:{port}"],
        )
        self.hosts: list[Host] = []
        try:
            for name, address, role in zip(names, addresses, roles, strict=True):
                own = [f"--node-ip-address={address}", f"--temp-dir={self._ray}/{name}"]
                agents = [f"--dashboard-agent-{kind}-port={free_port()}" for kind in ("listen", "grpc")]
                command = ["ray", "start", *role(), *own, *common, *agents]
                self.hosts.append(Host(name, address, folder, command, daemon, self.hosts[0] if self.hosts else None))
            if namespaces():
                self._connect()
            for host in self.hosts:
                host.start()
        except BaseException:
            self.end()
            raise

    def _connect(self) -> None:
        """A cable between the hosts. Made from outside of their process namespaces: it is named by a PID of this machine."""
        first, second = self.hosts
        cable = ["ip", "link", "add", "name", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second.pid)]
        subprocess.run([*first.enter("--user", "--net"), *cable], check=True)
        for host in self.hosts:
            plug = f"ip addr add {host.address}/24 dev eth0 && ip link set eth0 up && ip route add default dev eth0"
            subprocess.run([*host.enter("--user", "--net"), "sh", "-c", plug], check=True)

    def run(self, *command: str, check: bool = True, env: dict | None = None, timeout: float = 120) -> str:
        """A command on the first host, in the repository's folder: its output."""
        done = self.hosts[0].run(command, {**self.env, **(env or {})}, timeout=timeout)
        assert done.returncode == 0 or not check, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def end(self) -> None:
        for host in reversed(self.hosts):
            host.end()
        shutil.rmtree(self._ray)
