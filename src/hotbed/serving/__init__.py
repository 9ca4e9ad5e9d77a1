# SPDX-License-Identifier: Apache-2.0
"""Serve models: frozen rows, parameter server, cache, session and server. Nothing here trains."""
