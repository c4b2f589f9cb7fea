"""Times calls on the GPU as graphs of launches, and watches the clocks meanwhile."""
import ctypes as c
import datetime
import threading

import torch

import measured


class Launches:
    """A CUDA graph of up to 50 calls, taken in turn, so that neither Python nor a call's dispatch is timed. settle: that
    many milliseconds of them run before each measure, so that clocks and power are this contender's own."""

    def __init__(self, calls, milliseconds, settle=0):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # compiles, loads, allocates
                call()
            start.record()
            calls[0]()
            stop.record()
        stop.synchronize()
        once = start.elapsed_time(stop)
        turns = max(1, min(50, int(milliseconds / 4 / once)) // len(calls))
        self.count, self.calls = turns * len(calls), calls  # what the graph launches must outlive it
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for _ in range(turns):
                for call in calls:
                    call()
        self.start, self.stop = start, stop
        self.repeats = self.before = 1
        self.microseconds()
        replay = self.microseconds() * self.count / 1e3
        self.repeats, self.before = max(1, round(milliseconds / replay)), max(1, round(settle / replay))

    def microseconds(self):
        """Of one launch, the mean over all replays."""
        for _ in range(self.before):
            self.graph.replay()
        self.start.record()
        for _ in range(self.repeats):
            self.graph.replay()
        self.stop.record()
        self.stop.synchronize()
        return self.start.elapsed_time(self.stop) * 1e3 / self.repeats / self.count


def take_rounds(launches, count, nvml):
    """label -> microseconds per round, and label -> clocks, of contenders that take turns."""
    rounds, watches = {label: [] for label in launches}, {label: Watch(nvml) for label in launches}
    labels = list(launches)
    for turn in range(count):
        at = turn % len(labels)  # another one comes first
        for label in labels[at:] + labels[:at]:
            with watches[label]:
                rounds[label].append(launches[label].microseconds())
    return rounds, {label: watch.means() for label, watch in watches.items()}


def result_of(options, nvml, **more):
    """What the JSON of a benchmark begins with; cells are added to it."""
    return {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "commit": options.commit,
            "gpu": {"name": torch.cuda.get_device_name(), "driver": nvml.driver(), "before": nvml.state()},
            "cuda": torch.version.cuda, "torch": torch.__version__, **more, "rounds": options.rounds, "cells": []}


def save(options, result, nvml):
    """Writes the result so far to --out, if that is given."""
    if options.out:
        result["gpu"]["after"] = nvml.state()
        measured.write(options.out, result)


class FieldValue(c.Structure):
    """nvmlFieldValue_t with a value of 32 bits."""
    _fields_ = [("field", c.c_uint), ("scope", c.c_uint), ("timestamp", c.c_longlong), ("latency", c.c_longlong),
                ("value_type", c.c_int), ("status", c.c_int), ("value", c.c_uint), ("upper", c.c_uint)]


POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT: nvmlDeviceGetPowerUsage is the mean of a second


class Nvml:
    """NVIDIA's management library, for the device that PyTorch uses. OSError: it is not here."""

    def __init__(self):
        self.lib = c.CDLL("libnvidia-ml.so.1")
        self.device = c.c_void_p()
        self.check(self.lib.nvmlInit_v2())
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        self.check(self.lib.nvmlDeviceGetHandleByUUID(uuid, c.byref(self.device)))

    def check(self, code):
        if code:
            raise OSError(f"libnvidia-ml.so.1: error {code}")

    def read(self, function, *arguments, value=c.c_uint):
        value = value()
        self.check(getattr(self.lib, function)(self.device, *arguments, c.byref(value)))
        return value.value

    def watts(self):
        field = FieldValue(field=POWER_INSTANT)
        self.check(self.lib.nvmlDeviceGetFieldValues(self.device, 1, c.byref(field)))
        self.check(field.status)
        return field.value / 1e3

    def state(self):
        return {"sm_mhz": self.read("nvmlDeviceGetClockInfo", 1), "memory_mhz": self.read("nvmlDeviceGetClockInfo", 2),
                "watts": self.watts(),
                "celsius": self.read("nvmlDeviceGetTemperature", 0),
                "throttle_reasons": self.read("nvmlDeviceGetCurrentClocksEventReasons", value=c.c_ulonglong)}

    def driver(self):
        text = c.create_string_buffer(96)
        self.check(self.lib.nvmlSystemGetDriverVersion(text, c.c_uint(len(text))))
        return text.value.decode()


class Watch:
    """Samples clocks and power every 5 ms while its block runs; means() tells of all blocks together."""

    def __init__(self, nvml):
        self.nvml, self.samples = nvml, []

    def __enter__(self):
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.sample) if self.nvml else None
        if self.thread:
            self.thread.start()

    def __exit__(self, *_):
        self.done.set()
        if self.thread:
            self.thread.join()

    def sample(self):
        while not self.done.wait(0.005):
            self.samples.append((self.nvml.read("nvmlDeviceGetClockInfo", 1), self.nvml.watts()))

    def means(self):
        if not self.samples:
            return None
        clocks, watts = zip(*self.samples)
        return {"sm_mhz": round(sum(clocks) / len(clocks)), "watts": round(sum(watts) / len(watts), 1),
                "samples": len(self.samples)}
