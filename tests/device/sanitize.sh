#!/usr/bin/env bash
# The CUDA kernels under compute-sanitizer: memcheck, initcheck, racecheck and synccheck. Each tool must also
# report a planted bug (planted.cu), which proves that it sees what the kernels do.
#   tests/device/sanitize.sh BIN_DIR [LOG_DIR]    BIN_DIR holds attn-tests and attn-planted
# For racecheck they are those of a build with -DATTN_CUDA_LINES=ON: races.py knows its reports by their lines.
# TOOLS: of the four, those to run. KERNELS: names of those to run, as patterns. TESTS: a pattern of those to run
# beside each kernel's. JOBS: how many at a time; the GPUs of the machine share them. Prints a line per run; fails if
# a kernel of the library has a finding or a planted bug has none. Needs a device and compute-sanitizer of the CUDA
# toolkit.
set -uo pipefail

[ $# = 1 ] || [ $# = 2 ] || { echo "usage: sanitize.sh BIN_DIR [LOG_DIR]" >&2; exit 2; }
bin=$(cd "$1" && pwd) || exit 2
logs=${2:-$(mktemp -d)}
mkdir -p "$logs"
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null) ||
  { echo "sanitize: compute-sanitizer is not here" >&2; exit 2; }
# Each line of a variants.h names a kernel.
files=$(ls "$(dirname "$0")"/../../kernels/*/*variants.h) || exit 2
kernels=$(set -f; for pattern in ${KERNELS:-fwd_* decode_* mla_*}; do
  sed -nE 's/.*\.name = "([a-z0-9_]+)".*/\1/p' $files | while read -r name; do
    # shellcheck disable=SC2254
    case $name in $pattern) echo "$name" ;; esac
  done
done)
[ -n "$kernels" ] || { echo "sanitize: KERNELS is \"${KERNELS:-}\"; no kernel of kernels/*/*variants.h has such a name" >&2; exit 2; }
races=$(cd "$(dirname "$0")" && pwd)/races.py
few="cuda: every forward kernel on few problems"
# With accumulate_cuda, which is the same beside any kernel. racecheck itself fails where many kernels take turns.
added="cuda: results of each kernel are added*"
adding="fwd_sm80_bf16_d128 fwd_sm90_bf16_d128 decode_sm80_bf16_d128 decode_sm90_bf16_d128_r8"

# report TOOL TEXT RESULT
report() {
  printf '%-9s  %-58s  %s\n' "$1" "$2" "$3"
}
fail() {
  report "$1" "$2" "FAILED: $3"
  tail -n 30 "$log.txt" "$log.out" "$log.races" 2>/dev/null
}

# findings TOOL NAME COMMAND...: runs it and sets `found` to what the tool has found, "" if it has not ended
findings() {
  local tool=$1 name=$2
  shift 2
  log=$logs/$tool-${name//[^a-z0-9_]/-}
  rm -f "$log".*
  local padding=()
  [ "$tool" != memcheck ] || padding=(--padding 65536)  # else the allocation behind hides reads beyond the end
  timeout 300 "$sanitizer" --tool "$tool" "${padding[@]}" --print-limit 1000 --log-file "$log.txt" "$@" >"$log.out" 2>&1
  code=$?
  found=$(sed -nE 's/^=+ (RACECHECK|ERROR) SUMMARY: ([0-9]+) .*/\2/p' "$log.txt" 2>/dev/null | tail -1)
}

# Whether racecheck's reports are all of kinds that are known, which races.py prints.
known() {
  python3 "$races" "$log.txt" >"$log.races" && [ -s "$log.races" ]
}

# planted TOOL BUG
planted() {
  findings "$1" "planted $2" "$bin/attn-planted" "$2"
  if [ -z "$found" ]; then
    fail "$1" "planted: $2" "no result, exit code $code"
  elif [ "$found" = 0 ]; then
    fail "$1" "planted: $2" "not caught"
  else
    report "$1" "planted: $2" "caught, $found found"
  fi
}

# clean TOOL TEST_CASE [SECTION]
clean() {
  local name=${3:-$2} section=()
  [ "$2" != "$added" ] || name="added, $3"
  [ $# = 2 ] || section=(-c "$3")
  findings "$1" "$name" "$bin/attn-tests" "$2" "${section[@]}"
  if [ $# = 3 ] && grep -q 'assertions: - none -' "$log.out"; then
    report "$1" "$name" "not of this test"
  elif [ -z "$found" ]; then
    fail "$1" "$name" "no result, exit code $code"
  elif [ "$found" != 0 ] && { [ "$1" != racecheck ] || ! known; }; then
    fail "$1" "$name" "$found found"
  elif [ "$code" != 0 ] || ! grep -q '^All tests passed' "$log.out"; then
    fail "$1" "$name" "the test failed, exit code $code"
  elif grep -Eq '^SKIP: ([a-z0-9_]+_sm[0-9]+[a-z0-9_]*: )?attn_context_create' "$log.out"; then
    fail "$1" "$name" "skipped, so that no kernel ran"
  elif [ "$found" != 0 ]; then
    report "$1" "$name" "clean but for $(wc -l <"$log.races") known kinds of reports"
  else
    report "$1" "$name" "clean"
  fi
}

# A line per run: its function and arguments between tabs.
runs() {
  local tool name
  for tool in ${TOOLS:-memcheck initcheck racecheck synccheck}; do
    case $tool in
      memcheck) bugs="write forward-read" ;;
      initcheck) bugs="uninitialised forward-uninitialised" ;;
      racecheck) bugs="race forward-race groups-apart hand-over" ;;
      synccheck) bugs="barrier barrier-mask" ;;
      *) echo "sanitize: no tool $tool" >&2; exit 2 ;;
    esac
    for name in "cuda: lengths out of range are clamped" "cuda: cu_seqlens that break every rule are clamped" \
      "blocks: values are*,blocks: a cut*" "blocks: several heads of few*" "merge: shapes*" "quantize: types*" \
      "kv_append: every pair of types*" "kv_append: slots" "kv_begin: every kernel*" "kv_roll: pages*" \
      "tree: the same as*" "fp8: exact inputs*" "fp8: lengths out*" "fp8: NaN codes*" "backward: lengths out*" "backward: NaN*" \
      "cuda: segments that are there*" "mla: lists_cuda and reference on few*" "mla: rows of 656 bytes on few*,mla: rows of e4m3 on few*"; do
      # shellcheck disable=SC2053
      [[ $name != ${TESTS:-*} ]] || printf 'clean\t%s\t%s\n' "$tool" "$name"
    done
    # shellcheck disable=SC2053
    [[ $added != ${TESTS:-*} ]] || for name in $adding; do printf 'clean\t%s\t%s\t%s\n' "$tool" "$added" "$name"; done
    for name in $bugs; do printf 'planted\t%s\t%s\n' "$tool" "$name"; done
    for name in $kernels; do printf 'clean\t%s\t%s\t%s\n' "$tool" "$few" "$name"; done
  done
}
one() {
  [ -n "${CUDA_VISIBLE_DEVICES:-}" ] || export CUDA_VISIBLE_DEVICES=$((SLOT % gpus))
  IFS=$'\t' read -r -a run <<<"$1"
  "${run[@]}"
}
export -f report fail findings known planted clean one
export bin logs sanitizer races added
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') || gpus=1
export gpus
all=$(runs) || exit 2
xargs --process-slot-var=SLOT -P "${JOBS:-$((($(nproc) + 1) / 2))}" -d '\n' -I{} bash -c 'one "$1"' - {} <<<"$all" | tee "$logs/results"
failures=$(grep -c 'FAILED: ' "$logs/results")
echo "sanitize: $failures of $(wc -l <<<"$all") failed; logs in $logs"
[ "$failures" = 0 ]
