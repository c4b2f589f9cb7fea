"""ggml's test-backend-ops on libggml-attn.so: every case of FLASH_ATTN_EXT is computed like by ggml's CPU backend, or not supported.

    backend_ops.py [LIBGGML_ATTN [TEST_BACKEND_OPS [PATTERN]]]

The pattern (a regular expression) selects cases by their parameters. Without the program it says SKIP.
"""
import os
import re
import subprocess
import sys

# Types that libattn does not have; all others must be served.
LEFT = ("type_K=q1_0", "type_K=q2_0", "type_V=q1_0", "type_V=q2_0")


def judge(output):
    """(passed, not supported, complaints) of what the program printed."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in output.splitlines()]
    cases = [line.strip() for line in lines if line.lstrip().startswith("FLASH_ATTN_EXT(")]
    passed = [case for case in cases if case.endswith("OK")]
    left = [case for case in cases if "not supported" in case]
    wrong = [case for case in cases if case not in passed and case not in left]
    wrong += [case for case in left if not any(kind in case for kind in LEFT)]
    total = [line for line in lines if re.fullmatch(r"\s*(\d+)/\1 tests passed", line)]
    if len(total) != 1 or f" {len(passed)}/" not in f" {total[0].strip()}":
        wrong.append(f"{len(passed)} cases passed, and the program's sum is {[line.strip() for line in total]}")
    if not passed:
        wrong.append("no case was computed")
    return len(passed), len(left), wrong


def main():
    if len(sys.argv) < 3:
        print("SKIP: no " + ("libggml-attn.so, which needs ggml's sources", "test-backend-ops next to libggml-base.so")[len(sys.argv) - 1])
        return 0
    library, program, *patterns = sys.argv[1:]
    command = [program, "test", "-o", "FLASH_ATTN_EXT", "-b", "ATTN"] + [word for pattern in patterns for word in ("-p", pattern)]
    done = subprocess.run(command, env={**os.environ, "GGML_BACKEND_PATH": library, "GGML_ATTN_ALL": "1"}, capture_output=True, text=True)
    passed, left, wrong = judge(done.stdout)
    if done.returncode != 0:
        wrong.append(f"test-backend-ops ended with {done.returncode}: {done.stderr[-500:]}")
    print(f"{passed} passed, {left} not supported, {len(wrong)} wrong")
    print("\n".join(wrong[:20]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
