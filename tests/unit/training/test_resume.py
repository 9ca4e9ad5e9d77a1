# SPDX-License-Identifier: Apache-2.0
"""What may change between a checkpoint and what resumes from it: one field after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb
from hotbed.data.fitted import FittedMap
from hotbed.data.transforms import Clip, Normalize
from hotbed.errors import ConfigError, PersistError
from hotbed.optim.schedule import Hold
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.resume import compare, meaning

COLUMNS: dict[str, Any] = {
    "y": hb.Label("y", threshold=1),
    "t": hb.Time("t", unit="s"),
    "user": hb.Id("user"),
    "item": hb.Id("item"),
    "x": hb.Dense("x", [Normalize(0.0, 1.0)]),
    "z": hb.Dense("z"),
}
TABLE: dict[str, Any] = {"dim": 2, "rule": hb.Adam(lr=0.1)}


def build(
    columns: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **table: Any
) -> hb.RecModel:
    """A small model; `columns` replaces columns, `table` is of the table "user" alone."""
    torch.manual_seed(0)
    schema = hb.Schema(list({**COLUMNS, **(columns or {})}.values()))
    tables = {name: hb.Table(name, **TABLE) for name in ("user", "item")}
    tables["user"] = hb.Table("user", **{**TABLE, **table})
    given = {
        "loss_fn": "bce",
        "optimizer": hb.Adam(lr=0.1),
        "metrics": {"log_loss"},
        **(model or {}),
    }
    network = given.pop("network", {"hidden": [2]})
    return hb.RecModel(hb.models.DNN(schema, tables, **network), **given)


def reordered(*names: str) -> dict[str, Any]:
    """The columns as a mapping in which the order of some is another one."""
    return {
        **{name: COLUMNS[name] for name in names},
        **{n: c for n, c in COLUMNS.items() if n not in names},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    build().save(path)
    return path


REFUSED: dict[str, Callable[[], hb.RecModel]] = {
    "tables.user.rule": lambda: build(rule=hb.Ftrl()),
    "tables.user.rule.beta1": lambda: build(rule=hb.Adam(lr=0.1, beta1=0.5)),
    "tables.user.rule.beta2": lambda: build(rule=hb.Adam(lr=0.1, beta2=0.5)),
    "tables.user.rule.scope": lambda: build(rule=hb.Adam(lr=0.1, scope="all")),
    "tables.user.dim": lambda: build(dim=3),
    "tables.user.seed": lambda: build(seed=1),
    "tables.user.dtype": lambda: build(dtype="bfloat16"),
    "tables.user.init": lambda: build(init=hb.Constant(1.0)),
    "tables.user.default": lambda: build(default=1.0),
    "tables.user.admit": lambda: build(admit=hb.MinCount(2)),
    "schema.user.column": lambda: build({"user": hb.Id("user", column="other")}),
    "schema.user.pooling": lambda: build({"user": hb.Id("user", pooling="mean")}),
    "schema.user.padding": lambda: build({"user": hb.Id("user", padding=0)}),
    "schema.x.transforms": lambda: build({"x": hb.Dense("x", [Clip(0.0)])}),
    "schema.y.threshold": lambda: build({"y": hb.Label("y", threshold=2)}),
    "schema.y.column": lambda: build({"y": hb.Label("y", threshold=1, column="z")}),
    "schema.t.unit": lambda: build({"t": hb.Time("t", unit="ms")}),
    "schema.t.column": lambda: build({"t": hb.Time("t", column="z")}),
    "loss_fn": lambda: build(model={"loss_fn": "mse"}),
    "network.activation": lambda: build(model={"network": {"hidden": [2], "activation": "tanh"}}),
}
ACCEPTED: dict[str, Callable[[], hb.RecModel]] = {
    "tables.user.rule.lr": lambda: build(rule=hb.Adam(lr=0.2)),
    "tables.user.rule.clip": lambda: build(rule=hb.Adam(lr=0.1, clip=1.0)),
    "tables.user.rule.l2": lambda: build(rule=hb.Adam(lr=0.1, l2=0.1)),
    "tables.user.rule.eps": lambda: build(rule=hb.Adam(lr=0.1, eps=1e-4)),
    "tables.user.evict": lambda: build(evict=hb.Lru(2000)),
    "network.dropout": lambda: build(model={"network": {"hidden": [2], "dropout": 0.5}}),
    "optimizer.lr": lambda: build(model={"optimizer": hb.Adam(lr=0.2)}),
    "optimizer.beta1": lambda: build(model={"optimizer": hb.Adam(lr=0.1, beta1=0.5)}),
    "metrics": lambda: build(model={"metrics": {"auc"}}),
    "amp_level": lambda: build(model={"amp_level": "O1"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_changes_what_a_state_means_is_refused_by_name_unless_allowed(
    saved: Path, name: str
) -> None:
    model = REFUSED[name]()
    with pytest.raises(PersistError, match=rf"checkpoint-\d+: {name} is "):
        model.restore(saved)
    if name != "tables.user.dim":  # rows of another width fit nowhere
        REFUSED[name]().restore(saved, allow=[name])


@pytest.mark.parametrize("names", [("item", "user"), ("z", "x")])
def test_another_order_of_columns_is_refused(saved: Path, names: tuple[str, str]) -> None:
    torch.manual_seed(0)
    schema = hb.Schema(list(reordered(*names).values()))
    tables = {name: hb.Table(name, **TABLE) for name in ("user", "item")}
    network = hb.models.DNN(schema, tables, hidden=[2])
    role = "id" if "user" in names else "dense"
    with pytest.raises(PersistError, match=f"order.{role} is "):
        hb.RecModel(network, "bce", hb.Adam(lr=0.1)).restore(saved)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_field_of_how_to_train_is_accepted_and_logged(
    saved: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hotbed.persist"):
        ACCEPTED[name]().restore(saved)
    changes = [record.getMessage() for record in caplog.records if record.name == "hotbed.persist"]
    assert len(changes) == 1
    assert f": {name} " in changes[0]


def test_an_accepted_learning_rate_takes_effect_for_its_table_alone(saved: Path) -> None:
    changed = build(rule=hb.Adam(lr=0.2)).restore(saved)
    rates = {
        table: group["lr"]
        for group in changed.learner.sparse.param_groups
        for table in group["tables"]
    }
    assert rates == {"user": 0.2, "item": 0.1}
    dense = build(model={"optimizer": hb.Adam(lr=0.3)}).restore(saved).learner.dense
    assert [group["lr"] for group in dense.param_groups] == [0.3]


def test_a_fitted_map_may_be_moved_but_not_be_another_one() -> None:
    def state(path: str, digest: str) -> dict[str, object]:
        fitted = FittedMap(Path(path), digest * 64)
        schema = hb.Schema([hb.Id("item", transforms=[hb.transforms.Map(fitted=fitted)])])
        return meaning({}, schema.to_json(), None)

    compare("states", state("here/item.rows", "a"), state("there/item.rows", "a"))
    with pytest.raises(PersistError, match=r"schema\.item\.transforms is"):
        compare("states", state("item.rows", "a"), state("item.rows", "b"))


def test_a_field_that_an_old_checkpoint_does_not_tell_is_accepted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "hotbed.persist"):
        compare(
            "old",
            {"tables.t.dim": 2},
            {"tables.t.dim": 2, "tables.t.dtype": "float16", "loss_fn": "bce"},
        )
    assert [record.getMessage() for record in caplog.records] == [
        "old: it does not say tables.t.dtype, resumed with 'float16'",
        "old: it does not say loss_fn, resumed with 'bce'",
    ]


def stream(
    path: Path,
    batch_size: int,
    model: hb.RecModel,
    *,
    allow: Any = (),
    max_steps: int | None = None,
) -> None:
    draw = np.random.default_rng(0)
    rows = {name: draw.integers(0, 2, 200) for name in COLUMNS}
    data = hb.Dataset(hb.sources.Memory(rows), model.schema, batch_size, prefetch=0)
    callbacks = [hb.callbacks.Checkpoint(path, allow=allow)]
    if max_steps is not None:
        callbacks.append(hb.callbacks.LearningRate(Hold(100)))
    model.online_train(data, callbacks, progress=False, max_steps=max_steps)


def test_a_stream_is_resumed_with_another_batch_size_and_machine_which_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream(tmp_path, 10, build(), max_steps=2)
    setting = open_checkpoint(tmp_path).progress["wall_setting"]
    assert setting["machine.torch_threads"] == torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with caplog.at_level(logging.INFO, "hotbed.persist"):
        stream(tmp_path, 20, build())
    messages = [
        record.getMessage().partition(": ")[2]
        for record in caplog.records
        if record.name == "hotbed.persist"
    ]
    assert messages[0] == "run.batch_size was 10, resumed with 20"
    assert messages[1].startswith("run.callbacks was ")
    assert messages[2].startswith("machine.torch_threads was ")
    assert messages[2].endswith(
        "resumed with 77; the bits may differ from those of an unbroken run"
    )


def test_a_stream_is_not_resumed_with_another_rule_unless_it_is_allowed(tmp_path: Path) -> None:
    stream(tmp_path, 10, build(rule=hb.Adagrad()), max_steps=2)
    newest = open_checkpoint(tmp_path).folder
    with pytest.raises(
        PersistError, match=r"tables.user.rule is 'adagrad' in the checkpoint, got 'momentum'"
    ):
        stream(tmp_path, 10, build(rule=hb.Momentum()))
    assert open_checkpoint(tmp_path).folder == newest
    stream(tmp_path, 10, build(rule=hb.Momentum()), allow=["tables.user.rule"])
    assert open_checkpoint(tmp_path).manifest.version == 20


def test_a_model_without_an_optimizer_does_not_resume_where_it_would_lose_one(
    tmp_path: Path,
) -> None:
    stream(tmp_path, 10, build())
    before = open_checkpoint(tmp_path).manifest.digest
    with pytest.raises(
        PersistError, match="it holds the state of the optimizer 'dense', got a model w"
    ):
        stream(tmp_path, 10, build(model={"optimizer": None}))
    assert open_checkpoint(tmp_path).manifest.digest == before
    build(model={"optimizer": None}).restore(tmp_path)  # to evaluate


class UpdatesItself(torch.nn.Module):
    """Learns by optimizers and a schedule of its own."""

    def __init__(self, lr: float = 0.1, kind: Any = torch.optim.Adam) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lookup = hb.Embedding(hb.Table("user", 2, rule=hb.Adam(lr=0.1)))
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        self.first = kind(self.layers[0].parameters(), lr=lr)
        self.others = [torch.optim.SGD(self.layers[1].parameters(), lr=0.1, momentum=0.9)]
        self.rows = hb.SparseOptimizer(self)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.others[0], 3, 0.5)

    def forward(self, batch: hb.Batch) -> torch.Tensor:
        scores = self.layers(self.lookup(batch.ids["user"].values)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, batch.labels["y"])
        loss.backward()
        for optimizer in (self.first, *self.others, self.rows):
            optimizer.step()
            optimizer.zero_grad()
        self.schedule.step()
        return loss.detach()


def learned(path: Path, steps: int, network: UpdatesItself) -> list[Any]:
    """Learn up to a step from where the folder ends; return weights, rows and rates."""
    draw = np.random.default_rng(0)
    rows = {"y": draw.integers(0, 2, 200), "user": draw.integers(0, 9, 200)}
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    data = hb.Dataset(hb.sources.Memory(rows), schema, 10, prefetch=0)
    checkpoint = hb.callbacks.Checkpoint(path)
    hb.RecModel(network).online_train(data, [checkpoint], max_steps=steps, progress=False)
    weights = [parameter.tolist() for parameter in hb.dense_parameters(network)]
    ids = torch.arange(9)
    return [weights, network.lookup(ids).tolist(), network.others[0].param_groups[0]["lr"]]


def test_a_network_that_updates_itself_resumes_with_its_optimizers_and_schedules(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = learned(tmp_path / "whole", 20, UpdatesItself())
    learned(tmp_path / "parts", 7, UpdatesItself())
    assert learned(tmp_path / "parts", 20, UpdatesItself()) == whole
    faster = UpdatesItself(lr=0.3)
    with caplog.at_level(logging.INFO, "hotbed.persist"):
        learned(tmp_path / "parts", 20, faster)
    assert "optimizers.network.first.lr was 0.1, resumed with 0.3" in caplog.text
    assert faster.first.param_groups[0]["lr"] == 0.3
    with pytest.raises(PersistError, match=r"optimizer network\.first: .* has the state of Adam"):
        learned(tmp_path / "parts", 20, UpdatesItself(kind=torch.optim.Adagrad))
    without = UpdatesItself()
    del without.first
    with pytest.raises(PersistError, match=r"the optimizer 'network\.first', got a model without"):
        learned(tmp_path / "parts", 20, without)


def test_a_saved_network_that_updates_itself_holds_its_schedules(tmp_path: Path) -> None:
    network = UpdatesItself()
    learned(tmp_path / "run", 7, network)
    hb.RecModel(network).save(tmp_path / "saved")
    restored = UpdatesItself()
    hb.load(tmp_path / "saved", network=restored)
    assert restored.schedule.state_dict() == network.schedule.state_dict()
    assert restored.others[0].state_dict()["state"].keys() == {0, 1}
    assert restored.others[0].param_groups[0]["lr"] == 0.1 / 4


def test_a_state_without_the_optimizers_of_a_network_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As states were before they held them."""
    with monkeypatch.context() as before:
        before.setattr("hotbed.training.step.learner.optimizers_of", lambda network: {})
        learned(tmp_path, 7, UpdatesItself())
    learned(tmp_path, 20, UpdatesItself())
    assert "it does not hold the optimizer network.first, which begins anew" in caplog.text


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", None),
        ("O2", hb.Compile("max-autotune-no-cudagraphs")),
        ({"kind": "boost", "backend": "eager"}, hb.Compile(backend="eager")),
    ],
)
def test_a_state_from_before_compile_is_loaded_and_resumed(
    level: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(torch, "compile", lambda network, **settings: network)
    model = build()
    arguments = {**model._arguments, "boost_level": "O0"}
    del arguments["compile"]
    with monkeypatch.context() as before:
        before.setattr(model, "_arguments", arguments)
        state = model.state()
        state.model["boost_level"] = level
        before.setattr(model, "state", lambda: state)
        model.save(tmp_path)
    assert hb.load(tmp_path).arguments["compile"] == expected
    with caplog.at_level(logging.INFO, "hotbed.persist"):
        build().restore(tmp_path)
    assert not caplog.records


def test_allow_takes_a_list_of_names() -> None:
    for allow in ("tables.user.rule", None, 3):
        with pytest.raises(ConfigError, match=r"Checkpoint.allow: must be names"):
            hb.callbacks.Checkpoint("x", allow=allow)


@pytest.mark.parametrize(
    ("name", "value"),
    [("every_steps", 1.5), ("full_every", None), ("keep", None), ("keep", True), ("publish", "x")],
)
def test_arguments_of_a_checkpoint_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"Checkpoint.{name}: must be"):
        hb.callbacks.Checkpoint("x", **{name: value})


def test_a_state_keeps_the_rules_of_missing_values_that_it_was_learned_with(tmp_path: Path) -> None:
    """Before there were rules, an empty text was a text to `Hash`: it has a row there."""
    rows = hb.sources.Memory({"y": [0, 1] * 20, "u": ["", "a"] * 20})
    columns = [hb.Label("y"), hb.Id("u", transforms=[hb.transforms.Hash()])]

    def trained(rules: int, folder: str, epochs: int) -> hb.RecModel:
        torch.manual_seed(0)
        schema = hb.Schema(columns, rules=rules)
        model = hb.RecModel(hb.models.DNN(schema, hb.make_tables(schema, dim=2)), "bce")
        checkpoint = hb.callbacks.Checkpoint(tmp_path / folder)
        data = hb.Dataset(rows, schema, 10)
        model.fit(data, epochs=epochs, callbacks=[checkpoint], progress=False)
        return model

    assert len(trained(2, "now", 1).tables["u"]) == 1
    trained(1, "before", 1)
    assert "rules" not in (open_checkpoint(tmp_path / "before").manifest.schema or {})
    model = trained(2, "before", 2)  # the same script, run with a new release
    assert len(model.tables["u"]) == 2
    assert "rules" not in (open_checkpoint(tmp_path / "before").manifest.schema or {})
    asked = hb.sources.Memory({"y": [0, 0], "u": ["", "a"]})
    loaded = hb.load(tmp_path / "before")
    expected = loaded.predict(hb.Dataset(asked, hb.Schema(columns, rules=1), 2))
    scores = loaded.predict(hb.Dataset(asked, hb.Schema(columns), 2))
    np.testing.assert_array_equal(scores, expected)
    model.export(tmp_path / "exported")
    served = hb.InferenceSession(tmp_path / "exported").predict({"u": ["", "a"]})
    np.testing.assert_allclose(served, expected, atol=1e-6)
