"""Spreads processes over the GPUs of a machine."""
import functools
import os
import subprocess


@functools.cache
def count():
    try:
        made = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    except FileNotFoundError:
        return 1
    return max(1, made.stdout.count("GPU "))


@functools.cache
def capabilities():
    """The compute capabilities, such as {"9.0"}; empty if they are not known."""
    try:
        made = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True)
    except FileNotFoundError:
        return set()
    return set(made.stdout.split()) if made.returncode == 0 else set()


def environment(number):
    """That of process `number`, which sees one GPU, unless the caller has chosen GPUs."""
    return {"CUDA_VISIBLE_DEVICES": str(number % count()), **os.environ}
