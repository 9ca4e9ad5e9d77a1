# SPDX-License-Identifier: Apache-2.0
"""Features, insert functions and the start of the pipeline."""
