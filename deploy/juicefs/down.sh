#!/usr/bin/env bash
# See `down.sh --help` and docs/juicefs.md. Needs vime's Python: $VIME_PYTHON, the repository's .venv, or python3.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(dirname "$(dirname "$here")")"
python="${VIME_PYTHON:-}"
if [ -z "$python" ] && [ -x "$root/.venv/bin/python" ]; then python="$root/.venv/bin/python"; fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${python:-python3}" -m deploy.juicefs.down "$@"
