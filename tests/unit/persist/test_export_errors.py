# SPDX-License-Identifier: Apache-2.0
"""A network that cannot become a graph: the error names the feature or the layer, and keeps its
cause.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")
pytest.importorskip("onnxscript", reason="onnx absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.persist.publish.export import export_graph

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
            owner = torch.zeros(int(offsets[-1]), dtype=torch.int64)
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
