# SPDX-License-Identifier: Apache-2.0
"""The connections between the ranks of a job: how they are made, and that messages pass."""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllToAllOptions, PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from hotbed.errors import ConfigError

from .calls import PLACE, report_uncaught_errors
from .hosts import Hosts, RankLink
from .roll_call import report_departure

TIMEOUT = "HOTBED_RANKS_TIMEOUT"
"""Environment variable: the seconds that a call waits for the other ranks; 60 without it."""
LONGEST_SECONDS = 7 * 86_400
"""The longest timeout: in milliseconds it fits into 31 bits, as sockets need it."""
CHECK_TIMEOUT = timedelta(seconds=10)
"""How long each of the two messages may take that check new connections, and before them a first
contact with all other hosts."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable: the network interface that gloo connects over, or several with commas."""
ADDRESS_OF_INTERFACE = 0x8915
"""The request of Linux for the IPv4 address of a network interface."""

_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()
"""The connections for each default group of torch; None = these are its own."""

_SOCKETS: WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, int]]] = WeakKeyDictionary()
"""The sockets of connections: the number of the file, and that of the socket behind it."""

_HOSTS: WeakKeyDictionary[dist.ProcessGroup, Hosts] = WeakKeyDictionary()
"""The hosts of the ranks, for each default group of torch."""

_LINKS: WeakKeyDictionary[dist.ProcessGroup, dict[RankLink, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)
"""Beside connections between all ranks, those over the other links, where hosts have several."""

_START = (
    "Start the ranks by torchrun or `hotbed train JOB --ranks 2`, which set it; or, for one "
    "process, unset WORLD_SIZE."
)


def call_timeout() -> timedelta:
    """Return how long a call waits for the other ranks.

    Raises:
        ConfigError: the environment has no number of seconds.
    """
    text = os.environ.get(TIMEOUT, "60")
    is_number = text.isdecimal() and len(text) <= len(str(LONGEST_SECONDS))
    if not is_number or not 1 <= int(text) <= LONGEST_SECONDS:
        raise ConfigError(
            f"{TIMEOUT}: expected whole seconds from 1 to {LONGEST_SECONDS}, got {text!r:.40}. "
            "Give a number, such as 60."
        )
    return timedelta(seconds=int(text))


def connect(timeout: timedelta) -> dist.ProcessGroup | None:
    """Connect the ranks that the launcher started; each of them calls this.

    Return None for torch's default group, if it is made here: a reference to it would keep the
    threads of gloo alive, which must end before Python does. Beside a default group of the program
    there is another one, with the timeout of Hotbed and without the calls of the program.

    Args:
        timeout: of each call, for a process group that is made here.

    Raises:
        ConfigError: a rank cannot be reached, or the environment does not say where the ranks are.
    """
    if not dist.is_initialized():
        _check_environment()
        with unreached_explained():
            store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
            # processes that torchrun starts again meet in the same store: keys of the dead remain
            started = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = PrefixStore(f"hotbed/{started}", store)
            hosts = _check_hosts(store, rank, size)
            before = _sockets()
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timeout
            )
            atexit.register(_leave)
            _begin_calls()
            try:
                _check(_default_group())
            except RuntimeError:
                _leave()  # so that nobody uses them
                raise
            _HOSTS[_default_group()] = hosts
            _connect_links(_default_group(), timeout)
            _SOCKETS[_default_group()] = _sockets() - before
        _GROUPS[_default_group()] = None
    default = _default_group()
    if default not in _GROUPS:
        if dist.get_backend() == "gloo":
            dist.barrier()  # ranks may arrive minutes apart, as the program's own timeout allows
        with unreached_explained():
            beside = PrefixStore("hotbed/beside", _get_default_store())
            _HOSTS[default] = _check_hosts(beside, dist.get_rank(), dist.get_world_size())
        atexit.register(_leave)
        _begin_calls()
        _GROUPS[default] = connect_again(call_timeout())
    return _GROUPS[default]


def hosts_of_ranks() -> Hosts:
    """Return on which hosts the ranks are, which are connected."""
    return _HOSTS[_default_group()]


def _begin_calls() -> None:
    """Forget the calls over earlier connections, of which the store may keep a departure."""
    PLACE.begin()
    report_departure(None)
    report_uncaught_errors()


def _check_environment() -> None:
    """Raise ConfigError unless a launcher's variables say which rank this is, and where all meet.

    torch waits for minutes for a rank that cannot be.
    """
    size = _number_below("WORLD_SIZE", math.inf)
    _number_below("RANK", size)
    _number_below("MASTER_PORT", 65_536)
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError(f"ranks: MASTER_ADDR: must name the host of rank 0, got ''. {_START}")


def _number_below(variable: str, limit: float) -> int:
    """Return a number that the launcher has set."""
    text = os.environ.get(variable, "")
    if text.isdecimal() and int(text) < limit:
        return int(text)
    problem = "must be a whole number"
    if limit < math.inf:
        problem += f" below {limit}"
    raise ConfigError(f"ranks: {variable}: {problem}, got {text!r}. {_START}")


def connect_again(timeout: timedelta) -> dist.ProcessGroup:
    """Return further connections of ranks that are connected; each of them calls this.

    Args:
        timeout: of a call.

    Raises:
        ConfigError: a rank cannot be reached.
    """
    with unreached_explained():
        before = _sockets()
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        _check(group)
        _connect_links(group, timeout)
        _SOCKETS[group] = _sockets() - before
    return group


def connect_first(size: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return connections between the first ranks, for single messages; None on other ranks.

    All ranks call this.

    Args:
        size: how many they are.
        timeout: of a message.

    Raises:
        ConfigError: a rank cannot be reached.
    """
    with unreached_explained():
        before = _sockets()
        group: dist.ProcessGroup = dist.new_group(list(range(size)), timeout, "gloo")
        if dist.get_rank() >= size:
            return None
        _check(group)
        _SOCKETS[group] = _sockets() - before
    return group


def release(group: dist.ProcessGroup) -> None:
    """Close the connections that `connect_first` returned, on which nothing waits."""
    _SOCKETS.pop(group, None)
    dist.destroy_process_group(group)


def _connect_links(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Connect the ranks of each host, and those alike, beside connections between all."""
    hosts = hosts_of_ranks()
    if hosts.ranks == 1:
        return
    links = {}
    for link, every in hosts.links.items():
        for ranks in every:  # all ranks make all groups
            part = dist.new_group(list(ranks), timeout, "gloo")
            if dist.get_rank() in ranks:
                links[link] = part
    _LINKS[group] = links


def group_over(link: RankLink, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the connections over a link; `group`: those between all, as `connect` returns them."""
    if link is RankLink.ALL:
        return group
    return _LINKS[group or _default_group()][link]


@contextmanager
def unreached_explained() -> Iterator[None]:
    """Let an error of torch.distributed in this block say what to do, as a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        rank = os.environ.get("RANK")
        size = os.environ.get("WORLD_SIZE")
        advice = (
            f"See that all ranks are started, that {place} is reachable from each host, and that "
            f"{INTERFACE} names the interface between them. `hotbed doctor --ranks {size}` tests "
            f"one host, and `torchrun -m hotbed.cli doctor` several."
        )
        reason = str(error).partition("\n")[0][:200]
        hints = " ".join([advice, *name_problems()])
        raise ConfigError(
            f"ranks: rank {rank} of {size} cannot reach the others, got {reason}. {hints}"
        ) from error


def _check_hosts(store: PrefixStore, rank: int, size: int) -> Hosts:
    """Return the hosts; raise ConfigError, on every rank, if one cannot be reached by its address.

    gloo connects in any case, and waits for minutes for a rank that it cannot reach.
    """
    every = _of_every_rank(store, "host", [_network(), name_problems()], rank, size)
    networks = [network for network, _ in every]
    problems = [problem for _, of_rank in every for problem in of_rank]
    if len(set(networks)) == 1:
        return Hosts(size)
    if not problems:
        with ExitStack() as open_servers:
            places = []
            for address in _own_addresses():
                server = open_servers.enter_context(socket.create_server((address, 0)))
                places.append(server.getsockname())
            every_place = _of_every_rank(store, "place", places, rank, size)
            others = [number for number in range(size) if networks[number] != networks[rank]]
            unreached = _unreached({number: every_place[number] for number in others})
            problems = _of_every_rank(store, "unreached", unreached, rank, size)
    if any(problems):
        raise ConfigError(
            f"ranks: ranks on {len(set(networks))} hosts cannot reach each other, got this: "
            f"{' '.join(dict.fromkeys(filter(None, problems)))} `torchrun -m hotbed.cli doctor` "
            "tests the hosts."
        )
    return Hosts.of(networks)


def _of_every_rank(store: PrefixStore, kind: str, value: Any, rank: int, size: int) -> list[Any]:
    """Return a value of each rank; all of them call this."""
    store.set(f"{kind}/{rank}", json.dumps(value))
    values = []
    for number in range(size):
        try:
            values.append(json.loads(store.get(f"{kind}/{number}")))
        except RuntimeError as error:
            raise RuntimeError(f"no sign of rank {number}") from error
    return values


def _own_addresses() -> list[str]:
    """Return the addresses of this host by which gloo connects, as far as that can be known."""
    chosen = os.environ.get(INTERFACE)
    if chosen is None:
        return [socket.gethostbyname(socket.gethostname())]
    addresses = []
    with socket.socket() as probe, suppress(OSError, ImportError):  # none of IPv4
        import fcntl

        for name in chosen.split(","):
            request = struct.pack("256s", name.encode())
            answer = fcntl.ioctl(probe.fileno(), ADDRESS_OF_INTERFACE, request)
            addresses.append(socket.inet_ntoa(answer[20:24]))
    return addresses


def _unreached(places: Mapping[int, Sequence[tuple[str, int]]]) -> str:
    """Return why a rank on another host cannot be reached from here; "" if all can.

    `places`: where each of them listens.
    """
    end = time.monotonic() + CHECK_TIMEOUT.total_seconds()
    for number, of_rank in places.items():
        for place in of_rank:
            try:
                socket.create_connection(place, max(end - time.monotonic(), 0.1)).close()
            except OSError as error:
                interfaces = ", ".join(name for _, name in socket.if_nameindex())
                return (
                    f"{socket.gethostname()!r} cannot reach rank {number} by its address "
                    f"{place[0]}, got {error}. Set {INTERFACE} to the interface between the hosts "
                    f"on each of them, here one of {interfaces}."
                )
    return ""


def _network() -> str:
    """Return what differs between hosts, and between containers with a loopback of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def name_problems() -> list[str]:
    """Return what keeps other hosts from reaching this one by its name, a sentence or two each."""
    interfaces = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get(INTERFACE)
    if chosen is not None:
        names = chosen.split(",")
        if "lo" in names:
            return [f"{INTERFACE}={chosen}: the loopback reaches no other host."]
        if set(names) <= set(interfaces):
            return []
        return [
            f"{INTERFACE}={chosen}: there is no such interface here. Give one of "
            f"{', '.join(interfaces)}."
        ]
    host = socket.gethostname()
    advice = f"Ranks on other hosts need {INTERFACE}, one of {', '.join(interfaces)}."
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return [f"The host name {host!r} has no address, so gloo takes the loopback. {advice}"]
    if address.startswith("127."):
        return [f"The host name {host!r} has the address {address}, the loopback. {advice}"]
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return [
            f"The host name {host!r} has the address {address}, which no interface here has, so "
            f"gloo takes the loopback. {advice}"
        ]
    return []


def _check(group: dist.ProcessGroup) -> None:
    """Send each rank a message, and then whether all messages came from the ranks they should.

    Raises:
        RuntimeError: on every rank: a message did not come in time, or came from another rank.
    """
    every_rank = list(range(dist.get_world_size(group)))
    senders = _from_each(group, dist.get_rank(group))
    answers = _from_each(group, int(senders == every_rank))
    if not all(answers):
        wrong = [number for number, is_right in enumerate(answers) if not is_right]
        raise RuntimeError(f"messages of other processes on ranks {wrong}, {senders} on this one")


def _from_each(group: dist.ProcessGroup, number: int) -> list[int]:
    """Return the number that each rank sends."""
    size = dist.get_world_size(group)
    received = torch.full((size,), -1)
    options = AllToAllOptions()
    options.timeout = CHECK_TIMEOUT
    group.alltoall_base(
        received, torch.full((size,), number), [1] * size, [1] * size, options
    ).wait()
    return received.tolist()


def _sockets() -> set[tuple[int, int]]:
    """Return the sockets of this process."""
    sockets = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # that of the folder is closed
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets.add((int(name), status.st_ino))
    return sockets


def shut(group: dist.ProcessGroup | None) -> None:
    """End the connections of a group, and with them all waits on them, here and on other ranks.

    gloo has no call for it.

    Args:
        group: as `connect` returns it.
    """
    for number, place in _SOCKETS[group or _default_group()] & _sockets():
        with suppress(OSError), open(os.dup(number), "rb", 0) as file:  # gloo may close it now
            if os.fstat(file.fileno()).st_ino != place:
                continue
            with socket.socket(fileno=os.dup(file.fileno())) as connection:
                connection.getpeername()  # gloo ends the process if the one that listens is shut
                connection.shutdown(socket.SHUT_RDWR)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "it is initialized"
    return group


def _leave() -> None:
    """End the threads of gloo while there is an interpreter.

    One that drops the tensors of the last call later, when Python ends, ends the process by
    std::terminate.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
