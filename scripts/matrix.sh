#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The suite's core on every Python here (tests marked `core`: no torch), on torch 2.6 (marked `torch_core`), the server's
# connections on the newest uvicorn, and compile-only checks of the native core for arm64 and with clang. A row that this machine cannot run says so and is not a failure.
# matrix.sh BIN; MATRIX="python torch uvicorn arm64 clang", PYTHONS="3.12" and TORCHES="2.6.0" choose rows.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$1
rows=${MATRIX:-python torch uvicorn arm64 clang}
mkdir -p build/matrix
log=build/matrix/log.txt
: >"$log"
summary=()
failed=0

record() {  # name, exit status, what happened
  summary+=("$(printf '%-22s %s' "$1" "$3")")
  [ "$2" -eq 0 ] || failed=1
  echo "== $1: $3"
}

pins() {  # the pinned versions of the named packages
  for name in "$@"; do grep -iE "^$name==" constraints.txt; done
}

source scripts/interpreter.sh

# run NAME PYTHON MARKER PACKAGE...: a fresh environment, the wheel built for it, the marked tests
run() {
  local name=$1 python=$2 marker=$3 env=build/matrix/$1
  shift 3
  {
    [ -x "$env/bin/python" ] || "$python" -m venv "$env"
    "$env/bin/pip" install -qq "$@" &&
      rm -rf "$env/wheel" &&
      "$env/bin/pip" wheel -qq --no-build-isolation --no-deps -w "$env/wheel" . &&
      "$env/bin/pip" install -qq --no-deps --force-reinstall "$env"/wheel/hotbed-*.whl
  } >>"$log" 2>&1 || { record "$name" 1 "could not be set up: see $log"; return; }
  # Only files that hold such tests: others import torch, which is not there.
  local pattern="mark\\.(${marker// or /|})\\b"
  HOTBED_TEST_WHEEL=1 "$env/bin/pytest" -q -p no:cacheprovider -m "$marker" $(grep -rlE "$pattern" tests --include='test_*.py') \
    >"$env/tests.txt" 2>&1
  local status=$?
  cat "$env/tests.txt" >>"$log"
  record "$name" "$status" "$(tail -n 1 "$env/tests.txt" | tr -d '=')"
}

build_tools=(scikit_build_core nanobind cmake ninja packaging pathspec)
libraries=(numpy pyarrow polars pydantic PyYAML rich safetensors typer pytest pytest-timeout hypothesis xxhash setuptools)

case " $rows " in *" python "*)
  for version in ${PYTHONS:-3.11 3.12 3.13}; do
    python=$(interpreter "$version")
    if [ -z "$python" ]; then record "python-$version" 0 "absent on this machine"; continue; fi
    run "python-$version" "$python" core $(pins "${build_tools[@]}" "${libraries[@]}")
  done ;;
esac

case " $rows " in *" torch "*)
  python=$(interpreter 3.11)
  for version in ${TORCHES:-2.6.0 $(pins torch | cut -d= -f3)}; do
    run "torch-$version" "$python" "core or torch_core" $(pins "${build_tools[@]}" "${libraries[@]}") "torch==$version"
  done ;;
esac

case " $rows " in *" uvicorn "*)
  newest=build/matrix/uvicorn
  rm -rf "$newest"
  if "$bin/pip" install -qq --no-deps --target "$newest" uvicorn >>"$log" 2>&1; then
    PYTHONPATH=$newest${PYTHONPATH:+:$PYTHONPATH} "$bin/pytest" -q -p no:cacheprovider \
      tests/unit/serving/test_uvicorn.py tests/unit/serving/test_connections.py >"$newest/tests.txt" 2>&1
    status=$?
    cat "$newest/tests.txt" >>"$log"
    record "uvicorn" "$status" "$(tail -n 1 "$newest/tests.txt" | tr -d '=')"
  else
    record "uvicorn" 1 "could not be installed: see $log"
  fi ;;
esac

compile() {  # name, compiler, flags...
  local name=$1 compiler=$2
  shift 2
  if ! command -v "$compiler" >/dev/null; then record "$name" 0 "$compiler is absent on this machine"; return; fi
  local out=build/matrix/$name
  mkdir -p "$out"
  for file in csrc/core/*.cpp; do
    "$compiler" -std=c++20 -O3 -ffp-contract=off -fno-math-errno -Wall -Wextra -Werror -Icsrc "$@" -c "$file" \
      -o "$out/$(basename "$file").o" >>"$log" 2>&1 || { record "$name" 1 "$file does not compile: see $log"; return; }
  done
  record "$name" 0 "csrc/core compiles"
}
case " $rows " in *" arm64 "*) compile arm64 aarch64-linux-gnu-g++ ;; esac
case " $rows " in *" clang "*) compile clang clang++ -DHOTBED_X86 ;; esac

printf '\n%s\n' "matrix:"
printf '  %s\n' "${summary[@]}"
exit "$failed"
