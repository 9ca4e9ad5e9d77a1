# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's names: `import hotbed.compat.hugectr as hugectr`.

Calls and JSON files become values of the engine, which does the work. docs/migrate/hugectr.md
shows both side by side.
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
