#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Wheels for publishing, in dist/: one for Python 3.11, and one of the stable ABI for 3.12 and newer, as far as this machine has these Pythons.
# auditwheel gives each the oldest manylinux tag that its symbols allow: that of this machine's C library or older. `cibuildwheel` reads
# [tool.cibuildwheel] of pyproject.toml instead, and builds in manylinux images, for arm64 too.
# wheels.sh BIN; PYTHONS="3.12" chooses versions.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "$1")
tools=(scikit_build_core nanobind cmake ninja packaging pathspec)
source scripts/interpreter.sh
rm -rf build/wheels/raw
mkdir -p build/wheels dist
for version in ${PYTHONS:-3.11 3.12}; do
  python=$(interpreter "$version")
  if [ -z "$python" ]; then echo "python $version: absent on this machine"; continue; fi
  env=build/wheels/$version
  [ -x "$env/bin/python" ] || "$python" -m venv "$env"
  for tool in "${tools[@]}"; do grep -iE "^$tool==" constraints.txt; done | xargs "$env/bin/pip" install -qq
  "$env/bin/pip" wheel -qq --no-build-isolation --no-deps -w "build/wheels/raw" .
done
for wheel in build/wheels/raw/*.whl; do
  if [ "$(uname)" = Linux ]; then
    PATH="$bin:$PATH" "$bin/auditwheel" repair -w dist "$wheel" | grep -E "Fixed-up wheel|manylinux" || true
  else
    cp "$wheel" dist/
  fi
done
ls dist/*.whl
