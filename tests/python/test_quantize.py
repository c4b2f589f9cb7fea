"""quantize() beside ml_dtypes' own conversions, and merge()'s errors; its values are in test_golden."""
import unittest

from support import Case, attn, ml_dtypes, np


class Quantize(Case):
    def test_fp8(self):
        x = self.normal(2, 70, 3, 16) * 3
        for name in "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz":
            dtype = getattr(ml_dtypes, name)
            top = float(ml_dtypes.finfo(dtype).max)
            for backend in "reference", "cpu":
                stored, descale = attn.quantize(x, dtype, backend=backend)
                self.assertEqual((stored.dtype, descale.tolist()), (dtype, [1]))
                np.testing.assert_array_equal(stored.view(np.uint8), x.astype(dtype).view(np.uint8))
                stored, descale = attn.quantize(x, f"f8_{name[7:]}", scale=0.5, backend=backend)
                np.testing.assert_array_equal(stored.view(np.uint8), (x * 2).astype(dtype).view(np.uint8))
                self.assertEqual(descale.tolist(), [0.5])
                for per, want in (("tensor", np.abs(x).max().reshape(1)), ("head", np.abs(x).max((1, 3))),
                                  (64, np.stack([np.abs(x[:, :64]).max((1, 3)), np.abs(x[:, 64:]).max((1, 3))], -1))):
                    stored, descale = attn.quantize(x, name, scale="amax", per=per, backend=backend)
                    np.testing.assert_allclose(descale, want / top, rtol=1e-6)
                    again, same = attn.quantize(x, name, scale=descale, per=per, backend=backend)
                    self.assertIs(same, descale)
                    np.testing.assert_array_equal(again.view(np.uint8), stored.view(np.uint8))

    def test_saturate_and_strides(self):
        x = np.array([1000, -1000, 1, 2], np.float32).reshape(1, 4, 1)
        values = attn.quantize(x, "f8_e4m3fn")[0].astype(np.float32).ravel()
        np.testing.assert_array_equal(values, [np.nan, np.nan, 1, 2])
        values = attn.quantize(x, "f8_e4m3fn", saturate=True)[0].astype(np.float32).ravel()
        np.testing.assert_array_equal(values, [448, -448, 1, 2])
        y = self.normal(2, 3, 5, 8)  # [B, H, S, D]
        stored = attn.quantize(y.transpose(0, 2, 1, 3), "f8_e5m2")[0]
        np.testing.assert_array_equal(stored.astype(np.float32),
                                      y.transpose(0, 2, 1, 3).astype(ml_dtypes.float8_e5m2).astype(np.float32))

    def test_ggml(self):
        x = self.normal(1, 5, 2, 64)
        stored, descale = attn.quantize(x, "q8_0")
        self.assertIsNone(descale)
        blocks = stored.reshape(1, 5, 2, 2, 34)
        scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
        values = (scale * blocks[..., 2:].view(np.int8)).reshape(x.shape)
        np.testing.assert_allclose(values, x, atol=np.abs(x).max() / 127)

    def test_no_elements(self):
        """A descale is written where there is nothing to look at: 1, as for zeros."""
        x = np.empty((2, 0, 3, 16), np.float32)
        for backend in "reference", "cpu":
            for per, shape in (("tensor", (1,)), ("head", (2, 3)), (64, (2, 3, 0))):
                stored, descale = attn.quantize(x, "f8_e4m3fn", scale="amax", per=per, backend=backend)
                self.assertEqual(stored.shape, x.shape)
                np.testing.assert_array_equal(descale, np.ones(shape))

    def test_kinds_of_numbers(self):
        x = self.normal(1, 5, 2, 32)
        want, descale = attn.quantize(x, "f8_e4m3fn", scale=0.25, saturate=True, per=64)
        for number in np.float64(0.25), np.float16(0.25):
            stored, same = attn.quantize(x, "f8_e4m3fn", scale=number, saturate=np.True_, per=np.int64(64))
            np.testing.assert_array_equal(stored.view(np.uint8), want.view(np.uint8))
            np.testing.assert_array_equal(same, descale)
        self.refuses(TypeError, ["saturate is a int", "a bool"], attn.quantize, x, "f8_e4m3fn", saturate=1)
        self.refuses(TypeError, ["backend is a int"], attn.quantize, x, "f8_e4m3fn", backend=1)
        self.refuses(ValueError, ["scale is 0"], attn.quantize, x, "f8_e4m3fn", scale=0)
        for scale in float("nan"), float("inf"):
            self.refuses(ValueError, [f"scale is {scale}; accepted: finite numbers"], attn.quantize, x, "f8_e4m3fn", scale=scale)
            self.refuses(ValueError, ["descale[1] is", "finite"], attn.quantize, x, "f8_e4m3fn", scale=np.array([[1, scale]], np.float32), per="head")
        self.refuses(ValueError, ["scale is 1e-50", "f32"], attn.quantize, x, "f8_e4m3fn", scale=1e-50)

    def test_sentences(self):
        x = self.normal(1, 5, 2, 48)
        self.refuses(ValueError, ["dtype is float32", "accepted: f8_e4m3fn"], attn.quantize, x, "float32")
        self.refuses(ValueError, ["scale is mean", "amax"], attn.quantize, x, "f8_e5m2", scale="mean")
        self.refuses(ValueError, ["per is row"], attn.quantize, x, "f8_e5m2", per="row")
        self.refuses(ValueError, ["head_dim", "32"], attn.quantize, x, "q8_0")
        self.refuses(ValueError, ["scale has shape [3]", "[1]"], attn.quantize, x, "f8_e5m2",
                     scale=np.ones(3, np.float32))
        self.refuses(ValueError, ["f64"], attn.quantize, x.astype(np.float64), "f8_e5m2")


class Merge(Case):
    def test_parts_of_one_attention(self):
        q, k, v = self.qkv()
        whole, whole_lse = attn.forward(q, k, v, return_lse=True)
        parts = [attn.forward(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 4), (4, 5), (5, 13))]
        out, lse = attn.merge(parts)
        self.close(out, whole)
        self.close(lse, whole_lse)
        self.assertEqual(attn.merge(parts, out_dtype=ml_dtypes.bfloat16)[0].dtype, ml_dtypes.bfloat16)

    def test_sentences(self):
        out, lse = self.normal(2, 9, 4, 16), self.normal(2, 4, 9)
        self.refuses(ValueError, "parts is empty", attn.merge, [])
        self.refuses(ValueError, ["parts[1][0] has shape", "[2, 9, 4, 16]"], attn.merge, [(out, lse), (out[:, 1:], lse)])
        self.refuses(ValueError, ["parts[0][1] has shape", "[2, 4, 9]"], attn.merge, [(out, lse[:1])])
        self.refuses(ValueError, ["parts[1][0] is f16", "f32"], attn.merge, [(out, lse), (out.astype(np.float16), lse)])
        self.refuses(ValueError, ["out_dtype is i32"], attn.merge, [(out, lse)], out_dtype="i32")
        self.refuses(ValueError, ["parts[0][0] is i32", "f32"], attn.merge, [(out.astype(np.int32), lse)])
        self.refuses(ValueError, ["head_dim_v is 0"], attn.merge, [(out[..., :0], lse)])


if __name__ == "__main__":
    unittest.main()
