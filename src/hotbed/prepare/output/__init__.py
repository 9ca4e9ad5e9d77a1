# SPDX-License-Identifier: Apache-2.0
"""The output folder of a preparation: its columns, its files, and the tasks that write them."""
