# SPDX-License-Identifier: Apache-2.0
"""The server: requests over REST and gRPC, batched, scored and watched."""
