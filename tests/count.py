"""Adds up CTest's JUnit files: python3 tests/count.py FILE... prints "passed failed skipped" and exits.

A test that ran a Catch2 binary counts once per test case, with the skipped ones that tests/main.cpp reports; one of
Python's unittest once per test method; any other test counts as one.
"""
import re
import sys
import xml.etree.ElementTree as ElementTree


def catch_counts(output):
    """(cases, failed, skipped) of a Catch2 run, or None. Reads the summaries of Catch2 2.13 and 3."""
    skipped = sum(int(n) for n in re.findall(r"^SKIPPED: (\d+)$", output, re.M))
    match = re.search(r"^All tests passed \(.* in (\d+) test cases?\)$", output, re.M)
    if match:
        return int(match.group(1)), 0, skipped
    match = re.search(r"^test cases:\s*(\d+)(.*)$", output, re.M)
    if match:
        failed = re.search(r"(\d+) failed", match.group(2))
        return int(match.group(1)), int(failed.group(1)) if failed else 0, skipped
    return None


def unittest_counts(output):
    """(tests, failed, skipped) of Python's unittest, or None."""
    ran = re.search(r"^Ran (\d+) tests? in ", output, re.M)
    end = re.search(r"^(OK|FAILED)(?: \((.*)\))?$", output, re.M)
    if not ran or not end:
        return None
    parts = {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", end.group(2) or "")}
    return int(ran.group(1)), parts.get("failures", 0) + parts.get("errors", 0), parts.get("skipped", 0)


def count(case):
    """(passed, failed, skipped) of one CTest test."""
    status = case.get("status")
    output = case.findtext("system-out") or ""
    if status == "disabled":
        return 0, 0, 1
    if status == "notrun":
        # Also what CTest says of tests that it could not start, which are failures.
        asked = case.find("skipped").get("message").startswith("SKIP_")
        return (0, 0, 1) if asked else (0, 1, 0)
    counts = catch_counts(output) or unittest_counts(output)
    if counts is None:
        return (1, 0, 0) if status == "run" else (0, 1, 0)
    cases, failed, skipped = counts
    if status != "run":
        failed = max(failed, 1)
    return max(cases - failed - skipped, 0), failed, skipped


def main(paths):
    total = [0, 0, 0]
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            total = [t + c for t, c in zip(total, count(case))]
    print(*total)


if __name__ == "__main__":
    main(sys.argv[1:])
