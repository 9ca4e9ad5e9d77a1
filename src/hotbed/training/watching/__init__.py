# SPDX-License-Identifier: Apache-2.0
"""What a run shows while it learns: history, progress, Prometheus, TensorBoard, the report."""
