# SPDX-License-Identifier: Apache-2.0
"""Ids of lookups before the forward pass: how a model is called, samples of ids, rows in turn."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.data.batch import Batch, Ids
from hotbed.errors import ConfigError, RowShapeError
from hotbed.training.auto import Report
from hotbed.training.auto.foreseen import IdFeatures, LookupEntry, calls_of, lookup_report
from hotbed.training.auto.tracing.sources import IdSource
from hotbed.training.step.turns import Turns

pytestmark = pytest.mark.torch_core
USERS = torch.tensor([5, 0, -3, 8])
MOVIES = torch.tensor([1, 2, 3, 4])


class Described(nn.Module):
    """A table that does not exist yet."""

    embedding_dim = 4

    def forward(self, ids: Tensor) -> Tensor:
        raise AssertionError("a trace looks nothing up")


class Twice(nn.Module):
    """Looks up one table twice, and another one for shapes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.word = Described()
        self.place = Described()

    def forward(self, user: Tensor, movie: Tensor) -> Tensor:
        both = self.word(user * 2) + self.word(torch.stack([movie, movie + 1], 1)).sum(1)
        return both + self.place(torch.arange(3)).sum(0)


def features_of(model: Twice) -> IdFeatures:
    lookups = {"word": model.word, "place": model.place}
    _, features = IdFeatures.trace(model, lookups, (USERS, MOVIES))
    assert features is not None
    return features


class Two(nn.Module):
    def forward(self, user: Tensor, movie: Tensor) -> None: ...


class One(nn.Module):
    def forward(self, batch: Any) -> None: ...


class Optional(nn.Module):
    def forward(self, user: Tensor, movie: Tensor | None = None) -> None: ...


LIKE = torch.ones(4)
BATCH = Batch({"user": Ids(USERS), "movie": Ids(MOVIES)}, labels={"like": LIKE})


@pytest.mark.parametrize(
    ("model", "item", "expected"),
    [
        (Two(), (USERS, MOVIES, LIKE), [((USERS, MOVIES), {})]),
        (Two(), ((USERS, MOVIES), LIKE), [((USERS, MOVIES), {}), (((USERS, MOVIES), LIKE), {})]),
        (Two(), {"user": USERS, "movie": MOVIES, "like": LIKE}, [((), {0: USERS, 1: MOVIES})]),
        (Two(), BATCH, [((USERS, MOVIES), {})]),
        (One(), (USERS, LIKE), [((USERS,), {}), (((USERS, LIKE),), {})]),
        (One(), USERS, [((USERS,), {})]),
        (Optional(), (USERS, MOVIES), [((USERS, MOVIES), {}), (((USERS, MOVIES),), {})]),
    ],
)
def test_a_loop_may_call_a_model_with_an_item_in_these_ways(
    model: nn.Module, item: Any, expected: list[Any]
) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.tolist()
        if isinstance(value, (tuple, list)):
            return [plain(part) for part in value]
        return value

    calls = [[plain(args), plain(list(named.values()))] for args, named in calls_of(model, item)]
    wanted = [[plain(args), plain(list(named.values()))] for args, named in expected]
    assert calls == wanted


def test_a_batch_is_one_argument_of_a_model_that_takes_one() -> None:
    first, *_ = calls_of(One(), BATCH)
    assert first[0][0] is BATCH


def test_each_lookup_is_a_feature_and_a_repeated_one_has_a_number() -> None:
    features = features_of(Twice())
    assert features.lookups == {"word": "word", "word/2": "word", "place": "place"}
    batch = features.compute((USERS[:2], MOVIES[:2]))
    assert batch.num_samples == 2
    assert batch.ids["word"].values.tolist() == [10, 0]
    assert batch.ids["word"].offsets is None
    assert batch.ids["word/2"].values.tolist() == [1, 2, 2, 3]
    assert batch.ids["word/2"].offsets.tolist() == [0, 2, 4]
    only = features.compute((USERS, MOVIES), among=["place"])
    assert list(only.ids) == ["place"]


def test_ids_that_are_not_of_single_samples_belong_to_the_newest() -> None:
    features = features_of(Twice())
    batch = features.compute((USERS, MOVIES), time=torch.tensor([3, 9, 9, 4]))
    assert batch.ids["place"].offsets.tolist() == [0, 0, 3, 3, 3]
    assert batch.time.tolist() == [3, 9, 9, 4]
    batch = features.compute((USERS, MOVIES), time=torch.tensor(5))
    assert batch.time.tolist() == [5, 5, 5, 5]
    assert features.compute((USERS, MOVIES)).ids["place"].offsets.tolist() == [0, 0, 0, 0, 3]


def test_ids_of_bags_belong_to_their_samples() -> None:
    class OfBags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tag = Described()

        def forward(self, batch: Any) -> Tensor:
            return self.tag(batch.ids["tag"].values * 2).sum() + batch.dense["age"]

    def batch(offsets: list[int]) -> Batch:
        tags = Ids(torch.arange(offsets[-1]), torch.tensor(offsets))
        return Batch({"tag": tags}, {"age": torch.ones(len(offsets) - 1)})

    model = OfBags()
    _, features = IdFeatures.trace(model, {"tag": model.tag}, batch([0, 2, 5]))
    assert features is not None
    for offsets in ([0, 1, 4, 4], [0, 0, 3, 3], [0, 6, 6, 6]):
        ids = features.compute(batch(offsets), torch.tensor([7])).ids["tag"]
        assert ids.values.tolist() == list(range(0, 2 * offsets[-1], 2))
        assert ids.offsets.tolist() == offsets


def test_a_batch_of_another_kind_is_rejected() -> None:
    features = features_of(Twice())
    with pytest.raises(RowShapeError, match="tensor 'user': expected int64 with 1 axes"):
        features.compute((USERS[:, None], MOVIES))


def turns() -> Turns[str]:
    features = features_of(Twice())
    ids = features.compute((USERS, MOVIES)).ids
    values = {name: Ids(of.values) for name, of in ids.items()}
    return Turns(features.lookups, values, "share of {}".format, others=["elsewhere"])


def test_lookups_take_their_shares_in_turn() -> None:
    rows = turns()
    assert rows.serves("word")
    assert not rows.serves("elsewhere")
    assert rows.take("word", Ids(USERS * 2)) == "share of word"
    assert rows.take("word", Ids(torch.stack([MOVIES, MOVIES + 1], 1))) == "share of word/2"
    with pytest.raises(ConfigError, match="place: the forward pass looks up less"):
        rows.check_taken()
    rows.take("place", Ids(torch.arange(3)))
    rows.check_taken()
    with pytest.raises(ConfigError, match="word: the forward pass looks up more"):
        rows.take("word", Ids(USERS))


def test_other_ids_than_computed_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"word: .* got \[5, 0, -3, 8\] … for \[10, 0, -6, 16\]"):
        turns().take("word", Ids(USERS))


def test_a_forward_pass_that_looks_nothing_up_takes_nothing() -> None:
    turns().check_taken()


def report() -> Report[LookupEntry]:
    cross = hb.Table("cross", 8, rule=hb.Adam(lr=0.001), admit=hb.MinCount(2))
    return lookup_report(
        "modify_graph",
        "Ranker",
        (
            LookupEntry(
                "cross",
                "ahead",
                table=cross,
                num_lookups=2,
                source=IdSource("('user' * 31) + 'movie'", leaves=("user", "movie")),
            ),
            LookupEntry("near", "forward", "its ids depend on the rows of 'cross'"),
            LookupEntry("spare", "unused"),
        ),
        17,
        ("user", "movie", "age"),
        ("Evaluation reads rows in the forward pass.",),
    )


def test_a_printed_report_accounts_for_every_table() -> None:
    assert (
        str(report()).splitlines()
        == """\
modify_graph: the ids of 1 of 3 tables leave the forward pass of Ranker; 17 dense parameters stay

ahead    cross  computed and mapped while earlier batches train
                ids: ('user' * 31) + 'movie'
                2 lookups, whose gradients are summed
                table: dim 8, adam, min_count(count=2)

forward  near   computed and mapped in the forward pass
                why: its ids depend on the rows of 'cross'

unused   spare  the forward pass looks up nothing in this table

Evaluation reads rows in the forward pass.""".splitlines()
    )


def test_a_picture_shows_what_runs_before_the_forward_pass(tmp_path: Path) -> None:
    svg = report().picture(tmp_path / "ranker.svg")
    assert (tmp_path / "ranker.svg").read_text() == svg
    root = xml.etree.ElementTree.fromstring(svg)
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    before = texts[: texts.index("The forward pass")]
    forward = texts[texts.index("The forward pass") :]
    assert {"user", "movie", "cross", "('user' * 31) + 'movie'"} <= set(before)
    assert {"age", "cross", "near", "Ranker"} <= set(forward)
    assert "user" not in forward
    assert "spare" not in texts
