#!/usr/bin/env python3
"""Tokens/s of vLLM on a GPU with random weights: LIBATTN beside vLLM's own attention.

    bench/serve_vllm.py [--requests 64] [--prompt 1000] [--new 128] [--rounds 6] [--turns 2] [--caches auto fp8] [--out FILE]

The model has the shape of Llama 3.2 1B in bf16, with 32000 tokens of vocabulary. Decoding runs in CUDA graphs, without torch.compile. Each
contender is a process of its own, and contenders take turns. A round is two batches: one with a token for each request, one with --new. Then a
batch of 32 tokens runs under torch's profiler: for each step, how long a kernel of attention ran (overlapping kernels count once), and how long
the kernel that writes the cache ran. Steps in which all requests decode are the last 31."""
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
    """[(microseconds of attention, of cache writes)] by step, of the device's events (start, end, name). Each layer's call begins with its write."""
    events = sorted(e for e in events if any(part in e[2] for part in (*WRITES, *ATTENDS)))
    begins = [n for n, e in enumerate(events) if any(part in e[2] for part in WRITES)]
    calls = [events[a:b] for a, b in zip(begins, [*begins[1:], len(events)])]
    return [(round(union((a, b) for call in calls[n:n + layers] for a, b, _ in call[1:]), 1), round(sum(c[0][1] - c[0][0] for c in calls[n:n + layers]), 1))
            for n in range(0, len(calls), layers)]


def serve(name, cache, options):
    """What one contender's process measures."""
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})
    import torch
    import transformers
    import vllm

    import attn
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaConfig(**MODEL, architectures=["LlamaForCausalLM"], pad_token_id=0, bos_token_id=1, eos_token_id=2).save_pretrained(folder)
        llm = vllm.LLM(folder, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, max_num_batched_tokens=8192,
                       max_num_seqs=options.requests, block_size=16, enable_prefix_caching=False, disable_log_stats=True, attention_backend=name,
                       kv_cache_dtype=cache, kv_cache_memory_bytes=8 << 30, gpu_memory_utilization=0.3,
                       compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})
    random = torch.Generator().manual_seed(7)
    prompts = [{"prompt_token_ids": torch.randint(3, MODEL["vocab_size"], (options.prompt,), generator=random).tolist()} for _ in range(options.requests)]

    def run(new):
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(prompts, vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False), use_tqdm=False)
        torch.cuda.synchronize()
        return round(time.perf_counter() - start, 4)
    run(options.new)
    seconds = [(run(1), run(options.new)) for _ in range(options.rounds)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(PROFILED)
    events = [(e.time_range.start, e.time_range.end, e.name) for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = {}
    for begin, end, kernel in events:
        if any(part in kernel for part in (*WRITES, *ATTENDS)):
            count, total = kernels.get(kernel[:90], (0, 0))
            kernels[kernel[:90]] = count + 1, round(total + end - begin, 1)
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "vllm": vllm.__version__, "libattn": attn.__version__,
            "seconds_of_1_and_all_tokens": seconds, "kernels_us": kernels, "steps_us": steps_of(events, MODEL["num_hidden_layers"])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("requests", 64), ("prompt", 1000), ("new", 128), ("rounds", 6), ("turns", 2), ("seconds", 3600)):
        parser.add_argument(f"--{name}", type=int, default=value, help="begin no process after this" if name == "seconds" else None)
    parser.add_argument("--caches", nargs="*", default=["auto", "fp8"])
    parser.add_argument("--backends", nargs="*", default=["LIBATTN", "FLASH_ATTN"])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.serve:
        print("\nROW " + json.dumps(serve(*options.serve, options)), flush=True)
        return
    import measured
    begin, rows, result = time.monotonic(), [], {}
    for turn in range(options.turns):
        for cache in options.caches:
            for name in options.backends if turn % 2 == 0 else options.backends[::-1]:
                if time.monotonic() - begin > options.seconds:
                    break
                child = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--serve", name, cache], capture_output=True, text=True)
                found = [line for line in child.stdout.splitlines() if line.startswith("ROW ")]
                row = {"backend": name, "cache": cache, "turn": turn}
                if not found:
                    print(name, cache, "failed:", child.stderr[-1500:], flush=True)
                    rows.append({**row, "error": child.stderr.strip().splitlines()[-1:]})
                    continue
                measure = json.loads(found[0][4:])
                result.update({key: measure.pop(key) for key in ("device", "torch", "vllm", "libattn")})
                first, all_tokens = (statistics.median(x[n] for x in measure["seconds_of_1_and_all_tokens"]) for n in (0, 1))
                decode = measure["steps_us"][-(PROFILED - 1):]
                row.update({"new_tokens_per_second": round(options.requests * options.new / all_tokens),
                            "prompt_tokens_per_second": round(options.requests * options.prompt / first),
                            "decode_step_us": {"attention": statistics.median(x[0] for x in decode), "cache": statistics.median(x[1] for x in decode)},
                            "prefill_us": {"attention": round(sum(x[0] for x in measure["steps_us"][:-(PROFILED - 1)])),
                                           "cache": round(sum(x[1] for x in measure["steps_us"][:-(PROFILED - 1)]))}, **measure})
                rows.append(row)
                print(f"{name:10} {cache:4} {row['new_tokens_per_second']:6} new tokens/s, {row['prompt_tokens_per_second']:7} prompt tokens/s; "
                      f"decode step {row['decode_step_us']} us, prefill {row['prefill_us']} us", flush=True)
                if options.out:
                    measured.write(options.out, {**result, "model": MODEL, "requests": options.requests, "prompt": options.prompt, "new": options.new, "rows": rows})


if __name__ == "__main__":
    main()
