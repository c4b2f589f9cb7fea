"""Parts of documents that a script writes: whole files, or what is between two marks."""
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]


def between(document, script, made):
    """The document's text with `made` between the marks of that script."""
    begin, end = f"<!-- made by {script} -->\n", "<!-- end -->\n"
    before, mark, rest = (SOURCE / document).read_text().partition(begin)
    _, mark_end, after = (rest + "\n").partition(end)
    if not mark or not mark_end:
        sys.exit(f"{document} lacks the marks {begin.strip()} and {end.strip()}")
    return before + begin + "\n" + made + "\n" + end + after[:-1]


def write(texts, script, check):
    """texts: the whole text of each document. With `check` ends with an error where a document has another one."""
    for document, text in texts.items():
        if not check:
            (SOURCE / document).write_text(text)
        elif (SOURCE / document).read_text() != text:
            sys.exit(f"{document} is not what {script} writes; run {script}")
