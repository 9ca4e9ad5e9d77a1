# SPDX-License-Identifier: Apache-2.0
"""Hotbed trains and serves recommendation models with embedding tables that grow and forget.

    import hotbed as hb

Names load on first use, so `import hotbed` needs neither torch nor a network client; a name whose
optional dependency is missing raises MissingExtra with the command that installs it.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import config as config
    from . import connectors as sources  # noqa: F401 - public under this name
    from . import errors as errors
    from . import metrics as metrics
    from . import models as models
    from . import persist as checkpoints  # noqa: F401 - public under this name
    from . import prepare as prepare
    from . import testing as testing
    from .connectors import Position as Position
    from .data import transforms as transforms
    from .data.batch import Batch as Batch
    from .data.batch import Ids as Ids
    from .data.dataset import Dataset as Dataset
    from .data.encode import Encoder as Encoder
    from .data.histories import Count as Count
    from .data.histories import History as History
    from .data.schema import Dense as Dense
    from .data.schema import DisplayPosition as DisplayPosition
    from .data.schema import Id as Id
    from .data.schema import Label as Label
    from .data.schema import Schema as Schema
    from .data.schema import Time as Time
    from .data.schema import Weight as Weight
    from .embedding.init import Constant as Constant
    from .embedding.init import Normal as Normal
    from .embedding.init import Uniform as Uniform
    from .embedding.init import Zeros as Zeros
    from .embedding.modules import Embedding as Embedding
    from .embedding.modules import EmbeddingBag as EmbeddingBag
    from .embedding.modules import EmbeddingCollection as EmbeddingCollection
    from .embedding.native import set_num_threads as set_num_threads
    from .embedding.policy import Lfu as Lfu
    from .embedding.policy import Lru as Lru
    from .embedding.policy import MinCount as MinCount
    from .embedding.policy import Probability as Probability
    from .embedding.policy import Ttl as Ttl
    from .embedding.rule import Adagrad as Adagrad
    from .embedding.rule import Adam as Adam
    from .embedding.rule import Ftrl as Ftrl
    from .embedding.rule import Momentum as Momentum
    from .embedding.rule import Nesterov as Nesterov
    from .embedding.rule import RmsProp as RmsProp
    from .embedding.rule import RowwiseAdagrad as RowwiseAdagrad
    from .embedding.rule import Sgd as Sgd
    from .embedding.table import Table as Table
    from .embedding.tables import make_tables as make_tables
    from .embedding.tier import Ram as Ram
    from .embedding.tier import Ssd as Ssd
    from .job.job import Job as Job
    from .models import losses as losses
    from .optim import schedule as schedules  # noqa: F401 - public under this name
    from .optim.combined import CombinedOptimizer as CombinedOptimizer
    from .optim.precision import Compile as Compile
    from .optim.sparse import SparseOptimizer as SparseOptimizer
    from .optim.sparse import dense_parameters as dense_parameters
    from .persist.publish import Follower as Follower
    from .persist.publish import PublishDirectory as PublishDirectory
    from .persist.publish import PublishTopic as PublishTopic
    from .quality.measure import ServingQuality as ServingQuality
    from .quality.replay import JobReplay as JobReplay
    from .serving.cache import EmbeddingCache as EmbeddingCache
    from .serving.client import Client as Client
    from .serving.parameter_server import ParameterServer as ParameterServer
    from .serving.session import InferenceSession as InferenceSession
    from .training import callbacks as callbacks
    from .training.ahead.data import Ahead as Ahead
    from .training.ahead.insert import Insert as Insert
    from .training.auto import auto as auto
    from .training.load import load as load
    from .training.model import Evaluation as Evaluation
    from .training.model import RecModel as RecModel
    from .training.sharded_loop import shard as shard
    from .training.watching import report as report

__version__ = "0.1.0"

# Public name -> its place: a module, or a module and the name in it.
_HOMES: dict[str, str] = {
    "Adagrad": "embedding.rule:Adagrad",
    "Adam": "embedding.rule:Adam",
    "Ahead": "training.ahead.data:Ahead",
    "Insert": "training.ahead.insert:Insert",
    "Batch": "data.batch:Batch",
    "Client": "serving.client:Client",
    "CombinedOptimizer": "optim.combined:CombinedOptimizer",
    "Compile": "optim.precision:Compile",
    "Constant": "embedding.init:Constant",
    "Count": "data.histories:Count",
    "Dataset": "data.dataset:Dataset",
    "Dense": "data.schema:Dense",
    "DisplayPosition": "data.schema:DisplayPosition",
    "Embedding": "embedding.modules:Embedding",
    "EmbeddingBag": "embedding.modules:EmbeddingBag",
    "EmbeddingCache": "serving.cache:EmbeddingCache",
    "EmbeddingCollection": "embedding.modules:EmbeddingCollection",
    "Encoder": "data.encode:Encoder",
    "Evaluation": "training.model:Evaluation",
    "Follower": "persist.publish:Follower",
    "Ftrl": "embedding.rule:Ftrl",
    "History": "data.histories:History",
    "Id": "data.schema:Id",
    "Ids": "data.batch:Ids",
    "InferenceSession": "serving.session:InferenceSession",
    "Job": "job.job:Job",
    "Label": "data.schema:Label",
    "Lfu": "embedding.policy:Lfu",
    "Lru": "embedding.policy:Lru",
    "MinCount": "embedding.policy:MinCount",
    "Momentum": "embedding.rule:Momentum",
    "Nesterov": "embedding.rule:Nesterov",
    "Normal": "embedding.init:Normal",
    "Position": "connectors:Position",
    "Probability": "embedding.policy:Probability",
    "PublishDirectory": "persist.publish:PublishDirectory",
    "PublishTopic": "persist.publish:PublishTopic",
    "Ram": "embedding.tier:Ram",
    "ParameterServer": "serving.parameter_server:ParameterServer",
    "RecModel": "training.model:RecModel",
    "RmsProp": "embedding.rule:RmsProp",
    "RowwiseAdagrad": "embedding.rule:RowwiseAdagrad",
    "Schema": "data.schema:Schema",
    "JobReplay": "quality.replay:JobReplay",
    "ServingQuality": "quality.measure:ServingQuality",
    "Sgd": "embedding.rule:Sgd",
    "SparseOptimizer": "optim.sparse:SparseOptimizer",
    "Ssd": "embedding.tier:Ssd",
    "Table": "embedding.table:Table",
    "Time": "data.schema:Time",
    "Ttl": "embedding.policy:Ttl",
    "Uniform": "embedding.init:Uniform",
    "Weight": "data.schema:Weight",
    "Zeros": "embedding.init:Zeros",
    "auto": "training.auto:auto",
    "callbacks": "training.callbacks",
    "checkpoints": "persist",
    "config": "config",
    "dense_parameters": "optim.sparse:dense_parameters",
    "errors": "errors",
    "load": "training.load:load",
    "losses": "models.losses",
    "make_tables": "embedding.tables:make_tables",
    "metrics": "metrics",
    "models": "models",
    "prepare": "prepare",
    "report": "training.watching.report",
    "schedules": "optim.schedule",
    "set_num_threads": "embedding.native:set_num_threads",
    "shard": "training.sharded_loop:shard",
    "sources": "connectors",
    "testing": "testing",
    "transforms": "data.transforms",
}

# Optional top-level module -> the extra that installs it.
_EXTRAS = {
    "torch": "train",
    "confluent_kafka": "kafka",
    "onnxruntime": "serve",
    "httptools": "serve",
    "uvicorn": "serve",
    "uvloop": "serve",
    "grpc": "serve",
    "onnx": "export",
    "prometheus_client": "prometheus",
    "tensorboard": "tensorboard",
}

__all__ = sorted(_HOMES)


# Folders that pages import from; they are attributes before any of their modules is imported.
_FOLDERS = ("connectors", "data", "embedding", "optim", "persist", "serving", "training")


def __getattr__(name: str) -> Any:
    home = name if name in _FOLDERS else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hotbed' has no attribute {name!r}")
    module_name, _, attribute = home.partition(":")
    try:
        with _without_collections():
            module = importlib.import_module(f"hotbed.{module_name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        from hotbed.errors import MissingExtra

        raise MissingExtra(
            f"hotbed.{name}: {missing} is not installed. "
            f"Run pip install hotbed[{_EXTRAS[missing]}]."
        ) from error
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


@contextmanager
def _without_collections() -> Iterator[None]:
    """Import without garbage collections: they find nothing, and take a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
