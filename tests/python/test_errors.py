"""The sentence of each usual mistake, word for word, as docs/python.md has them."""
import importlib.util
import unittest
from pathlib import Path

from support import Case, attn, np

DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"


class Sentences(Case):
    def setUp(self):
        super().setUp()
        self.document = DOCUMENT.read_text()

    def says(self, error, sentence, call, *arguments, **options):
        with self.assertRaises(error) as caught:
            call(*arguments, **options)
        self.assertEqual(str(caught.exception), sentence)
        self.assertIn(sentence, self.document)

    def test_numpy(self):
        q, k, v = self.qkv()  # [2, 9, 4, 16], [2, 13, 2, 16]
        invalid = attn.InvalidArgument
        self.says(invalid, "q is i32; accepted: f32, f16, bf16, f8_e4m3fn, f8_e5m2, f8_e4m3fnuz", attn.forward, q.astype(np.int32), k, v)
        self.says(invalid, "sinks is f64; accepted: f32", attn.forward, q, k, v, sinks=np.zeros(4))
        self.says(invalid, "q: the last dimension has stride 2; accepted: 1", attn.forward, q[..., ::2], k[..., :8], v)
        self.says(invalid, "heads_q is 3; accepted: multiples of heads_kv = 2", attn.forward, q[:, :, :3].copy(), k, v)
        self.says(invalid, "k: head_dim is 8; accepted: 16 as in q", attn.forward, q, k[..., :8].copy(), v)
        self.says(invalid, "k: batch is 1; accepted: 2 as in q", attn.forward, q, k[:1], v[:1])
        self.says(invalid, "seqlens_kv has shape [3]; accepted: [B] = [2]", attn.forward, q, k, v, seqlens_kv=np.zeros(3, np.int32))
        self.says(TypeError, "causal is a str; accepted: a bool", attn.forward, q, k, v, causal="yes")

    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed")
    def test_torch(self):
        import torch
        q, k, v = map(torch.from_numpy, self.qkv())
        self.says(attn.InvalidArgument, "k requires grad; accepted: arrays that do not, and any under torch.no_grad() or inference_mode(); "
                  "attn.torch has functions with a backward", attn.forward, q, k.clone().requires_grad_(), v)
        from attn.torch import scaled_dot_product_attention
        self.says(attn.InvalidArgument, "dropout_p is 0.1; accepted: 0, attn has no dropout",
                  scaled_dot_product_attention, *(q.transpose(1, 2),) * 3, dropout_p=0.1)

    def test_device(self):
        from test_frameworks import Claimed
        q, k, v = self.qkv()
        self.says(attn.InvalidArgument, "k is in cuda device 1; accepted: host memory, where q is", attn.forward, q,
                  Claimed(k, (2, 1)), v)


if __name__ == "__main__":
    unittest.main()
