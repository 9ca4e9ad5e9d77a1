# SPDX-License-Identifier: Apache-2.0
"""Job: everything a training run is, as one value, as a file, and as a draft of one."""
