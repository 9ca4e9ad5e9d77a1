# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's inference calls score as the model that was trained, from its JSON and weight files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from parameter_pages import HUGECTR

import hotbed as hb
import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr import Check_t, DataReaderType_t, OptParams, converter, weights
from hotbed.compat.hugectr.inference import (
    HPS,
    CreateEmbeddingCache,
    CreateInferenceSession,
    CreateParameterServer,
    InferenceModel,
    InferenceParams,
    InferenceSession,
    ParameterServerConfig,
)
from hotbed.compat.hugectr.json.layers import read_graph
from hotbed.compat.hugectr.reader import evaluation_data
from hotbed.compat.hugectr.translate import translate
from hotbed.errors import ConfigError, DataError, FormatError, PersistError, RowShapeError

NUM_SAMPLES = 60
SPARSE = [
    {"top": "data1", "type": "DistributedSlot", "max_feature_num_per_sample": 9, "slot_num": 3},
    {"top": "wide_data", "type": "LocalizedSlot", "max_feature_num_per_sample": 4, "slot_num": 1},
]


def embedding(name: str, bottom: str, kind: str, dim: int, combiner: int) -> dict[str, Any]:
    return {
        "name": name,
        "type": kind,
        "bottom": bottom,
        "top": name,
        "sparse_embedding_hparam": {
            "max_vocabulary_size_per_gpu": 1000,
            "embedding_vec_size": dim,
            "combiner": combiner,
        },
    }


def layers(*, tables: int = 2, normalized: bool = False) -> list[dict[str, Any]]:
    """A wide and deep network, as v3.0 writes it for inference."""
    data = {
        "name": "data",
        "type": "Data",
        "check": "Sum",
        "label": {"label_dim": 1},
        "dense": {"top": "dense", "dense_dim": 2},
        "sparse": SPARSE[:tables],
    }
    hash_kind = "SlotSparseEmbeddingHash"
    found = [data, embedding("emb1", "data1", f"Distributed{hash_kind}", 4, 1)]
    if tables == 2:
        found.append(embedding("emb2", "wide_data", f"Localized{hash_kind}", 1, 0))
    found += [
        {"type": "Reshape", "bottom": "emb1", "top": "reshape1", "leading_dim": 12},
        {"type": "Concat", "bottom": ["reshape1", "dense"], "top": "concat1"},
        {"type": "InnerProduct", "bottom": "concat1", "top": "fc1", "fc_param": {"num_output": 8}},
    ]
    last = "fc1"
    if normalized:
        bn = {"factor": 0.9, "eps": 1e-5}
        found.append({"type": "BatchNorm", "bottom": "fc1", "top": "bn1", "bn_param": bn})
        last = "bn1"
    found += [
        {"type": "ReLU", "bottom": last, "top": "relu1"},
        {"type": "InnerProduct", "bottom": "relu1", "top": "fc2", "fc_param": {"num_output": 1}},
    ]
    if tables == 2:
        found += [
            {"type": "Reshape", "bottom": "emb2", "top": "reshape2", "leading_dim": 1},
            {"type": "Add", "bottom": ["fc2", "reshape2"], "top": "add1"},
        ]
    logit = "add1" if tables == 2 else "fc2"
    return [*found, {"type": "Sigmoid", "bottom": logit, "top": "sigmoid"}]


def data(tables: int, n: int = NUM_SAMPLES, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def bags(most: int, low: int) -> list[list[int]]:
        return [rng.integers(low, low + 20, rng.integers(0, most + 1)).tolist() for _ in range(n)]

    columns: dict[str, Any] = {
        "dense": rng.random((n, 2), np.float32).tolist(),
        "label": rng.integers(0, 2, n),
    }
    for slot in range(3):
        columns[f"data1_{slot}"] = bags(3, 20 * slot)
    if tables == 2:
        columns["wide_data"] = bags(4, 0)
    return columns


class Trained:
    """A model that was trained, and its files in HugeCTR's formats."""

    def __init__(self, home: Path, tables: int, *, normalized: bool, form: Any) -> None:
        torch.manual_seed(0)
        self.spec = {"layers": layers(tables=tables, normalized=normalized)}
        translation = translate(read_graph(self.spec), OptParams())
        network = hb.models.Graph(translation.schema, translation.tables, translation.description)
        self.model = hb.RecModel(network, translation.loss, hb.Adam(lr=0.05))
        self.columns = data(tables)
        source = hb.sources.Memory(self.columns)
        self.dataset = hb.Dataset(source, translation.schema, 20)
        self.model.fit(self.dataset, epochs=3, progress=False)
        self.dense = str(home / "_dense_9.model")
        weights.save_dense(self.dense, network, translation)
        self.sparse = []
        for number, one in enumerate(translation.embeddings):
            path = str(home / f"{number}_sparse_9.model")
            localized = number == 1
            weights.save_sparse(
                path, translation.tables[one.table], weights.SparseFile(form, localized, i64=False)
            )
            self.sparse.append(path)

    @property
    def scores(self) -> np.ndarray:
        return np.asarray(self.model.predict(self.dataset))


def inference_json(path: Path, trained: Trained, **clause: Any) -> str:
    sparse = trained.sparse if len(trained.sparse) > 1 else trained.sparse[0]
    spec = {
        "inference": {
            "max_batchsize": NUM_SAMPLES,
            "hit_rate_threshold": 0.6,
            "dense_model_file": trained.dense,
            "sparse_model_file": sparse,
            **clause,
        },
        **trained.spec,
    }
    path.write_text(json.dumps(spec))
    return str(path)


def one_csr(columns: dict[str, Any], names: list[str], n: int) -> tuple[list[float], ...]:
    """Keys by sample, and where those of each slot begin."""
    keys: list[Any] = []
    pointers = [0]
    for sample in range(n):
        for name in names:
            keys += columns[name][sample]
            pointers.append(len(keys))
    dense = [one for row in columns["dense"][:n] for one in row]
    return dense, keys, pointers


DEEP = ["data1_0", "data1_1", "data1_2"]


@pytest.mark.parametrize(("form", "cached"), [("file", False), ("folder", True)])
def test_a_session_of_v3_0_scores_as_training(form: str, cached: bool, tmp_path: Path) -> None:
    trained = Trained(tmp_path, 1, normalized=True, form=form)
    config = inference_json(tmp_path / "dcn.json", trained)
    server = CreateParameterServer([config], ["dcn"], False)
    cache = CreateEmbeddingCache(server, 0, cached, 0.2, config, "dcn", False)
    session = InferenceSession(config, 0, cache)
    dense, keys, pointers = one_csr(trained.columns, DEEP, NUM_SAMPLES)
    scores = session.predict(dense, keys, pointers)
    assert isinstance(scores, list)
    assert isinstance(scores[0], float)
    assert np.abs(np.array(scores) - trained.scores).max() <= 1e-6
    again = session.predict(dense_feature=dense, embeddingcolumns=keys, row_ptrs=pointers)
    assert again == scores
    assert session.predict([], [], [0]) == []


def test_several_tables_have_pointers_of_their_own(tmp_path: Path) -> None:
    trained = Trained(tmp_path, 2, normalized=False, form="folder")
    (tmp_path / "wdl.json").write_text(json.dumps(trained.spec))
    session = CreateInferenceSession(str(tmp_path / "wdl.json"), params(trained))
    columns = trained.columns
    dense, keys, joined = one_csr(columns, [*DEEP, "wide_data"], NUM_SAMPLES)
    assert np.abs(np.array(session.predict(dense, keys, joined)) - trained.scores).max() <= 1e-6
    pointers = [*one_csr(columns, DEEP, NUM_SAMPLES)[2]]
    pointers += one_csr(columns, ["wide_data"], NUM_SAMPLES)[2]
    assert session.predict(dense, keys, pointers) == session.predict(dense, keys, joined)
    session.refresh_embedding_cache()


def params(trained: Trained, **changed: Any) -> InferenceParams:
    return InferenceParams(
        **{
            "model_name": "wdl",
            "max_batchsize": NUM_SAMPLES,
            "hit_rate_threshold": 1.0,
            "dense_model_file": trained.dense,
            "sparse_model_files": trained.sparse,
            "device_id": 0,
            "use_gpu_embedding_cache": True,
            "cache_size_percentage": 0.5,
            "i64_input_key": False,
            **changed,
        }
    )


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("deep"), 1, normalized=False, form="file")


@pytest.fixture(scope="module")
def session(deep: Trained, tmp_path_factory: pytest.TempPathFactory) -> InferenceSession:
    path = tmp_path_factory.mktemp("served") / "g.json"
    path.write_text(json.dumps(deep.spec))
    return CreateInferenceSession(path, params(deep))


def test_a_loss_in_the_last_place_of_a_graph_is_a_sigmoid(deep: Trained, tmp_path: Path) -> None:
    spec = copy.deepcopy(deep.spec)
    spec["layers"][0]["label"]["top"] = "label"
    loss = {"type": "BinaryCrossEntropyLoss", "bottom": ["fc2", "label"], "top": "loss"}
    spec["layers"][-1] = loss
    (tmp_path / "g.json").write_text(json.dumps(spec))
    session = CreateInferenceSession(tmp_path / "g.json", params(deep))
    request = one_csr(deep.columns, DEEP, NUM_SAMPLES)
    assert np.abs(np.array(session.predict(*request)) - deep.scores).max() <= 1e-6


def test_without_a_sigmoid_scores_are_logits(deep: Trained, tmp_path: Path) -> None:
    spec = {"layers": deep.spec["layers"][:-1]}
    (tmp_path / "g.json").write_text(json.dumps(spec))
    session = CreateInferenceSession(tmp_path / "g.json", params(deep))
    logits = np.array(session.predict(*one_csr(deep.columns, DEEP, NUM_SAMPLES)))
    assert np.abs(1 / (1 + np.exp(-logits)) - deep.scores).max() <= 1e-6


def test_a_key_without_a_row_reads_the_default(deep: Trained, tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(json.dumps(deep.spec))
    dense = one_csr(deep.columns, DEEP, 1)[0]
    unknown = [9_999 for _ in range(3)]
    outputs = []
    for default in (0.0, 5.0):
        one = params(deep, default_value_for_each_table=[default])
        session = CreateInferenceSession(tmp_path / "g.json", one)
        outputs.append(session.predict(dense, unknown, [0, 1, 2, 3])[0])
        outputs.append(session.predict(dense, [], [0, 0, 0, 0])[0])
    # the mean of one default vector is that vector; without keys it is zero
    assert outputs[0] == outputs[1] == outputs[3] != outputs[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda dense, keys, ptrs: (dense[1:], keys, ptrs),
            "2 values for each of 5 samples, got 9",
        ),
        (lambda dense, keys, ptrs: (dense, keys, ptrs[:-2]), r"row_ptrs: expected n \* 3 entries"),
        (lambda dense, keys, ptrs: (dense, [*keys, 1], ptrs), "the number of ids"),
        (lambda dense, keys, ptrs: (dense, keys, [1, *ptrs[1:]]), "rise from 0"),
        (lambda dense, keys, ptrs: (dense, keys * 9, ptrs), "at most 9 keys for each of 5 samples"),
        (lambda dense, keys, ptrs: (dense * 20, keys, [0] * 301), "at most 60 samples"),
    ],
)
def test_requests_that_do_not_fit_are_refused(
    change: Any, message: str, deep: Trained, session: InferenceSession
) -> None:
    with pytest.raises((DataError, RowShapeError), match=message):
        session.predict(*change(*one_csr(deep.columns, DEEP, 5)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda spec: spec.update(solver={}), 'Delete the lines of "solver"'),
        (lambda spec: spec.update(optimizer={}), 'Delete the lines of "optimizer"'),
        (lambda spec: spec.pop("inference"), 'Add "inference": {"dense_model_file"'),
        (
            lambda spec: spec["layers"].__setitem__(
                -1, {"type": "BinaryCrossEntropyLoss", "bottom": ["fc2", "label"], "top": "loss"}
            ),
            r'Write {"type": "Sigmoid", "bottom": "fc2", "top": "sigmoid"} in its place',
        ),
        (lambda spec: spec["inference"].update(batchsize=1), "batchsize: unknown key"),
        (lambda spec: spec["inference"].pop("dense_model_file"), "dense_model_file: missing key"),
        (lambda spec: spec["inference"].update(input_key_type="I16"), "not I32 or I64"),
        (lambda spec: spec["inference"].update(input_key_type="I64"), "i64_input_key=False"),
        (lambda spec: spec["inference"].update(sparse_model_file=[]), "one sparse file for each"),
    ],
)
def test_files_that_are_not_for_inference_show_the_edit(
    edit: Any, message: str, deep: Trained, tmp_path: Path
) -> None:
    path = tmp_path / "dcn.json"
    inference_json(path, deep)
    spec = json.loads(path.read_text())
    edit(spec)
    path.write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match=message):
        CreateParameterServer([str(path)], ["dcn"], False)


def test_names_files_and_shares_that_contradict_each_other_are_refused(
    deep: Trained, tmp_path: Path
) -> None:
    config = inference_json(tmp_path / "a.json", deep)
    with pytest.raises(ConfigError, match="a name of its own for each model, got 'A' of models 0"):
        CreateParameterServer([config, config], ["A", "A"], False)
    for arguments in ((config, ["A"]), ([config], "A")):
        with pytest.raises(ConfigError, match="expected a list, got"):
            CreateParameterServer(*arguments, False)
    server = CreateParameterServer([config, config], ["A", "B"], False)
    right = (server, 0, True, 0.5, config, "A", False)
    cache = CreateEmbeddingCache(*right)
    InferenceSession(config, 0, cache)
    other = json.loads(Path(config).read_text())
    other["layers"][4]["fc_param"]["num_output"] = 9
    (tmp_path / "other.json").write_text(json.dumps(other))
    clause = inference_json(tmp_path / "clause.json", deep, max_batchsize=7)
    (tmp_path / "text.json").write_text("hello")
    for path, error, message in (
        (str(tmp_path / "other.json"), ConfigError, "other.json' with another layers"),
        (clause, ConfigError, "clause.json' with another max_batchsize"),
        (str(tmp_path / "text.json"), ConfigError, "not JSON"),
        (str(tmp_path / "none.json"), PersistError, "cannot be read"),
        (cache, ConfigError, "expected the path of a JSON file"),
    ):
        with pytest.raises(error, match=message):
            InferenceSession(path, 0, cache)
        with pytest.raises(error, match=message):
            CreateEmbeddingCache(*right[:4], path, *right[5:])
    for place, value, message in (
        (0, config, "expected what CreateParameterServer returns"),
        (3, 50, "cache_size_percentage: not from 0 to 1, got 50"),
        (3, float("nan"), "cache_size_percentage: not from 0 to 1, got nan"),
        (6, True, "i64_input_key: expected False"),
    ):
        wrong = [*right[:place], value, *right[place + 1 :]]
        with pytest.raises(ConfigError, match=message):
            CreateEmbeddingCache(*wrong)
    with pytest.raises(ConfigError, match=r"expected what CreateEmbeddingCache returns"):
        InferenceSession(config, cache, server)  # the order of words of HugeCTR's blog


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((), {}, r"predict\.dense_feature: missing argument, got no arguments"),
        (([], []), {}, r"predict\.row_ptrs: missing argument, got dense_feature, embedd"),
        (([], [], [0]), {"rows": 1}, r"predict\.rows: unknown argument"),
        ((1, "x"), {}, r"predict\.data_reader_type: missing argument"),
        ((0, "x", DataReaderType_t.Norm, Check_t.Sum), {}, r"predict\.num_batches"),
        ((1, "x", DataReaderType_t.Parquet, Check_t.Non), {}, r"slot_size_array: missing argument"),
        ((["a", "b"], [], [0, 0, 0, 0]), {}, "dense_feature: expected numbers"),
    ],
)
def test_calls_of_predict_that_lack_something_are_refused(
    arguments: Any, keywords: Any, message: str, session: InferenceSession
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        session.predict(*arguments, **keywords)


def test_dense_numbers_that_are_not_finite_are_not_served(deep: Trained, tmp_path: Path) -> None:
    numbers = np.fromfile(deep.dense, np.float32)
    for place, value, layer in ((3, np.nan, "fc1"), (-1, np.inf, "fc2")):
        changed = numbers.copy()
        changed[place] = value
        changed.tofile(tmp_path / "dense.model")
        (tmp_path / "g.json").write_text(json.dumps(deep.spec))
        with pytest.raises(FormatError, match=rf"dense\.model: .*got {value} .*layer '{layer}'"):
            CreateInferenceSession(
                tmp_path / "g.json", params(deep, dense_model_file=str(tmp_path / "dense.model"))
            )


def test_missing_and_wrong_files_are_named(deep: Trained, tmp_path: Path) -> None:
    config = inference_json(tmp_path / "dcn.json", deep, dense_model_file="nowhere.model")
    with pytest.raises(PersistError, match=r"nowhere\.model: expected a file, got nothing"):
        CreateParameterServer([config], ["dcn"], False)
    config = inference_json(tmp_path / "dcn.json", deep, dense_model_file=deep.sparse[0])
    with pytest.raises(FormatError, match="numbers of the dense layers"):
        CreateParameterServer([config], ["dcn"], False)
    with pytest.raises(ConfigError, match="expected one for each of 1 files"):
        CreateParameterServer([config], [], False)
    with pytest.raises(PersistError, match="cannot be read"):
        CreateParameterServer([str(tmp_path / "no.json")], ["dcn"], False)


@pytest.mark.parametrize("kind", [DataReaderType_t.Norm, DataReaderType_t.Parquet])
def test_files_are_scored_as_requests(
    kind: Any, deep: Trained, session: InferenceSession, tmp_path: Path
) -> None:
    columns = deep.columns
    numbers = np.array(columns["dense"], np.float32)
    offsets = (0, 20, 40)
    if kind is DataReaderType_t.Norm:
        source = norm(tmp_path, columns, numbers)
        keywords: dict[str, Any] = {}
    else:
        source = parquet(tmp_path, columns, numbers, offsets)
        keywords = {"slot_size_array": [20, 20, 20]}
    (tmp_path / "g.json").write_text(json.dumps(deep.spec))
    model = InferenceModel(tmp_path / "g.json", params(deep, max_batchsize=25, i64_input_key=False))
    check = Check_t.Sum if kind is DataReaderType_t.Norm else Check_t.Non
    with pytest.raises(ConfigError, match="nothing was scored yet"):
        model.check_out_tensor("fc2")
    scores = model.predict(3, source, kind, check, **keywords)
    assert scores.shape == (75, 1)  # 60 samples, and the first 15 again
    logits = model.check_out_tensor("fc2")
    assert np.abs(1 / (1 + np.exp(-logits)) - scores[60:]).max() <= 1e-6
    expected = np.concatenate([deep.scores, deep.scores[:15]])
    assert np.abs(scores[:, 0] - expected).max() <= 1e-6
    named = {
        "num_batches": 1,
        "source": source,
        "data_reader_type": kind,
        "check_type": check,
        **keywords,
    }
    assert (session.predict(**named) == scores[:NUM_SAMPLES, 0]).all()
    if keywords:  # a graph of training here says the sizes, also of keys without a row
        deep.spec["layers"][0]["slot_size_array"] = named.pop("slot_size_array")
        (tmp_path / "g.json").write_text(json.dumps(deep.spec))
        del deep.spec["layers"][0]["slot_size_array"]
        sized = CreateInferenceSession(tmp_path / "g.json", params(deep))
        assert (sized.predict(**named) == scores[:NUM_SAMPLES, 0]).all()
        named |= keywords
    metric = hb.metrics.AUC()
    metric.update(deep.scores, np.asarray(columns["label"]))
    assert session.evaluate(**named) == pytest.approx(metric.eval(), abs=1e-9)


@pytest.mark.parametrize("adds", [False, True])
def test_raw_files_are_scored_with_the_keys_that_training_read(
    adds: bool, deep: Trained, session: InferenceSession, tmp_path: Path
) -> None:
    """From v3.1 on, Raw files hold the offsets of their slots; readers up to v3.0.1 add them."""
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 20, (25, 3), dtype=np.int32)
    dense = rng.integers(0, 9, (25, 2), dtype=np.int32)
    offsets = np.array([0, 20, 40], np.int32)
    labels = np.zeros((25, 1), np.int32)
    raw = keys if adds else keys + offsets
    np.concatenate([labels, dense, raw], axis=1).tofile(tmp_path / "0.bin")
    spec = copy.deepcopy(deep.spec)
    if adds:
        spec["layers"][0] |= {"slot_size_array": [20, 20, 20], "adds_slot_offsets": True}
    (tmp_path / "g.json").write_text(json.dumps(spec))
    own = CreateInferenceSession(tmp_path / "g.json", params(deep, max_batchsize=25))
    scores = own.predict(1, str(tmp_path / "0.bin"), DataReaderType_t.Raw, Check_t.Non)
    request = np.log(dense.astype(np.float32) + 1).reshape(-1).tolist()
    expected = session.predict(request, (keys + offsets).reshape(-1).tolist(), list(range(76)))
    assert np.abs(scores - expected).max() <= 1e-6


def norm(home: Path, columns: dict[str, Any], numbers: Any) -> str:
    """A Norm file and a file list."""
    source = hb.sources.Norm(str(home / "0.data"), ["label"], DEEP, key_bits=32, checksum=True)
    source.write(hb.sources.Memory({**columns, "dense": list(numbers)}))
    (home / "list.txt").write_text(f"1\n{home / '0.data'}\n")
    return str(home / "list.txt")


def parquet(home: Path, columns: dict[str, Any], numbers: Any, offsets: Any) -> str:
    """A Parquet file with its metadata and a file list, whose ids lack the offsets."""
    table: dict[str, Any] = {"label": np.asarray(columns["label"], np.float32)}
    for place in range(2):
        table[f"I{place}"] = numbers[:, place]
    for slot, offset in enumerate(offsets):
        ids = [[one - offset for one in row] for row in columns[DEEP[slot]]]
        table[f"C{slot}"] = pa.array(ids, pa.list_(pa.int64()))
    pq.write_table(pa.table(table), home / "0.parquet")
    entries = {"labels": ["label"], "conts": ["I0", "I1"], "cats": ["C0", "C1", "C2"]}
    metadata: dict[str, Any] = {"file_stats": [{"file_name": "0.parquet", "num_rows": NUM_SAMPLES}]}
    for role, names in entries.items():
        places = [list(table).index(name) for name in names]
        metadata[role] = [
            {"col_name": name, "index": place} for name, place in zip(names, places, strict=True)
        ]
    (home / "_metadata.json").write_text(json.dumps(metadata))
    (home / "list.txt").write_text(f"1\n{home / '0.parquet'}\n")
    return str(home / "list.txt")


def test_a_model_of_the_high_level_api_is_served_from_its_files(
    deep: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = norm(tmp_path, deep.columns, np.array(deep.columns["dense"], np.float32))
    solver = hugectr.CreateSolver(batchsize=20, batchsize_eval=20, max_eval_batches=3)
    reader = hugectr.DataReaderParams(
        DataReaderType_t.Norm, source=[source], eval_source=source, check_type=Check_t.Sum
    )
    model = hugectr.Model(solver, reader, hugectr.CreateOptimizer())
    sparse = hugectr.DataReaderSparseParam("data1", 3, False, 3)
    model.add(hugectr.Input(1, "label", 2, "dense", [sparse]))
    kind = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash
    model.add(hugectr.SparseEmbedding(kind, 1, 4, "sum", "emb1", "data1"))
    layer = hugectr.Layer_t
    for kind, bottoms, tops, keywords in (
        (layer.Reshape, ["emb1"], ["reshape1"], {"leading_dim": 12}),
        (layer.Concat, ["reshape1", "dense"], ["concat1"], {}),
        (layer.MultiCross, ["concat1"], ["cross1"], {"num_layers": 2}),
        (layer.BatchNorm, ["cross1"], ["bn1"], {}),
        (layer.InnerProduct, ["bn1"], ["fc1"], {"num_output": 1}),
        (layer.BinaryCrossEntropyLoss, ["fc1", "label"], ["loss"], {}),
    ):
        model.add(hugectr.DenseLayer(kind, bottoms, tops, **keywords))
    model.compile()
    model.fit(max_iter=9, display=0, eval_interval=0, snapshot=0)
    model.save_params_to_files("m", 9)
    model.graph_to_json("m.json")
    assert json.loads(Path("m.json").read_text())["layers"][0]["slot_size_array"] == []
    samples = evaluation_data(reader, model.graph.input, solver, model.translation.schema)
    trained = np.asarray(model.learner.predict(samples))
    one = InferenceParams(
        model_name="m",
        max_batchsize=NUM_SAMPLES,
        hit_rate_threshold=1.0,
        dense_model_file="m_dense_9.model",
        sparse_model_files=["m0_sparse_9.model"],
        use_gpu_embedding_cache=False,
        cache_size_percentage=1.0,
        i64_input_key=False,
    )
    served = CreateInferenceSession("m.json", one)
    request = one_csr(deep.columns, DEEP, NUM_SAMPLES)
    assert np.abs(np.array(served.predict(*request)) - trained).max() <= 1e-6


def test_what_its_page_calls_read_is_read(
    deep: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()

    class Recorded(InferenceParams):
        def __getattribute__(self, name: str) -> Any:
            if ready:
                read.add(name)
            return super().__getattribute__(name)

    ready: list[bool] = []
    (tmp_path / "g.json").write_text(json.dumps(deep.spec))
    values = {name: getattr(params(deep), name) for name in InferenceParams.__dataclass_fields__}
    sizes = {"embedding_vecsize_per_table": (4,), "default_value_for_each_table": (0.0,)}
    recorded = Recorded(**{**values, **sizes, "sparse_model_files": deep.sparse[:1]})
    ready.append(True)
    model = CreateInferenceSession(tmp_path / "g.json", recorded)
    model.predict(*one_csr(deep.columns, DEEP, NUM_SAMPLES))
    config = ParameterServerConfig({"wdl": ("t",)}, {}, {}, (recorded,))
    assert HPS(config).lookup([1], "wdl", 0).shape == (1, 4)
    (section,) = [one for one in HUGECTR.sections if one["title"] == "InferenceParams"]
    named = {row.name for row in HUGECTR.parameters(section) if row.kind in ("same", "mapped")}
    assert named <= read


# --- ONNX -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalized", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_converted_model_scores_as_the_session(normalized: bool, tmp_path: Path) -> None:
    """With its rows, on keys padded by -1 and keys without a row; and without, on pooled rows."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime absent")
    trained = Trained(tmp_path, 2, normalized=normalized, form="folder")
    graph = str(tmp_path / "wdl.json")
    Path(graph).write_text(json.dumps(trained.spec))
    columns = trained.columns
    columns["data1_0"][0] = [10_000]  # has no row
    keys = {
        "data1": np.full((NUM_SAMPLES, 3, 4), -1),
        "wide_data": np.full((NUM_SAMPLES, 1, 4), -1),
    }
    for row in range(NUM_SAMPLES):
        for slot, name in enumerate([*DEEP, "wide_data"]):
            ids = columns[name][row]
            keys["wide_data" if slot == 3 else "data1"][row, slot % 3, : len(ids)] = ids
    dense = np.array(columns["dense"], np.float32)
    request = one_csr(columns, [*DEEP, "wide_data"], NUM_SAMPLES)
    expected = CreateInferenceSession(graph, params(trained)).predict(*request)
    path = str(tmp_path / "new" / "wdl.onnx")
    converter.convert(path, graph, trained.dense, True, trained.sparse)
    scores = onnxruntime.InferenceSession(path).run(["label"], {"dense": dense, **keys})[0]
    assert scores.shape == (NUM_SAMPLES, 1)
    assert np.abs(scores[:, 0] - expected).max() <= 1e-6

    rows = {}
    for top, bottom, is_mean in (("emb1", "data1", True), ("emb2", "wide_data", False)):
        table = trained.model.tables[top]
        present = keys[bottom] >= 0
        known = present & (keys[bottom] < 10_000)
        vectors = np.where(
            known[..., None], table.lookup(keys[bottom].ravel()).reshape(*known.shape, -1), 0
        )
        divisor = np.maximum(present.sum(2), 1)[..., None] if is_mean else 1
        rows[top] = (vectors.sum(2) / divisor).astype(np.float32)
    assert (
        converter.main(
            ["--onnx_model_path", path, "--graph_config", graph, "--dense_model", trained.dense]
        )
        == 0
    )
    scores = onnxruntime.InferenceSession(path).run(None, {"dense": dense, **rows})[0]
    assert np.abs(scores[:, 0] - expected).max() <= 1e-6
