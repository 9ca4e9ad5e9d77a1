# SPDX-License-Identifier: Apache-2.0
"""A network that cannot be served: the error names the feature or the layer, and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")
pytest.importorskip("onnxscript", reason="onnx absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.embedding.modules import table_modules
from hotbed.errors import ConfigError
from hotbed.persist.publish.export import export_graph
from hotbed.persist.publish.independence import NUM_ROWS, REQUESTS, made_up_lengths

SCHEMA = hb.Schema([hb.Label("y"), hb.Id("item"), hb.Id("hist", table="item", pooling="none")])


class Attention(nn.Module):
    """Sums of a sequence's rows, by the item that each belongs to."""

    def __init__(self, owners: str) -> None:
        super().__init__()
        self.owners = owners

    def forward(self, rows: Tensor, offsets: Tensor, item: Tensor) -> Tensor:
        if self.owners == "fixed":
            number = torch.arange(len(offsets) - 1)
            owner = torch.repeat_interleave(number, offsets.diff())
        else:
            owner = torch.bucketize(torch.arange(int(offsets[-1])), offsets[1:], right=True)
        return torch.zeros_like(item).index_add(0, owner, rows)


class Din(nn.Module):
    def __init__(self, owners: str) -> None:
        super().__init__()
        self.embedding = hb.EmbeddingCollection(SCHEMA, hb.make_tables(SCHEMA, 4))
        self.attention = Attention(owners)
        self.head = nn.Linear(4, 1)

    def forward(self, batch: Any) -> Tensor:
        rows = self.embedding(batch)
        history = self.attention(rows["hist"], batch.ids["hist"].offsets, rows["item"])
        return self.head(rows["item"] + history).squeeze(1)


@pytest.mark.parametrize(
    "owners, place", [("fixed", "feature 'hist'"), ("read", "layer 'attention'")]
)
def test_network_that_cannot_be_exported_is_an_error_that_names_where(
    owners: str, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ConfigError, match=f"Din cannot become an ONNX graph, because of {place}"
    ) as caught:
        export_graph(Din(owners), SCHEMA)
    assert "\x1b" not in str(caught.value)
    assert "Give the rows of 'hist' to hb.models.layers.PadSequence(length)" in str(caught.value)
    for words in ("ONNXRuntimeError", "data-dependent"):  # the runtime's own
        assert words not in str(caught.value)
    assert caught.value.__cause__ is not None
    assert capfd.readouterr() == ("", "")


class Recurrent(nn.Module):
    """Runs a recurrent layer over a packed sequence of one row a sample."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        schema = hb.Schema([hb.Label("y"), hb.Id("item")])
        self.embedding = hb.EmbeddingCollection(schema, hb.make_tables(schema, 4))
        self.tower = nn.ModuleDict({"rnn": kind(4, 2)})

    def forward(self, batch: Any) -> Tensor:
        rows = self.embedding(batch)["item"]
        lengths = torch.ones(rows.shape[0], dtype=torch.int64)
        packed = nn.utils.rnn.pack_padded_sequence(rows[None], lengths)
        outputs, _ = self.tower["rnn"](packed)
        return outputs.data.sum(1)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_packed_sequence_is_an_error_that_names_the_layer_and_the_remedy(
    kind: type[nn.RNNBase],
) -> None:
    with pytest.raises(
        ConfigError, match=r"layer 'tower\.rnn', got packed sequences .*the padded rows \[n, length"
    ):
        export_graph(Recurrent(kind), hb.Schema([hb.Label("y"), hb.Id("item")]))


class Steps(nn.Module):
    """Scores [n] of rows [n, 8] after a step, as a network of its own or for `hb.auto`."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor], *, is_converted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        if is_converted:
            self.user = nn.Embedding(50, 4)
            self.item = nn.Embedding(50, 4)
        else:
            self.rows = hb.EmbeddingCollection(SCHEMA, hb.make_tables(SCHEMA, 4))
        self.first = nn.Linear(8, 8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.plain_norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.attention = nn.MultiheadAttention(8, 2)
        self.recurrent = nn.GRU(8, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.dropout = nn.Dropout()
        self.gate = nn.Parameter(torch.zeros(1))  # learned later
        self.score = nn.Linear(8, 1)
        self.register_buffer("seen", None)
        self.step = step

    def end(self, scores: Tensor) -> Tensor:
        return scores.squeeze(1)

    def history(self, rows: Tensor) -> Tensor | int:
        return 0

    def forward(self, *columns: Any) -> Tensor:
        if len(columns) == 1:
            rows = self.rows(columns[0])
            pair = rows["item"], rows["item"] + self.history(rows["hist"])
        else:
            pair = self.user(columns[0]), self.item(columns[1])
        hidden = self.first(torch.cat(pair, 1))
        return self.end(self.score(self.step(self, hidden)))


def without_eval(layer: nn.Module) -> nn.Module:
    return layer.train()


def kept(net: Any, x: Tensor) -> Tensor:
    """Keep the mean of a request in buffers that were None or another tensor."""
    net.seen = net.batch_norm.running_mean = x.mean(0).clone()
    return x - net.seen


DEPENDENT: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "norm": (lambda net, x: net.plain_norm(x), "layer 'plain_norm': .*track_running_stats=True"),
    "norm in train mode": (
        lambda net, x: without_eval(net.batch_norm)(x),
        "layer 'batch_norm': .*in eval mode",
    ),
    "instance norm": (lambda net, x: nn.functional.instance_norm(x.T[None])[0].T, "its operations"),
    "mean": (lambda net, x: x - x.mean(0), "its operations: .*axis 0 holds the candidates"),
    "softmax": (lambda net, x: x.softmax(0), "its operations"),
    "sums so far": (lambda net, x: x.cumsum(0), "its operations"),
    "size": (lambda net, x: x / x.shape[0], "its operations"),
    "alone": (lambda net, x: x if x.shape[0] > 1 else 2 * x, "its operations"),
    "mean that is kept": (kept, "its operations"),
    "place": (lambda net, x: x + torch.arange(x.shape[0])[:, None], "its operations"),
    "first": (lambda net, x: x - x[:1], "its operations"),
    "reversed": (lambda net, x: x.flip(0), "its operations"),
    "sorted": (lambda net, x: x.sort(0).values, "its operations"),
    "attention": (
        lambda net, x: net.attention(x[:, None], x[:, None], x[:, None])[0][:, 0],
        "layer 'attention': .*batch_first=True",
    ),
    "recurrence": (
        lambda net, x: net.recurrent(x[:, None])[0][:, 0],
        "layer 'recurrent': .*batch_first=True",
    ),
    "similarity": (lambda net, x: (x @ x.T).softmax(1) @ x, "its operations"),
    "gate that is closed yet": (lambda net, x: x + net.gate * x.mean(0), "its operations"),
}
RANDOM: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "noise": (lambda net, x: x + torch.rand_like(x), "its operations: two calls"),
    "dropout": (lambda net, x: nn.functional.dropout(x), "its operations: two calls"),
    "dropout layer": (lambda net, x: without_eval(net.dropout)(x), "layer 'dropout': two calls"),
}


def soak(*cases: Any) -> list[Any]:
    """Cases that only the soak tries."""
    return [pytest.param(case, marks=pytest.mark.soak) for case in cases]


def state_of(net: nn.Module) -> list[Any]:
    """All that an export must leave as it was."""
    parameters = [item for item in net.named_parameters() if type(item[1]) is nn.Parameter]
    tensors = [*parameters, *net.named_buffers()]
    modules = dict(net.named_modules())
    return [
        {name: (id(tensor), tensor.tolist(), tensor.requires_grad) for name, tensor in tensors},
        {name: dict(module._buffers).keys() for name, module in modules.items()},
        {name: module.training for name, module in modules.items()},
        {
            name: [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks]
            for name, module in modules.items()
        },
        [list(table.export()) for module in table_modules(net) for table in module.tables],
        torch.get_rng_state().tolist(),
    ]


def assert_refused(net: nn.Module, export: Callable[[], Any], message: str) -> None:
    """Assert that an export is refused, and leaves the network and the generator as they were."""
    net.train()
    for layer in (net.batch_norm, net.dropout, net.recurrent):
        layer.eval()
    before = state_of(net)
    with pytest.raises(ConfigError, match=f"Steps cannot be served, because of {message}"):
        export()
    for ours, theirs in zip(state_of(net), before, strict=True):
        assert ours == theirs


@pytest.mark.parametrize("case", [*DEPENDENT, *RANDOM])
def test_score_that_depends_on_other_candidates_or_on_chance_is_refused(case: str) -> None:
    step, message = {**DEPENDENT, **RANDOM}[case]
    net = Steps(step, is_converted=False)
    assert_refused(net, lambda: export_graph(net, SCHEMA), message)


@pytest.mark.parametrize(
    "case", ["norm in train mode", *soak("norm", "mean", "gate that is closed yet", "dropout")]
)
def test_score_of_a_converted_model_that_depends_on_others_is_refused(case: str) -> None:
    step, message = {**DEPENDENT, **RANDOM}[case]
    net = Steps(step, is_converted=True)
    assert_refused(net, converted(net, 2).graph, message)


def converted(net: nn.Module, num_columns: int) -> hb.RecModel:
    net, _, _ = hb.auto(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net(*[torch.arange(4)] * num_columns)
    return hb.RecModel(net)


def test_network_that_drops_the_axis_of_one_candidate_is_refused() -> None:
    net = Steps(lambda net, x: x, is_converted=False)
    net.end = torch.squeeze
    message = r"its operations: .* shapes \[7\] and \[\]\. Use squeeze\(1\), not squeeze\(\)"
    assert_refused(net, lambda: export_graph(net, SCHEMA), message)


def test_score_that_depends_on_the_histories_of_other_candidates_is_refused() -> None:
    net = Steps(lambda net, x: x, is_converted=False)
    net.history = lambda rows: rows.mean(0)
    with pytest.raises(ConfigError, match="must not depend on the other candidates"):
        export_graph(net, SCHEMA)


@pytest.mark.parametrize("num_lists", [1, 6, 7, 13, 40])
def test_sizes_of_made_up_lists_tell_lists_and_candidates_apart(num_lists: int) -> None:
    sizes = {NUM_ROWS}
    for number in range(num_lists):
        for requests in REQUESTS:
            ours, theirs = [
                made_up_lengths(request.num_rows, request.shared, number, num_lists)
                for request in requests
            ]
            shared, others = [request.shared for request in requests]
            assert sum(ours[row] for row in shared) == sum(theirs[row] for row in others)
            assert min(ours + theirs) >= 0
        size = sum(made_up_lengths(NUM_ROWS, (0,), number, num_lists))
        assert not any(size % other == 0 or other % size == 0 for other in sizes)
        sizes.add(size)


def test_a_model_of_seven_histories_is_exported() -> None:
    names = [f"history{number}" for number in range(7)]
    lists = [hb.Id(name, table="item", pooling="none") for name in names]
    schema = hb.Schema([hb.Label("y"), hb.Id("item"), *lists])
    histories = [{name: "item"} for name in names]
    settings = {"attention": "decay", "length": 5, "hidden": ()}
    net = hb.models.DIN(schema, hb.make_tables(schema, 4), histories=histories, **settings)
    export_graph(net, schema)


def test_network_that_mixes_the_parts_of_one_candidate_is_exported() -> None:
    def parts(net: Any, x: Tensor) -> Tensor:
        pairs = torch.stack([x, net.batch_norm(x)], 1)
        mixed = net.encoder(pairs).mean(1) + pairs.softmax(1).cumsum(1)[:, 1]
        return net.dropout(nn.functional.layer_norm(mixed - mixed.mean(1, keepdim=True), (8,)))

    export_graph(Steps(parts, is_converted=False), SCHEMA)


class OwnIds(nn.Module):
    """Looks up ids that it computes."""

    def __init__(self, ids: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.item = nn.Embedding(50, 4)
        self.score = nn.Linear(4, 1)
        self.ids = ids

    def forward(self, item: Tensor) -> Tensor:
        return self.score(self.item(self.ids(item))).squeeze(1)


@pytest.mark.parametrize(
    "ids",
    [
        lambda item: item.cumsum(0) % 50,
        *soak(
            lambda item: (item - item.min()) % 50,
            lambda item: (item + torch.arange(item.shape[0])) % 50,
            lambda item: item.flip(0) % 50,
        ),
    ],
    ids=["sums", "least", "place", "reversed"],
)
def test_ids_that_depend_on_other_candidates_are_refused(ids: Callable[[Tensor], Tensor]) -> None:
    model = converted(OwnIds(ids), 1)
    with pytest.raises(ConfigError, match="the ids of 'item' must not depend on the other"):
        model.graph()
