# SPDX-License-Identifier: Apache-2.0
"""Training by HugeCTR's door, against a reader, a network and optimizers in float64 of our own.

The optimizers are those of HugeCTR's kernels, written down again; gradients come from torch in
float64. Everything starts from the files that the door saves before the first step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr.translate.rules import dense_rule
from hotbed.errors import ConfigError
from hotbed.optim.dense import dense_optimizer

Optimizer = hugectr.Optimizer_t
Update = hugectr.Update_t
Layer = hugectr.Layer_t

BATCH = 32
STEPS = 4
LR = 0.03
SIZES = [11, 7]  # keys of each slot; those of the second slot begin at 11
DIM = 4
HIDDEN = 6
LAMBDA = 0.7
FLT_EPSILON = 2.0**-23


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches, which a reader repeats: lists of keys with repetitions."""
    folder = tmp_path_factory.mktemp("numbers")
    rng = np.random.default_rng(5)
    rows = 2 * BATCH

    def keys(size: int, most: int) -> pa.Array:
        lists = [rng.integers(0, size, rng.integers(1, most + 1)).tolist() for _ in range(rows)]
        return pa.array(lists, pa.list_(pa.int64()))

    columns = {
        "y": pa.array((rng.random(rows) < 0.4).astype(np.float32)),
        "a": pa.array(rng.normal(size=rows).astype(np.float32)),
        "b": pa.array(rng.normal(size=rows).astype(np.float32)),
        "s": keys(SIZES[0], 3),
        "t": keys(SIZES[1], 1),
    }
    pq.write_table(pa.table(columns), folder / "0.parquet")
    roles = {"labels": ["y"], "conts": ["a", "b"], "cats": ["s", "t"]}
    places = list(columns)
    metadata: dict[str, Any] = {"file_stats": [{"file_name": "0.parquet", "num_rows": rows}]}
    for role, names in roles.items():
        metadata[role] = [{"col_name": name, "index": places.index(name)} for name in names]
    (folder / "_metadata.json").write_text(json.dumps(metadata))
    (folder / "list.txt").write_text(f"1\n{folder / '0.parquet'}\n")
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- the door -------------------------------------------------------------------------------------


def made(
    folder: Path, optimizer: Any, regularizer: Any = None, collection: bool = False, **solver: Any
) -> hugectr.Model:
    """A hidden layer over two slots and two dense values, compiled."""
    settings = {"batchsize": BATCH, "batchsize_eval": BATCH, "lr": LR, "seed": 3}
    built = hugectr.Model(
        hugectr.CreateSolver(i64_input_key=True, **settings, **solver),
        hugectr.DataReaderParams(
            hugectr.DataReaderType_t.Parquet,
            source=str(folder / "list.txt"),
            eval_source=str(folder / "list.txt"),
            check_type=hugectr.Check_t.Non,
            slot_size_array=SIZES,
        ),
        optimizer,
    )
    params = [hugectr.DataReaderSparseParam("keys", [3, 1], False, 2)]
    if collection:
        params = [
            hugectr.DataReaderSparseParam("s", 3, False, 1),
            hugectr.DataReaderSparseParam("t", 1, True, 1),
        ]
    built.add(hugectr.Input(1, "y", 2, "dense", params))
    if collection:
        table = hugectr.EmbeddingTableConfig("rows", sum(SIZES), DIM)
        lookups = hugectr.EmbeddingCollectionConfig()
        for name in ("s", "t"):
            lookups.embedding_lookup(table, name, f"of_{name}", "mean")
        built.add(lookups)
        built.add(hugectr.DenseLayer(Layer.Concat, ["of_s", "of_t"], ["rows"]))
    else:
        kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
        built.add(hugectr.SparseEmbedding(kind, 1, DIM, "mean", "rows", "keys"))
    loss: dict[str, Any] = {}
    if regularizer is not None:
        loss = {"use_regularizer": True, "regularizer_type": regularizer, "lambda": LAMBDA}
    for kind, bottoms, top, extra in (
        (Layer.Reshape, ["rows"], "flat", {"leading_dim": 2 * DIM}),
        (Layer.Concat, ["flat", "dense"], "x", {}),
        (Layer.InnerProduct, ["x"], "fc", {"num_output": HIDDEN}),
        (Layer.ReLU, ["fc"], "relu", {}),
        (Layer.InnerProduct, ["relu"], "logit", {"num_output": 1}),
        (Layer.BinaryCrossEntropyLoss, ["logit", "y"], "loss", loss),
    ):
        built.add(hugectr.DenseLayer(kind, bottoms, [top], **extra))
    built.compile()
    return built


def dense_of(built: hugectr.Model, folder: Path) -> np.ndarray:
    built.save_params_to_files(str(folder / "saved"))
    return np.fromfile(folder / "saved_dense_0.model", "<f4").astype(np.float64)


def rows_of(built: hugectr.Model) -> np.ndarray:
    """The rows of all keys [18, 4], those that were not read with their first values."""
    (table,) = built.learner.tables.values()
    return table.lookup(np.arange(sum(SIZES))).astype(np.float64)


# --- the reference --------------------------------------------------------------------------------

Rule = Callable[[np.ndarray, dict[str, np.ndarray], np.ndarray, int], np.ndarray]
"""Returns the weights after a step, of weights, their state, gradients and the number of the step."""


def ftrl(eps: float, beta: float, lambda1: float, lambda2: float) -> Rule:
    def step(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int) -> np.ndarray:
        n = s.get("n", np.zeros_like(w))
        grown = n + g * g
        z = s.get("z", np.zeros_like(w)) + g
        z = z + (np.sqrt(n + eps) - np.sqrt(grown + eps)) * w / LR
        s.update(n=grown, z=z)
        x = lambda1 * (1 - 2 * np.signbit(z)) - z
        y = np.sqrt(grown + eps) / LR + lambda2 + beta / LR
        return np.where(np.abs(z) > lambda1, x / np.where(y > 0, y, 1.0), 0.0)

    return step


def adam(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int) -> np.ndarray:
    s["m"] = 0.9 * s.get("m", np.zeros_like(w)) + 0.1 * g
    s["v"] = 0.999 * s.get("v", np.zeros_like(w)) + 0.001 * g * g
    alpha = LR * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - alpha * s["m"] / (np.sqrt(s["v"]) + 1e-5)


def adagrad(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int) -> np.ndarray:
    s["sum"] = s.get("sum", np.full_like(w, 0.2)) + g * g
    return w - LR * g / (np.sqrt(s["sum"]) + 1e-5)


def rms_prop(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int) -> np.ndarray:
    s["v"] = 0.9 * s.get("v", np.zeros_like(w)) + 0.1 * g * g
    return w - LR * g / (np.sqrt(s["v"]) + 1e-5)


def momentum(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int) -> np.ndarray:
    s["m"] = 0.7 * s.get("m", np.zeros_like(w)) - LR * g
    return w + s["m"]


def nesterov(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int) -> np.ndarray:
    before = s.get("m", np.zeros_like(w))
    s["m"] = 0.7 * before - LR * g
    return w - 0.7 * before + 1.7 * s["m"]


def sgd(w: np.ndarray, s: dict[str, np.ndarray], g: np.ndarray, t: int) -> np.ndarray:
    return w - LR * g


def samples(folder: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[list[list[int]]]]]:
    """Yield labels, dense values and the keys of each slot, batch after batch."""
    table = pq.read_table(folder / "0.parquet").to_pydict()
    while True:
        for first in (0, BATCH):
            part = {name: values[first : first + BATCH] for name, values in table.items()}
            dense = torch.tensor([part["a"], part["b"]], dtype=torch.float64).T
            second = [[key + SIZES[0] for key in keys] for keys in part["t"]]
            yield torch.tensor(part["y"], dtype=torch.float64), dense, [part["s"], second]


def logits(dense: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The network, its parameters in the order of HugeCTR's file."""
    width = 2 * DIM + 2
    ends = np.cumsum([width * HIDDEN, HIDDEN, HIDDEN, 1]).tolist()
    first, bias, last, end = torch.tensor_split(dense, ends[:-1])
    hidden = torch.relu(x @ first.reshape(width, HIDDEN) + bias)
    return hidden @ last + end


def trained(
    folder: Path,
    rule: Rule,
    dense: np.ndarray,
    rows: np.ndarray,
    penalty: Callable[[np.ndarray], np.ndarray],
    moves_all: bool,
) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Return the losses, and the dense parameters and rows after all steps."""
    losses = []
    state: dict[str, np.ndarray] = {}
    states: dict[int, dict[str, np.ndarray]] = {}
    batches = samples(folder)
    for t in range(1, STEPS + 1):
        labels, numbers, slots = next(batches)
        parameters = torch.tensor(dense, requires_grad=True)
        table = torch.tensor(rows, requires_grad=True)
        means = [[table[keys].mean(0) for keys in slot] for slot in slots]
        x = torch.cat([torch.stack(means[0]), torch.stack(means[1]), numbers], 1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits(parameters, x), labels)
        loss.backward()
        losses.append(loss.item())
        dense = rule(dense, state, parameters.grad.numpy() + penalty(dense), t)
        touched = {key for slot in slots for keys in slot for key in keys}
        rows = rows.copy()
        for key in touched | (set(states) if moves_all else set()):
            gradient = table.grad[key].numpy()
            rows[key] = rule(rows[key], states.setdefault(key, {}), gradient, t)
    return losses, dense, rows


RULES: dict[Any, tuple[Rule, dict[str, float]]] = {
    Optimizer.Adam: (adam, {"epsilon": 1e-5}),
    Optimizer.AdaGrad: (adagrad, {"epsilon": 1e-5, "initial_accu_value": 0.2}),
    Optimizer.MomentumSGD: (momentum, {"momentum_factor": 0.7}),
    Optimizer.Nesterov: (nesterov, {"momentum_factor": 0.7}),
    Optimizer.RMSProp: (rms_prop, {"epsilon": 1e-5}),
    Optimizer.SGD: (sgd, {}),
}
PENALTIES: dict[Any, Callable[[np.ndarray], np.ndarray]] = {
    None: lambda w: 0.0 * w,
    hugectr.Regularizer_t.L1: lambda w: LAMBDA / BATCH * np.sign(w),
    hugectr.Regularizer_t.L2: lambda w: LAMBDA / BATCH * w,
}
FTRL = {"beta": 0.3, "lambda1": 0.01, "lambda2": 0.02}


def compare(
    folder: Path,
    rule: Rule,
    built: hugectr.Model,
    regularizer: Any = None,
    moves_all: bool = False,
    atol: float = 5e-6,
) -> None:
    """Compare losses, dense parameters and rows of some steps."""
    dense = dense_of(built, folder)
    rows = rows_of(built)
    expected = trained(folder, rule, dense, rows, PENALTIES[regularizer], moves_all)
    losses = []
    built.start_data_reading()
    for _ in range(STEPS):
        built.train()
        losses.append(built.get_current_loss())
    assert min(np.abs(expected[1] - dense).max(), np.abs(expected[2] - rows).max()) > 1e-4
    np.testing.assert_allclose(losses, expected[0], rtol=0, atol=atol)
    np.testing.assert_allclose(dense_of(built, folder), expected[1], rtol=0, atol=atol)
    np.testing.assert_allclose(rows_of(built), expected[2], rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("regularizer", "is_mixed"), list(zip(PENALTIES, [False, True, False], strict=True))
)
@pytest.mark.parametrize(
    ("kind", "update"),
    [
        *((kind, update) for kind in RULES for update in (Update.Local, Update.Global)),
        (Optimizer.Adam, Update.LazyGlobal),  # HugeCTR refuses it for the others, as the door does
    ],
)
def test_training_has_the_numbers_of_hugectr(
    kind: Any, update: Any, regularizer: Any, is_mixed: bool, folder: Path
) -> None:
    """On a CPU mixed precision computes in float32; LazyGlobal has the numbers of Global."""
    rule, settings = RULES[kind]
    optimizer = hugectr.CreateOptimizer(kind, update, **settings)
    built = made(folder, optimizer, regularizer, use_mixed_precision=is_mixed)
    compare(folder, rule, built, regularizer, moves_all=update is not Update.Local)


@pytest.mark.parametrize("regularizer", PENALTIES)
@pytest.mark.parametrize("settings", [{}, FTRL])
@pytest.mark.parametrize(
    ("release", "eps"), [(None, FLT_EPSILON), ("v23.04.00", FLT_EPSILON), ("v23.02.00", 0.0)]
)
def test_ftrl_has_the_numbers_of_the_release(
    release: Any, eps: float, settings: Any, regularizer: Any, folder: Path, capsys: Any
) -> None:
    """With n near 0 and no divisor, float32 has a few digits less."""
    solver = {} if release is None else {"release": release}
    optimizer = hugectr.CreateOptimizer(Optimizer.Ftrl, **settings)
    built = made(folder, optimizer, regularizer, collection=True, **solver)
    added = "FLT_EPSILON is added" if eps else "nothing is added"
    assert f"Ftrl is that of HugeCTR {release or 'v25.03'}: {added}" in capsys.readouterr().out
    rule = ftrl(eps, **{"beta": 0.0, "lambda1": 0.0, "lambda2": 0.0, **settings})
    compare(folder, rule, built, regularizer, atol=5e-5)


@pytest.mark.parametrize("kind", RULES)
def test_a_collection_updates_the_rows_of_a_batch_by_any_update_type(
    kind: Any, folder: Path
) -> None:
    rule, settings = RULES[kind]
    optimizer = hugectr.CreateOptimizer(kind, Update.Global, **settings)
    compare(folder, rule, made(folder, optimizer, collection=True))


def test_one_step_of_ftrl_has_the_weights_of_hugectrs_kernel() -> None:
    """One weight of 0.1, at rate 0.01 and HugeCTR's own defaults: v23.12's kernel gives these."""
    expected = {1e-5: -0.00025, 1e-4: 0.00117, 1e-3: 0.05791, 1e-2: 0.08656}
    for gradient, weight in expected.items():
        optimizer = hugectr.CreateOptimizer(Optimizer.Ftrl)
        parameter = torch.nn.Parameter(torch.tensor([0.1]))
        step = dense_optimizer(dense_rule(optimizer, 0.01, 0.0, 0.0), [parameter])
        parameter.grad = torch.tensor([gradient])
        assert step is not None
        step.step()
        assert parameter.item() == pytest.approx(weight, abs=5e-6)


@pytest.mark.parametrize("release", ["", "25", "v26.01", "v1.0", "newest"])
def test_what_is_not_a_release_is_refused(release: str) -> None:
    with pytest.raises(ConfigError, match=r"solver\.release: not a release of HugeCTR"):
        hugectr.CreateSolver(release=release)
