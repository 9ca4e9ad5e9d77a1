# SPDX-License-Identifier: Apache-2.0
"""The signature of a model, and batches as its arguments."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.data.batch import Batch, Ids
from hotbed.errors import ConfigError, RowShapeError
from hotbed.training.auto import Signature, bind

USERS = torch.arange(4)
ITEMS = torch.arange(12).reshape(4, 3)
PRICES = torch.linspace(0, 1, 4)


class Positional(nn.Module):
    def forward(self, user, items, price=None, *, scale=1.0):
        return user, items, price, scale


class OneArgument(nn.Module):
    def forward(self, batch):
        return batch


@dataclass(frozen=True)
class Inner:
    price: Tensor
    unused: int = 3


@dataclass(frozen=True)
class Outer:
    user: Tensor
    inner: Inner
    flags: list = field(default_factory=list)


@dataclass
class Numbers:
    price: Tensor
    image: Tensor


@dataclass
class Features:
    user: Tensor
    numbers: Numbers
    bias: float = 0.5


def roundtrip(model, *args, **kwargs):
    """Return the signature and what the model receives when its leaves are put back."""
    signature = Signature.of(model, args, kwargs)
    leaves = signature.leaves(args, kwargs)
    new_args, new_kwargs = signature.arguments(leaves)
    return signature, model(*new_args, **new_kwargs)


def test_leaves_follow_the_parameters_however_they_are_given():
    model = Positional()
    by_position = Signature.of(model, (USERS, ITEMS, PRICES), {})
    by_name = Signature.of(model, (), {"price": PRICES, "items": ITEMS, "user": USERS})
    assert by_position.names == by_name.names == ("user", "items", "price")
    leaves = by_position.leaves((USERS,), {"price": PRICES, "items": ITEMS})
    assert [leaf is own for leaf, own in zip(leaves, (USERS, ITEMS, PRICES), strict=True)]
    assert by_name["items"].shape == (3,)
    assert by_name["items"].dtype == "int64"
    assert by_name.num_samples == 4


def test_constants_stay_and_missing_arguments_keep_their_default():
    signature, received = roundtrip(Positional(), USERS, ITEMS, scale=2.5)
    assert signature.names == ("user", "items")
    assert received[2:] == (None, 2.5)


def test_nested_arguments_come_back_as_they_were():
    Pair = namedtuple("Pair", "user price")
    batch = {
        "pair": Pair(USERS, PRICES),
        "rest": [ITEMS, {"user": USERS + 1}],
        "data": Outer(USERS, Inner(PRICES), [ITEMS]),
        "mode": "train",
    }
    signature, received = roundtrip(OneArgument(), batch)
    assert signature.names == (
        "pair_user",
        "pair_price",
        "rest_0",
        "rest_1_user",
        "data_user",
        "inner_price",
        "flags_0",
    )
    assert isinstance(received["pair"], Pair)
    assert received["pair"].price is PRICES
    assert received["rest"][1]["user"].tolist() == [1, 2, 3, 4]
    assert isinstance(received["data"], Outer)
    assert received["data"].inner.price is PRICES
    assert received["data"].inner.unused == 3
    assert received["mode"] == "train"
    assert batch["data"].inner.price is PRICES  # the batch itself is as it was


def test_dict_keys_may_come_in_another_order_and_may_be_more():
    signature = Signature.of(OneArgument(), ({"user": USERS, "price": PRICES},), {})
    leaves = signature.leaves(({"more": ITEMS, "price": PRICES, "user": USERS},), {})
    assert leaves[0] is USERS
    assert leaves[1] is PRICES


def test_batch_that_differs_from_the_first_is_named():
    signature = Signature.of(Positional(), (USERS, ITEMS, PRICES), {})
    with pytest.raises(RowShapeError, match=r"tensor 'price': expected float32 .* got NoneType"):
        signature.leaves((USERS, ITEMS), {})
    with pytest.raises(RowShapeError, match=r"'user': expected int64 with 1 axes.*float32"):
        signature.leaves((USERS.float(), ITEMS, PRICES), {})
    with pytest.raises(ConfigError, match=r"forward\(user.*does not take these arguments"):
        signature.leaves((USERS, ITEMS, PRICES, PRICES), {})
    leaves = signature.leaves((USERS, ITEMS), {}, needed=["user"])
    assert leaves[2].shape == (0,)
    with pytest.raises(ConfigError, match="Did you mean 'price'"):
        signature["prize"]


def test_axes_of_bags_are_known():
    class Bags(nn.Module):
        def __init__(self, include_last):
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 2, include_last_offset=include_last)

        def forward(self, tag, tag_offsets, tag_weights, bias, factor):
            return tag

    values = torch.arange(6)
    bias = torch.ones(4)
    arguments = (values, torch.tensor([0, 2, 2, 5]), torch.rand(6), bias, torch.tensor(2.0))
    signature = Signature.of(Bags(False), arguments, {})
    axes = [leaf.axis for leaf in signature.tensors]
    assert axes == ["values", "samples", "values", "samples", "fixed"]
    arguments = (values, torch.tensor([0, 2, 2, 5, 6]), *arguments[2:])
    signature = Signature.of(Bags(True), arguments, {})
    assert [leaf.axis for leaf in signature.tensors][:2] == ["values", "ends"]
    assert signature.num_samples == 4
    schema = signature.schema(["tag", "bias"])
    assert [column.name for column in schema.ids] == ["tag"]
    assert schema.ids[0].weights == "tag_weights"
    assert schema.shapes["tag"] == "list"
    with pytest.raises(ConfigError, match="first axis of tensor 'factor'"):
        signature.schema()


def test_schema_has_ids_for_integers_and_numbers_for_the_rest():
    class Wide(nn.Module):
        def forward(self, user, items, price, image, mask):
            return user

    arguments = (USERS, ITEMS, PRICES, torch.rand(4, 2, 3), ITEMS > 2)
    schema = Signature.of(Wide(), arguments, {}).schema()
    assert [(column.name, column.pooling) for column in schema.ids] == [
        ("user", "sum"),
        ("items", "none"),
    ]
    widths = [(column.name, column.width) for column in schema.dense]
    assert widths == [("price", 1), ("image", 6), ("mask", 3)]
    assert schema.shapes == dict.fromkeys(("items", "image", "mask"), "list") | dict.fromkeys(
        ("user", "price"), "value"
    )


def batch(**changes):
    columns = {
        "ids": {
            "user": Ids(np.arange(3)),
            "items": Ids(np.arange(6), np.array([0, 2, 4, 6])),
            "tags": Ids(np.arange(4), np.array([0, 1, 1, 4]), np.ones(4, np.float32)),
        },
        "dense": {"price": np.ones(3, np.float32), "image": np.ones((3, 2), np.float32)},
        "labels": {"click": np.zeros(3, np.float32)},
        "weight": np.full(3, 2, np.float32),
        "time": np.arange(3),
    }
    return Batch(**{**columns, **changes})


def test_parameters_take_the_columns_of_their_names():
    class Model(nn.Module):
        def forward(self, price, user, *, items, tags, tags_offsets, time, other=7):
            return None

    args, kwargs = bind(Model(), batch())
    assert [value.tolist() for value in args] == [[1, 1, 1], [0, 1, 2]]
    assert kwargs["items"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert kwargs["tags"].tolist() == [0, 1, 2, 3]
    assert kwargs["tags_offsets"].tolist() == [0, 1, 1]
    assert kwargs["time"].tolist() == [0, 1, 2]
    assert "other" not in kwargs


def test_offsets_include_the_last_one_where_the_bags_take_it():
    class Model(nn.Module):
        def __init__(self, *flags):
            super().__init__()
            self.bags = nn.ModuleList(
                nn.EmbeddingBag(9, 2, include_last_offset=flag) for flag in flags
            )

        def forward(self, user, user_offsets):
            return None

    args, _ = bind(Model(True), batch())
    assert args[1].tolist() == [0, 1, 2, 3]
    args, _ = bind(Model(False), batch())
    assert args[1].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="include_last_offset"):
        bind(Model(False, True), batch())


def test_one_parameter_takes_all_columns_or_its_dataclass():
    (columns,), _ = bind(OneArgument(), batch())
    assert list(columns) == [
        "user",
        "items",
        "tags",
        "tags_offsets",
        "tags_weights",
        "price",
        "image",
        "click",
        "weight",
        "time",
    ]
    assert columns["items"].shape == (3, 2)
    assert columns["tags"].shape == (4,)

    class Model(nn.Module):
        def forward(self, features: Features):
            return features

    (features,), _ = bind(Model(), batch())
    assert features.user.tolist() == [0, 1, 2]
    assert features.numbers.image.shape == (3, 2)
    assert features.bias == 0.5


def test_keywords_take_the_columns_that_are_left():
    class Model(nn.Module):
        def forward(self, user, **rest):
            return None

    (user,), rest = bind(Model(), batch())
    assert user.tolist() == [0, 1, 2]
    assert "user" not in rest
    assert rest["price"].tolist() == [1, 1, 1]


def test_parameter_without_a_column_is_named():
    class Model(nn.Module):
        def forward(self, user, prize):
            return None

    class Typed(nn.Module):
        def forward(self, usr: Tensor):
            return None

    with pytest.raises(ConfigError, match=r"Model.forward: 'prize' .* Did you mean 'price'"):
        bind(Model(), batch())
    with pytest.raises(ConfigError, match="Did you mean 'user'"):
        bind(Typed(), batch())


def test_lists_of_several_lengths_need_offsets():
    class Model(nn.Module):
        def forward(self, tags):
            return None

    with pytest.raises(RowShapeError, match=r"'tags'.*from 0 to 3.*'tags_offsets'"):
        bind(Model(), batch())


def test_tensors_of_a_batch_are_bound_without_a_copy():
    class Model(nn.Module):
        def forward(self, user, price):
            return None

    tensors = batch().map_arrays(torch.from_numpy)
    args, _ = bind(Model(), tensors)
    assert args[0] is tensors.ids["user"].values
    assert args[1] is tensors.dense["price"]


def test_names_of_weight_and_time_are_those_of_the_schema():
    class Model(nn.Module):
        def forward(self, user, when, importance):
            return None

    schema = hb.Schema([hb.Id("user"), hb.Time("when"), hb.Weight("importance"), hb.Label("y")])
    columns = {"user": [1, 2], "when": [5, 6], "importance": [1.0, 2.0], "y": [0, 1]}
    dataset = hb.Dataset(hb.sources.Memory(columns), schema, batch_size=2)
    (_, when, importance), _ = bind(Model(), next(iter(dataset)))
    assert when.tolist() == [5_000_000, 6_000_000]
    assert importance.tolist() == [1, 2]


def test_offsets_and_weights_belong_to_the_ids_beside_them():
    class Bags(nn.Module):
        def forward(self, words, topics):
            return words

    class Text(nn.Module):
        def forward(self, text, offsets):
            return text

    words = {
        "values": torch.arange(5),
        "weights": torch.rand(5),
        "offsets": torch.tensor([0, 2, 2, 5]),
    }
    topics = {"values": torch.arange(7), "offsets": torch.tensor([0, 1, 4])}
    signature = Signature.of(Bags(), (words, topics), {})
    assert signature.num_samples == 3
    parts = [(leaf.name, leaf.axis, leaf.bag) for leaf in signature.tensors]
    assert parts == [
        ("words_values", "values", None),
        ("weights", "values", "words_values"),
        ("words_offsets", "ends", "words_values"),
        ("topics_values", "values", None),
        ("topics_offsets", "samples", "topics_values"),
    ]
    ids = {column.name: column.weights for column in signature.schema().ids}
    assert ids == {"words_values": "weights", "topics_values": None}
    signature = Signature.of(Text(), (torch.arange(7), torch.tensor([0, 1, 4])), {})
    assert [leaf.axis for leaf in signature.tensors] == ["values", "samples"]
    assert signature["offsets"].bag == "text"


def test_offsets_of_any_name_belong_to_the_ids_before_them():
    class Bags(nn.Module):
        def forward(self, user, words, offsets, tags, tag_offsets, hours):
            return user

    arguments = (torch.arange(3), torch.arange(5), torch.tensor([0, 2, 2]))
    arguments += (torch.arange(4), torch.tensor([0, 1, 4]), torch.arange(3))
    signature = Signature.of(Bags(), arguments, {})
    bags = {leaf.name: leaf.bag for leaf in signature.tensors if leaf.bag}
    assert bags == {"offsets": "words", "tag_offsets": "tags"}
    assert signature.num_samples == 3
    unsorted = (*arguments[:2], torch.tensor([0, 2, 1]), *arguments[3:])
    bags = {leaf.name: leaf.bag for leaf in Signature.of(Bags(), unsorted, {}).tensors if leaf.bag}
    assert bags == {"tag_offsets": "tags"}
