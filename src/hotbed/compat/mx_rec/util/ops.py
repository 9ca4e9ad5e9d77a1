# SPDX-License-Identifier: Apache-2.0
"""import_host_pipeline_ops: what Rec SDK's host side offers to a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hotbed import checks
from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.checks import MOST_INT
from hotbed.compat.mx_rec.no_effect import ARGUMENTS
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError

__all__ = ["HostPipelineOps", "import_host_pipeline_ops"]


class HostPipelineOps:
    """The operations of the host pipeline."""

    def set_threshold(
        self, input: Any, emb_name: str | Sequence[str] = "", ids_name: str | Sequence[str] = ""
    ) -> None:
        """Change the access threshold of tables, for ids that are mapped from now on.

        Ids of up to two batches ahead may be mapped already; after a step of `train_steps` or
        `save_steps` none are.

        Args:
            input: the new threshold, a number or a tensor of one. 0 and 1 let in every id; a later
                call may raise the threshold again.
            emb_name: the name of the table, or names; "" = every table with an access threshold
                above 0.
            ids_name: not needed: a threshold belongs to a table.

        Raises:
            ConfigError: the table is unknown, or was made without an access threshold above 0.
        """
        count: Any = input.item() if isinstance(input, Tensor) else input
        checks.whole_number("set_threshold: input", count, 0, MOST_INT)
        tables = framework.current().started("set_threshold").tables
        names = [emb_name] if isinstance(emb_name, str) else list(emb_name)
        names = [name for name in names if name]
        for name in names:
            if name not in tables:
                advice = did_you_mean(name, tables)
                raise ConfigError(f"set_threshold: no table has this name, got {name!r}. {advice}")
        counting = [name for name, table in tables.items() if table.min_count is not None]
        chosen = names or counting
        if not set(chosen) <= set(counting) or not chosen:
            raise ConfigError(
                "set_threshold: a table counts ids if it was made with an access threshold above "
                f"0, got {names or 'tables'} without. Give access_threshold=1 to its features."
            )
        for name in chosen:
            tables[name].set_min_count(max(count, 1))

    def clear_channel(self, channel_id: int) -> None:
        """Have no effect: each loop over data begins anew. `channel_id`: 0 or 1."""
        checks.whole_number("clear_channel: channel_id", channel_id, 0, 1)
        ARGUMENTS.log_no_effect("clear_channel.channel")


def import_host_pipeline_ops(library: str = "") -> HostPipelineOps:
    """Return the operations of the host pipeline.

    Args:
        library: a file name such as `LIBREC_EOS_OPS_SO`, not needed: the operations are here.
    """
    return HostPipelineOps()
