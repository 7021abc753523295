#!/bin/sh
# Makes .venv with Proa and its test tools, or says what is missing. Does nothing when it is up to date.
set -eu
cd "$(dirname "$0")/.."

fail() {
    printf '\nproa: %s\n' "$1" >&2
    exit 1
}

PYTHON=${PYTHON:-python3}
command -v "$PYTHON" >/dev/null 2>&1 ||
    fail "there is no '$PYTHON' on the PATH. Install Python 3.11 or newer (Debian, Ubuntu: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$PYTHON" --version) is too old; Proa needs Python 3.11 or newer. Name one: make PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python cannot make virtual environments. Install the package for it (Debian, Ubuntu: apt install python3-venv) and try again."

stamp=.venv/.proa-installed
want=$(cat pyproject.toml constraints.txt tools/venv.sh | cksum)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

echo "proa: making .venv (the first time this takes a minute or two)" >&2
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' ||
    fail "installing the dependencies failed; the reason stands above. Without a network connection, point pip at a local mirror (PIP_INDEX_URL or PIP_FIND_LINKS) and try again."
printf '%s' "$want" >"$stamp"
