#!/usr/bin/env python3
"""Tokens/s of vLLM on a GPU with random weights: LIBATTN next to vLLM's own attention.

    bench/serve_vllm.py [--requests 64] [--prompt 1000] [--new 128] [--rounds 10] [--caches auto fp8] [--out FILE]

The model has the shape of Llama 3.2 1B in bf16, with 32000 tokens of vocabulary. Decoding runs in CUDA graphs, without torch.compile. Each
contender is a process of its own; all are started at once and then take turns, round by round. A round is two batches: one with a token for each
request, one with --new. Then a batch of 32 tokens runs under torch's profiler: how long any kernel ran, and for each step how long a kernel of
attention ran, one that writes the cache, and either of them; what overlaps counts once. A kernel of libattn may start before the kernel that it waits
for has ended, so "attention" contains some waiting for the write, and "either" is fair. In the last 31 steps all requests decode."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

PROFILED = 32
WRITES, ATTENDS = ("kv_append", "reshape_and_cache"), ("flash", "fwd_sm", "decode_sm", "dequantise_sm", "merge_", "fmha", "scaled_fp8_quant")
MODEL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}


def union(ranges):
    """Microseconds that at least one of the ranges covers."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(ranges):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def steps_of(events, layers):
    """[(microseconds of attention, of cache writes, of either)] by step, of the device's events (start, end, name). Each layer's call begins with its
    write."""
    events = sorted(e for e in events if any(part in e[2] for part in (*WRITES, *ATTENDS)))
    begins = [n for n, e in enumerate(events) if any(part in e[2] for part in WRITES)]
    calls = [events[a:b] for a, b in zip(begins, [*begins[1:], len(events)])]
    steps = [calls[n:n + layers] for n in range(0, len(calls), layers)]
    return [tuple(round(union((a, b) for call in step for a, b, _ in call[part]), 1) for part in (slice(1, None), slice(1), slice(None))) for step in steps]


def serve(name, cache, options):
    """One contender's process: for each line of its input, what it measured."""
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})
    import torch
    import transformers
    import vllm

    import attn
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaConfig(**MODEL, architectures=["LlamaForCausalLM"], pad_token_id=0, bos_token_id=1, eos_token_id=2).save_pretrained(folder)
        llm = vllm.LLM(folder, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, max_num_batched_tokens=8192,
                       max_num_seqs=options.requests, block_size=16, enable_prefix_caching=False, disable_log_stats=True, attention_backend=name,
                       kv_cache_dtype=cache, kv_cache_memory_bytes=3 << 30, gpu_memory_utilization=0.1,
                       compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})
    random = torch.Generator().manual_seed(7)
    prompts = [{"prompt_token_ids": torch.randint(3, MODEL["vocab_size"], (options.prompt,), generator=random).tolist()} for _ in range(options.requests)]

    def run(new):
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(prompts, vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False), use_tqdm=False)
        torch.cuda.synchronize()
        return round(time.perf_counter() - start, 4)

    def profiled():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(PROFILED)
        events = [(e.time_range.start, e.time_range.end, e.name) for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = {}
        for begin, end, kernel in events:
            if any(part in kernel for part in (*WRITES, *ATTENDS)):
                count, total = kernels.get(kernel[:90], (0, 0))
                kernels[kernel[:90]] = count + 1, round(total + end - begin, 1)
        steps = steps_of(events, MODEL["num_hidden_layers"])
        decode, prefill = steps[-(PROFILED - 1):], steps[:-(PROFILED - 1)]
        columns = list(enumerate(("attention", "cache", "either")))
        return {"decode_step_us": {name: statistics.median(x[n] for x in decode[1:-5]) for n, name in columns},
                "prefill_us": {name: round(sum(x[n] for x in prefill)) for n, name in columns},
                "device_us": round(union([(a, b) for a, b, _ in events])), "kernels_us": kernels, "steps_us": steps}
    run(options.new)
    answer({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "vllm": vllm.__version__, "libattn": attn.__version__})
    for command in sys.stdin:
        answer(profiled() if command.strip() == "profile" else (run(1), run(options.new)))


def answer(value):
    print("\nROW " + json.dumps(value), flush=True)


def ask(child, command=None):
    """A child's next answer; None if it has ended."""
    try:
        if command:
            child.stdin.write(command + "\n")
            child.stdin.flush()
    except BrokenPipeError:
        return None
    return next((json.loads(line[4:]) for line in child.stdout if line.startswith("ROW ")), None)


def report(key, errors):
    errors.seek(0)
    print(*key, "failed:", errors.read()[-1500:], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("requests", 64), ("prompt", 1000), ("new", 128), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--caches", nargs="*", default=["auto", "fp8"])
    parser.add_argument("--backends", nargs="*", default=["LIBATTN", "FLASH_ATTN"])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve, options)
        return
    import measured
    from timing import Nvml, Watch
    nvml = Nvml()
    watch = Watch(nvml)
    children, rows, result = {}, [], {}
    for name, cache in [(name, cache) for cache in options.caches for name in options.backends]:
        errors = tempfile.TemporaryFile("w+")
        child = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--serve", name, cache], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=errors, text=True)
        children[name, cache] = child, errors, []
    for key, (child, errors, _) in list(children.items()):
        start = ask(child)
        if start is None:
            report(key, children.pop(key)[1])
        else:
            result.update(start)
    with watch:
        for turn in range(options.rounds):
            for key in list(children) if turn % 2 == 0 else list(children)[::-1]:
                measure = ask(children[key][0], "round")
                if measure is None:
                    report(key, children.pop(key)[1])
                else:
                    children[key][2].append(measure)
    result.update({"driver": nvml.driver(), "clocks": watch.means()})
    for (name, cache), (child, errors, seconds) in children.items():
        profile = ask(child, "profile")
        if profile is None:
            report((name, cache), errors)
            continue
        first, whole = (statistics.median(x[n] for x in seconds) for n in (0, 1))
        row = {"backend": name, "cache": cache, "new_tokens_per_second": round(options.requests * options.new / whole),
               "prompt_tokens_per_second": round(options.requests * options.prompt / first), "seconds_of_1_and_all_tokens": seconds,
               **profile}
        rows.append(row)
        print(f"{name:10} {cache:4} {row['new_tokens_per_second']:6} new tokens/s, {row['prompt_tokens_per_second']:7} prompt tokens/s; device "
              f"{row['device_us']} us, decode step {row['decode_step_us']} us, prefill {row['prefill_us']} us", flush=True)
        if options.out:
            measured.write(options.out, {**result, "model": MODEL, "requests": options.requests, "prompt": options.prompt, "new": options.new, "rows": rows})
    for child, *_ in children.values():
        child.stdin.close()
        child.wait()


if __name__ == "__main__":
    main()
