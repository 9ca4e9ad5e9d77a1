# SPDX-License-Identifier: Apache-2.0
"""Ranks share out the reading of a fit: each encodes the features of the grains that it computes.

The result has the bits of one process, and an error of reading is raised on each rank.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from forked import ranks_of

import hotbed as hb
from hotbed.connectors.prepared import WORKFLOW_FILE, sealed
from hotbed.data.encode import Encoder
from hotbed.errors import HotbedError
from hotbed.files import digest_of
from hotbed.persist import content_digest, open_checkpoint
from hotbed.persist.state.digest import part_digests
from hotbed.training import share_out
from hotbed.training.run import Callbacks
from hotbed.training.share_out import identity_of

GRAINS = 8
ROWS = 403
"""The last batch of 100 has 3 rows, so most ranks have none of them."""
SCHEMA = hb.Schema(
    [
        hb.Label("y"),
        hb.Weight("w"),
        hb.Time("t", unit="s"),
        hb.Id("user"),
        hb.Id("word", transforms=[hb.transforms.Hash()]),
        hb.Id("tags", weights="strengths"),
        hb.Dense("x"),
        hb.Dense("pair", width=2),
    ]
)


def columns(rows: int = ROWS) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 4, rows)
    return {
        "y": draw.integers(0, 2, rows),
        "w": draw.random(rows),
        "t": np.sort(draw.integers(0, 10**6, rows)),
        "user": draw.zipf(1.2, rows) % 700,
        "word": [f"word {number}" for number in draw.integers(0, 40, rows)],
        "tags": [draw.integers(0, 50, length).tolist() for length in lengths],
        "strengths": [draw.random(length).tolist() for length in lengths],
        "x": draw.normal(size=rows),
        "pair": draw.normal(size=(rows, 2)).tolist(),
    }


# --- data -----------------------------------------------------------------------------------------


def files(folder: Path) -> hb.sources.Parquet:
    """Two files, with dictionaries of text that change from one group of rows to the next."""
    table = pa.table(columns())
    for name, part in {"0": table.slice(0, 250), "1": table.slice(250)}.items():
        pq.write_table(part, folder / f"{name}.parquet", row_group_size=32)
    return hb.sources.Parquet(str(folder / "*.parquet"))


def prepared(folder: Path) -> hb.sources.Prepared:
    files(folder)
    entries = [
        {"file": path.name, "bytes": path.stat().st_size, "sha256": digest_of(str(path))}
        for path in sorted(folder.glob("*.parquet"))
    ]
    workflow = {"parts": {"train": {"rows": ROWS, "files": entries}}}
    (folder / WORKFLOW_FILE).write_text(json.dumps(sealed(workflow)))
    return hb.sources.Prepared(str(folder))


def memory(folder: Path) -> hb.sources.Memory:
    return hb.sources.Memory(columns())


def joined(folder: Path) -> Any:
    """Slices one after the other, whose labels come from a side table."""
    table = columns(310)
    table["row"] = np.arange(310)
    side = {"row": np.arange(310), "y": table.pop("y")}
    rows = hb.sources.Memory(table).join(hb.sources.Memory(side), on="row")
    return hb.sources.Concat([rows.slice(0.0, 0.6), rows.slice(0.6, 1.0)])


SHARED: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "files": (files, {"shuffle": 150}),
    "prepared": (prepared, {"drop_last": True}),
    "memory": (memory, {"shuffle": 5000, "prefetch": 0}),
    "joined": (joined, {}),
}
"""The source, and options of its dataset."""

WHOLE: dict[str, dict[str, Any]] = {
    "rows that may be left out": {"on_error": "skip"},
    "a cache": {"cache": True, "shuffle": 100},
    "events ahead of the clock": {"max_ahead_seconds": 60},
    "batches smaller than grains": {"batch_size": 5},
}
"""Options of datasets that each rank reads as a whole."""


class Counted:
    """Counts the rows whose features are encoded in a block."""

    def __init__(self) -> None:
        self.rows = 0

    @contextmanager
    def here(self) -> Iterator[None]:
        encode = Encoder.__call__

        def counting(encoder: Encoder, rows: Any, *, features: bool = True, **options: Any) -> Any:
            self.rows += rows.num_rows * features
            return encode(encoder, rows, features=features, **options)

        with patch.object(Encoder, "__call__", counting):
            yield


def model_of(schema: hb.Schema = SCHEMA, **policies: Any) -> hb.RecModel:
    torch.manual_seed(1)
    policies = policies or {"admit": hb.MinCount(2), "evict": hb.Ttl(seconds=300_000)}
    tables = hb.make_tables(schema, 2, **policies)
    network = hb.models.DCNv2(schema, tables, hidden=(4,), dropout=0.2)
    return hb.RecModel(network, "bce", "adam", {"auc"}, grains=GRAINS)


class Reader:
    """A callback of the user's own that reads the batches."""

    barrier = staticmethod(lambda step, now: False)

    def __init__(self) -> None:
        self.ids = 0

    def on_step_end(self, run: Any) -> None:
        self.ids += len(run.example.batch.ids["user"].values)


def fits(folder: str, names: list[str]) -> dict[str, Any]:
    """Fit these kinds of data for two epochs; return the losses, and the rows encoded here."""
    found: dict[str, Any] = {}
    rank = os.environ["RANK"]
    for name in names:
        make, options = SHARED[name]
        place = Path(
            folder, rank, name
        )  # each rank has copies of the files, in a folder of its own
        place.mkdir(parents=True)
        data: Any = hb.Dataset(make(place), SCHEMA, **{"batch_size": 100, "seed": 3, **options})
        counted = Counted()
        callbacks = [
            hb.callbacks.Evict(step_interval=3),
            hb.callbacks.Checkpoint(f"{folder}/{name}", every_steps=4, full_every=2),
        ]
        if name == "joined":
            data = hb.Ahead(data)
        with counted.here():
            history = model_of().fit(
                data, epochs=2, callbacks=callbacks, progress=False, max_steps=9
            )
        found[name] = {
            "losses": [epoch["loss"] for epoch in history.epochs],
            "rates": [epoch.get("label_rate") for epoch in history.epochs],
            "encoded": counted.rows,
        }
    return found


def wholes() -> dict[str, int]:
    """Return the rows that are encoded here in an epoch that each rank reads as a whole."""
    found: dict[str, int] = {}
    reader = Reader()
    for name, options in {**WHOLE, "a callback": {}, "scores": {}, "map": {}}.items():
        data = hb.Dataset(memory(Path()), SCHEMA, **{"batch_size": 100, **options})
        if name == "map":
            data = data.map(lambda batch: batch)
        callbacks = [reader] if name == "a callback" else []
        counted = Counted()
        with counted.here():
            model_of().fit(
                data,
                callbacks=callbacks,
                progressive=name == "scores",
                progress=False,
                max_steps=2,  # all rows are encoded before them
            )
        found[name] = counted.rows
    assert reader.ids == 200
    return found


SCORED: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "files": (files, {}),
    "prepared": (prepared, {"drop_last": True, "prefetch": 0}),
    "joined": (joined, {"batch_size": 5}),
}


def scores(folder: str) -> dict[str, Any]:
    """Score each kind of data by parts; return metrics, predictions, and the rows encoded here."""
    found: dict[str, Any] = {}
    model = model_of()
    model.metrics["gauc"] = hb.metrics.GAUC("user")
    model.fit(hb.Dataset(memory(Path()), SCHEMA, batch_size=100), progress=False)
    for name, (make, options) in SCORED.items():
        place = Path(folder, os.environ["RANK"], name)
        place.mkdir(parents=True)
        data = hb.Dataset(make(place), SCHEMA, **{"batch_size": 100, **options})
        counted = Counted()
        labels: list[float] = []
        watch = SimpleNamespace(
            reads_features=False,
            on_step_end=lambda run, labels=labels: labels.extend(run.example.labels.tolist()),
        )
        small = patch.multiple(share_out, MOST_ROWS=300, SCORED_TOGETHER=40)
        with counted.here(), small:
            metrics = model.evaluate(data, watch)
            predictions = model.predict(data).tolist()
        found[name] = [metrics, predictions, labels, counted.rows]
    hook = model.network.register_forward_hook(
        lambda module, arguments, output: output + torch.rand(len(output))
    )
    data = hb.Dataset(memory(Path()), SCHEMA, batch_size=100)
    with patch.object(share_out, "MOST_ROWS", 100):
        found["random"] = [model.evaluate(data), torch.rand(3).tolist(), [], 0]
    hook.remove()
    stop = SimpleNamespace(reads_features=False, on_step_end=lambda run: run.stop("it is enough"))
    found["stopped"] = [model.evaluate(data, stop), data.resume({}).resumed_epoch, [], 0]
    return found


def test_ranks_read_and_score_parts_of_an_evaluation_with_the_bits_of_one_process(
    tmp_path: Path,
) -> None:
    (expected,) = ranks_of(scores, 1, f"{tmp_path}/one")
    for ranks in (2, 3):
        several = ranks_of(scores, ranks, f"{tmp_path}/{ranks}")
        for name, (*of_one, rows) in expected.items():
            assert [of_rank[name][:-1] for of_rank in several] == [of_one] * ranks, name
            assert sum(of_rank[name][-1] for of_rank in several) <= rows


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (3, ["files", "joined"]),
        pytest.param(2, list(SHARED), marks=pytest.mark.soak),
        pytest.param(3, ["prepared", "memory"], marks=pytest.mark.soak),
        pytest.param(8, list(SHARED), marks=pytest.mark.soak),
    ],
)
def test_ranks_encode_the_grains_that_they_compute_and_have_the_bits_of_one_process(
    ranks: int, names: list[str], tmp_path: Path
) -> None:
    (expected,) = ranks_of(fits, 1, f"{tmp_path}/one", names)
    several = ranks_of(fits, ranks, f"{tmp_path}/several", names)
    for name in names:
        of_ranks = [of_rank[name].pop("encoded") for of_rank in several]
        whole = expected[name].pop("encoded")
        assert sum(of_ranks) == whole, name
        assert max(of_ranks) < whole * 0.6
        assert [of_rank[name] for of_rank in several] == [expected[name]] * ranks
        one, other = (open_checkpoint(f"{tmp_path}/{part}/{name}") for part in ("one", "several"))
        assert part_digests(other) == part_digests(one)
        assert content_digest(other) == content_digest(one)
        assert other.manifest.positions == one.manifest.positions


def test_each_rank_reads_all_rows_where_it_needs_them() -> None:
    for of_rank in ranks_of(wholes, 2):
        assert of_rank == dict.fromkeys(of_rank, ROWS)


# --- errors ---------------------------------------------------------------------------------------


def set_at(name: str, row: int, value: Any) -> dict[str, Any]:
    """The columns, with another value in one row."""
    every = columns()
    every[name] = [*every[name]]
    every[name][row] = value
    return every


BAD: dict[str, dict[str, Any]] = {
    "dense of the first rank": set_at("x", 20, None),
    "dense of the last rank": set_at("x", ROWS - 2, None),
    "list of the last rank": set_at("strengths", ROWS - 40, [0.5] * 9),
    "label of the last rank": set_at("y", ROWS - 40, 2),
    "last row": set_at("x", ROWS - 1, None),
}


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except HotbedError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors() -> dict[str, str]:
    """Return the error of each bad row, and of a label that never matches."""
    found = {}
    for name, bad in BAD.items():
        data: Any = hb.Dataset(hb.sources.Memory(bad), SCHEMA, batch_size=100)
        if name == "last row":
            data = hb.Ahead(data)
        found[name] = error_of(functools.partial(model_of().fit, data, progress=False))
    model = model_of()
    for name, bad in BAD.items():
        data = hb.Dataset(hb.sources.Memory(bad), SCHEMA, batch_size=100)
        found[f"{name}, scored"] = error_of(functools.partial(model.evaluate, data))
    label = hb.Label("never", column="word", positive="seven")
    schema = dataclasses.replace(SCHEMA, columns=[label, *SCHEMA.columns[1:]])
    data = hb.Dataset(memory(Path()), schema, batch_size=100)
    found["no row matches"] = error_of(lambda: model_of(schema).fit(data, progress=False))
    return found


def test_an_error_of_reading_is_raised_on_each_rank_as_by_one_process() -> None:
    (expected,) = ranks_of(errors, 1)
    assert "no error" not in expected.values()
    assert ranks_of(errors, 2) == [expected] * 2


def damaged(folder: str) -> dict[str, str]:
    """Return the errors of each call, where the last rank alone has a file without its end."""
    rank = os.environ["RANK"]
    place = Path(folder, rank)
    place.mkdir()
    data = hb.Dataset(files(place), SCHEMA, batch_size=100)
    whole = hb.Dataset(memory(Path()), SCHEMA, batch_size=100)
    if rank != "0":
        file = place / "1.parquet"
        file.write_bytes(file.read_bytes()[:-100])
    model = model_of()
    calls: dict[str, Callable[[], Any]] = {
        "train": lambda: model.fit(data, progress=False),
        "valid": lambda: model.fit(whole, valid=data, progress=False),
        "online_train": lambda: model.online_train(data, progress=False),
        "evaluate": lambda: model.evaluate(data),
        "predict": lambda: model.predict(data),
    }
    return {name: error_of(call) for name, call in calls.items()}


def test_a_damaged_file_of_one_rank_is_named_on_each(tmp_path: Path) -> None:
    first, last = ranks_of(damaged, 2, str(tmp_path))
    assert first == last
    for text in first.values():
        assert re.match(r"DecodeError: rank 1: .*/1/1\.parquet: not a whole parquet file", text)


def differing() -> dict[str, str]:
    """Return the error of data of which the last rank has others."""
    is_last = os.environ["RANK"] != "0"
    other = columns()
    other["user"] = other["user"] + is_last
    schema = dataclasses.replace(SCHEMA, columns=[*SCHEMA.columns])
    hashed = hb.Id("word", transforms=[hb.transforms.Hash(seed=int(is_last))])
    of_hash = dataclasses.replace(
        SCHEMA, columns=[hashed if column.name == "word" else column for column in SCHEMA.columns]
    )
    data = {
        "ids": hb.Dataset(hb.sources.Memory(other), schema, batch_size=100),
        "seed": hb.Dataset(memory(Path()), schema, batch_size=100, shuffle=10, seed=int(is_last)),
        "schema": hb.Dataset(memory(Path()), of_hash, batch_size=100),
        "rows": hb.Dataset(hb.sources.Memory(columns(ROWS - is_last)), schema, batch_size=100),
    }
    found = {
        name: error_of(functools.partial(model_of().fit, train, progress=False))
        for name, train in data.items()
    }
    model = model_of()
    for name in ("ids", "schema", "rows"):
        found[f"{name}, scored"] = error_of(functools.partial(model.evaluate, data[name]))
    return found


def test_ranks_that_share_out_different_data_are_refused_on_each() -> None:
    first, second = ranks_of(differing, 2)
    assert first == second
    for text in first.values():
        assert text.startswith("ConfigError: ranks: all ranks must read the same data"), text


# --- what the decision is taken by ----------------------------------------------------------------


def reads(run: Any) -> Any:
    return run.example


class ReadsByFunction:
    """Reads the batch in a function of its own file."""

    def on_step_end(self, run: Any) -> None:
        self.last = reads(run)


class ReadsByName:
    def on_step_end(self, run: Any) -> None:
        self.last = getattr(run, "example")  # noqa: B009


class Counts:
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, run: Any) -> None:
        self.losses.append(float(run.loss))


class Several:
    """Holds another callback."""

    def __init__(self, inner: Any) -> None:
        self.inner = [inner]

    def on_step_end(self, run: Any) -> None:
        for callback in self.inner:
            callback.on_step_end(run)


class ReadsLabels(Reader):
    reads_features = False


def test_callbacks_that_read_batches_are_known_by_their_code() -> None:
    readers = [
        Reader(),
        ReadsByFunction(),
        ReadsByName(),
        Several(Reader()),
        SimpleNamespace(on_step_end=reads),
        SimpleNamespace(on_step_end=lambda run: reads(run)),
        SimpleNamespace(on_step_end=functools.partial(reads)),
        SimpleNamespace(on_step_end=Reader().on_step_end),
        hb.callbacks.Windows(samples=5),
    ]
    counts = Counts()
    counts.losses = [0.0] * 20_000  # too many to look at
    readers.append(counts)
    assert [Callbacks([callback]).reads_features for callback in readers] == [True] * len(readers)
    plain = SimpleNamespace(on_step_end=lambda run: torch.save(np.mean(run.step), "steps"))
    evict = hb.callbacks.Evict(step_interval=3)
    others = [Counts(), Several(Counts()), ReadsLabels(), plain, evict]
    assert not Callbacks([*others, hb.callbacks.Checkpoint("states")]).reads_features


def test_data_are_known_by_their_files_and_by_some_of_their_rows(tmp_path: Path) -> None:
    """Also by values that Python has no object for."""
    odd = pa.table(
        {
            "time": pa.array([2**62 + 1, None] * 500, pa.timestamp("ns")),
            "spans": pa.array([[2**62], None] * 500, pa.list_(pa.duration("ns"))),
            "years": pa.array([2**60] * 1000, pa.timestamp("s")),
            "bytes": pa.array([b"\xff"] * 1000),
        }
    )
    chunked = pa.concat_tables([odd.slice(0, 7), odd.slice(7)])
    assert identity_of(hb.sources.Memory(odd)) == identity_of(hb.sources.Memory(chunked))
    sources = [hb.sources.Memory(odd), hb.sources.Memory(odd.slice(1)), memory(tmp_path)]
    for name, rows in {"a": 1000, "b": 999}.items():
        pq.write_table(pa.table({"user": range(rows)}), tmp_path / f"{name}.parquet")
        sources.append(hb.sources.Parquet(tmp_path / f"{name}.parquet"))
    sources += [hb.sources.Concat(sources[3:]), sources[0].slice(0, 5), sources[0].slice(0, 6)]
    sources.append(joined(tmp_path))
    none = hb.sources.Memory(odd.slice(0, 0))
    sources += [none, hb.sources.Concat([none, sources[0]])]
    identities = [repr(identity_of(source)) for source in sources]
    assert len(set(identities)) == len(sources)
    assert identity_of(hb.sources.Generated(100, slots={"user": hb.sources.Keys(5)})) is None
