# SPDX-License-Identifier: Apache-2.0
"""Arguments of the methods of Model, by their names in all releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotbed.compat.hugectr.clauses import Clause, DataSourceParams
from hotbed.compat.hugectr.knobs import KNOBS
from hotbed.errors import ConfigError

_KEYWORDS_OF_ADD = (
    "input",
    "sparse_embedding",
    "dense_layer",
    "group_dense_layer",
    "embedding_collection_place_holder",  # of v3.7
    "embedding_collection",
    "ebc_config",
)


def one_clause(clauses: tuple[Clause, ...], by_keyword: Mapping[str, Clause]) -> Clause:
    """Return the clause that `add` takes."""
    values = [*clauses, *by_keyword.values()]
    wrong = [name for name in by_keyword if name not in _KEYWORDS_OF_ADD]
    if len(values) != 1 or wrong:
        raise ConfigError(
            f"model.add: one clause is needed, got {len(values)}{' ' + str(wrong) if wrong else ''}"
            ". Give an Input, an embedding or a layer."
        )
    return values[0]


def files_given(argument: str, files: tuple[Any, ...], by_keyword: dict[str, Any]) -> Any:
    """Return the one argument of a method that takes a list or a mapping."""
    arguments = [*files, *by_keyword.values()]
    values = [value for value in arguments if not isinstance(value, DataSourceParams)]
    for params in arguments:
        if isinstance(params, DataSourceParams):
            log_data_source(params)
    keywords = (argument, f"{argument}_map")
    wrong = [name for name in by_keyword if name not in (*keywords, "data_source_params")]
    if len(values) != 1 or wrong:
        raise ConfigError(
            f"{argument}: one list or mapping of files is needed, got {len(values)} arguments"
            f"{' ' + str(wrong) if wrong else ''}. Give {argument}=[…]."
        )
    return values[0]


def log_data_source(params: DataSourceParams | None) -> None:
    """Log that files of v3.4 on another file system are read and written here."""
    is_remote = params is not None and params != DataSourceParams()
    KNOBS.log_no_effect("files.data_source_params", when=is_remote)


def checked(name: str, value: Any, kind: type, advice: str) -> Any:
    """Return an argument of `Model`; ConfigError if it has another type."""
    if not isinstance(value, kind):
        raise ConfigError(
            f"model.{name}: not a {kind.__name__}, got {type(value).__name__}. Give {advice}."
        )
    return value
