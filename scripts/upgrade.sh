#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Resolve the newest versions that pyproject.toml allows in a fresh environment and pin them: upgrade.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q ".[dev]"
header=$(grep '^#' constraints.txt)
{
  echo "$header"
  "$work/venv/bin/pip" freeze --all --exclude hotbed --exclude pip | sed -E 's/ @ .*//; s/\+cpu$//' | grep '=='
} >"$work/new"
mv "$work/new" constraints.txt
echo "constraints-torchrec.txt is as it was: renew it by hand, for the torch of constraints.txt"
