#!/usr/bin/env bash
# The CUDA kernels under compute-sanitizer: memcheck, initcheck, racecheck and synccheck. Each tool must also
# report a planted bug (planted.cu), which proves that it sees what the kernels do.
#   tests/device/sanitize.sh BIN_DIR [LOG_DIR]    BIN_DIR holds attn-tests and attn-planted
# TOOLS: of the four, those to run. Prints a line per tool and program; fails if a kernel of the library has a
# finding or a planted bug has none. Needs a device and compute-sanitizer of the CUDA toolkit.
set -uo pipefail

[ $# = 1 ] || [ $# = 2 ] || { echo "usage: sanitize.sh BIN_DIR [LOG_DIR]" >&2; exit 2; }
bin=$(cd "$1" && pwd) || exit 2
logs=${2:-$(mktemp -d)}
mkdir -p "$logs"
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null) ||
  { echo "sanitize: compute-sanitizer is not here" >&2; exit 2; }
failures=0

# report TOOL TEXT OK
report() {
  printf '%-9s  %-58s  %s\n' "$1" "$2" "$3"
}
fail() {
  report "$1" "$2" "FAILED: $3"
  tail -n 30 "$log.txt" "$log.out" 2>/dev/null
  failures=$((failures + 1))
}

# findings TOOL NAME COMMAND...: runs it and sets `found` to what the tool has found, "" if it has not ended
findings() {
  local tool=$1 name=$2
  shift 2
  log=$logs/$tool-${name//[^a-z0-9]/-}
  rm -f "$log".*
  local padding=()
  [ "$tool" != memcheck ] || padding=(--padding 65536)  # else the allocation behind hides reads beyond the end
  timeout 300 "$sanitizer" --tool "$tool" "${padding[@]}" --print-limit 10 --log-file "$log.txt" "$@" >"$log.out" 2>&1
  code=$?
  found=$(sed -nE 's/^=+ (RACECHECK|ERROR) SUMMARY: ([0-9]+) .*/\2/p' "$log.txt" 2>/dev/null | tail -1)
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

# clean TOOL TEST_CASE
clean() {
  findings "$1" "$2" "$bin/attn-tests" "$2"
  if [ -z "$found" ]; then
    fail "$1" "$2" "no result, exit code $code"
  elif [ "$found" != 0 ]; then
    fail "$1" "$2" "$found found"
  elif [ "$code" != 0 ] || ! grep -q '^All tests passed' "$log.out"; then
    fail "$1" "$2" "the test failed, exit code $code"
  elif grep -Eq '^SKIP: (.*_sm[0-9]+: )?attn_context_create' "$log.out"; then
    fail "$1" "$2" "skipped, so that no kernel ran"
  else
    report "$1" "$2" "clean"
  fi
}

for tool in ${TOOLS:-memcheck initcheck racecheck synccheck}; do
  case $tool in
    memcheck) planted $tool write; planted $tool forward-read ;;
    initcheck) planted $tool uninitialised; planted $tool forward-uninitialised ;;
    racecheck) planted $tool race; planted $tool forward-race ;;
    synccheck) planted $tool barrier; planted $tool barrier-mask ;;
    *) echo "sanitize: no tool $tool" >&2; exit 2 ;;
  esac
  clean $tool "cuda: every forward kernel on few problems"
  clean $tool "cuda: lengths out of range are clamped"
  clean $tool "cuda: cu_seqlens that break every rule are clamped"
  clean $tool "blocks: values are*,blocks: a cut*"
  clean $tool "merge: shapes*"
  clean $tool "quantize: types*"
done
echo "sanitize: $failures failed; logs in $logs"
[ "$failures" = 0 ]
