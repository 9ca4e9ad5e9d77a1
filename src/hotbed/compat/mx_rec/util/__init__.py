# SPDX-License-Identifier: Apache-2.0
"""Names by which Rec SDK sets up a program."""
