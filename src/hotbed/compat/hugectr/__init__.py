# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's names: `import hotbed.compat.hugectr as hugectr`.

Calls and JSON files become values of the engine, which does the work. docs/migrate/hugectr.md
shows both side by side.

__main__.py        the command line: train what a training file describes
run.py             runs a script that imports hugectr, unchanged
calls.py           the functions of HugeCTR that make clauses
clause.py          the decorator of clauses: frozen, checked values
clauses/           the clauses
enums.py           enumerations of all releases
knobs.py           arguments and keys without effect, with their reasons
json/              JSON files to clauses, and back
job.py             training files
session.py         Session: the low-level API of v2.3 to v3.0.1
model/             Model: compile, fit, and the verbs of a loop
translate/         clauses to values of the engine
weights/           weight files
inference/         `hugectr.inference`
params.py          InferenceParams, and the values of other calls of `hugectr.inference`
reader.py          data readers as datasets of the engine
parquet.py         Parquet data: file lists and metadata
data.py            `hugectr.data`: file systems
optimizer.py       `hugectr.optimizer`: CreateOptimizer up to v3.0.1
tools.py           `hugectr.tools`: the data generator
data_generator.py  its command line of v2.3 to v3.1
generation.py      random data in the formats of HugeCTR
converter.py       a graph and weight files as one ONNX file, for `hugectr2onnx`
rehearsal.py       Rehearsal: a short run on small generated data
paths.py           checks of local paths
"""

from hotbed.compat.hugectr import (
    calls,
    clauses,
    data,
    enums,
    inference,
    model,
    optimizer,
    session,
    tools,
)
from hotbed.compat.hugectr.calls import *  # noqa: F403
from hotbed.compat.hugectr.clauses import *  # noqa: F403
from hotbed.compat.hugectr.enums import *  # noqa: F403
from hotbed.compat.hugectr.json.adapt import adapt_json
from hotbed.compat.hugectr.model import *  # noqa: F403
from hotbed.compat.hugectr.session import *  # noqa: F403

__all__ = [
    *calls.__all__,
    *clauses.__all__,
    *enums.__all__,
    *model.__all__,
    *session.__all__,
    "adapt_json",
    "data",
    "inference",
    "optimizer",
    "tools",
]
