"""Where things are, and how programs are called."""
import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
DIST = SOURCE / "build" / "dist"
OUT = DIST / "out"


def say(text):
    print(f"release: {text}", flush=True)


def run(*command, **options):
    """Ends the release with the program's output if it fails; else returns its standard output."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nrelease: failed, exit code {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def fresh(folder):
    """An empty folder."""
    run("rm", "-rf", folder)
    folder.mkdir(parents=True)
    return folder
