# SPDX-License-Identifier: Apache-2.0
"""import_host_pipeline_ops: what Rec SDK does on its host side."""

from __future__ import annotations

__all__ = ["import_host_pipeline_ops"]


class HostPipelineOps:
    """The operations of the host pipeline."""


def import_host_pipeline_ops() -> HostPipelineOps:
    """Return the operations of the host pipeline."""
    return HostPipelineOps()
