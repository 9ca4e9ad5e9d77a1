# SPDX-License-Identifier: Apache-2.0
"""The report of a conversion, as it is printed and drawn."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.training.auto import EmbeddingEntry, Report


class Shop(nn.Module):
    """A shared weight, a hashed id, an id that depends on rows, a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(1000, 4)
        self.item = nn.Embedding(50, 4)
        self.history = nn.EmbeddingBag(50, 4, mode="sum")
        self.history.weight = self.item.weight
        self.nearest = nn.Embedding(7, 4)
        self.city = nn.Embedding(9, 4)
        self.output = nn.Linear(4, 9, bias=False)
        self.output.weight = self.city.weight

    def forward(self, user: Tensor, item: Tensor, city: Tensor, age: Tensor) -> Tensor:
        rows = self.user(user * 31 % 1000) + self.item(item) + self.history(item[:, None])
        rows = rows + self.nearest(rows.argmax(-1)) + self.city(city) + age[:, None]
        return self.output(rows)


def converted(*, batch: bool = False, unbounded: tuple[str, ...] = ()) -> Report[EmbeddingEntry]:
    model = Shop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tables = {"user": {"evict": hb.Ttl(days=30)}}
    ids = torch.arange(5)
    _, _, report = hb.auto(
        model,
        optimizer,
        tables,
        unbounded=unbounded,
        batch=(ids, ids, ids, torch.ones(5)) if batch else None,
    )
    return report


def test_a_printed_report_accounts_for_every_embedding() -> None:
    assert (
        str(converted(batch=True)).splitlines()
        == """\
hb.auto: 4 of 5 embeddings of Shop are tables now; 36 dense parameters stay as they are

moved  user     Embedding, 1,000 x 4
                table 'user': sgd(lr=0.1), ttl(days=30)
                ids: ('user' * 31) % 1000
                unbounded=['user'] drops % 1,000: then the table grows with new ids

moved  item     Embedding, 50 x 4
                table 'item': sgd(lr=0.1)
                shares its rows with history
                ids: 'item'

moved  history  EmbeddingBag, 50 x 4
                table 'item': sgd(lr=0.1)
                shares its rows with item
                ids: 'item'

moved  nearest  Embedding, 7 x 4
                table 'nearest': sgd(lr=0.1)
                ids: computed in the forward pass: they depend on the rows of 'user'

kept   city     Embedding, 9 x 4
                its weight is also output.weight""".splitlines()
    )


def test_a_modulo_that_was_dropped_is_not_offered_again() -> None:
    (entry, *_) = converted(unbounded=("user",)).entries
    assert entry.ids == "('user' * 31) % 1000, without the last % 1,000"
    assert entry.offer == ""


def test_a_model_that_cannot_be_traced_is_converted_and_says_so() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user = nn.Embedding(10, 4)

        def forward(self, user: Tensor) -> Tensor:
            return self.user(torch.tensor(user.tolist()))

    model = Listed()
    _, _, report = hb.auto(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "ids: not known before a trace" in str(report)
    (note,) = report.notes
    assert note.startswith("The code of the model could not be traced (")


def test_a_picture_shows_the_model_before_and_after(tmp_path: Path) -> None:
    report = converted(batch=True, unbounded=("user",))
    svg = report.picture(tmp_path / "shop.svg")
    assert (tmp_path / "shop.svg").read_text() == svg
    root = xml.etree.ElementTree.fromstring(svg)
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    before = texts[: texts.index("After hb.auto")]
    after = texts[texts.index("After hb.auto") :]
    assert before[0] == "Before hb.auto"
    assert before.count("nn.Embedding") == 4
    assert before.count("nn.EmbeddingBag") == 1
    assert before.count("('user' * 31) % 1000") == 1
    assert after.count("table") == 3  # item and history share one
    assert "nn.Embedding, kept" in after
    assert "('user' * 31) % 1000" not in after
    for name in ("user", "item", "city", "age"):  # age feeds the dense part
        assert name in before
