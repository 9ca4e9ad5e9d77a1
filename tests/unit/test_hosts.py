# SPDX-License-Identifier: Apache-2.0
"""What goes between ranks by their hosts is what goes between them directly, in fewer messages."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotbed.parallel.hosts import HostMail, Hosts, RankLink

Sent = Counter[tuple[int, int]]


def on_ranks(hosts: Hosts, task: Callable[[HostMail, int], Any]) -> tuple[list[Any], Sent]:
    """What the task returns on each rank, which are threads; and the messages from rank to rank."""
    size = hosts.count * hosts.ranks
    boxes = {(a, b): queue.Queue[Tensor]() for a in range(size) for b in range(size)}
    sent: Sent = Counter()
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        links = {RankLink.ALL: range(size), RankLink.HOST: hosts.together_with(rank)}
        links[RankLink.ALIKE] = hosts.alike(rank)

        def exchange(
            link: RankLink, values: Tensor, sizes: Sequence[int], room: Sequence[int]
        ) -> Tensor:
            out = torch.full((sum(room),), -1, dtype=values.dtype)
            for other, part in zip(links[link], values.split(list(sizes)), strict=True):
                sent[rank, other] += other != rank
                boxes[rank, other].put(part)
            for other, place in zip(links[link], out.split(list(room)), strict=True):
                part = boxes[other, rank].get(timeout=5)
                assert other != rank or len(part) == len(place), "as gloo wants it"
                place[: len(part)] = part
            return out

        def gather(link: RankLink, values: Tensor) -> Tensor:
            ranks = len(links[link])
            sizes = [len(values)] * ranks
            return exchange(link, values.repeat(ranks), sizes, sizes).view(ranks, -1)

        results[rank] = task(HostMail(hosts, rank, exchange, gather), rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(box.empty() for box in boxes.values())
    return [results[rank] for rank in range(size)], +sent


def test_hosts_are_known_by_those_of_ranks() -> None:
    assert Hosts.of("aabbcc") == Hosts(3, 2)
    assert Hosts.of("aaabbb") == Hosts(2, 3)
    for of_ranks in ("aaaa", "abcd", "aaab", "abab", "aabba"):
        assert Hosts.of(of_ranks) == Hosts(len(of_ranks), 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_an_exchange_by_hosts_brings_each_rank_its_parts(
    count: int, ranks: int, data: st.DataObject
) -> None:
    hosts = Hosts(count, ranks)
    size = count * ranks
    lengths = data.draw(
        st.lists(
            st.lists(st.sampled_from([0, 0, 1, 3]), min_size=size, max_size=size),
            min_size=size,
            max_size=size,
        )
    )
    parts = [
        [torch.arange(n) + 1000 * a + 10 * b for b, n in enumerate(of_rank)]
        for a, of_rank in enumerate(lengths)
    ]

    def task(mail: HostMail, rank: int) -> Tensor:
        coming = [of_rank[rank] for of_rank in lengths]
        return mail.exchange(torch.cat(parts[rank]), lengths[rank], coming)

    received, sent = on_ranks(hosts, task)
    for rank, values in enumerate(received):
        assert values.tolist() == torch.cat([of_rank[rank] for of_rank in parts]).tolist()
    for (a, b), messages in sent.items():
        on_host = a // ranks == b // ranks
        assert messages == (2 if on_host else 1)  # one with sizes
        assert on_host or ranks == 1 or a % ranks == b % ranks
    between = Counter(a for a, b in sent if a // ranks != b // ranks)
    assert set(between.values()) <= {count - 1}, "one message to each other host"


def test_first_messages_may_be_shorter_than_their_room() -> None:
    hosts = Hosts(2, 2)

    def task(mail: HostMail, rank: int) -> list[list[int]]:
        sizes = [1 + other for other in range(4)]
        values = torch.cat(
            [torch.full((size,), 10 * rank + other) for other, size in enumerate(sizes)]
        )
        of_hosts = mail.exchange_within(values, sizes, [6] * 4)
        return [of_host[: 2 * (1 + rank)].tolist() for of_host in of_hosts]

    received, _ = on_ranks(hosts, task)
    for rank, of_hosts in enumerate(received):
        for host, values in enumerate(of_hosts):
            first, second = 20 * host + rank, 20 * host + 10 + rank
            assert values == [first] * (1 + rank) + [second] * (1 + rank)


@pytest.mark.parametrize("hosts", [Hosts(1), Hosts(4), Hosts(3, 2), Hosts(2, 3)])
def test_values_of_all_ranks_are_gathered_in_their_order(hosts: Hosts) -> None:
    size = hosts.count * hosts.ranks
    received, sent = on_ranks(
        hosts, lambda mail, rank: mail.gather(torch.tensor([rank, rank + 0.5]))
    )
    for values in received:
        assert values.tolist() == [[rank, rank + 0.5] for rank in range(size)]
    messages = hosts.count - 1 + hosts.ranks - 1
    assert Counter(a for a, _ in sent.elements()) == {a: messages for a in range(size) if messages}
