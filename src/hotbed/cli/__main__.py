# SPDX-License-Identifier: Apache-2.0
"""`python -m hotbed.cli`: the same as the command `hotbed`."""

from hotbed.cli.commands import main

main()
