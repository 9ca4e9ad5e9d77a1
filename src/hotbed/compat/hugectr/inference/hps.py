# SPDX-License-Identifier: Apache-2.0
"""HPS: vectors of keys from the tables of several models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.compat.hugectr.json.inference import read_ps_config
from hotbed.compat.hugectr.knobs import KNOBS
from hotbed.compat.hugectr.params import InferenceParams, ParameterServerConfig
from hotbed.compat.hugectr.weights import SparseFile, load_served
from hotbed.config import did_you_mean
from hotbed.data.batch import as_ids
from hotbed.embedding.init import Constant
from hotbed.embedding.rule import Sgd
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, DataError


class HPS:
    """Tables of several models, which are read from HugeCTR's sparse files.

    Args:
        ps_config: a `ParameterServerConfig`, or the path of a `ps.json`.
        hps_json_config_file: another name of the argument.

    Raises:
        ConfigError: a key is wrong, or there are not as many sizes as files.
        PersistError, FormatError: a sparse file is missing or has the wrong size.

    Example: `HPS("ps.json").lookup(np.array([7, 8]), "wdl", 0)`
    """

    def __init__(
        self,
        ps_config: ParameterServerConfig | str | Path | None = None,
        hps_json_config_file: str | Path | None = None,
    ) -> None:
        config = hps_json_config_file if ps_config is None else ps_config
        if config is None:
            raise ConfigError("HPS.ps_config: missing argument, got none. Give a file of HPS.")
        if not isinstance(config, ParameterServerConfig):
            config = read_ps_config(config)
        self._tables: dict[str, list[Table]] = {}
        for params in config.inference_params_array:
            name = params.model_name
            dims = config.embedding_vec_size.get(name, params.embedding_vecsize_per_table)
            self._tables[name] = _tables(params, dims)

    def lookup(
        self, h_keys: Any, model_name: str, table_id: int, device_id: int = 0
    ) -> NDArray[np.float32]:
        """Return the vectors of keys, float32 [n, vector size].

        A key without a row reads the default value of its table.

        Args:
            h_keys: integers [n].
            model_name: name of the model.
            table_id: number of the table in the model.
            device_id: without effect: rows lie in the memory of the host.

        Raises:
            DataError: there is no such model or table.
            RowShapeError: the keys are not integers [n].
        """
        KNOBS.log_no_effect("inference_params.device_id", when=device_id != 0)
        vectors: NDArray[np.float32] = self._table(model_name, table_id).lookup(as_ids(h_keys))
        return vectors

    def lookup_fromdlpack(
        self,
        keys: Any = None,
        out_tensor: Any = None,
        model_name: str = "",
        table_id: int = 0,
        device_id: int = 0,
        h_keys: Any = None,
    ) -> None:
        """Write the vectors of keys into a tensor, both given by DLPack.

        Args:
            keys: integers of any shape: a capsule, or a tensor. `h_keys` is its name up to v4.0.
            out_tensor: float32 with as many vectors as keys, in any shape: a capsule, or a tensor.
            model_name: name of the model.
            table_id: number of the table in the model.
            device_id: without effect.
        """
        import torch
        from torch.utils.dlpack import from_dlpack

        wanted = from_dlpack(h_keys if keys is None else keys).reshape(-1)
        out = from_dlpack(out_tensor)
        vectors = self.lookup(wanted.numpy(), model_name, table_id, device_id)
        if out.numel() != vectors.size:
            raise DataError(
                f"lookup_fromdlpack: expected a tensor of {vectors.size} numbers for "
                f"{len(vectors)} keys, got {out.numel()}. Give it that size."
            )
        with torch.no_grad():
            out.copy_(torch.from_numpy(vectors).reshape(out.shape))

    def _table(self, model_name: str, table_id: int) -> Table:
        tables = self._tables.get(model_name)
        if tables is None:
            advice = did_you_mean(model_name, self._tables)
            raise DataError(f"HPS: unknown model, got {model_name!r}. {advice}")
        if not 0 <= table_id < len(tables):
            raise DataError(
                f"HPS: model {model_name!r} has tables 0 to {len(tables) - 1}, got {table_id}. "
                "Give one of them."
            )
        return tables[table_id]


def _tables(params: InferenceParams, dims: tuple[int, ...]) -> list[Table]:
    """Return the tables of a model with their rows."""
    files = params.sparse_model_files
    where = f"model {params.model_name!r}"
    if len(dims) != len(files):
        raise ConfigError(
            f"{where}: embedding_vecsize_per_table: expected one size for each of {len(files)} "
            f"sparse files, got {list(dims)}. Give the vector size of each table."
        )
    values = params.default_value_for_each_table
    tables = []
    for number, (file, dim) in enumerate(zip(files, dims, strict=True)):
        default = values[number] if number < len(values) else 0.0
        table = Table(f"{number}", dim, rule=Sgd(), init=Constant(default))
        load_served(file, table, SparseFile(i64=params.i64_input_key))
        tables.append(table)
    return tables
