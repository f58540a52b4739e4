#!/usr/bin/env bash
# Writes constraints.txt: every package that pyproject.toml leads to, for Python 3.10 or newer
# on any platform, resolved once for all of them, so that a pin that differs between Pythons has a marker.
# Pins that still fit are kept. Arguments go to uv: --upgrade, --upgrade-package NAME.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools/venv"
"$tools/venv/bin/pip" install --quiet uv==0.13.8

cp constraints.txt "$tools/pins.txt"
# What the set-up itself uses is pinned as well: pip, and what builds DeepSpeed and this project.
printf '%s\n' pip setuptools wheel |
    "$tools/venv/bin/uv" pip compile --quiet --universal --python-version 3.10 --all-extras --group all \
        --no-header --no-annotate --output-file "$tools/pins.txt" "$@" pyproject.toml -
{
    echo "# Exact versions of everything that \`make\` installs. Made by \`make pins\` from pyproject.toml:"
    echo "# edit that file, not this one. The NVIDIA packages are installed with torch's CUDA build only."
    cat "$tools/pins.txt"
} >constraints.txt
