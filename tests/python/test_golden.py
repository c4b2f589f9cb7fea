"""forward() and merge() on the golden values that NumPy made, every feature of libattn among them."""
import json
import sys
import unittest
from pathlib import Path

import numpy as np

from support import Case, attn, ml_dtypes

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
sys.path.insert(0, str(GOLDEN))
import st  # noqa: E402

BITS = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
SEGMENT = ("k", "v", "seqlens_kv", "cu_seqlens_kv", "block_table", "k_descale", "v_descale", "k_type", "v_type", "k_scale", "v_scale")
WHOLE = ("q", "cu_seqlens_q", "bias", "bias_slopes", "alibi_slopes", "sinks", "tree", "q_descale", "out_scale")


def load(name):
    stored, metadata = st.load(GOLDEN / f"{name}.safetensors")
    tensors = {}
    for key, tensor in stored.items():
        if isinstance(tensor, tuple):
            dtype, bits = tensor
            tensor = bits.view(ml_dtypes.float8_e4m3fnuz if metadata.get(key) == "f8_e4m3fnuz" else BITS[dtype])
        tensors[key] = tensor
        if tensor.dtype == np.uint8 and key in metadata:  # a ggml type
            tensors[key.replace("k", "k_type").replace("v", "v_type")] = metadata[key]
    return tensors, json.loads(metadata["options"])


def arguments(tensors, options):
    """The arguments of forward, without the tensors' golden ones."""
    given = {name: tensors[name] for name in WHOLE if name in tensors}
    if "k" in tensors:
        given.update({name: tensors[name] for name in SEGMENT if name in tensors})
    else:
        count = sum(key.startswith("k.") for key in tensors)
        for name in SEGMENT:
            values = [tensors.get(f"{name}.{i}") for i in range(count)]
            if any(value is not None for value in values):
                given[name] = values
    given.update({name: options[name] for name in ("causal", "causal_top_left", "window", "scale", "softcap")
                  if name in options})
    if "tree" in tensors:
        given["tree_keys"] = tensors["tree_keys"][0]
    if "shared_segments" in tensors:
        given["shared_segments"] = int(tensors["shared_segments"][0])
    if "cu_seqlens_q" in given:
        given["max_seqlen_q"] = int(np.diff(given["cu_seqlens_q"]).max())
    if "block_kinds" in tensors:
        keys = given["k"] if isinstance(given["k"], list) else [given["k"]]
        given["block_mask"] = attn.BlockMask.from_kinds(
            tensors["block_kinds"], given["q"].shape[1], sum(k.shape[1] for k in keys), block_size=tuple(tensors["block_size"]),
            index=tensors.get("block_index"), bits=tensors.get("block_bits"))
    used = set(WHOLE) | {f"{name}{suffix}" for name in SEGMENT for suffix in ("", ".0", ".1", ".2", ".3")}
    used |= {"tree_keys", "shared_segments", "block_kinds", "block_size", "block_index", "block_bits", "golden.out", "golden.lse"}
    assert set(tensors) <= used, set(tensors) - used
    return given


class Golden(Case):
    names = [name for name in json.loads((GOLDEN / "index.json").read_text())]

    def forward(self, backend, out_dtype, bound):
        count = 0
        for name in self.names:
            if name.startswith("merge_"):
                continue
            with self.subTest(name):
                tensors, options = load(name)
                out, lse = attn.forward(**arguments(tensors, options), return_lse=True, out_dtype=out_dtype,
                                        backend=backend)
                largest = max(1, np.abs(tensors["golden.out"]).max())
                self.close(out, tensors["golden.out"], bound * largest)
                self.close(lse, tensors["golden.lse"], bound, relative=1e-7 + bound)
                count += 1
        self.assertGreater(count, 80)

    def test_reference(self):
        self.forward("reference", "f64", 1e-12)

    def test_cpu(self):
        self.forward("cpu", "f32", 4e-6)

    def test_merge(self):
        for name in self.names:
            if not name.startswith("merge_"):
                continue
            with self.subTest(name):
                tensors, _ = load(name)
                count = sum(key.startswith("out.") for key in tensors)
                parts = [(tensors[f"out.{i}"], tensors[f"lse.{i}"]) for i in range(count)]
                for backend in ("reference", "cpu"):
                    out, lse = attn.merge(parts, out_dtype="f32", backend=backend)
                    self.close(out, tensors["golden.out"], 2e-6)
                    self.close(lse, tensors["golden.lse"], 1e-5)


if __name__ == "__main__":
    unittest.main()
