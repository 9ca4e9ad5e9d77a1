# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol without a network: the bytes of a request as columns, and answers."""
