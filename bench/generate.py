#!/usr/bin/env python3
"""Tokens/s of transformers' server, model.generate_batch(), with random weights: libattn next to the server's other attentions.

    bench/generate.py [--requests 32] [--prompt 512] [--new 64] [--layers 16] [--out FILE]

    libattn_flash_3   attn.flash: packed prefill, decoding over pages, CUDA graphs
    flash_attention_3, flash_attention_2   the packages of these names, where they are installed
    torch_flash_2     FlashAttention 2 as PyTorch has it (torch.nn.attention.varlen), which has no pages: transformers gathers the cache
    paged|sdpa        PyTorch's scaled_dot_product_attention over gathered keys with a mask in memory

The model has the shape of Llama 3.2 1B in bf16. Prompts are --prompt / 2 to --prompt * 3 / 2 random tokens. A contender's first batch warms up, the
next is timed by the server's own timestamps: from the first request to the last token, with the host's work, and the part in which all
requests decode. A third batch, of 16 tokens each, runs under torch's profiler: the kernels' time, and attention's share of it."""
import argparse
import contextlib
import importlib.util
import inspect

import measured
import torch
import transformers
import transformers.modeling_flash_attention_utils as flash_utils
from timing import Nvml, Watch
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import attn
import attn.transformers

TORCH_FLASH = "torch_flash_2"


def register_torch_flash():
    """PyTorch's own FlashAttention 2 under a name that the server takes."""
    from torch.nn.attention.varlen import varlen_attn

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=None, causal=True, window_size=(-1, -1), **others):
        return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=softmax_scale, window_size=(window_size[0], 0 if causal else window_size[1]))
    load = flash_utils._lazy_imports

    def functions(implementation, *arguments, **options):
        if implementation in (TORCH_FLASH, f"paged|{TORCH_FLASH}"):
            return None, flash_attn_varlen_func, None, flash_utils._pad_input, flash_utils._unpad_input
        return load(implementation, *arguments, **options)
    flash_utils._lazy_imports = functions
    AttentionInterface.register(TORCH_FLASH, transformers.integrations.flash_attention.flash_attention_forward)
    AttentionInterface.register(f"paged|{TORCH_FLASH}", AttentionInterface()["paged|flash_attention_2"])
    transformers.masking_utils.AttentionMaskInterface.register(TORCH_FLASH, transformers.masking_utils.flash_attention_mask)


def contenders():
    names = [attn.transformers.FLASH]
    if importlib.util.find_spec("flash_attn_interface"):
        names.append("flash_attention_3")
    if importlib.util.find_spec("flash_attn"):
        names.append("flash_attention_2")
    if importlib.util.find_spec("torch.nn.attention.varlen"):
        register_torch_flash()
        names.append(TORCH_FLASH)
    return [*names, "paged|sdpa"]


def launches():
    return {op: sum(attn._attn.launch_count(k["name"]) for k in attn.info()["kernels"] if k["op"] == op) for op in ("forward", "kv_append")}


def run(model, name, requests, options, sizes, nvml):
    """(what was measured, tokens by prompt)"""
    model.set_attn_implementation(name)
    before, watch = launches(), Watch(nvml)
    generation = GenerationConfig(max_new_tokens=options.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for turn in range(2):
        with watch if turn else contextlib.nullcontext():
            answers = model.generate_batch(inputs=requests, generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**sizes),
                                           record_timestamps=True, persistent_manager=True, progress_bar=False).values()
        tokens = {tuple(x.prompt_ids): list(x.generated_tokens) for x in answers}
        if len(tokens) < len(requests) or any(len(x) != options.new for x in tokens.values()):
            raise RuntimeError(f"not all of {len(requests)} requests were answered")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model.generate_batch(inputs=requests, generation_config=generation, max_new_tokens=16, persistent_manager=True, progress_bar=False)
    kernels = {x.key: x.self_device_time_total / 1e3 for x in profile.key_averages() if x.self_device_time_total}
    ours = [k["name"] for k in attn.info()["kernels"]]
    attention = [key for key in kernels if key in ours or any(part in key for part in ("flash_fwd", "fmha", "attention", "sdpa"))]
    longest = sorted(kernels, key=kernels.get, reverse=True)[:8]
    times = sorted(t for x in answers for t in x.timestamps)
    begin, first = min(x.created_time for x in answers), max(x.timestamps[0] for x in answers)
    after = sum(t > first for t in times)
    return {"name": name, "tokens_per_second": round(len(times) / (times[-1] - begin)), "seconds": round(times[-1] - begin, 4),
            "seconds_to_all_first_tokens": round(first - begin, 4), "decode_tokens": after,
            "decode_tokens_per_second": round(after / (times[-1] - first)),
            "profiled_16_tokens": {"kernels_ms": round(sum(kernels.values()), 2), "attention_ms": round(sum(kernels[key] for key in attention), 2),
                                   "longest_ms": {key[:80]: round(kernels[key], 2) for key in longest}},
            "libattn_launches_by_the_host": {op: n - before[op] for op, n in launches().items()}, "clocks": watch.means()}, tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("requests", 32), ("prompt", 512), ("new", 64), ("layers", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="*", help="names of contenders")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=options.layers, num_attention_heads=32,
                         num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=True,
                         eos_token_id=None, bos_token_id=None)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    random = torch.Generator().manual_seed(1)
    lengths = torch.linspace(options.prompt / 2, options.prompt * 3 / 2, options.requests).int().tolist()
    requests = [torch.randint(0, config.vocab_size, (n,), generator=random).tolist() for n in lengths]
    blocks = sum((n + options.new) // 256 + 2 for n in lengths)
    known = inspect.signature(ContinuousBatchingConfig).parameters
    sizes = {key: x for key, x in {"page_size": 256, "block_size": 256, "num_blocks": blocks, "max_batch_tokens": 4096,
                                   "allow_block_sharing": False}.items() if key in known}
    try:
        nvml = Nvml()
    except OSError:
        nvml = None
    rows, tokens = [], {}
    result = {"device": torch.cuda.get_device_name(), "driver": nvml.driver() if nvml else None, "torch": torch.__version__,
              "transformers": transformers.__version__, "libattn": attn.__version__,
              "model": {"parameters": sum(p.numel() for p in model.parameters()), **{key: getattr(config, key) for key in (
                  "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")}},
              "requests": options.requests, "prompt_tokens": sum(lengths), "new_tokens": options.new, "cache": sizes, "rows": rows}
    names = contenders()
    for name in options.only or names:
        try:
            row, tokens[name] = run(model, name, requests, options, sizes, nvml)
            ours = tokens.get(attn.transformers.FLASH, tokens[name])
            same = [sum(map(int.__eq__, x, ours[prompt])) / options.new for prompt, x in tokens[name].items()]
            row["tokens_as_libattn"] = round(sum(same) / len(same), 3)
        except Exception as error:
            row = {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}
        model.destroy_cached_continuous_batching_manager()
        torch.cuda.empty_cache()
        rows.append(row)
        print(f"{name:20}", row.get("error") or f"{row['tokens_per_second']:7} tokens/s in {row['seconds']} s; first tokens after "
              f"{row['seconds_to_all_first_tokens']} s, then {row['decode_tokens_per_second']} tokens/s; {row['tokens_as_libattn']} as libattn's", flush=True)
        if options.out:
            measured.write(options.out, result)


if __name__ == "__main__":
    main()
