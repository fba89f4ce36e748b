#!/bin/sh
# Installs packages into a virtual environment.
#
#   tools/install.sh DIRECTORY PIP_ARGUMENT...
#
# uv takes a few seconds where pip takes half a minute, but reads none of pip's settings: pip installs
# where it was told of an index, or where uv fails.
set -eu

python=$1/bin/python
shift

# Python compiles what it imports; to compile all that is installed takes half a minute more.
pip_install() { "$python" -m pip install --no-compile --quiet --quiet --disable-pip-version-check "$@"; }

if "$python" -m pip config list | grep -q '\.\(index-url\|no-index\)=' ||
    ! pip_install uv || ! "$python" -m uv pip install --quiet --python "$python" "$@"; then
    pip_install "$@"
fi
