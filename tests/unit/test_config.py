# SPDX-License-Identifier: Apache-2.0
"""Configuration is the constructor: keys are keywords, and every mistake names its dotted path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed import config
from hotbed.errors import ConfigError


class Shape(ABC):
    @abstractmethod
    def area(self) -> float: ...


@dataclass(frozen=True)
class Square(Shape):
    side: float = 1.0
    name: str | None = None

    def area(self) -> float:
        return self.side**2


@dataclass(frozen=True)
class RoundHole(Shape):
    radius: float

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise ConfigError(
                f"RoundHole.radius: must be >= 0, got {self.radius}. Give such a number."
            )

    def area(self) -> float:
        return 3 * self.radius**2


@dataclass(frozen=True)
class Box:
    shapes: Sequence[Shape] = ()
    lid: Shape | list[Shape] | None = None
    size: tuple[int, int] = (1, 1)
    mode: Literal["open", "shut"] = "open"
    where: Path | None = None
    extras: Mapping[str, Shape] = field(default_factory=dict)
    count: int | float = 0
    with_: str = ""


@config.described
class Net:
    def __init__(
        self, schema: object, tables: object, *, width: int = 8, lid: Shape | None = None
    ) -> None:
        self.schema, self.tables, self.width, self.lid = schema, tables, width, lid


def test_keys_are_the_keywords_of_the_constructor() -> None:
    spec = {
        "shapes": [{"kind": "square", "side": 2}, {"kind": "round_hole", "radius": 1.5}],
        "lid": "square",
        "size": [3, 4],
        "where": "a/b",
        "extras": {"x": {"kind": "square"}},
        "with": "w",
    }
    box = config.build(spec, Box)
    assert box == Box(
        (Square(2.0), RoundHole(1.5)),
        Square(),
        (3, 4),
        "open",
        Path("a/b"),
        {"x": Square()},
        0,
        "w",
    )


def test_objects_that_already_fit_are_passed_through() -> None:
    box = Box(lid=Square())
    assert config.build(box, Box) is box
    assert config.build({"lid": box.lid}, Box).lid is box.lid


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"shpaes": []},
            "job.shpaes: unknown key of box, got 'shpaes' with the value []. Did you mean 'shapes'?",
        ),
        ({"qqq": 1}, "job.qqq: unknown key of box, got 'qqq' with the value 1. Use one of"),
        (
            {"shapes": [{"kind": "sqare"}]},
            "job.shapes.0.kind: unknown kind, got 'sqare'. Did you mean 'square'?",
        ),
        (
            {"lid": {"kind": "square", "sid": 1}},
            "job.lid.sid: unknown key of square, got 'sid' with the value 1. Did you mean 'side'?",
        ),
        ({"lid": [{"kind": "square", "sid": 1}]}, "job.lid.0.sid: unknown key of square"),
        (
            {"lid": {"side": 1}},
            "job.lid.kind: missing key, got {'side': 1}. Use one of round_hole, square",
        ),
        ({"lid": "round_hole"}, "job.lid.radius: missing key of round_hole, got no keys. Add it"),
        ({"lid": {"kind": "round_hole", "radius": -1}}, "job.lid.radius: must be >= 0"),
        ({"lid": 3}, "job.lid: wrong value, got 3 (int)"),
        ({"shapes": 3}, "job.shapes: wrong value, got 3 (int). Give a list"),
        ({"size": [1]}, "job.size: wrong value, got [1] (list). Give a list of 2"),
        ({"size": [1, "x"]}, "job.size.1: wrong value, got 'x' (str). Give int"),
        ({"mode": "ajar"}, "job.mode: wrong value, got 'ajar' (str). Give one of 'open', 'shut'"),
        (
            {"extras": {"x": {"kind": "square", "side": True}}},
            "job.extras.x.side: wrong value, got True (bool)",
        ),
        ({"extras": []}, "job.extras: wrong value, got [] (list). Give a mapping"),
        ({"count": "many"}, "job.count: wrong value, got 'many' (str). Give int | float"),
        (None, "job: wrong value, got None (NoneType). Give a mapping"),
    ],
)
def test_a_mistake_is_an_error_that_starts_with_its_dotted_path(spec: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.build(spec, Box)
    assert str(caught.value).startswith(message)


def test_a_whole_float_counts_as_an_integer_and_nothing_else_does() -> None:
    assert config.build(1e6, int) == 1_000_000
    with pytest.raises(ConfigError):
        config.build(1.5, int)
    with pytest.raises(ConfigError):
        config.build(True, int)


def test_integers_stay_integers_where_both_numbers_are_allowed() -> None:
    assert isinstance(config.build(3, int | float), int)
    assert isinstance(config.build(3.5, int | float), float)


def test_given_arguments_are_not_keys() -> None:
    given = {"schema": "s", "tables": "t"}
    net = config.build({"kind": "net", "width": 3}, Net, "job.model", given)
    assert (net.schema, net.tables, net.width) == ("s", "t", 3)
    with pytest.raises(ConfigError, match=r"^job\.model\.schema: unknown key of net"):
        config.build({"kind": "net", "schema": "s"}, Net, "job.model", given)


def test_a_described_class_is_written_by_its_constructor_arguments() -> None:
    net = Net("s", "t", width=9, lid=Square(2.0))
    assert config.describe(net) == {
        "kind": f"{__name__}:Net",
        "width": 9,
        "lid": {"kind": f"{__name__}:Square", "side": 2.0},
    }
    assert config.describe(Net("s", "t")) == {"kind": f"{__name__}:Net"}


def test_a_described_child_remembers_what_the_child_was_given() -> None:
    @config.described
    class Child(Net):
        def __init__(self, schema: object, depth: int) -> None:
            super().__init__(schema, None, width=99)
            self.depth = depth

    assert config.describe(Child("s", 3)) == {"kind": "child", "depth": 3}


def test_what_cannot_be_written_is_an_error_that_names_its_type() -> None:
    with pytest.raises(ConfigError, match="object cannot be written as configuration"):
        config.describe({"a": object()})


shapes = st.one_of(
    st.builds(Square, side=st.floats(0, 10), name=st.none() | st.text()),
    st.builds(RoundHole, radius=st.floats(0, 10)),
)
boxes = st.builds(
    Box,
    shapes=st.lists(shapes, max_size=3).map(tuple),
    lid=st.none() | shapes | st.lists(shapes, max_size=2),
    size=st.tuples(st.integers(), st.integers()),
    mode=st.sampled_from(["open", "shut"]),
    where=st.none() | st.just(Path("a/b")),
    extras=st.dictionaries(st.text(min_size=1), shapes, max_size=2),
    count=st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    with_=st.text(),
)


@given(boxes)
def test_build_is_the_inverse_of_describe(box: Box) -> None:
    assert config.build(config.describe(box), Box) == box


def test_a_suggestion_names_all_that_are_equally_near_and_the_names_of_other_frameworks() -> None:
    pytest.importorskip("torch", reason="torch absent")
    from hotbed.models.losses import Loss

    for kind, said in [
        ("bse", "Did you mean 'bce' or 'mse'?"),
        ("bec", "Did you mean 'bce'?"),
        ("binary_crossentropy", "Did you mean 'bce'?"),
        ("BCEWithLogitsLoss", "Did you mean 'bce'?"),
        ("mean_squared_error", "Did you mean 'mse'?"),
        ("xyz", "Use one of bce, cross_entropy, focal, "),
    ]:
        with pytest.raises(ConfigError) as caught:
            config.build(kind, Loss, "loss")
        assert said in str(caught.value)


def test_a_kind_stays_one_where_a_user_derives_from_its_class() -> None:
    pytest.importorskip("torch", reason="torch absent")
    from hotbed.models import DCNv2
    from hotbed.models.losses import BCE, Loss

    class Wider(DCNv2):
        pass

    class Shifted(BCE):
        pass

    assert config.kinds(DCNv2) == {}
    assert config.kinds(Loss)["bce"] is BCE
    assert "shifted" not in config.kinds(Loss)
    assert config.build("bce", Loss) == BCE()
    del Wider, Shifted
