# SPDX-License-Identifier: Apache-2.0
"""Ordinary torch models whose embeddings become tables: `hb.auto`.

adapter.py            what the loop asks of a converted model
binding.py            batches as the arguments of an ordinary model
conversion_report.py  the report of hb.auto: what became of every embedding
convert.py            hb.auto: an ordinary torch model becomes one whose embeddings are tables
folder_values.py      FolderValues: what torch.distributed.checkpoint has written
leaf_names.py         names of the tensors in nested arguments, by the paths that lead to them
lookups.py            what nn.Embedding and nn.EmbeddingBag become
network.py            the state of a converted model, and what happens at each of its calls
owners.py             the optimizers that learn the embeddings of a model
plain.py              the way back: the weights of a converted model
plain_load.py         load_plain_state: what a program without Hotbed has saved becomes rows
plain_values.py       PlainValues: tensors by key, in memory or in a folder
report.py             Report: what became of each embedding or table of a model, and why
report_boxes.py       the boxes that the pictures of all reports share
rows.py               a weight as the rows of a table: row i of the weight is the row of id i
served.py             a converted model as the exporter takes it
signature.py          the signature of a model: names, types and shapes of its arguments
sites.py              the embeddings of a model before its conversion
trace.py              the id graph of a model
foreseen/             the ids of a model's lookups before its forward pass
torchrec/             what hb.auto knows of TorchRec
tracing/              how the code of a model is followed
"""

from .binding import bind
from .conversion_report import EmbeddingEntry
from .convert import auto
from .network import Converted, converted
from .plain import plain_state_dict
from .plain_load import LoadedState, LoadedTable, load_plain_state
from .report import Report, ReportEntry
from .signature import Leaf, Signature
from .torchrec.jagged import from_kjt, to_kjt
from .trace import Call, Findings, IdGraph, inspect
from .tracing.sources import IdSource

__all__ = [
    "Call",
    "Converted",
    "EmbeddingEntry",
    "Findings",
    "IdGraph",
    "IdSource",
    "Leaf",
    "LoadedState",
    "LoadedTable",
    "Report",
    "ReportEntry",
    "Signature",
    "auto",
    "bind",
    "converted",
    "from_kjt",
    "inspect",
    "load_plain_state",
    "plain_state_dict",
    "to_kjt",
]
