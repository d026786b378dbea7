#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: the doctor, the benchmarks on CUDA tensors, and the tests marked gpu. Needs no
# network and installs nothing: the package runs from a copy, and what the machine lacks comes from folders. Stages are
# independent: one that fails or hangs does not keep the next from running.
#
#   PYTHON   the interpreter, with torch and pytest (default: python3)
#   WHEELS   folder of wheels, for packages that the interpreter lacks
#   LIBS     folder of .deb files, for libraries that the machine lacks, such as libegl1 and libglvnd0
#   OUT      where the results go, at most 8 files (default: out/gpu-check)
#   MINUTES  how long all of it may take, 9.5 for example (default: 9)
#   STAGES   which to run, of doctor compile tests kernels bench bridge allocators calibrate (default: all of these) and
#            shared-memory; they share the time
#   TESTS    which tests to run, as pytest's -k takes it (default: all)
#   WORKERS  processes that run them beside one another (default: 1); those that measure, or fill, the GPU's memory then
#            run by themselves, unless TESTS is given
#   GO_ON    bench.json of an earlier run, of the same commit and machine: what it left out is measured, and added to it
#   CACHE    folder in which torch finds what it compiled in an earlier run, and keeps what it compiles (default: none)
#   GPU_LOD_COMMIT  what the results name as measured, where the checkout has no history (default: what git says)
#
# Exit status: 0 if all is well; 1 if there is no GPU, the tests or the doctor fail, or a benchmark could not run.
set -uo pipefail

MINUTES=${MINUTES:-9}
if [[ ! $MINUTES =~ ^([0-9]+)(\.([0-9]))?$ ]]; then
    echo "gpu-check: MINUTES is $MINUTES; expected a number such as 9 or 9.5"
    exit 2
fi
total=$((BASH_REMATCH[1] * 60 + ${BASH_REMATCH[3]:-0} * 6))

# Of the time, in percent, for each stage at the most. What one leaves the next may have: together they are more than all.
declare -A percent=(
    [doctor]=10 [compile]=28 [tests]=28 [kernels]=8 [bench]=52 [bridge]=24 [shared-memory]=8 [allocators]=16 [calibrate]=12
)
read -ra wanted <<<"${STAGES:-doctor compile tests kernels bench bridge allocators calibrate}"
whole=0
for name in "${wanted[@]}"; do
    if [ -z "${percent[$name]:-}" ]; then
        echo "gpu-check: STAGES names $name; expected some of ${!percent[*]}"
        exit 2
    fi
    whole=$((whole + percent[$name]))
done
((whole <= 100)) || whole=100
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
out=$(realpath -m "${OUT:-out/gpu-check}")
wheels=${WHEELS:+$(realpath -m "$WHEELS")}
libs=${LIBS:+$(realpath -m "$LIBS")}
go_on=${GO_ON:+$(realpath -m "$GO_ON")}
cache=${CACHE:+$(realpath -m "$CACHE")}

GRACE=5 # seconds between the polite signal and the other one
FILES=(doctor.json gpu-tests.log bench.json allocators.json bridge.json kernels.json shared-memory.json calibrated.json summary.txt)
GLVND=(/etc/glvnd/egl_vendor.d /usr/share/glvnd/egl_vendor.d) # where it looks by itself
NVIDIA=/usr/local/nvidia                                      # where containers mount the driver

# --- is there a GPU? -------------------------------------------------------------------------------------------------

probe='
try:
    import torch
except ImportError as error:
    raise SystemExit(f"no PyTorch: {error}")
if not torch.cuda.is_available():
    raise SystemExit(f"torch {torch.__version__} finds no CUDA device")
'
if ! why=$(timeout 120 "$python" -W ignore -c "$probe" 2>&1); then
    echo "gpu-check: no GPU here, so nothing was run: $(tail -n 1 <<<"${why:-$python gave no answer}")"
    exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work"/{packages,wheels,libs,here} || exit 1
if [ -f "$go_on" ]; then # it may be the file that the new one is written over
    cp "$go_on" "$work/earlier.json" && go_on=$work/earlier.json
fi
(cd "$out" && rm -f "${FILES[@]}" ./*.part)
summary=$out/summary.txt

# --- stages ----------------------------------------------------------------------------------------------------------

lines=()
failures=0

# allow NAME: false if the stage is not wanted. $limit becomes the seconds that it may take, at most its part of the whole
# and all that is left.
allow() {
    local left=$((total - SECONDS - GRACE - 2))
    [[ " ${wanted[*]} " == *" $1 "* ]] || return
    limit=$((total * percent[$1] / whole))
    ((limit <= left)) || limit=$left
}

minutes() { echo "$(($1 / 60)).$(printf '%02d' $(($1 % 60 * 100 / 60)))"; } # of seconds

# record NAME VERDICT SECONDS LOG: a line for the end, and the end of the log for the summary.
record() {
    local last
    last=$(grep -v '^[[:space:]]*$' "$4" | tail -n 1 | cut -c 1-160)
    lines+=("$(printf '%-14s %-14s %4d s  %s' "$1" "$2" "$3" "$last")")
    echo "gpu-check: ${lines[-1]}"
    printf '=== %s: %s\n%s\n\n' "$1" "$2" "$(tail -n 100 "$4")" >>"$summary"
    [ "$2" = ok ] && return
    failures=$((failures + 1))
    tail -n 15 "$4" | sed 's/^/    /'
}

# stage NAME LOG STDOUT COMMAND...: run it for $limit seconds at most. STDOUT may be LOG.
stage() {
    local name=$1 log=$2 stdout=$3 began=$SECONDS status took
    shift 3
    : >"$log"
    if ((limit < 1)); then
        echo "no time was left for it" >"$log"
        record "$name" SKIPPED 0 "$log"
        return
    fi
    # SIGINT lets Python say where it was, and pytest write its report.
    (cd "$work/here" && exec timeout -s INT -k $GRACE "$limit" "$@") >>"$stdout" 2>>"$log" </dev/null
    status=$?
    took=$((SECONDS - began))
    if [ $status -eq 124 ] || { [ $status -eq 137 ] && ((took >= limit)); }; then
        echo "stopped after $limit s" >>"$log"
        record "$name" "TIMED OUT" $took "$log"
    elif [ $status -ne 0 ]; then
        record "$name" "FAILED ($status)" $took "$log"
    else
        record "$name" ok $took "$log"
    fi
}

# --- libraries, packages and the package itself ----------------------------------------------------------------------

unpack_libraries() {
    local deb status=0
    for deb in "$libs"/*.deb; do
        if dpkg -x "$deb" "$work/libs"; then
            echo "unpacked ${deb##*/}"
        else
            echo "could not unpack ${deb##*/}"
            status=1
        fi
    done
    return $status
}

# What the interpreter lacks of the wheels, all in one go, or one by one if one of them spoils it.
install_wheels() {
    local missing wheel status=0
    local pip=("$python" -m pip --isolated --disable-pip-version-check --no-input install -q --no-index --no-deps
        --no-compile --no-cache-dir --target "$work/wheels")
    mapfile -t missing < <("$python" - "$wheels"/*.whl <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

for wheel in sys.argv[1:]:
    try:
        version(Path(wheel).name.split("-")[0])
    except PackageNotFoundError:
        print(wheel)
PYTHON
    )
    if [ ${#missing[@]} -eq 0 ]; then
        echo "no wheel is needed"
    elif timeout 60 "${pip[@]}" "${missing[@]}"; then
        printf 'installed %s\n' "${missing[@]##*/}"
    else
        for wheel in "${missing[@]}"; do
            # Into a folder of its own first: pip leaves out what goes into one that is there, as packages of a namespace do.
            if timeout 30 "${pip[@]}" --target "$work/one" "$wheel" && cp -R "$work/one/." "$work/wheels/"; then
                echo "installed ${wheel##*/}"
            # A wheel is a zip file of what goes on the path: where there is no pip, that will do.
            elif ! "$python" -m pip --version >/dev/null && "$python" -m zipfile -e "$wheel" "$work/wheels"; then
                echo "unpacked ${wheel##*/}"
            else
                echo "could not install ${wheel##*/}"
                status=1
            fi
            rm -rf "$work/one"
        done
    fi
    return $status
}

# bridge/ and shaders/ are part of gpu_lod only once installed: the copy is laid out as the wheel is.
assemble() {
    local version root=$work/packages
    cp -R "$checkout/gpu_lod" "$root/" && cp -R "$checkout/bridge" "$checkout/shaders" "$root/gpu_lod/" || return 1
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$checkout/pyproject.toml")
    mkdir "$root/gpu_lod-$version.dist-info"
    printf 'Metadata-Version: 2.1\nName: gpu-lod\nVersion: %s\n' "$version" >"$root/gpu_lod-$version.dist-info/METADATA"
}

setup() {
    local folder status=0
    for folder in "$libs" "$wheels"; do
        if [ -n "$folder" ] && [ ! -d "$folder" ]; then
            echo "there is no folder $folder"
            status=1
        fi
    done
    [ ! -d "$libs" ] || unpack_libraries || status=1
    [ ! -d "$wheels" ] || install_wheels || status=1
    assemble || status=1
    [ $status -eq 0 ] && echo "ready"
    return $status
}

vendor_files() { find "$@" -maxdepth 1 -name '*.json' 2>/dev/null | sort; }

# Without a word glvnd looks in its own folders only. A list hides those, so what they hold is listed too.
name_vendors() {
    local own given nvidia
    own=$(vendor_files "${GLVND[@]}")
    given=$(vendor_files "$work/libs/usr/share/glvnd/egl_vendor.d" "$NVIDIA/share/glvnd/egl_vendor.d")
    nvidia=$(grep nvidia <<<"$given")
    if [ -z "$nvidia" ] || grep -q nvidia <<<"$own"; then return; fi
    given=$(grep -v nvidia <<<"$given")
    __EGL_VENDOR_LIBRARY_FILENAMES=$(printf '%s\n' "$nvidia" "$given" "$own" | grep . | paste -sd :)
    export __EGL_VENDOR_LIBRARY_FILENAMES
}

# --- run it all ------------------------------------------------------------------------------------------------------

{
    echo "gpu-check of ${GPU_LOD_COMMIT:-$(git -C "$checkout" describe --always --dirty 2>/dev/null || echo 'an unknown commit')}"
    date -u
    uname -srm
    timeout 20 nvidia-smi -L
    "$python" -c 'import sys; from importlib.metadata import version as v; print(sys.version, "torch", v("torch"))'
    echo
} >"$summary" 2>&1

began=$SECONDS
shopt -s nullglob
setup >"$work/setup.log" 2>&1 && verdict=ok || verdict=FAILED
record setup "$verdict" $((SECONDS - began)) "$work/setup.log"

paths=("$work"/libs{/usr,}/lib/*-linux-gnu)
[ ! -e $NVIDIA/lib64/libEGL_nvidia.so.0 ] || paths+=("$NVIDIA/lib64")
[ -z "${LD_LIBRARY_PATH:-}" ] || paths+=("$LD_LIBRARY_PATH")
LD_LIBRARY_PATH=$(IFS=:; echo "${paths[*]}")
export LD_LIBRARY_PATH
export PYTHONPATH=$work/packages:$work/wheels${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1
export GPU_LOD_CACHE=$work/times # not what was calibrated on this machine
export TORCHINDUCTOR_CACHE_DIR=${cache:-$work}/inductor TRITON_CACHE_DIR=${cache:-$work}/triton
name_vendors
{
    echo "LD_LIBRARY_PATH=$LD_LIBRARY_PATH"
    printf 'EGL vendors: %s\n\n' "${__EGL_VENDOR_LIBRARY_FILENAMES:-those of glvnd}"
} >>"$summary"

if allow doctor; then
    stage doctor "$work/doctor.log" "$out/doctor.json" "$python" -m gpu_lod.cli doctor --json
    "$python" - "$out/doctor.json" 2>&1 <<'PYTHON' | tee -a "$summary"
import json
import sys
from pathlib import Path

file = Path(sys.argv[1])
try:
    findings = json.loads(file.read_text())["findings"]
except (ValueError, KeyError) as error:
    print(f"    the doctor wrote no JSON: {error}")
    file.unlink()
else:
    for one in findings:
        if one["status"] != "ok":
            print(f"    {one['status']}: {one['name']}: {one['found']}; {one['fix']}")
PYTHON
fi

# Only the files that have such tests: the others may need packages that are not here. This environment's own pytest
# plugins and warnings are not what is tested. In a process beside pytest's, a test that crashes or hangs takes no other
# with it. And that all tests were skipped is no success.
# Those of allocators come late: they rest on what the others test. Those that measure and fill the memory come last: a
# driver that does not bear it would fail all that follow.
gpu_files() { grep -lE 'mark\.gpu\b' "$checkout"/tests/test_*.py; }
mapfile -t files < <(
    gpu_files | grep -vE 'allocate|memory'
    gpu_files | grep allocate
)
mapfile -t alone < <(gpu_files | grep memory)
mapfile -t beside < <("$python" - 2>/dev/null <<'PYTHON'
from importlib.util import find_spec

import pytest

if find_spec("xdist"):
    print("-p", "xdist.plugin", "--max-worker-restart", "20", sep="\n")
    if pytest.version_tuple >= (9,):
        print("-o", "faulthandler_exit_on_timeout=true", sep="\n")
    elif find_spec("pytest_timeout"):  # which ends the process too
        print("-p", "pytest_timeout", "-o", "timeout=62", "-o", "timeout_method=thread", sep="\n")
PYTHON
)
# shellcheck disable=SC2016
some_passed='"$@" || exit; tail -n 20 "$0" | grep -qE "=+ .*[1-9][0-9]* passed" || { echo "no test ran"; exit 1; }'
run_pytest() { # NAME LOG ARGUMENT...
    local name=$1 log=$2
    shift 2
    GPU_LOD_TEST_INSTALLED=1 GPU_LOD_TEST_WARNINGS=default PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
        stage "$name" "$log" "$log" \
        bash -c "$some_passed" "$log" "$python" -m pytest -m gpu -v --durations=10 \
        -W default -p no:cacheprovider -o faulthandler_timeout=60 -c "$checkout/pyproject.toml" --rootdir "$checkout" "$@"
}
GRACE=15 # in which pytest waits for the process beside it, and writes its report
each=()
((${#beside[@]} == 0)) || each=("${beside[@]}" -n "${WORKERS:-1}")
split= # those that measure the GPU's memory, or fill it, from the others
[ "${WORKERS:-1}" = 1 ] || [ -n "${TESTS:-}" ] || split=yes
run_crowd() { allow tests && run_pytest tests "$out/gpu-tests.log" "${each[@]}" "${files[@]}"; }

# Most of a row's time torch compiles its opponents. Ahead of them several processes can do that, and beside the tests,
# for nothing is timed yet. What they choose by timing, beside one another, is not kept.
compilers=()
if allow compile; then
    began=$SECONDS verdict=ok
    count=$(($(nproc) / 3 < 6 ? $(nproc) / 3 : 6))
    ((count > 0)) || count=1
    if ((limit < 1)); then
        count=0 verdict=SKIPPED
        echo "no time was left for it" >"$work/compile0.log"
    fi
    for ((i = 0; i < count; i++)); do
        (cd "$work/here" && exec timeout -s INT -k 5 "$limit" "$python" "$checkout/bench/run.py" --device cuda \
            --compile "$i/$count") >"$work/compile$i.log" 2>&1 </dev/null &
        compilers+=($!)
    done
fi
[ -z "$split" ] || run_crowd
if allow compile; then
    for compiler in "${compilers[@]}"; do wait "$compiler" || verdict=FAILED; done
    find "$TORCHINDUCTOR_CACHE_DIR" -name '*.best_config' -delete 2>/dev/null
    cat "$work"/compile*.log >"$work/compile.log"
    record compile "$verdict" $((SECONDS - began)) "$work/compile.log"
fi
if ! allow tests; then
    :
elif [ -n "$split" ]; then
    run_pytest tests-alone "$work/alone.log" "${beside[@]}" ${beside:+-n 1} "${alone[@]}"
    cat "$work/alone.log" >>"$out/gpu-tests.log"
else
    run_pytest tests "$out/gpu-tests.log" "${each[@]}" ${TESTS:+-k "$TESTS"} "${files[@]:-$checkout/tests}" "${alone[@]}"
fi
GRACE=5

if allow kernels; then
    stage kernels "$work/kernels.log" "$work/kernels.log" "$python" "$checkout/bench/bench_kernels.py" \
        --out "$out/kernels.json"
fi

# What the project is judged by comes first, and first in it the rows that matter most. Less what importing, the last row
# and the plot take.
if allow bench; then
    seconds=$((limit > 65 ? limit - 45 : 20))
    stage bench "$work/bench.log" "$work/bench.log" "$python" "$checkout/bench/run.py" --device cuda \
        --minutes "$(minutes $seconds)" --out "$out/bench.json" ${go_on:+--go-on "$go_on"}
fi

if allow bridge; then
    stage bridge "$work/bridge.log" "$work/bridge.log" "$python" "$checkout/bench/bench_bridge.py" \
        --out "$out/bridge.json" --seconds $((limit * 60 / 100 + 1))
fi

if allow shared-memory; then
    stage shared-memory "$work/shared.log" "$work/shared.log" "$python" "$checkout/bench/bench_shared_memory.py" \
        --out "$out/shared-memory.json" --seconds 0.5
fi

if allow allocators; then
    stage allocators "$work/allocators.log" "$work/allocators.log" "$python" "$checkout/bench/bench_allocate.py" \
        --device cuda --out "$out/allocators.json" --seconds $((limit * 6 / 10 + 1))
fi

# The table that it keeps is what bench/results/calibrated/ takes.
if allow calibrate; then
    stage calibrate "$work/calibrate.log" "$work/calibrate.log" "$python" -m gpu_lod.cli calibrate --tensors cuda \
        --minutes "$(minutes $((limit * 8 / 10 + 1)))"
    for table in "$GPU_LOD_CACHE"/calibration/*.json; do mv "$table" "$out/calibrated.json"; done
fi

{
    printf '%s\n' "${lines[@]}"
    echo "$failures of ${#lines[@]} stages failed, after $SECONDS s"
} | tee -a "$summary"
(cd "$out" && rm -f ./*.part bench.svg) # the plot is made again from the file
[ $failures -eq 0 ]
