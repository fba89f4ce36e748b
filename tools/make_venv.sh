#!/bin/sh
# Makes a virtual environment from scratch and installs this checkout into it, editable.
#
#   tools/make_venv.sh DIRECTORY "PYTHON VERSIONS, BEST FIRST" PIP_ARGUMENT...
#
# The first version wins for which a real interpreter makes an environment with pip. Interpreters
# are looked for on the PATH and under pyenv. All are tried, not only found: a pyenv shim may stand
# for a version that is switched off, and a Python may lack ensurepip.
set -eu

directory=$1
versions=$2
shift 2

say() { printf '%s\n' "$*" >&2; }

# Every file that could be an interpreter of version $1, one a line.
candidates() {
    (
        IFS=:
        for folder in $PATH; do
            for name in "python$1" python3 python; do
                if [ -x "$folder/$name" ]; then printf '%s\n' "$folder/$name"; fi
            done
        done
    )
    for file in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if [ -x "$file" ]; then printf '%s\n' "$file"; fi
    done
}

is_version() {
    "$1" -c 'import sys
sys.exit(sys.implementation.name != "cpython" or "%d.%d" % sys.version_info[:2] != sys.argv[1])' \
        "$2" >/dev/null 2>&1 </dev/null
}

make_venv() {
    for version in $versions; do
        # Split at line ends only: a path may hold spaces.
        IFS='
'
        for python in $(candidates "$version"); do
            unset IFS
            is_version "$python" "$version" || continue
            if "$python" -m venv --clear "$directory" >/dev/null 2>&1 &&
                "$directory/bin/python" -m pip --version >/dev/null 2>&1; then
                say "$directory: Python $version from $python"
                return 0
            fi
            say "$directory: passing over $python, it cannot make a virtual environment with pip"
        done
        unset IFS
    done
    return 1
}

if ! make_venv; then
    say "No usable Python found: install Python $(echo "$versions" | sed 's/ / or /g') with venv and pip" \
        "(on Debian or Ubuntu: apt install python3 python3-venv; with pyenv: pyenv install ${versions%% *})."
    rm -rf "$directory"
    exit 1
fi

say "$directory: installing $* (a minute or two the first time)"
# Python compiles what it imports; to compile all that is installed takes half a minute more.
install() {
    "$directory/bin/python" -m pip install --no-compile --quiet --quiet --disable-pip-version-check "$@"
}
install "pip>=25.1"  # the first that knows dependency groups
install "$@"
