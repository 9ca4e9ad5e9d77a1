# SPDX-License-Identifier: Apache-2.0
"""Serving: frozen rows, the parameter server, the cache, the session, the server. Nothing here can
learn.
"""
