"""What stands before and after the examples of each document, in their order: inputs, and what must come out; then the modules that
an example of Python needs beside attn. A text says why one is not run."""

MASKS_CPP = ("""#include <attn/attn.hpp>
int main() {
attn::context context(ATTN_BACKEND_CPU);
auto segment = attn::make<attn_segment>();
segment.k_type = segment.v_type = ATTN_F32;
segment.seqlen = 8192;
auto problem = attn::make<attn_problem>();
problem.batch = problem.heads_q = problem.heads_kv = problem.num_segments = 1;
problem.head_dim = 64;
problem.seqlen_q = 8192;
problem.q_type = ATTN_F32;
problem.segments = &segment;
auto args = attn::make<attn_args>();
""", """
return problem.flags & ATTN_BLOCK_MASK ? 0 : 1;
}
""")

NUMPY = """
import numpy as np
def normal(*shape): return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
q, k, v = normal(2, 64, 4, 32), normal(2, 64, 2, 32), normal(2, 64, 2, 32)
"""

EXAMPLES = {
    "README.md": [("", """
scores = np.einsum("bqhd,bkhd->bhqk", q, k.repeat(4, 2)) / 8
weights = np.exp(np.where(np.tri(256), scores, -np.inf))
expected = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v.repeat(4, 2))
assert np.abs(out - expected).max() < 1e-5 and np.abs(lse - np.log(weights.sum(-1))).max() < 1e-5
"""), ("", "", "3c00")],
    "docs/backward.md": [("", """
moved = attn.forward(q, k, v + 1e-2 * d_out, causal=True)  # out is linear in v
assert abs(((moved - out) * d_out).sum() - 1e-2 * (dv * d_out).sum()) < 1e-3 * abs((moved - out) * d_out).sum()
""")],
    "docs/llama.md": ["needs llama-cpp-python and a model"],
    "docs/distributed.md": ["needs PyTorch and several processes; tests/python/test_distributed.py has them"] * 5,
    "docs/masks.md": [MASKS_CPP],
    "docs/mla.md": [("import attn" + NUMPY + """
q, cache, lengths = normal(2, 1, 16, 576), normal(8, 16, 576), np.array([60, 33], np.int32)
table = np.arange(8, dtype=np.int32).reshape(2, 4)
""", "assert np.array_equal(out, same)"), ("import attn" + NUMPY + """
q, cache, lengths = normal(2, 1, 16, 576), normal(8, 16, 576), np.array([60, 33], np.int32)
table, lists = np.arange(8, dtype=np.int32).reshape(2, 4), np.array([3, 0, -1, 3, 7, 3], np.int32).reshape(2, 1, 1, 3)
""", """
rows = cache.reshape(2, 64, 1, 576)
for b, keys in (0, [3, 0]), (1, [3, 7, 3]):
    one = np.ascontiguousarray(rows[b:b + 1, keys])
    assert np.abs(out[b] - attn.forward(q[b:b + 1], one, np.ascontiguousarray(one[..., :512]))[0]).max() < 1e-5
"""), ("import attn" + NUMPY + """
q, compressed, recent, sinks = normal(2, 4, 16, 512), normal(2, 30, 1, 512), normal(2, 128, 1, 512), normal(16)
lists = np.zeros((2, 4, 1, 5), np.int32)
""", "assert out.shape == (2, 4, 16, 512)")],
    "docs/python.md": [
        (NUMPY + """
k_old, k_new, v_old, v_new = k[:, :48], k[:, 48:], v[:, :48], v[:, 48:]
k_pages, v_pages = k.reshape(8, 16, 2, 32), v.reshape(8, 16, 2, 32)
table = np.arange(8, dtype=np.int32).reshape(2, 4)
lengths, begin = np.array([48, 48], np.int32), np.array([0, 7], np.int32)
bits = np.full((2, 64, 2), 2 ** 64 - 1, np.uint64)
""", """
assert np.abs(out - attn.forward(q, k_old, v_old)).max() < 1e-5
"""),
        "needs an NVIDIA device and PyTorch",
        ("import attn" + NUMPY + "q, k, v = normal(1, 8192, 1, 32), normal(1, 8192, 1, 32), normal(1, 8192, 1, 32)\n", """
assert np.abs(out[0, 3000] - v[0, 3000]).max() < 1e-6  # the first of its document sees itself alone
"""),
        ("import attn" + NUMPY + """
k1, k2, v1, v2 = k[:, :32], k[:, 32:], v[:, :32], v[:, 32:]
v8, v_descale = attn.quantize(v, "f8_e4m3fn", scale="amax", per="head")
whole = attn.forward(q, k, v)
""", """
assert np.abs(attn.merge([attn.forward(q, k1, v1, return_lse=True), attn.forward(q, k2, v2, return_lse=True)])[0]
              - whole).max() < 1e-5
assert np.abs(out - whole).max() < 0.2
assert np.abs(attn.forward(q, blocks, v) - whole).max() < 0.1
assert np.abs(out4 - whole).max() < 0.3
"""),
        ("import attn" + NUMPY + "d_out = normal(*q.shape)\n", """
exact = attn.backward(d_out, q, k, v, out, lse, causal=True, backend="reference")
assert all(np.abs(x - y).max() < 1e-4 for x, y in zip((dq, dk, dv), exact))
"""),
        ("import attn" + NUMPY + """
k_new, v_new, q = k[:, 48:], v[:, 48:], q[:, 48:]
k_pages, v_pages = k.reshape(8, 16, 2, 32).copy(), v.reshape(8, 16, 2, 32).copy()
k_pages[3::4] = v_pages[3::4] = np.nan
table = np.arange(8, dtype=np.int32).reshape(2, 4)
lengths = np.array([48, 48], np.int32)
cos, sin = np.ones((64, 16), np.float32), np.zeros((64, 16), np.float32)  # which turn nothing
""", """
assert lengths.tolist() == [64, 64]
assert np.abs(out - attn.forward(q, k, v, causal=True)).max() < 1e-5
"""),
        ("import attn" + NUMPY + """
q, k_prefix, v_prefix, lengths = q[:, :1], normal(1, 100, 2, 32), normal(1, 100, 2, 32), np.array([64, 9], np.int32)
""", """
flat = [np.concatenate([np.repeat(prefix, 2, 0), own], 1) for prefix, own in ((k_prefix, k), (v_prefix, v))]
assert np.abs(out - attn.forward(q, *flat, seqlens_kv=100 + lengths, causal=True)).max() < 1e-5
"""),
    ],
    "docs/start.md": [
        "0.75 1.00",
        ("#include <cstdio>\n" + MASKS_CPP[0], """
return plan.kernel()[0] == 0 || args.num_segments;
}
"""),
        ("", "assert out.shape == (1, 256, 8, 64)"),
        ("""
import torch
model, x = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True).eval(), torch.randn(2, 9, 32)
torch.backends.mha.set_fastpath_enabled(False)
torch.set_grad_enabled(False)
""", 'assert repr(taken) == "1 of 1 calls taken"', "torch"),
        "needs CUDA's headers and a device",
    ],
    "docs/explain.md": [("import attn" + NUMPY, """
assert found["kernel"].startswith("cpu_") and all(other["reason"] for other in found["declined"])
""")],
    "docs/flash.md": [(NUMPY + """
cu_seqlens = np.array([0, 16, 64], np.int32)
packed_q, packed_k, packed_v = q[0], k[0], v[0]
q_new, k_new, v_new = q[:, :1], k[:, :1], v[:, :1]
k_cache, v_cache, lengths = k.copy(), v.copy(), np.array([9, 63], np.int32)
cos, sin = np.ones((64, 16), np.float32), np.zeros((64, 16), np.float32)  # which turn nothing
""", """
assert lse.shape == (4, 64) and np.array_equal(k_cache[1, 63], k_new[1, 0])
assert np.abs(out[1] - flash_attn_func(q_new, k_cache, v_cache)[1]).max() < 1e-5
""")],
    "docs/torch.md": [("""
import torch
q, k, v = (torch.randn(2, 4, 9, 32) for _ in range(3))
layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True)
model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 9, 32)
torch.backends.mha.set_fastpath_enabled(False)
torch.set_grad_enabled(False)
""", """
assert (out - torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)).abs().max() < 1e-5
assert repr(taken) == "2 of 2 calls taken"
""", "torch"), ("""
import torch, attn.torch
q, k, v = (torch.randn(2, 4, 9, 32) for _ in range(3))
""", """
own, = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), q)
assert (q.grad - own).abs().max() < 1e-5
""", "torch")],
    "docs/transformers.md": [("""
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 80}
""", """
import torch
with torch.no_grad():
    assert model(torch.ones(1, 5, dtype=torch.long)).logits.shape == (1, 5, 80)
""", "torch", "transformers")],
    "docs/vllm.md": ["needs vLLM and a model; tests/python/test_vllm.py has models of random weights"],
    "docs/diffusers.md": [("""
import torch
from diffusers import WanTransformer3DModel
torch.set_grad_enabled(False)
model = WanTransformer3DModel(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
                              freq_dim=32, ffn_dim=32, num_layers=1, rope_max_seq_len=32).eval()
inputs = {"hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 7, 16), "timestep": torch.tensor([5])}
want = model(**inputs).sample
""", """
assert (out - want).abs().max() < 1e-5
""", "torch", "diffusers")],
    "docs/xformers.md": [("""
import torch
q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 13, 4, 16), torch.randn(2, 13, 4, 16)
bias = torch.randn(2, 1, 9, 13)
""", """
want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), bias).transpose(1, 2)
assert (out - want).abs().max() < 1e-5
""", "torch")],
    "docs/onnx.md": [(NUMPY + """
Q, K, V = (x.swapaxes(1, 2) for x in (q, k, v))
mask, past_key, past_value, K_new, V_new = np.ones((64, 64), bool), K[:, :, :48], V[:, :, :48], K[:, :, 48:], V[:, :, 48:]
""", """
assert np.array_equal(present[0], K) and scores is None
assert np.abs(Y[:, :, 15:16] - attn.onnx.attention(Q[:, :, 15:16], K, V)[0]).max() < 1e-5
"""), ("""
import onnx, onnxruntime, attn.onnx
from onnx import TensorProto, helper
tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4, 9, 16]) for name in "QKVY"]
node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"])
graph = helper.make_graph([node], "graph", tensors[:3], tensors[3:])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10), "model.onnx")
""", """
assert session.get_inputs()[0].name == "Q" and model.graph.node[0].domain == "libattn"
""", "onnxruntime")],
}
