# SPDX-License-Identifier: Apache-2.0
"""Models of hb.auto are served with their training scores: tensors in, ids computed by the server."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from schedule import in_soak
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hotbed as hb
from hotbed.cli import checkpoints
from hotbed.errors import ConfigError, DataError
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.publish import Follower, PublishDirectory
from hotbed.persist.state.checkpoint import capture
from hotbed.persist.state.saver import Saver
from hotbed.training.auto import converted

from .conftest import Held, Running, check_logged

MODELS = Path(__file__).parents[2] / "parity" / "models"
KINDS = {"int64": "INT64", "float32": "FP32"}


@dataclass
class Subject:
    """A converted model, its export, and arguments with what it returns for them."""

    model: nn.Module
    exported: Path
    arguments: dict[str, Tensor]
    expected: np.ndarray


def subject(name: str, folder: Path) -> Subject:
    spec = importlib.util.spec_from_file_location(f"served_{name}", MODELS / f"{name}.py")
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    torch.manual_seed(0)
    model = source.make_model()
    model, optimizer, _ = hb.auto(model, source.make_optimizer(model))
    calls = []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(args), with_kwargs=True)
    for _ in range(3):
        source.train_step(model, optimizer, source.make_batch())
    hb.RecModel(model).export(folder)
    model.eval()
    with torch.no_grad():
        expected = model(*calls[-1])
    names = converted(model).signature.names
    arguments = dict(zip(names, calls[-1], strict=True))
    return Subject(model, folder, arguments, expected.numpy())


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    return cache(lambda name: subject(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=in_soak(["hashing_trick", "dlrm", "tied_output"], {"hashing_trick"}))
def served(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


def test_logged_tensors_score_again_to_the_same_bits(served: Subject, tmp_path: Path) -> None:
    columns = {name: tensor.numpy() for name, tensor in served.arguments.items()}
    flat = {
        name: values if values.ndim == 1 else list(values.reshape(len(values), -1))
        for name, values in columns.items()
    }
    some = {name: values[:3] for name, values in flat.items()}
    check_logged(served.exported, tmp_path, [(flat, {}), (some, {})])


def relative(found: Any, expected: np.ndarray) -> float:
    assert np.shape(found) == expected.shape
    return float((np.abs(found - expected) / np.maximum(1, np.abs(expected))).max())


def test_scores_of_a_session_and_a_server_are_those_of_the_model(served: Subject) -> None:
    columns = {name: tensor.numpy() for name, tensor in served.arguments.items()}
    assert relative(hb.InferenceSession(served.exported).predict(columns), served.expected) < 1e-6
    running = Running(served.exported)
    try:
        for module, place in (
            (tritonclient.http, running.http),
            (tritonclient.grpc, f"127.0.0.1:{running.server.grpc_port}"),
        ):
            inputs = []
            for name, values in columns.items():
                kind = KINDS[values.dtype.name]
                inputs.append(module.InferInput(name, list(values.shape), kind))
                inputs[-1].set_data_from_numpy(values)
            with module.InferenceServerClient(place) as client:
                found = client.infer("m", inputs).as_numpy("prediction")
            assert relative(found, served.expected) < 1e-6
        with tritonclient.http.InferenceServerClient(running.http) as rest:
            metadata = rest.get_model_metadata("m")
            config = rest.get_model_config("m")
        with hb.Client(f"http://{running.http}") as own:
            flat = {name: list(values.reshape(len(values), -1)) for name, values in columns.items()}
            single = {name: values for name, values in columns.items() if values.ndim == 1}
            found = own.predict("m", {**flat, **single})
        assert relative(found, served.expected) < 1e-6
    finally:
        running.close()
    shapes = {entry["name"]: entry["shape"] for entry in metadata["inputs"]}
    assert shapes == {name: [-1, *values.shape[1:]] for name, values in columns.items()}
    kinds = {entry["name"]: entry["datatype"] for entry in metadata["inputs"]}
    assert kinds == {name: KINDS[values.dtype.name] for name, values in columns.items()}
    assert metadata["outputs"][0]["shape"] == [-1, *served.expected.shape[1:]]
    dims = {entry["name"]: entry["dims"] for entry in config["input"]}
    assert dims == {name: list(values.shape[1:]) for name, values in columns.items()}


def test_context_holds_for_every_candidate(served: Subject) -> None:
    session = hb.InferenceSession(served.exported)
    first, *rest = served.arguments
    columns = {name: tensor.numpy() for name, tensor in served.arguments.items()}
    repeated = {**columns, first: np.repeat(columns[first][:1], len(columns[first]), axis=0)}
    others = {name: columns[name] for name in rest}
    shared = columns[first][0]
    if shared.ndim == 0:
        shared = shared.item()
    if not rest:
        return
    found = session.predict(others, context={first: shared})
    assert relative(found, session.predict(repeated)) == 0
    assert len(session.predict({name: values[:0] for name, values in columns.items()})) == 0


def test_ids_of_any_64_bits_are_those_of_training(subjects: Callable[[str], Subject]) -> None:
    own = subjects("hashing_trick")
    edges = np.array([0, -1, 2**63 - 1, -(2**63), 2**53 + 1, -(2**62), 12345678901234567])
    columns = {"user": edges, "item": edges[::-1].copy()}
    with torch.no_grad():
        expected = own.model(torch.from_numpy(edges), torch.from_numpy(columns["item"]))
    found = hb.InferenceSession(own.exported).predict(columns)
    assert relative(found, expected.numpy()) < 1e-6
    assert len(set(found.tolist())) > 1


def test_wrong_columns_are_named(subjects: Callable[[str], Subject]) -> None:
    own = subjects("tied_output")
    session = hb.InferenceSession(own.exported)
    columns = {name: tensor.numpy() for name, tensor in own.arguments.items()}
    with pytest.raises(DataError, match=r"'session': the model takes 5 ids a candidate, got 3"):
        session.predict({**columns, "session": columns["session"][:, :3]})
    with pytest.raises(DataError, match=r"'user'"):
        session.predict({"session": columns["session"]})


# --- batches of a Dataset ---------------------------------------------------------------------

SCHEMA = hb.Schema(
    [
        hb.Label("label"),
        hb.Id("user"),
        hb.Id("tags", transforms=[hb.transforms.Split("|")], pooling="mean"),
        hb.Id("words", weights="importance", pooling="sum"),
        hb.Dense("price", transforms=[hb.transforms.FillMissing(0.5)]),
        hb.Dense("unused", width=2),
    ]
)


class Bags(nn.Module):
    """Ids computed in the model, bags with offsets and weights, and padding."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.user = nn.Embedding(50, 4)
        self.tags = nn.EmbeddingBag(97, 4, mode="mean", padding_idx=padding)
        self.words = nn.EmbeddingBag(50, 4, mode="sum")
        self.learned = nn.Embedding(50, 1)
        self.out = nn.Linear(13, 1)

    def forward(
        self,
        price: Tensor,
        user: Tensor,
        tags: Tensor,
        tags_offsets: Tensor,
        words: Tensor,
        words_offsets: Tensor,
        words_weights: Tensor,
    ) -> Tensor:
        weights = words_weights * torch.sigmoid(self.learned(words).squeeze(1))
        rows = [
            self.user(user % 50),
            self.tags(tags % 97, tags_offsets),
            self.words(words, words_offsets, per_sample_weights=weights),
            price.unsqueeze(1),
        ]
        return self.out(torch.cat(rows, dim=1)).squeeze(1)


def rows(n: int, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    words = [draw.integers(0, 50, draw.integers(0, 4)).tolist() for _ in range(n)]
    tags = [
        "|".join(f"t{tag}" for tag in draw.integers(0, 9, 1 + number % 3)) for number in range(n)
    ]
    return {
        "user": draw.integers(-(2**40), 2**40, n),
        "tags": tags,
        "words": words,
        "importance": [draw.random(len(bag)).tolist() for bag in words],
        "price": np.where(draw.random(n) < 0.2, np.nan, draw.random(n)),
        "unused": draw.random((n, 2)).tolist(),
    }


def dataset(columns: dict[str, Any], batch_size: int = 32) -> hb.Dataset:
    labels = np.arange(len(columns["user"])) % 2
    return hb.Dataset(hb.sources.Memory({**columns, "label": labels}), SCHEMA, batch_size)


@pytest.fixture(scope="module")
def bags() -> hb.RecModel:
    torch.manual_seed(0)
    first = next(iter(dataset(rows(200, 0)))).ids["tags"].values[0]
    network = Bags(padding=int(first % 97))  # an id that is there
    network, optimizer, _ = hb.auto(network, torch.optim.Adagrad(network.parameters(), lr=0.1))
    model = hb.RecModel(network, "bce", optimizer)
    for table in model.tables.values():
        table.track()
    model.fit(dataset(rows(200, 0)), progress=False)
    return model


@pytest.fixture(scope="module")
def exported(bags: hb.RecModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bags")
    bags.export(folder)
    return folder


def test_model_of_a_dataset_is_served_from_raw_columns(bags: hb.RecModel, exported: Path) -> None:
    asked = rows(60, 1)
    expected = bags.predict(dataset(asked))
    session = hb.InferenceSession(exported)
    needed = {name: values for name, values in asked.items() if name != "unused"}
    found = session.predict(needed)
    assert relative(found, expected) < 1e-6
    assert found.std() > 0
    rest = {name: values for name, values in needed.items() if name not in ("words", "importance")}
    shared = {"words": [3, 4, 5], "importance": [0.5, 0.25, 1.0]}
    repeated = {**asked, **{name: [value] * 60 for name, value in shared.items()}}
    assert relative(session.predict(rest, context=shared), bags.predict(dataset(repeated))) < 1e-6
    manifest = open_checkpoint(exported).manifest
    assert manifest.graph.files == ["graph.onnx", "ids.onnx"]
    columns = {column["name"] for column in manifest.schema["columns"]}
    assert "unused" not in columns


def test_rows_may_come_from_a_parameter_server(
    bags: hb.RecModel, exported: Path, tmp_path: Path
) -> None:
    asked = rows(40, 3)
    expected = bags.predict(dataset(asked))
    needed = {name: values for name, values in asked.items() if name != "unused"}
    held = Held(tmp_path / "rows", f"ranker={exported}")
    store = hb.ParameterServer.connect(f"grpc://127.0.0.1:{held.port}")
    try:
        cache = hb.EmbeddingCache(store, "ranker", deadline_seconds=60)
        session = hb.InferenceSession(store.model("ranker"), cache)
        for _ in range(2):  # the second time out of the cache
            assert relative(session.predict(needed), expected) < 1e-6
    finally:
        store.close()
        held.stop()


def test_inspect_describes_the_id_graph(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints.print_checkpoint(hb.checkpoints.describe(exported))
    text = capsys.readouterr().out
    assert "input     words_offsets: int64 [n], starts of column words" in text
    assert "ids.onnx computes those of learned, user, tags, words" in text


@pytest.mark.parametrize("brings_graph", [True, False])
def test_published_versions_are_served_with_the_id_graph(
    bags: hb.RecModel, exported: Path, tmp_path: Path, brings_graph: bool
) -> None:
    publisher = PublishDirectory(tmp_path / "published")
    saver = Saver(tmp_path / "run")
    follower = Follower(tmp_path / "published")
    server = hb.ParameterServer(tmp_path / "rows")
    if brings_graph:
        publisher.graph = bags.graph()
    else:
        server.load("m", exported)  # the versions after it have its graphs
    asked = rows(40, 2)
    needed = {name: values for name, values in asked.items() if name != "unused"}
    for number in range(3):
        bags.fit(dataset(rows(100, 10 + number)), progress=False)
        saver.submit(capture(bags.state(), changes=not saver.needs_full))
        assert publisher.publish(saver.wait()) is not None
        (reader,) = follower.poll()
        version = server.load("m", reader)
        assert version.version == bags.counters["steps"]
        found = hb.InferenceSession(version).predict(needed)
        assert relative(found, bags.predict(dataset(asked))) < 1e-6
    restarted = hb.ParameterServer(tmp_path / "rows").model("m")
    assert relative(hb.InferenceSession(restarted).predict(needed), found) == 0


def test_unbounded_ids_are_served_whole(tmp_path: Path) -> None:
    class Binned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = nn.Embedding(10, 2)
            self.out = nn.Linear(2, 1)

        def forward(self, item: Tensor) -> Tensor:
            return self.out(self.item((item * 31 + 7) % 10)).squeeze(1)

    torch.manual_seed(0)
    model = Binned()
    ids = torch.tensor([5, 15, 25, 2**60])
    model, optimizer, _ = hb.auto(
        model, torch.optim.SGD(model.parameters(), lr=0.1), unbounded=["item"], batch=(ids,)
    )
    for _ in range(3):
        optimizer.zero_grad()
        (model(ids) * torch.tensor([1.0, -2.0, 3.0, -4.0])).sum().backward()
        optimizer.step()
    hb.RecModel(model).export(tmp_path)
    model.eval()
    with torch.no_grad():
        expected = model(ids).numpy()
    assert len(set(expected.tolist())) == 4  # with bins they would be one
    assert relative(hb.InferenceSession(tmp_path).predict({"item": ids.numpy()}), expected) < 1e-6


class Session(nn.Module):
    """Offsets behind their ids, a softmax over no items, and a loss beside the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(9, 4)
        self.item = nn.Embedding(9, 4)

    def forward(
        self,
        words: Tensor,
        offsets: Tensor,
        items: Tensor,
        lengths: Tensor,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        rows = self.item(items)
        is_padding = torch.arange(3) >= lengths[:, None]
        shares = rows.sum(2).masked_fill(is_padding, -torch.inf).softmax(1)
        scores = self.words(words, offsets).sum(1) + (shares[:, :, None] * rows).sum((1, 2))
        loss = None
        if labels is not None:
            loss = nn.functional.binary_cross_entropy_with_logits(scores, labels)
        return {"loss": loss, "scores": scores, "hidden": None}


@pytest.mark.parametrize(
    "labels", [pytest.param(None, marks=pytest.mark.soak), torch.tensor([0.0, 1.0])]
)
def test_scores_beside_a_loss_are_served_with_offsets_and_lengths(
    tmp_path: Path, labels: Tensor | None
) -> None:
    words, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1])
    items, lengths = torch.tensor([[1, 2, 0], [3, 4, 5]]), torch.tensor([2, 3])
    model = moved(Session(), words, offsets, items, lengths, labels)
    hb.RecModel(model).export(tmp_path)
    expected = model.eval()(words, offsets, items, lengths)["scores"].detach().numpy()
    columns = {"words": [[1], [2, 3, 4]], "items": items.numpy(), "lengths": lengths.numpy()}
    found = hb.InferenceSession(tmp_path).predict(columns)
    if isinstance(found, dict):
        (found,) = found.values()
    assert relative(found, expected) < 1e-6


# --- what cannot be served --------------------------------------------------------------------


class Learned(nn.Module):
    """Looks up ids that depend on what is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(8, 2)
        self.second = nn.Embedding(8, 2)

    def forward(self, item: Tensor) -> Tensor:
        nearest = (self.item(item).abs().sum(1) * 10).long() % 8
        return self.second(nearest).sum(1)


def moved(model: nn.Module, *batch: Tensor) -> nn.Module:
    model, _, _ = hb.auto(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if batch:
        model(*batch)
    return model


def test_models_that_cannot_be_served_are_named(tmp_path: Path) -> None:
    ids = torch.arange(4)
    with pytest.raises(ConfigError, match="export: a server needs the arguments of the model"):
        hb.RecModel(moved(Learned())).export(tmp_path)
    with pytest.raises(ConfigError, match="the ids of 'second' must depend on the batch alone"):
        hb.RecModel(moved(Learned(), ids)).export(tmp_path)

    class InBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = nn.Embedding(8, 2)

        def forward(self, item: Tensor) -> Tensor:
            return self.item(item) @ self.item(item).T

    with pytest.raises(ConfigError, match="must not depend on the other candidates of a request"):
        hb.RecModel(moved(InBatch(), ids)).export(tmp_path)

    class Stacked(nn.Module):
        """Takes the offsets of all bags as one tensor, one row for each bag."""

        def __init__(self) -> None:
            super().__init__()
            self.item = nn.EmbeddingBag(8, 2)

        def forward(self, price: Tensor, offsets: Tensor, items: list[Tensor]) -> Tensor:
            bags = [self.item(ids, offsets[number]) for number, ids in enumerate(items)]
            return torch.cat([price, *bags], 1)

    stacked = moved(Stacked(), torch.rand(4, 1), torch.stack([ids, ids]), [ids, ids])
    with pytest.raises(ConfigError, match="the first axis of tensor 'offsets' must be the samples"):
        hb.RecModel(stacked).export(tmp_path)

    assert not list(tmp_path.iterdir())


class Packed(nn.Module):
    """Runs a recurrent layer over packed sequences, or takes the last of its padded outputs."""

    def __init__(self, kind: type[nn.RNNBase], how: str) -> None:
        super().__init__()
        self.item = nn.Embedding(8, 2)
        self.encoder = nn.ModuleDict({"rnn": kind(2, 2, batch_first=True)})
        self.how = how

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        rows = self.item(items)
        if self.how == "remedy":
            outputs, _ = self.encoder["rnn"](rows)
            return outputs[torch.arange(items.shape[0]), lengths - 1].sum(1)
        packed = pack_padded_sequence(
            rows, lengths.clamp(min=1), batch_first=True, enforce_sorted=False
        )
        outputs, state = self.encoder["rnn"](packed)
        if self.how == "last":
            return (state[0] if isinstance(state, tuple) else state)[-1].sum(1)
        length = 3 if self.how == "total" else None
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=length)
        return padded[:, 0].sum(1)


@pytest.mark.parametrize(
    ("kind", "how"), [(nn.GRU, "last"), (nn.LSTM, "padded"), (nn.RNN, "total")]
)
def test_a_packed_sequence_is_refused_with_its_layer_and_the_remedy(
    kind: type[nn.RNNBase], how: str, tmp_path: Path
) -> None:
    batch = torch.tensor([[1, 2, 0], [3, 4, 5]]), torch.tensor([2, 3])
    with pytest.raises(
        ConfigError,
        match=r"layer 'encoder\.rnn', got packed sequences .*Give the layer the padded rows",
    ):
        hb.RecModel(moved(Packed(kind, how), *batch)).export(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.soak  # the network "own" of test_histories.py runs a GRU over padded rows
def test_the_remedy_for_packed_sequences_gives_their_scores(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.tensor([[1, 2, 0], [3, 4, 5]]), torch.tensor([2, 3])
    packed = Packed(nn.GRU, "last")
    model = Packed(nn.GRU, "remedy")
    model.load_state_dict(packed.state_dict())
    hb.RecModel(moved(model, *batch)).export(tmp_path)
    columns = {"items": batch[0].tolist(), "lengths": batch[1].tolist()}
    scores = hb.InferenceSession(tmp_path).predict(columns)
    np.testing.assert_allclose(scores, packed(*batch).detach(), atol=1e-6)


class Masked(nn.Module):
    """Gives one of torch's transformers a causal mask, with or without its hints."""

    def __init__(self, kind: str, **hints: bool) -> None:
        super().__init__()
        self.item = nn.Embedding(8, 4)
        self.kind = kind
        self.hints = hints
        sizes: dict[str, Any] = {"dim_feedforward": 4, "dropout": 0.0, "batch_first": True}
        parts = {
            "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, **sizes), 1),
            "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 1, **sizes), 1),
            "both": lambda: nn.Transformer(4, 1, 1, 1, **sizes),
        }
        self.inner = nn.ModuleDict({"block": parts[kind]()})

    def forward(self, items: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
        rows = self.item(items)
        block = self.inner["block"]
        if self.kind == "encoder":
            rows = block(rows, mask=mask, **self.hints)
        elif self.kind == "decoder":
            rows = block(rows, rows, tgt_mask=mask, **self.hints)
        else:
            rows = block(rows, rows, src_mask=mask, tgt_mask=mask, **self.hints)
        return rows[:, -1].sum(1)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize(
    "kind, hints",
    [
        pytest.param("encoder", ["is_causal"], marks=pytest.mark.soak),
        pytest.param("decoder", ["tgt_is_causal"], marks=pytest.mark.soak),
        ("both", ["src_is_causal", "tgt_is_causal"]),
    ],
)
def test_a_mask_that_torch_compares_is_refused_with_its_layer_and_the_hint(
    kind: str, hints: list[str], tmp_path: Path
) -> None:
    items = torch.tensor([[1, 2, 3], [4, 5, 6]])
    known: dict[str, bool] = {}
    for hint in hints:
        with pytest.raises(
            ConfigError, match=rf"layer 'inner\.block', got a mask .* layer {hint}=True beside"
        ):
            hb.RecModel(moved(Masked(kind, **known), items)).export(tmp_path)
        assert not list(tmp_path.iterdir())
        known[hint] = True
    if kind == "both":
        return  # two layers of the kinds that the other cases export
    torch.manual_seed(0)
    model = moved(Masked(kind, **known), items)
    hb.RecModel(model).export(tmp_path)
    scores = hb.InferenceSession(tmp_path).predict({"items": items.tolist()})
    np.testing.assert_allclose(scores, model.eval()(items).detach(), atol=1e-5)
