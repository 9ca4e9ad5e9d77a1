# SPDX-License-Identifier: Apache-2.0
"""Where versions of models and their rows come from: mapped files in process, or another process."""
