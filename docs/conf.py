# SPDX-License-Identifier: Apache-2.0
"""The documentation site: `make docs` builds it into build/site, and fails on a link that leads
nowhere.

The guides are the Markdown files here. The pages of the reference are made from the public names
and their docstrings.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import hotbed

project = "Hotbed"
version = release = hotbed.__version__
author = "the Hotbed authors"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["job.schema.json", "openapi.json"]
suppress_warnings = ["myst.xref_missing_anchor.external"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "Hotbed"
html_copy_source = False
myst_heading_anchors = 4
myst_links_external_new_tab = False
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
add_module_names = False
maximum_signature_line_length = 80
highlight_language = "text"
default_role = "code"  # docstrings write `name` for code

REFERENCE = Path(__file__).parent / "reference"

# Page -> the modules whose public names stand on it; each public name of `hotbed` stands on exactly
# one.
PAGES = {
    "Training": [
        "training.model",
        "training.ahead.data",
        "training.ahead.insert",
        "training.load",
        "training.sharded_loop",
        "job.job",
    ],
    "Callbacks": ["training.callbacks", "training.decisions.eviction_schedule"],
    "Data": ["data.schema", "data.histories.columns", "data.dataset", "data.batch", "data.encode"],
    "Sources": ["connectors"],
    "Transforms": ["data.transforms"],
    "Preparation": ["prepare"],
    "Tables": [
        "embedding.table",
        "embedding.tables",
        "embedding.modules.embedding",
        "embedding.modules.collection",
        "embedding.changed_rows",
        "embedding.tier",
        "embedding.native",
    ],
    "Rules": ["embedding.rule", "optim.sparse"],
    "Converted models": [
        "training.auto.convert",
        "training.auto.report",
        "training.auto.conversion_report",
        "optim.combined",
    ],
    "Policies and initial rows": ["embedding.policy", "embedding.init"],
    "Models": ["models"],
    "Layers": ["models.layers"],
    "Losses": ["models.losses"],
    "Schedules": ["optim.schedule"],
    "Precision": ["optim.precision"],
    "Metrics": ["metrics"],
    "Checkpoints": ["persist"],
    "Publishing and following": [
        "persist.publish.directory",
        "persist.publish.topic",
        "persist.publish.follow",
    ],
    "Serving": ["serving.session", "serving.parameter_server", "serving.cache", "serving.client"],
    "Report": ["training.watching.report"],
    "Quality of what is served": ["quality.measure", "quality.replay"],
    "Errors": ["errors"],
    "Testing": ["testing"],
    "Configuration": ["config"],
    "HugeCTR": [
        "compat.hugectr.model",
        "compat.hugectr.session",
        "compat.hugectr.calls",
        "compat.hugectr.clauses",
        "compat.hugectr.enums",
        "compat.hugectr.tools",
        "compat.hugectr.inference",
        "compat.hugectr.json.adapt",
    ],
    "Rec SDK": [
        "compat.mx_rec.util.initialize",
        "compat.mx_rec.core.asc.helper",
        "compat.mx_rec.core.asc.manager",
        "compat.mx_rec.core.embedding",
        "compat.mx_rec.core.arguments",
        "compat.mx_rec.core.feature_process",
        "compat.mx_rec.util.variable",
        "compat.mx_rec.util.ops",
        "compat.mx_rec.graph.modifier",
        "compat.mx_rec.saver.hook",
        "compat.mx_rec.saver.saver",
        "compat.mx_rec.saver.warm_start",
    ],
    "MindSpore Recommender": [
        # its RecModel has the name of the engine's, which annotations refer to
        "compat.mindspore_rec.embedding",
        "compat.mindspore_rec.map_parameter",
        "compat.mindspore_rec.callback",
        "compat.mindspore_rec.checkpoint",
    ],
}


# Heading of the navigation -> pages below it.
NAVIGATION = {
    "Start": ["quickstart", "walk", "walk_log", "which"],
    "Data": ["connectors", "types", "join", "data", "prepare", "prepare_keys", "prepare_rows"],
    "Models": ["models", "cookbook", "sequences", "histories", "graphs", "layers", "auto"],
    "Training": [
        "jobs",
        "training",
        "embedding",
        "tiers",
        "devices",
        "watching",
        "watch_page",
        "bad_model",
        "grains",
        "ranks",
    ],
    "Serving": ["serving", "serving_server", "serving_clients", "serving_rows", "serving_kserve"],
    "Operation": ["operate", "persist", "gate", "routing", "request_log", "measure", "replay"],
    "Coming from": [
        "migrate/index",
        "migrate/fuxictr",
        "migrate/torcheasyrec",
        "migrate/torchrec",
        "migrate/hugectr",
        "migrate/hugectr_parameters",
        "migrate/hugectr_samples",
        "migrate/nvtabular",
        "migrate/recsdk",
        "migrate/recsdk_parameters",
        "migrate/mindspore",
        "migrate/mindspore_parameters",
    ],
    "中文": [
        "zh/index",
        "zh/quickstart",
        "zh/walk",
        "zh/which",
        "zh/cookbook",
        "zh/bad_model",
        "zh/operate",
    ],
    "Look up": ["reference/index", "extending", "architecture", "format", "benchmarks", "accuracy"],
    "Design notes": sorted(
        f"design/{path.stem}" for path in Path(__file__).parent.glob("design/*.md")
    ),
}


def setup(app: Any) -> None:
    write_reference()
    app.connect("source-read", add_navigation)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-signature", own_signature)


def skip_fields(
    app: Any, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out the fields of named tuples, which `Attributes` in their docstrings describes."""
    if type(value).__name__ == "_tuplegetter":
        return True
    return None


def own_signature(
    app: Any, what: str, name: str, value: Any, options: Any, arguments: str, returned: str
) -> tuple[str, str] | None:
    """Show a class that has no constructor without the arguments of `nn.Module`'s."""
    if what == "class" and arguments == "(*args: Any, **kwargs: Any)":
        return "()", returned
    return None


def add_navigation(app: Any, page: str, source: list[str]) -> None:
    """Give the first page the navigation, which readers of the Markdown file do not need."""
    if page != "index":
        return
    for caption, pages in NAVIGATION.items():
        head = ["```{toctree}", ":hidden:", f":caption: {caption}", ""]
        source[0] += "\n".join(["", "", *head, *pages, "```", ""])


def write_reference() -> None:
    """Write one page for each entry of PAGES, and their index."""
    REFERENCE.mkdir(exist_ok=True)
    names = names_by_module()
    for title, modules in PAGES.items():
        blocks = [
            block(module, name)
            for module in modules
            for name in names.pop(module, None) or listed(module)
        ]
        page = "\n".join([f"# {title}", "", "```{eval-rst}", *blocks, "```", ""])
        (REFERENCE / file_name(title)).write_text(page)
    if names:
        raise ValueError(
            f"docs/conf.py: public names without a page: {names}. Add their modules to PAGES."
        )
    entries = [file_name(title) for title in PAGES]
    index = [
        "# Reference",
        "",
        "Every public name, from its docstring.",
        "",
        "```{toctree}",
        *entries,
        "```",
        "",
    ]
    (REFERENCE / "index.md").write_text("\n".join(index))


def file_name(title: str) -> str:
    return f"{title.lower().replace(' ', '_')}.md"


def names_by_module() -> dict[str, list[str]]:
    """Public names of `hotbed` by the module that they live in; all listed names of public modules."""
    modules: dict[str, list[str]] = {}
    for name in hotbed.__all__:
        value = getattr(hotbed, name)
        if isinstance(value, ModuleType):
            module = value.__name__.removeprefix("hotbed.")
            modules[module] = listed(module)
    for name in hotbed.__all__:
        value = getattr(hotbed, name)
        if not isinstance(value, ModuleType):
            module = value.__module__.removeprefix("hotbed.")
            home = next(
                (public for public in modules if name in modules[public] and public in module),
                module,
            )
            if name not in modules.setdefault(home, []):
                modules[home].append(name)
    return modules


def listed(module: str) -> list[str]:
    """The names in a module's `__all__`, or else its public classes and functions."""
    loaded = importlib.import_module(f"hotbed.{module}")
    if hasattr(loaded, "__all__"):
        return list(loaded.__all__)
    members = vars(loaded).items()
    own = [
        (name, value)
        for name, value in members
        if getattr(value, "__module__", "") == loaded.__name__
    ]
    return [
        name
        for name, value in own
        if name[0] != "_" and (inspect.isclass(value) or inspect.isfunction(value))
    ]


def block(module: str, name: str) -> str:
    """The directive for one public name."""
    value = getattr(importlib.import_module(f"hotbed.{module}"), name)
    if inspect.isclass(value):
        return f".. autoclass:: hotbed.{module}.{name}\n   :members:\n"
    kind = "autofunction" if inspect.isfunction(value) else "autodata"
    return f".. {kind}:: hotbed.{module}.{name}\n"
