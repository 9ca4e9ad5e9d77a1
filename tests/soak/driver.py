# SPDX-License-Identifier: Apache-2.0
"""Lives of a stream that is killed, each in a process of its own.

`lives(DIR, kill={"at": POINT, "number": N, "after": bool})` trains online from the events in DIR
until the stream ends or the N-th passage of POINT kills it; `kill_after=SECONDS` kills it from
outside. The answer has `killed`, and for a life that ended `digest`, `steps`, `samples`, `resumed`
(the step it began at), `evicted` (rows by table and reason) and `rows` (of each table). Tests make
events with `events`. Other keys:

* `source`: "files"; "concat" = csv files of DIR/events, then its Parquet files; "follow" =
  DIR/events as files arrive, with the keywords `follow`; or Kafka's keywords. With `bootstrap` the
  Parquet files of DIR/events come before the topic
* `join`: two topics are joined instead, with its keywords; the answer then has `learned`, the number
  and the label of each sample, and `counts` of the join
* `cut_log`: messages before the newest state are not there any more
* `rows`: an endless stream ends after so many; `max_steps`, `threads`
* `dataset`, `checkpoint`, `evict`: keywords
* `remember`: the journal forgets nothing, so that an unbroken run can be made to decide the same
* `admission_bytes`: memory for ids that wait; with events of `crowded`, a sketch
* `epochs`: a fit of shuffled files instead of a stream; `model` is then the digest of the model in
  the end, `rows` of its metrics an epoch
* `ahead`: so many batches are mapped ahead
* `histories`: the model keeps a history and a count, of these `windows`. With `publish`, DIR/seen-0.jsonl (the number is
  the rank) has what the rows of each step saw, and what the version of a step served to
  `kept_world.REQUESTS`; see `kept_world.check`
* `grains`: of the model; `auto`: a plain torch model that `hb.auto` converted
* `ram_rows`: the tables lie on a disk, with so many rows of each in memory
* `every_rule`: 24 tables, of all rules and policies; `once`: a table of every row, and one of those
  that were counted twice
* `ranks`: so many processes learn together. `kill_rank` is killed, and the life is over when all of
  them are; with `kill_job` the others are then killed, too
* `publish`: versions to this folder, or to a topic by these keywords; DIR/scores.jsonl has what the model scored at their steps
* `switches`: a plain loop by the eight steps of Rec SDK (`rec_sdk_loops.of_door`, with the keywords
  `loop`), or with `engine` the same of the engine
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import kept_world
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import torch
from forked import SERVER

ROWS = 3000

Lives = Callable[..., dict[str, Any]]
"""`lives`, as tests get it."""


def events(seed: int, rows: int = ROWS) -> pa.Table:
    """Events of users and items that come and go, one a minute."""
    rng = np.random.default_rng(seed)
    # ids wander, so that old ones expire and new ones wait for admission
    drift = np.arange(rows) // 30
    user, item = rng.integers(0, 40, rows) + drift, rng.zipf(1.5, rows) % 60 + drift
    x = rng.normal(size=rows).astype(np.float32)
    y = ((user * 7 + item * 3) % 11 + x > 5).astype(np.int64)
    return pa.table(
        {
            "user": user,
            "item": item,
            "x": x,
            "y": y,
            "t": np.arange(rows) * 60 + rng.integers(0, 90, rows),
        }
    )


def crowded(events: pa.Table) -> pa.Table:
    """Return events whose items lie in one partition of a table: many of them wait there."""
    from hotbed.embedding.hashing import partition

    ids = np.arange(2**17)
    ids = ids[partition(ids) == 3]
    items = pa.array(ids[events["item"].to_numpy()])
    return events.set_column(events.schema.get_field_index("item"), "item", items)


def spread(events: pa.Table) -> pa.Table:
    """Return events of so many items that tables of 1,024 rows are full."""
    items = events["item"].to_numpy() + np.arange(events.num_rows) // 2 % 1400 * 100
    return events.set_column(events.schema.get_field_index("item"), "item", pa.array(items))


def write_events(
    folder: Path,
    seed: int,
    rows: int = ROWS,
    files: int = 5,
    pause: float = 0.0,
    *,
    change: Callable[[pa.Table], pa.Table] | None = None,
) -> None:
    """The events, changed or as they are, in parquet files.

    Each appears whole, `pause` seconds after the one before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole, size = events(seed, rows), -(-rows // files)
    if change is not None:
        whole = change(whole)
    for number in range(files):
        path = folder / f"events-{number:03d}.parquet"
        pq.write_table(
            whole.slice(number * size, size), path.with_suffix(".tmp"), row_group_size=200
        )
        path.with_suffix(".tmp").rename(path)
        time.sleep(pause if number < files - 1 else 0.0)


def append_events(folder: Path, seed: int, rows: int, bursts: int, pause: float) -> None:
    """The events in one csv file that grows, by pieces that end anywhere in a line."""
    sink = pa.BufferOutputStream()
    pacsv.write_csv(events(seed, rows), sink)
    data = bytes(sink.getvalue())
    size = -(-len(data) // bursts)
    with (folder / "events.csv").open("ab", buffering=0) as file:
        for begin in range(0, len(data), size):
            file.write(data[begin : begin + size])
            time.sleep(pause)


def live(config: dict[str, Any]) -> dict[str, Any]:
    """One life: train until the stream ends."""
    import torch

    import hotbed as hb
    from hotbed.connectors import Journal
    from hotbed.optim.schedule import Warmup
    from hotbed.parallel import decoding
    from hotbed.persist.container.format import open_checkpoint
    from hotbed.persist.state.digest import content_digest

    hb.set_num_threads(config.get("threads", 1))
    root = Path(config["root"])
    if "switches" in config:
        import rec_sdk_loops

        if config.get("remember"):
            Journal.forget = lambda self, before: None
        loop = rec_sdk_loops.of_engine if config.get("engine") else rec_sdk_loops.of_door
        return loop(root, config["switches"], **config.get("loop", {}))
    ids = [hb.Id("user"), hb.Id("item")]
    if config.get("every_rule"):
        ids = [
            hb.Id(table.name, column=("item", "user")[k % 5 == 4]) for k, table in _every_table()
        ]
    if config.get("once"):
        ids = [hb.Id("row"), hb.Id("again", column="row")]
    if "join" in config or (config.get("histories") and "publish" in config):
        ids.append(hb.Id("n"))
    kept = _kept(config.get("windows", [600, 3600])) if config.get("histories") else []
    schema = hb.Schema([hb.Label("y"), hb.Time("t", unit="s"), *ids, hb.Dense("x"), *kept])
    torch.manual_seed(3)
    memory = config.get("admission_bytes", 1 << 26)
    if config.get("every_rule"):
        tables = {table.name: table for _, table in _every_table()}
        network = hb.models.DCNv2(schema, tables, hidden=(8,), batch_norm=True, dropout=0.3)
        optimizer = hb.Adam(lr=0.01)
    elif config.get("once"):
        tables = {"row": hb.Table("row", 1), "again": hb.Table("again", 1, admit=hb.MinCount(2))}
        network, optimizer = hb.models.LR(schema, tables), hb.Adam(lr=0.01)
    else:
        tier = hb.Ram()
        if "ram_rows" in config:
            (root / "disk").mkdir(exist_ok=True)
            tier = hb.Ssd(root / "disk", config["ram_rows"])
        network, optimizer = _converted() if config.get("auto") else _network(schema, memory, tier)
    grains = config.get("grains", 1)
    model = hb.RecModel(network, "bce", optimizer, {"auc", "log_loss"}, grains=grains)
    data = hb.Dataset(
        _source(config, root), schema, **{"batch_size": 32, **config.get("dataset", {})}
    )
    if config.get("remember"):
        Journal.forget = lambda self, before: None
    vars(decoding)["LEAST_BYTES"] = 1  # ranks decode small blocks together, too
    keywords = {"every_steps": 20, "full_every": 3, "wait": True} | config.get("checkpoint", {})
    scored = []
    if "publish" in config:
        to = config["publish"]
        if isinstance(to, dict):
            keywords["publish"] = hb.PublishTopic(**to)
        else:
            keywords["publish"] = hb.PublishDirectory(to, keep=4)
        scored = [_Scores(root / "scores.jsonl", schema)]
        if schema.kept:
            scored = [_Seen(root, to, keywords["every_steps"])]
    if "epochs" in config:
        return _fit(
            model, data, root, config["epochs"], hb.callbacks.Checkpoint(root / "state", **keywords)
        )
    callbacks = [
        hb.callbacks.Evict(**config.get("evict", {"step_interval": 7})),
        hb.callbacks.LearningRate(Warmup(60)),
        hb.callbacks.Windows(samples=500),
        hb.callbacks.Checkpoint(root / "state", **keywords),
        (bounds := _Bounds(config.get("rows"))),
        (learned := _Learned()),
        *scored,
    ]
    torch.manual_seed(5)
    data = hb.Ahead(data, depth=config["ahead"]) if config.get("ahead") else data
    if config.get("cut_log"):
        _cut_log(root / "state")
    model.online_train(data, callbacks, progress=False, max_steps=config.get("max_steps"))
    reader = open_checkpoint(root / "state")
    counters = {name: model.counters[name] for name in ("steps", "samples")}
    evicted = {name: evictions_of(table) for name, table in model.tables.items()}
    return {
        "digest": content_digest(reader),
        "chain": [link.manifest.version for link in reader.links],
        "resumed": bounds.first,
        "evicted": evicted,
        "rows": {entry.name: entry.rows for entry in reader.manifest.tables},
        "learned": learned.rows,
        "counts": reader.manifest.positions["stream"]["source"].get("counts"),
        **counters,
    }


def evictions_of(table: Any) -> dict[str, int]:
    """Return how many rows a table has evicted for each reason."""
    return {key: count for key, count in table.stats.items() if key.startswith("evicted_")}


def _network(schema: Any, memory: int, tier: Any) -> tuple[Any, Any]:
    """Return a network of Hotbed, and the optimizer of its dense parameters."""
    import hotbed as hb

    tables = hb.make_tables(
        schema,
        4,
        rule=hb.Adagrad(lr=0.1),
        tier=tier,
        admit=hb.MinCount(2, expire_seconds=9000, admission_bytes=memory),
        evict=hb.Ttl(seconds=7200),
        overrides={
            "item": {
                "admit": hb.MinCount(2, expire_steps=11, admission_bytes=memory),
                "evict": hb.Ttl(steps=9),
            }
        },
    )
    if schema.kept:
        histories = {"before": "item"}
        small = {"hidden": (8,), "attention_hidden": (4,)}
        return hb.models.DIN(schema, tables, histories=histories, **small), hb.Adam(lr=0.01)
    network = hb.models.DCNv2(
        schema, tables, hidden=(8,), num_cross_layers=1, batch_norm=True, dropout=0.3
    )
    return network, hb.Adam(lr=0.01)


def _kept(windows: list[int]) -> list[Any]:
    """Return columns that the model keeps: one for good, one whose rows expire."""
    import hotbed as hb

    return [
        hb.History("before", of=["item"], by="user", where={"y": 1}, length=20),
        hb.Count("likes", by="item", where={"y": 1}, windows=windows, every=60),
    ]


def _every_table() -> list[tuple[int, Any]]:
    """Return tables with their numbers, so that any two of rule, admission and eviction meet."""
    import hotbed as hb

    rules = [
        hb.Momentum(lr=0.1),
        hb.Adagrad(lr=0.1),
        hb.RowwiseAdagrad(lr=0.1),
        hb.Adam(lr=0.1),
        hb.Adam(lr=0.1, scope="all"),
        hb.Ftrl(lr=0.1),
    ]
    admissions = [
        None,
        hb.MinCount(2, sketch_bytes=1 << 16),
        hb.MinCount(3, max_candidates=512),
        hb.Probability(0.5),
    ]
    evictions = [None, hb.Ttl(seconds=7200), hb.Lru(1024), hb.Lfu(1024, half_life_seconds=3600)]
    tables: list[tuple[int, Any]] = []
    for i, rule in enumerate(rules):
        for j, admit in enumerate(admissions):
            policies: dict[str, Any] = {"admit": admit, "evict": evictions[(i + j) % 4]}
            dtype = ("float32", "bfloat16")[(i + j // 2) % 2]
            table = hb.Table(f"{i}-{j}", 2, rule=rule, dtype=dtype, **policies)
            tables.append((len(tables), table))
    return tables


def _converted() -> tuple[Any, Any]:
    """Return a plain torch network that `hb.auto` converted, and its optimizer."""
    import torch
    from torch import Tensor, nn

    import hotbed as hb

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user = nn.Embedding(30, 4)
            self.item = nn.Embedding(50, 4)
            self.pair = nn.Embedding(100, 4)
            self.norm = nn.BatchNorm1d(13)
            self.tower = nn.Sequential(nn.Linear(13, 8), nn.ReLU(), nn.Dropout(0.3))
            self.output = nn.Linear(8, 1)

        def forward(self, user: Tensor, item: Tensor, x: Tensor) -> Tensor:
            rows = [self.user(user), self.item(item), self.pair((user * 31 + item) % 100)]
            inputs = torch.cat([*rows, x.reshape(-1, 1)], dim=1)
            return self.output(self.tower(self.norm(inputs))).squeeze(1)

    network = Plain()
    policies = {
        "user": {"admit": hb.MinCount(2, expire_seconds=9000), "evict": hb.Ttl(seconds=7200)},
        "item": {"admit": hb.MinCount(2, expire_steps=11), "evict": hb.Ttl(steps=9)},
    }
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01, weight_decay=1e-3)
    network, optimizer, _ = hb.auto(network, optimizer, policies)
    return network, optimizer


def _fit(model: Any, data: Any, root: Path, epochs: int, checkpoint: Any) -> dict[str, Any]:
    """A life of a fit, whose callbacks remember validations, the best weights and plateaus."""
    import hotbed as hb
    from hotbed.persist.container.format import open_checkpoint
    from hotbed.persist.state.digest import content_digest

    bounds = _Bounds(None)
    callbacks = [
        hb.callbacks.Validate(every_steps=17),
        hb.callbacks.BestWeights("auc"),
        hb.callbacks.ReducePlateau("log_loss", patience=1, factor=0.5),
        hb.callbacks.EarlyStopping("auc", patience=12),
        hb.callbacks.Evict(step_interval=7),
        bounds,
        checkpoint,
    ]
    valid = hb.Dataset(hb.sources.Memory(events(99, 400)), data.schema, 32)
    torch.manual_seed(5)
    history = model.fit(data, valid, epochs, callbacks, progress=False)
    return {
        "digest": content_digest(open_checkpoint(root / "state")),
        "model": content_digest(open_checkpoint(model.save(root / "model"))),
        "rows": [{k: v for k, v in row.items() if "second" not in k} for row in history.epochs],
        "resumed": bounds.first,
        "steps": history.points[-1].step,
    }


class _Scores:
    """Writes what the model scores after each twentieth step, and the step."""

    def __init__(self, path: Path, schema: Any) -> None:
        import hotbed as hb

        self._path = path
        self._asked = hb.Dataset(hb.sources.Memory(events(99, 200)), schema, 200)

    def on_epoch_begin(self, run: Any) -> None:
        self.on_step_end(run)

    def on_step_end(self, run: Any) -> None:
        if run.step % 20:
            return
        scores = run.model.predict(self._asked)
        if run.learner.shard.is_first:
            with self._path.open("a") as file:
                file.write(json.dumps([run.step, np.asarray(scores).tolist()]) + "\n")


class _Seen:
    """Writes what each row saw of its history and count, and what each version then serves."""

    def __init__(self, root: Path, published: str, every: int) -> None:
        self._path = root / f"seen-{os.environ.get('RANK', '0')}.jsonl"
        self._requests = pq.read_table(root / kept_world.REQUESTS)
        self._published = Path(published)
        self._every = every
        self._served = -1
        self._newest = 0  # the time of the newest row, in seconds

    def on_step_begin(self, run: Any) -> None:
        batch = run.example.batch
        self._newest = max(self._newest, int(np.asarray(batch.time).max()) // 1_000_000)
        self._write(
            step=run.step,
            user=batch.ids["user"].values.tolist(),
            item=batch.ids["item"].values.tolist(),
            n=batch.ids["n"].values.tolist(),
            y=np.asarray(batch.labels["y"]).tolist(),
            time=(np.asarray(batch.time) // 1_000_000).tolist(),
            known=(
                np.asarray(batch.time if batch.known is None else batch.known) // 1_000_000
            ).tolist(),
            before=_lists(batch.ids["before"]),
            likes=np.asarray(batch.dense["likes"]).tolist(),
        )

    def on_step_end(self, run: Any) -> None:
        import hotbed as hb
        from hotbed.persist.container.format import open_checkpoint

        if not run.learner.shard.is_first or not (self._published / "CURRENT").exists():
            return
        reader = open_checkpoint(self._published)
        step = reader.manifest.counters["steps"]
        if step == self._served:
            return
        self._served = step
        version = hb.ParameterServer().load("kept", reader)
        size = run.example.num_samples
        first = int(np.searchsorted(self._requests["t"].to_numpy(), self._newest))
        first = max(0, first - self._every * size // 2)  # half of them come late
        asked = self._requests.slice(first, self._every * size)
        kept = hb.InferenceSession(version).ask(asked).kept
        self._write(
            step=step,
            served=asked["n"].to_pylist(),
            before=_lists(kept["before"]),
            likes=np.asarray(kept["likes"]).tolist(),
        )

    def _write(self, **line: Any) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def _lists(ids: Any) -> list[list[int]]:
    ids = ids.with_offsets()
    return [part.tolist() for part in np.split(np.asarray(ids.values), ids.offsets[1:-1])]


class _Bounds:
    """Remembers the step that a life begins at, and ends it after so many rows."""

    def __init__(self, rows: int | None) -> None:
        self.first, self._rows = -1, rows

    def on_epoch_begin(self, run: Any) -> None:
        self.first = run.step if self.first < 0 else self.first
        self.on_step_end(run)

    def on_step_end(self, run: Any) -> None:
        if self._rows is not None and run.samples >= self._rows:
            run.stop("all rows")


class _Learned:
    """Keeps the number and the label of each sample of a join, in the states of the run."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def on_step_end(self, run: Any) -> None:
        batch = run.example.batch
        if "n" in batch.ids:
            numbers = batch.ids["n"].values.tolist()
            self.rows += [
                list(row) for row in zip(numbers, batch.labels["y"].tolist(), strict=True)
            ]

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows.copy()} if self.rows else {}

    def load_state(self, state: Any) -> None:
        self.rows = list(state.get("rows", []))


def _join(servers: str, rule: str, **keywords: Any) -> Any:
    """A join of the topics that `produce_two` fills."""
    import hotbed as hb

    topics = [hb.sources.Kafka(servers, name, block_rows=100) for name in ("shown", "clicks")]
    rules = {"wait": hb.sources.Wait(), "as_they_come": hb.sources.AsTheyCome()}
    return hb.sources.Join(
        *topics, on="n", label="y", time="t", unit="s", rule=rules[rule], **keywords
    )


def _cut_log(states: Path) -> None:
    """Let the client fetch no message before the newest state, but the last one of each partition
    that was read, by which a topic is recognized.
    """
    from hotbed.connectors.kafka.client import KafkaClient
    from hotbed.persist.container.format import open_checkpoint

    if not (states / "CURRENT").exists():
        return
    place = open_checkpoint(states).manifest.positions["stream"]["source"]
    bounds = [
        (place or {}).get("inputs", [{}] * 2)[number].get("source") or {} for number in (0, 1)
    ]
    by_topic = {name: bounds[k].get("offsets", {}) for k, name in enumerate(("shown", "clicks"))}
    assign, consume = KafkaClient.request, KafkaClient.consume

    def request(self: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "assign":
            self.topic_of_the_test = arguments[0]
        return assign(self, name, *arguments, **keywords)

    def consumed(self: Any, count: int, seconds: float) -> Any:
        first = by_topic[self.topic_of_the_test]
        for entry in consume(self, count, seconds):
            if entry.error is not None or entry.offset >= first.get(str(entry.partition), 0) - 1:
                yield entry

    KafkaClient.request, KafkaClient.consume = request, consumed


def _source(config: dict[str, Any], root: Path) -> Any:
    import hotbed as hb

    if "join" in config:
        return _join(**config["join"])
    source = config.get("source", "files")
    parquet = hb.sources.Parquet(str(root / "events" / "*.parquet"))
    if isinstance(source, dict):
        topic = hb.sources.Kafka(**source)
        return hb.sources.Concat([parquet, topic]) if config.get("bootstrap") else topic
    if source == "follow":
        return hb.sources.Follow(root / "events", **config.get("follow", {}))
    if source == "concat":
        return hb.sources.Concat([hb.sources.Csv(str(root / "events" / "*.csv")), parquet])
    return parquet


# --- killing --------------------------------------------------------------------------------------


def points() -> dict[str, tuple[Any, str]]:
    """Where a life can be killed: the function that is passed there."""
    import torch

    from hotbed.compat.mx_rec import updates
    from hotbed.connectors.file_identity import FileIdentity
    from hotbed.connectors.journal import Journal
    from hotbed.data.dataset import Dataset
    from hotbed.data.encode import Encoder
    from hotbed.embedding.histories import HistoryStore
    from hotbed.embedding.lookups import LocalLookup
    from hotbed.embedding.table import Table
    from hotbed.optim.sparse import SparseOptimizer
    from hotbed.parallel import Ranks, RankShard, ShardedLookup, TableExchange
    from hotbed.persist.container.format import CheckpointWriter
    from hotbed.persist.state import checkpoint
    from hotbed.training.step.grains import Grains
    from hotbed.training.step.passes import NetworkPass

    return {
        "looking": (FileIdentity, "of"),
        "reading": (Encoder, "__call__"),
        "mapping": (NetworkPass, "forward"),
        "grain": (Grains, "_run_one"),
        "ahead": (LocalLookup, "ask"),
        "lookup": (LocalLookup, "pool"),
        "asking": (TableExchange, "ask"),
        "fetching": (TableExchange, "take"),
        "exchange": (Ranks, "exchange"),
        "deciding": (Ranks, "from_first"),
        "backward": (torch.Tensor, "backward"),
        "rows": (updates, "update_targets"),
        "dense": (torch.optim.Adam, "step"),
        "update": (SparseOptimizer, "step"),
        "eviction": (Table, "evict"),
        "histories": (HistoryStore, "fill"),
        "owners": (ShardedLookup, "read_tables"),
        "entries": (HistoryStore, "_add"),
        "capture": (checkpoint, "_capture"),
        "checkpoint": (CheckpointWriter, "write"),
        "table": (CheckpointWriter, "write_batches"),
        "rename": (os, "rename"),
        "replace": (os, "replace"),
        "committed": (Dataset, "commit"),
        "opened": (CheckpointWriter, "__init__"),
        "gathered": (RankShard, "gathered"),
        "collected": (RankShard, "collected"),
        "agreed": (RankShard, "from_first"),
        "commit": (CheckpointWriter, "commit"),
        "forget": (Journal, "forget"),
        "journal": (Journal, "append"),
    }


def arm(at: str, number: int, *, after: bool) -> None:
    """Make the `number`-th passage of a point kill this process, before or after what happens
    there.
    """
    owner, name = points()[at]
    original: Callable[..., Any] = getattr(owner, name)
    passed = 0

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal passed
        passed += 1
        if passed == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if passed == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def fork(config: dict[str, Any]) -> dict[str, Any]:
    """One life in a process of its own, or in several that learn together."""
    ranks = config.get("ranks", 1)
    deadly = config.get("kill_rank", 0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    children = []
    for rank in range(ranks):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            _be(config, write, is_killed=rank == deadly)
        os.close(write)
        children.append((child, read))
    if "kill_after" in config:
        time.sleep(config["kill_after"])
        os.kill(children[deadly][0], signal.SIGKILL)
    if config.get("kill_job"):
        os.waitid(os.P_PID, children[deadly][0], os.WEXITED | os.WNOWAIT)
        for child, _ in children:
            os.kill(child, signal.SIGKILL)
    answers, statuses = [], []
    for child, read in children:
        with open(read) as answer:
            answers.append(answer.read())
        statuses.append(os.waitpid(child, 0)[1])
    if os.WIFSIGNALED(statuses[deadly]):
        return {"killed": os.WTERMSIG(statuses[deadly])}
    assert not any(statuses), "the life failed; its traceback is above"
    return {"killed": 0, **json.loads(answers[0])}


def _be(config: dict[str, Any], write: int, *, is_killed: bool) -> NoReturn:
    """Be the process of a life, and write what it answers."""
    code = 1
    try:
        if "kill" in config and is_killed:
            kill = config["kill"]
            arm(kill["at"], kill["number"], after=kill.get("after", False))
        with open(write, "w") as out:
            json.dump(live(config), out)
        code = 0
    except BaseException as error:
        if "gloo" not in str(error):  # another rank was killed
            traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def lives(root: Path, **config: Any) -> dict[str, Any]:
    """Return how a life ended, in a process of its own: `lives(root, kill=…)`."""
    answer: dict[str, Any] = SERVER.call(fork, {"root": str(root), **config})
    return answer


def killed(
    lives: Lives,
    root: Path,
    seed: int,
    points: dict[str, int],
    config: dict[str, Any],
    seconds: float = 1.0,
) -> tuple[dict[str, Any], list[str]]:
    """One to three kills, half of them at a named point, then a life to the end.

    `points`: where a life is killed, and how often at most it has passed there by then. `seconds`:
    after which it is killed elsewhere, at most. Returns what the last life answers, and the kills.
    """
    choose = random.Random(seed)
    kills = []
    given = config
    for _ in range(choose.randint(1, 3)):
        if "ranks" in given:
            config = {**given, "kill_rank": choose.randrange(given["ranks"])}
        if choose.random() < 0.5:
            at = choose.choice(list(points))
            number = choose.randint(1, points[at])
            point = {"at": at, "number": number, "after": choose.random() < 0.5}
            how, answer = str(point), lives(root, kill=point, **config)
        else:
            after = choose.uniform(0.1, seconds)
            how, answer = f"after {after:.2f} s", lives(root, kill_after=after, **config)
        print(f"seed {seed}: {how}: killed {answer['killed']}")
        kills += [how] if answer["killed"] else []
    answer = lives(root, **given)
    print(f"seed {seed}: resumed at step {answer['resumed']} of {answer['steps']}")
    return answer, kills


# The wall clock evicts, idle time ends batches, and nothing of it is forgotten.
CLOCK = {
    "evict": {"seconds_interval": 0.3, "clock": "wall"},
    "dataset": {"flush_seconds": 0.05},
    "remember": True,
}


def decided_alike(lives: Lives, root: Path, whole: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A run in `whole` that nobody kills, with the decisions that those in `root` took.

    It takes none of its own: on a slow machine its clock would add an eviction after the last one.
    """
    (whole / "state").mkdir(parents=True)
    shutil.copy(root / "state" / "journal", whole / "state" / "journal")
    decided = (root / "state" / "journal").read_text()
    topics = {"block", "cut", "evict"}
    if "grains" in config or "join" in config:
        topics.remove("cut")  # batches end with their block; samples of a join may never wait
    assert all(f'"{topic}"' in decided for topic in topics), "the clock had nothing to decide"
    repeated = {"evict": {**config["evict"], "seconds_interval": 1e9}}
    answer = lives(whole, **config | repeated)
    assert answer["resumed"] == 0
    return answer


def produce(broker: Any, topic: str, rows: list[dict[str, Any]], seed: int) -> None:
    """The rows to three partitions of a topic, most of them to one, in bursts."""
    choose = random.Random(seed)
    while rows:
        burst = rows[: choose.randint(100, 900)]
        rows = rows[len(burst) :]
        parts: list[list[bytes]] = [[], [], []]
        for row in burst:
            parts[choose.choices(range(3), (6, 2, 1))[0]].append(json.dumps(row).encode())
        for partition, messages in enumerate(parts):
            broker.produce(topic, messages, partition)
        time.sleep(choose.uniform(0.0, 0.5))


def produce_two(broker: Any, seed: int, rows: int) -> None:
    """Impressions to three partitions of "shown" and outcomes to two of "clicks", in bursts.

    Some are out of order, come twice, or are missing on one side; outcomes come up to an hour late.
    """
    choose = random.Random(seed)
    whole = events(seed, rows).append_column("n", pa.array(range(rows))).drop_columns(["y"])
    sent: list[tuple[float, str, int, dict[str, Any]]] = []
    for row in whole.to_pylist():
        partition = choose.choices(range(3), (6, 2, 1))[0]
        for _ in range(choose.choices((0, 1, 2), (1, 20, 2))[0]):
            at = row["t"] + choose.choice((0, 0, 0, 30, 300, 900))
            sent.append((at, "shown", partition, row))
        if choose.random() < 0.4:
            outcome = {"n": row["n"], "t": row["t"] + choose.randint(0, 3000)}
            for _ in range(choose.choice((1, 1, 1, 2))):
                at = outcome["t"] + choose.choice((0, 0, 0, -1000, 600, 3600))
                sent.append((at, "clicks", choose.randrange(2), outcome))
    sent.sort(key=lambda event: event[0])
    while sent:
        size = choose.randint(100, 500)
        burst, sent = sent[:size], sent[size:]
        for place in sorted({(topic, partition) for _, topic, partition, _ in burst}):
            values = [json.dumps(row).encode() for _, *to, row in burst if tuple(to) == place]
            broker.produce(place[0], values, place[1])
        time.sleep(choose.uniform(0.0, 0.3))
