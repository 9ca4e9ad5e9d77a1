# SPDX-License-Identifier: Apache-2.0
"""A client that casts each column as the metadata says gets training's scores.

One model reads columns of every Arrow type through every transform that takes them.
"""

from __future__ import annotations

import dataclasses
import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cache
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import triton_to_np_dtype

import hotbed as hb
from hotbed.data import transforms as t
from hotbed.data.arrow_types import decimal_of, joined, time_of, type_of
from hotbed.errors import ConfigError, DataError, SchemaError
from hotbed.serving.client import _tensor
from hotbed.serving.protocol.inputs import ModelInputs
from hotbed.serving.request import RequestEncoder

from .conftest import Running
from .test_http import ask
from .test_metadata import example_of

pytestmark = pytest.mark.filterwarnings("ignore:table .* is fed both")

NUM_ROWS = 64
RNG = np.random.default_rng(0)
MOMENTS = [datetime(2023, 11, 14) + timedelta(minutes=int(n)) for n in RNG.integers(0, 20000, 64)]
SECONDS = (1_700_000_000 + RNG.integers(0, 600, NUM_ROWS)).tolist()
SMALL = RNG.integers(0, 100, NUM_ROWS).tolist()
PRICES = RNG.choice([9.99, 19.99, 4.49, 99.95, 14.9], NUM_ROWS).tolist()
WORDS = [f"{n % 7}|w{n % 3}" for n in SMALL]
IDS = [0, -1, 2**63 - 1, -(2**63), 2**53 + 1, -(2**53) - 1, 7, 8] * 8
LARGE = [0, 2**63, 2**64 - 1, 2**63 + 2**39 + 1, 2**53 + 1, 5, 6, 7] * 8
BYTES = [b"\xff\xfe", b"\x00a", b"caf\xe9", "café".encode()] * 16
TIMES = ("s", "ms", "us", "ns")

COLUMNS: dict[str, pa.Array] = {
    **{f"{u}int{n}": pa.array(SMALL, f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32)},
    "bool": pa.array([n % 2 == 0 for n in SMALL]),
    "int64": pa.array(IDS),
    "uint64": pa.array(LARGE, pa.uint64()),
    "small_uint64": pa.array(SMALL, pa.uint64()),
    "seconds": pa.array(SECONDS),
    "float16": pa.array(np.array(SMALL, np.float16)),
    "float32": pa.array(PRICES, pa.float32()),
    "float64": pa.array(PRICES),
    "float_seconds": pa.array([n + 0.25 for n in SECONDS]),
    "decimal": pa.array([Decimal(str(n)) for n in PRICES], pa.decimal128(10, 2)),
    "string": pa.array(WORDS),
    "large_string": pa.array(WORDS, pa.large_string()),
    "digits": pa.array([str(n) for n in SMALL]),
    "iso": pa.array([moment.isoformat() for moment in MOMENTS]),
    "binary": pa.array([n.encode() for n in WORDS]),
    "other_binary": pa.array(BYTES),
    "words": pa.array(WORDS).dictionary_encode(),
    "numbers": pa.array(SMALL).dictionary_encode(),
    **{f"timestamp_{unit}": pa.array(MOMENTS, pa.timestamp(unit)) for unit in TIMES},
    "zoned": pa.array(MOMENTS, pa.timestamp("ms", "Europe/Berlin")),
    "date32": pa.array(MOMENTS, pa.timestamp("s")).cast(pa.date32()),
    "date64": pa.array([moment.date() for moment in MOMENTS], pa.date64()),
    "time32": pa.array(SMALL, pa.int32()).cast(pa.time32("s")),
    "duration": pa.array(SMALL).cast(pa.duration("us")),
    "bag": pa.array([[n, 2**63 + n] for n in SMALL], pa.list_(pa.uint64())),
    "visits": pa.array([[moment, MOMENTS[0]] for moment in MOMENTS], pa.list_(pa.timestamp("ms"))),
}
LARGE_NUMBERS = {"int64", "uint64", "seconds", "float_seconds"}


def features(name: str) -> Iterator[hb.Id | hb.Dense]:
    """Yield every use of a column; some do not take its type."""
    unit = "iso" if name == "iso" else "s"
    ids: dict[str, list[Any]] = {
        "plain": [],
        "hash": [t.Hash(97)],
        "cross": [t.Cross(["bool"])],
        "map": [t.Map()],
        "shift": [t.Shift(5)],
        "bins": [t.Bucketize(bins=4)],
        "edges": [t.Bucketize([5, 2**53 + 1, 2**63])],
        "clip": [t.Clip(3, 2**62)],
        "fill": [t.FillMissing(7)],
        "extract": [t.Extract("(.*)")],
        "split": [t.Split("|")],
        "minute": [t.TimeOfDay("minute", unit)],
        "weekday": [t.TimeOfDay("weekday", unit)],
        "text": [t.Expression(f"CAST({name} AS VARCHAR)"), t.Hash(97)],
        "hour": [t.Expression(f"EXTRACT(hour FROM {name})")],
    }
    for use, steps in ids.items():
        yield hb.Id(f"{name}_{use}", "ids", steps, column=name)
    yield hb.Id(f"{name}_with", "ids", [t.Cross([name])], column="int8")
    dense: dict[str, list[Any]] = {
        "normal": [t.Normalize()],
        "limited": [t.Clip(4.4, 1_700_000_300), t.Normalize()],
        "log": [t.FillMissing(1), t.Clip(0, None), t.Log(), t.Normalize()],
        "rank": [t.Bucketize(bins=8), t.Normalize()],
        "part": [t.TimeOfDay("minute", unit), t.Normalize()],
        "sum": [t.Expression(f"{name} * 3.3 - 1"), t.Normalize()],
    }
    if name not in LARGE_NUMBERS:
        dense |= {"number": [], "filled": [t.FillMissing(0)], "cut": [t.Clip(0.1, 50)]}
    for use, steps in dense.items():
        yield hb.Dense(f"{name}_{use}", steps, column=name)


@cache
def usable() -> hb.Schema:
    """Return a fitted schema of all uses that take the type of their column."""
    rows = pa.table(COLUMNS)
    columns: list[Any] = [hb.Label("y")]
    for name in COLUMNS:
        for feature in features(name):
            try:
                schema = hb.Schema([feature]).fit(hb.sources.Memory(rows))
                encoder = hb.Encoder(schema)
                encoder(rows.slice(0, 8), labels=False)
            except (DataError, SchemaError):
                continue
            column = schema[feature.name]
            kinds = [kind for features in encoder._kinds.values() for kind in features.values()]
            if {"text"} in kinds:  # these never meet integers, so that a table of both is refused
                column = dataclasses.replace(column, table="texts")
            columns.append(column)
    return hb.Schema(columns)


@dataclass(frozen=True)
class Asked:
    """A server of the model, its session, and what training predicts."""

    running: Running
    session: hb.InferenceSession
    inputs: list[dict[str, Any]]
    rows: pa.Table
    scores: np.ndarray

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.running.server.grpc_port}"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    schema = usable()
    folder = tmp_path_factory.mktemp("types") / "export"
    rows = pa.table({**COLUMNS, "y": pa.array([float(n % 2) for n in SMALL])})
    tables = hb.make_tables(schema, dim=1, init=hb.Normal(0.5))
    model = hb.RecModel(hb.models.DNN(schema, tables, hidden=[4]), "bce", "adam")
    data = hb.Dataset(hb.sources.Memory(rows), schema, NUM_ROWS)
    model.fit(data, progress=False)
    model.export(folder)
    running = Running(folder)
    status, _, answer = ask(running.http, "GET", "/v2/models/m")
    assert status == 200
    inputs = json.loads(answer)["inputs"]
    read = [entry["name"] for entry in inputs]
    session = hb.InferenceSession(folder)
    yield Asked(running, session, inputs, rows.select(read), model.predict(data))
    running.close()


def test_every_type_and_transform_is_used() -> None:
    used = {column.name.rpartition("_")[2] for column in usable().columns[1:]}
    assert used == {feature.name.rpartition("_")[2] for feature in features("x")}


def cast(asked: Asked, entry: Mapping[str, Any]) -> np.ndarray:
    """Return a column as the metadata says, and nothing else."""
    column = asked.rows[entry["name"]].combine_chunks()
    lengths = {} if len(entry["shape"]) == 1 else {"shape": (NUM_ROWS, -1)}
    if lengths:
        column = column.flatten()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values = column.to_numpy(zero_copy_only=False)
    unit = entry.get("parameters", {}).get("unit")
    if values.dtype.kind == "M":
        values = values.astype(f"datetime64[{unit}]")
    elif values.dtype.kind == "m":
        values = values.astype(f"timedelta64[{unit}]")
    elif pa.types.is_time(column.type):
        values = column.cast(pa.int32()).to_numpy()
    if entry["datatype"] == "BYTES":
        texts = [value if isinstance(value, bytes) else value.encode() for value in values]
        return np.array(texts, object)
    numbers = values.astype(triton_to_np_dtype(entry["datatype"]))
    return numbers.reshape(lengths["shape"]) if lengths else numbers


def as_text(values: np.ndarray) -> list[Any]:
    """Return values, bytes as text where all are UTF-8."""
    try:
        return [value.decode() if isinstance(value, bytes) else value for value in values.tolist()]
    except UnicodeDecodeError:
        return values.tolist()


def by_json(asked: Asked) -> Any:
    body = []
    for entry in asked.inputs:
        values = cast(asked, entry)
        tensor = {"name": entry["name"], "datatype": entry["datatype"], "shape": values.shape}
        data = as_text(values)
        if isinstance(data[0], bytes):
            data = [b64encode(value).decode() for value in data]
            tensor["parameters"] = {"content_type": "base64"}
        body.append({**tensor, "data": data})
    status, _, answer = ask(asked.running.http, "POST", "/v2/models/m/infer", {"inputs": body})
    assert status == 200, answer
    return json.loads(answer)["outputs"][0]["data"]


def by_triton(module: Any, place: Callable[[Asked], str]) -> Callable[[Asked], Any]:
    def scores(asked: Asked) -> Any:
        inputs = []
        for entry in asked.inputs:
            values = cast(asked, entry)
            inputs.append(module.InferInput(entry["name"], values.shape, entry["datatype"]))
            inputs[-1].set_data_from_numpy(values)
        with module.InferenceServerClient(place(asked)) as client:
            return client.infer("m", inputs).as_numpy("prediction")

    return scores


FIELDS = {"INT64": "int64", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64", "BOOL": "bool"}


def by_typed_grpc(asked: Asked) -> Any:
    request = service_pb2.ModelInferRequest(model_name="m")
    for entry in asked.inputs:
        values = cast(asked, entry)
        tensor = request.inputs.add(
            name=entry["name"], datatype=entry["datatype"], shape=values.shape
        )
        field = f"{FIELDS.get(entry['datatype'], 'bytes')}_contents"
        getattr(tensor.contents, field).extend(values.reshape(-1).tolist())
    with grpc.insecure_channel(asked.grpc) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    return np.frombuffer(answer.raw_output_contents[0], "<f4")


def by_client(asked: Asked) -> Any:
    columns = {name: asked.rows[name].combine_chunks() for name in asked.rows.column_names}
    with hb.Client(f"http://{asked.running.http}") as client:
        return client.predict("m", columns)


def by_session(asked: Asked) -> Any:
    columns = {entry["name"]: cast(asked, entry) for entry in asked.inputs}
    for name, values in columns.items():
        if values.dtype == object:
            columns[name] = as_text(values)
    return asked.session.predict(columns)


WAYS: dict[str, Callable[[Asked], Any]] = {
    "JSON": by_json,
    "REST, binary": by_triton(tritonclient.http, lambda asked: asked.running.http),
    "gRPC, raw": by_triton(tritonclient.grpc, lambda asked: asked.grpc),
    "gRPC, typed": by_typed_grpc,
    "hb.Client": by_client,
    "session": by_session,
}


@pytest.mark.parametrize("way", WAYS)
def test_client_that_casts_as_the_metadata_says_gets_the_bits_of_training(
    asked: Asked, way: str
) -> None:
    expected = asked.session.predict(asked.rows)
    assert expected == pytest.approx(asked.scores, abs=1e-6)
    assert np.ptp(expected) > 0.01
    assert np.asarray(WAYS[way](asked), np.float32).tolist() == expected.tolist()


def test_example_of_a_request_is_answered_for_all_types(asked: Asked) -> None:
    request = example_of(asked.session)
    status, _, answer = ask(asked.running.http, "POST", "/v2/models/m/infer", request)
    assert status == 200, answer


def test_columns_without_a_recorded_type_are_told_what_their_uses_need() -> None:
    """Models of before all types were recorded."""
    columns = [
        hb.Id("user"),
        hb.Dense("plain"),
        hb.Dense("filled", [t.FillMissing(0), t.Clip(0, 8)]),
        hb.Dense("normal", [t.Normalize(1, 2)]),
        hb.Id("bucket", column="price", transforms=[t.Bucketize([1.5])]),
        hb.Id("hour", column="at", transforms=[t.TimeOfDay(unit="ms")]),
    ]
    schema = hb.Schema.from_json({**hb.Schema(columns).to_json(), "types": {"price": "number"}})
    told = {entry["name"]: entry for entry in ModelInputs(schema).metadata()}
    assert {name: entry["datatype"] for name, entry in told.items()} == {
        "user": "INT64",
        "plain": "FP32",
        "filled": "FP32",
        "normal": "FP64",
        "price": "FP64",
        "at": "INT64",
    }
    assert told["at"]["parameters"] == {"unit": "ms"}
    for wrong in ("datetime", "timestamp[h]", "decimal128(99, 2)", "string"):
        with pytest.raises(ConfigError, match=r"schema\.types\.price: unknown type"):
            hb.Schema.from_json({"columns": [], "types": {"price": wrong}})


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (["int32", "uint64"], "uint64"),
        (["float32", "float32"], "float32"),
        (["float32", "int64"], "number"),
        (["decimal128(9, 2)", "decimal128(9, 3)"], "number"),
        (["string", "large_binary"], "bytes"),
        (["binary", "int64"], "mixed"),
        (["timestamp[s]", "timestamp[us]"], "timestamp[us]"),
        (["timestamp[us, tz=UTC]", "timestamp[ns]"], "timestamp[us, tz=UTC]"),
        (["timestamp[us]", "string"], "text"),
        (["int64", "date32[day]"], "integer"),
        (["int64", "string"], "mixed"),
    ],
)
def test_types_of_a_column_that_differ_are_told_as_one(types: list[str], expected: str) -> None:
    kinds = [time_of(name) or decimal_of(name) or getattr(pa, name)() for name in types]
    first, second = (type_of(kind) for kind in kinds)
    assert first is not None
    assert second is not None
    assert joined(first, second) == expected


OTHER_TYPES = [
    *(getattr(pa, name)() for name in ("int8", "int64", "uint32", "uint64", "float16", "float32")),
    *(pa.float64(), pa.bool_(), pa.large_string(), pa.decimal128(24, 6), pa.date32(), pa.date64()),
    *(pa.timestamp(unit) for unit in TIMES),
    *(pa.timestamp("us", "UTC"), pa.timestamp("ms", "Asia/Shanghai")),
    *(pa.duration("s"), pa.duration("ns"), pa.time32("ms"), pa.time64("us")),
]


def in_other_types(column: pa.Array) -> Iterator[Any]:
    """Yield the same values in other Arrow types, as a list, in NumPy, and moments as text."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_time = pa.types.is_temporal(column.type)
    for kind in OTHER_TYPES:
        if is_time or not pa.types.is_temporal(kind):
            try:
                cast = column.cast(kind)
                is_same = cast.cast(column.type).equals(column)
            except pa.ArrowException:
                continue
            if is_same:
                yield cast
    yield column.dictionary_encode()
    yield column.to_pylist()
    yield column.to_numpy(zero_copy_only=False)
    if is_time:
        yield [str(value) for value in column.to_pylist()]


EXACT = [0, 7, -(2**53), 2**53, 2**53 + 2, 2**62]  # that float64 holds, and edges between them


@pytest.mark.parametrize(
    "kind", [pa.float64(), pa.decimal128(24, 0), pa.decimal128(30, 6)], ids=str
)
@pytest.mark.parametrize("trained", [pa.int64(), pa.list_(pa.int64())], ids=str)
def test_whole_numbers_are_compared_as_the_integers_of_training(
    trained: pa.DataType, kind: pa.DataType
) -> None:
    values = pa.array([*EXACT, 2**53 + 1][: 7 if pa.types.is_decimal(kind) else 6])
    numbers = values.cast(kind, safe=False)
    if pa.types.is_list(trained):
        values, numbers = (
            pa.ListArray.from_arrays(range(len(part) + 1), part) for part in (values, numbers)
        )
    edges = [t.Bucketize([5, 2**53 + 1, 2**62 + 1])]
    schema = hb.Schema([hb.Id("x", transforms=edges)], {"x": "integer"})
    expected = hb.Encoder(schema)(pa.table({"x": values}), labels=False)
    for request in (numbers, numbers.to_pylist(), as_sent(numbers)):
        assert values_of(RequestEncoder(schema)({"x": request}), "x") == values_of(expected, "x")


def as_sent(numbers: pa.Array) -> Any:
    """Return a column as a server reads it from the tensor of `hb.Client`."""
    tensor = _tensor("x", numbers)
    dtype = triton_to_np_dtype(tensor.spec["datatype"])
    return np.frombuffer(tensor.data, dtype).reshape(tensor.spec["shape"])


def test_numbers_of_float32_columns_are_rounded_to_it_before_transforms() -> None:
    values = [9.99, 0.1, 1e-3]
    schema = hb.Schema([hb.Dense("x", [t.Normalize(9, 1e-3)])], {"x": "float32"})
    rows = pa.table({"x": pa.array(values, pa.float32())})
    expected = hb.Encoder(schema)(rows, labels=False).dense["x"].reshape(-1).tolist()
    decimals = [Decimal(str(value)) for value in values]
    for request in (values, np.array(values), decimals, pa.array(decimals)):
        got = RequestEncoder(schema)({"x": request}).dense["x"]
        assert np.asarray(got).reshape(-1).tolist() == expected


def test_fractions_and_missing_numbers_pass_where_training_had_integers() -> None:
    schema = hb.Schema([hb.Dense("x", [t.FillMissing(3), t.Clip(0, 9)])], {"x": "integer"})
    for request in ([1.5, None], np.array([1.5, np.nan]), pa.array([Decimal("1.5"), None])):
        got = RequestEncoder(schema)({"x": request}).dense["x"]
        assert np.asarray(got).reshape(-1).tolist() == [1.5, 3.0]


NEVER_TEXT = ("bag", "visits", "other_binary", "duration")


@pytest.mark.parametrize("name", [name for name in COLUMNS if name not in NEVER_TEXT])
def test_values_of_a_request_in_another_type_are_those_of_training_or_refused(name: str) -> None:
    """Transforms that see the type of a value, and that compare and compute in it."""
    rows = pa.table(COLUMNS)
    column = rows[name].combine_chunks()
    num_equal = 0
    for use in ("text", "extract", "hour", "sum", "edges", "rank", "normal", "log", "limited"):
        feature = f"{name}_{use}"
        if not any(one.name == feature for one in usable().columns):
            continue
        read = usable()[feature]
        schema = hb.Schema([read]).with_types({name: str(type_of(column.type))}, {})
        expected = values_of(hb.Encoder(schema)(rows, labels=False), feature)
        encode = RequestEncoder(schema)
        for values in in_other_types(column):
            try:
                got = values_of(encode({name: values}), feature)
            except DataError:
                continue
            kind = getattr(values, "type", type(values))
            assert got == expected, f"{feature} of {column.type} as {kind}"
            num_equal += 1
    assert num_equal > 0


def values_of(batch: Any, feature: str) -> str:
    """Return what a feature is in a batch, as text, in which NaN is NaN."""
    if feature in batch.dense:
        return str(np.asarray(batch.dense[feature]).reshape(-1).tolist())
    ids = batch.ids[feature].with_offsets()
    return str((ids.values.tolist(), ids.offsets.tolist()))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("boolean", [0, 2]),
        ("boolean", [0.5, 1.0]),
        ("integer", [1.5, 2.0]),
        ("integer", [True, False]),
        ("float32", pa.array([1, 2], pa.timestamp("s"))),
        ("timestamp[s]", pa.array([1, 2], pa.time32("s"))),
        ("timestamp[ns]", pa.array([2**62, 0], pa.timestamp("s"))),
        ("duration[s]", pa.array([1, 2], pa.timestamp("s"))),
    ],
)
def test_values_that_the_type_of_training_does_not_hold_are_refused(kind: str, values: Any) -> None:
    text = hb.Id("x", transforms=[t.Expression("CAST(x AS VARCHAR)"), t.Hash(97)])
    encode = RequestEncoder(hb.Schema([text], {"x": kind}))
    with pytest.raises(DataError, match="column 'x': "):
        encode({"x": values})


HOURS = [datetime(2024, 5, 6, n) for n in (7, 13, 22)]
MILLISECONDS = [1_714_953_600_000 + 3_600_000 * n for n in (7, 13, 22)]


@pytest.mark.parametrize(
    ("kind", "values", "reads"),
    [
        ("timestamp[ms]", MILLISECONDS, True),
        ("timestamp[ms]", [*map(float, MILLISECONDS[:2]), float("nan")], True),
        ("timestamp[ms]", HOURS, True),
        ("timestamp[ns]", [one.isoformat() for one in HOURS], True),
        ("timestamp[s, tz=UTC]", [f"{one.isoformat()}+00:00" for one in HOURS], True),
        ("timestamp[s]", [None, "", "2024-05-06 22:00"], True),
        ("timestamp[s]", ["2024-05-06 07:00", "soon", ""], False),
        ("timestamp[s]", [1.5, 2.0, 3.0], False),
        ("timestamp[s]", [True, False, True], False),
        ("timestamp[s]", [b"\xff", b"a", b"b"], False),
        ("time32[s]", ["07:00", "13:00", "22:00"], False),
        ("date32[day]", [2**40, 1, 2], False),
        ("decimal128(4, 2)", [1e9, 1.0, 2.0], False),
    ],
)
def test_times_and_decimals_of_a_request_are_read_or_refused(
    kind: str, values: list[Any], reads: bool
) -> None:
    hour = hb.Id("at", transforms=[t.Expression("EXTRACT(hour FROM at)")])
    encode = RequestEncoder(hb.Schema([hb.Id("user"), hour], {"at": kind}))
    columns = {"at": values, "user": [1, 2, 3]}
    if reads:
        ids = encode(columns).ids["at"].with_offsets()
        expected = []
        for hour_of_row, value in zip((7, 13, 22), values, strict=True):
            is_missing = not value or value != value
            expected.append([] if is_missing else [hour_of_row])
        bounds = zip(ids.offsets[:-1], ids.offsets[1:], strict=True)
        assert [ids.values[begin:end].tolist() for begin, end in bounds] == expected
    else:
        with pytest.raises(DataError, match="column 'at': "):
            encode(columns)


@pytest.mark.parametrize(
    "values",
    [
        [b"\xff", b"a"],
        np.array([b"\xff", "a"], object),
        pa.array([[b"\xff"]], pa.list_(pa.large_binary())),
    ],
)
def test_bytes_that_are_not_text_are_refused_where_training_had_text(values: Any) -> None:
    schema = hb.Schema([hb.Id("word")])
    with pytest.raises(DataError, match="column 'word': expected text in UTF-8"):
        RequestEncoder(schema.with_types({"word": "text"}, {}))({"word": values})
    for types in ({}, {"word": "bytes"}):
        assert len(RequestEncoder(schema.with_types(types, {}))({"word": [b"\xff"]}).ids) == 1
