#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build and run the doctest suite of the native core: native_tests.sh BIN KIND..., KIND = plain, soak (plain, with
# what takes minutes), address, thread, undefined.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "$1" && pwd); shift
PATH="$bin:$PATH"
mkdir -p build
for kind in "$@"; do
  sanitizer=$kind
  flags=
  [ "$kind" = soak ] && kind=plain flags=--no-skip
  [ "$kind" = plain ] && sanitizer=
  build=build/native-$kind
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DHOTBED_DEV=ON -DHOTBED_PYTHON=OFF -DHOTBED_TESTS=ON \
    -DHOTBED_SANITIZE="$sanitizer" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
  cmake --build "$build" >>"$build.log" 2>&1 || { grep -E "error|warning|Error" -A 6 "$build.log" | head -n 80; exit 1; }
  echo "== native tests, $kind"
  # A fork while other threads live is what the pool promises to survive; the thread sanitizer only has to be told that we mean it.
  ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS=die_after_fork=0:second_deadlock_stack=1 UBSAN_OPTIONS=print_stacktrace=1 "$build/hotbed_tests" $flags
done
