"""How results are written: JSON as docs/measured keeps it.

    bench/measured.py FILE...    writes each anew
"""
import json
import pathlib
import sys

WIDTH = 160


def text(value, indent=0):
    """JSON in which a list or an object is on one line where that has at most WIDTH characters."""
    line = json.dumps(value, separators=(", ", ": "))
    if len(line) + indent <= WIDTH or not isinstance(value, (dict, list)):
        return line
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {text(item, indent + 1)}" for key, item in value.items()]
    else:
        items = [text(item, indent + 1) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return begin + "\n" + ",\n".join(pad + item for item in items) + "\n" + " " * indent + end


def write(path, value):
    pathlib.Path(path).write_text(text(value) + "\n")


if __name__ == "__main__":
    for path in sys.argv[1:]:
        write(path, json.loads(pathlib.Path(path).read_text()))
