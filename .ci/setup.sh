#!/usr/bin/env bash
# Make .venv ready: system libraries, Python packages, and the wheel of this checkout.
# Usage: .ci/setup.sh [further apt package]...
#
# Each step leaves a stamp and is skipped while what it depends on is unchanged, so a second run takes a second.
#   PYTHON           the interpreter to build .venv with; otherwise the first of python3, python3.14 ... that is >= 3.10
#   TORCH_INDEX_URL  where to get PyTorch; otherwise its CPU index where there is no NVIDIA driver and the index answers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EXTRAS="test,cli,view,bench" # one environment for all targets, so that going from one to the other installs nothing
VENV=.venv
CONSTRAINTS=.ci/constraints.txt
PIP=("$VENV/bin/python" -m pip --disable-pip-version-check --no-input)

say() { printf '[setup] %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# --- system packages -------------------------------------------------------------------------------------------------

is_installed() { [ "$(dpkg-query -W -f='${db:Status-Status}\n' "$1" 2>/dev/null | sort -u)" = installed ]; }

# Install Debian packages, or say the line that does. Returns 1 if any is still missing.
apt_packages() {
    local name missing=() as_root=() log status=0
    if ! command -v dpkg-query >/dev/null; then
        say "no apt here; what Debian calls $* must be installed by hand"
        return 1
    fi
    for name; do is_installed "$name" || missing+=("$name"); done
    [ ${#missing[@]} -eq 0 ] && return 0
    if [ "$(id -u)" -ne 0 ]; then
        as_root=(sudo -n)
        if ! sudo -n true 2>/dev/null; then
            say "missing packages; run:  sudo apt-get update && sudo apt-get install -y ${missing[*]}"
            return 1
        fi
    fi
    say "apt-get install ${missing[*]}"
    log=$(mktemp)
    local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120
        install -y --no-install-recommends "${missing[@]}")
    # The lists may be absent or too old: only then is it worth fetching them.
    "${install[@]}" </dev/null >"$log" 2>&1 ||
        { "${as_root[@]}" apt-get update && "${install[@]}"; } </dev/null >"$log" 2>&1 || status=1
    if [ $status -ne 0 ]; then
        tail -n 5 "$log" >&2
        say "could not install ${missing[*]}; run:  sudo apt-get update && sudo apt-get install -y ${missing[*]}"
    fi
    rm -f "$log"
    return $status
}

# --- Python ----------------------------------------------------------------------------------------------------------

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_recent "$PYTHON" || die "PYTHON=$PYTHON is not a Python >= 3.10"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if is_recent "$candidate"; then echo "$candidate"; return; fi
    done
    die "no Python >= 3.10 found; install one, or name it with PYTHON=..."
}

make_venv() {
    # Scripts in a venv hold its absolute path, and links to its interpreter: a copied or outdated one is made anew.
    local identity
    identity=$(pwd; "$python" -c 'import sys; print(sys.version, sys.executable)')
    [ -x $VENV/bin/python ] && [ "$(cat $VENV/.identity 2>/dev/null)" = "$identity" ] && return
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        apt_packages python3-venv || true
        "$python" -c 'import venv, ensurepip' 2>/dev/null || die "$python has no venv module; cannot go on without it"
    fi
    say "making $VENV with $("$python" -V)"
    if [ -e $VENV/.identity ]; then "$python" -m venv --clear $VENV; else "$python" -m venv $VENV; fi
    echo "$identity" >$VENV/.identity
}

# --- packages --------------------------------------------------------------------------------------------------------

# -qq: errors only. Bytecode is made of what is imported, when it is: of all packages that takes longer than to install them.
pip_install() { "${PIP[@]}" install -qq --no-compile -c $CONSTRAINTS "$@"; }

# Without a GPU, PyTorch's default wheel brings gigabytes of CUDA libraries that nothing can use. torchvision, which timm
# asks for, loads with the torch of its own index only.
install_torch() {
    local index=${TORCH_INDEX_URL-} packages
    mapfile -t packages < <(grep -E '^torch(vision)?==[^;]*$' $CONSTRAINTS)
    if [ -z "${TORCH_INDEX_URL+set}" ] && [ ! -e /proc/driver/nvidia/version ] && ! command -v nvidia-smi >/dev/null; then
        index=https://download.pytorch.org/whl/cpu
        timeout 10 $VENV/bin/python -c \
            'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/torch/", timeout=5)' "$index" 2>/dev/null || index=
    fi
    if [ -n "$index" ]; then
        say "installing ${packages[*]} from $index"
        pip_install --no-deps --index-url "$index" "${packages[@]}" && return
        say "that failed; trying pip's own index"
    fi
    say "installing ${packages[*]}"
    pip_install --no-deps "${packages[@]}"
}

# The wheel is built from a copy: a stale build/ in the checkout can then not slip old files into it.
build_wheel() {
    rm -rf $VENV/source $VENV/dist $VENV/wheel
    mkdir -p $VENV/source
    cp -R "${SOURCES[@]}" $VENV/source/
    "${PIP[@]}" wheel -qq --no-deps --no-build-isolation -w $VENV/dist $VENV/source
    $VENV/bin/python -m zipfile -e $VENV/dist/*.whl $VENV/wheel
    rm -rf $VENV/source
}

SOURCES=(pyproject.toml README.md LICENSE gpu_lod bridge shaders)

digest() {
    find "$@" -type f ! -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

is_done() { [ "$(cat "$VENV/.$1" 2>/dev/null)" = "$2" ]; }
done_with() { echo "$2" >"$VENV/.$1"; }

# --- the steps -------------------------------------------------------------------------------------------------------

python=$(find_python)
apt_packages libegl1 libgl1-mesa-dri "$@" || true
# moderngl and glcontext come compiled for x86-64 alone.
[ "$(uname -m)" = x86_64 ] || apt_packages g++ python3-dev libx11-dev || true
"$python" -c 'import ctypes; ctypes.CDLL("libEGL.so.1")' 2>/dev/null ||
    die "libEGL.so.1 cannot be loaded; Debian has it in libegl1, and a driver for it in libgl1-mesa-dri"
make_venv

packages=$(digest pyproject.toml $CONSTRAINTS .ci/setup.sh)
sources=$(digest "${SOURCES[@]}")

if ! is_done packages "$packages"; then
    rm -f $VENV/.wheel
    pip_install pip setuptools wheel
    build_wheel
    install_torch
    say "installing the packages of [$EXTRAS]"
    pip_install --force-reinstall --no-deps $VENV/dist/*.whl
    pip_install "$(echo $VENV/dist/*.whl)[$EXTRAS]"
    done_with wheel "$sources"
    done_with packages "$packages"
elif ! is_done wheel "$sources"; then
    say "building the wheel"
    build_wheel
    pip_install --force-reinstall --no-deps $VENV/dist/*.whl
    done_with wheel "$sources"
fi
