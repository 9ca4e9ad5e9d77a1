# SPDX-License-Identifier: Apache-2.0
# interpreter VERSION: a working Python of that version, also behind pyenv's shims; nothing if there is none.
interpreter() {
  local found
  for found in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
    if command -v "$found" >/dev/null && "$found" -c 'import venv' 2>/dev/null; then echo "$found"; return; fi
  done
}
