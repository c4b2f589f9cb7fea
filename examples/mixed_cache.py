"""A cache whose newest keys are f16 and whose older ones are quantised, attended to in one call.

    python3 examples/mixed_cache.py [--recent KEYS]

The keys, values and queries are a real encoder's (minilm_layer3.safetensors). For each type of the older keys it prints what a
cached token takes, and how far the result is from that of a cache all in f16: relative to it, in the Frobenius norm, and at most.
"""
import argparse
import sys
from pathlib import Path

import attn
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "golden"))
import st  # noqa: E402

GGML = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
SCALES_BESIDE = ("i8", "i4")  # of each token and head, in an array of their own
TYPES = ("f16", "f8_e4m3fn", *GGML, *SCALES_BESIDE)


def older(x, dtype):
    """(stored, descale, or what scales there are) of x [B, S, H, D]."""
    if dtype == "f16":
        return x, None
    if dtype in GGML + SCALES_BESIDE:
        return attn.quantize(x, dtype)
    return attn.quantize(x, dtype, scale="amax", per="head")


def over_mixed(q, k, v, recent, dtype):
    """(out, bytes of a cached token in both K and V) with the last `recent` keys in f16 and those before them in dtype."""
    split = k.shape[1] - recent
    (k_old, k_descale), (v_old, v_descale) = older(k[:, :split], dtype), older(v[:, :split], dtype)
    kinds = [dtype if dtype in (*GGML, "i4") else None, None]
    scales = "scale" if dtype in SCALES_BESIDE else "descale"
    out = attn.forward(q, [k_old, k[:, split:]], [v_old, v[:, split:]], k_type=kinds, v_type=kinds, causal=True,
                       **{f"k_{scales}": [k_descale, None], f"v_{scales}": [v_descale, None]})
    beside = 2 * k_descale[0, 0].nbytes if dtype in SCALES_BESIDE else 0
    return out, k_old[0, 0].nbytes + v_old[0, 0].nbytes + beside


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recent", type=int, default=32, help="newest keys, which stay f16 (%(default)s)")
    options = parser.parse_args()
    tensors, _ = st.load(HERE / "minilm_layer3.safetensors")
    q, k, v = tensors["q"], tensors["k"].astype(np.float16), tensors["v"].astype(np.float16)
    if not 0 < options.recent < k.shape[1]:
        parser.error(f"--recent is {options.recent}; accepted: 1 to {k.shape[1] - 1}")
    q = q[:, -options.recent:]  # those of the newest tokens, which see all the older ones
    results = {dtype: over_mixed(q, k, v, options.recent, dtype) for dtype in TYPES}
    exact, _ = results["f16"]
    print(f"{k.shape[1]} keys of {k.shape[2]} heads of {k.shape[3]}, the newest {options.recent} in f16\n"
          "older keys   bytes a token   error   largest")
    for dtype, (out, size) in results.items():
        print(f"{dtype:10}   {size:13}   {np.linalg.norm(out - exact) / np.linalg.norm(exact):.4f}  {np.abs(out - exact).max():.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
