"""BlockMask: every builder beside the dense mask that it stands for."""
import unittest

from support import Case, attn, np, softmax_attention

SQ, SKV = 45, 70


def window(left, right, global_tokens=0):
    i, j = np.arange(SQ)[:, None] + SKV - SQ, np.arange(SKV)
    return (j >= i - left) & (j <= i + right) | (j < global_tokens)


class Masks(Case):
    def setUp(self):
        super().setUp()
        self.q, self.k, self.v = self.qkv(seqlen_q=SQ, seqlen_kv=SKV)

    def holds(self, mask, visible, arrays=None):
        """forward() with the mask is attention with what `visible` shows, on each host backend."""
        q, k, v = arrays or (self.q, self.k, self.v)
        want, want_lse = softmax_attention(q, k, v, visible)
        for backend in "reference", "cpu":
            out, lse = attn.forward(q, k, v, block_mask=mask, return_lse=True, backend=backend)
            self.close(out, want)
            self.close(lse, want_lse, 4e-6)

    def test_dense(self):
        for shape in (SQ, SKV), (1, 1, SQ, SKV), (2, 1, SQ, SKV), (1, 4, SQ, SKV), (2, 4, SQ, SKV):
            visible = self.rng.random(shape) < 0.3
            visible[..., 7, :] = False  # a row that sees nothing
            for block_size in 128, 16, (8, 24):
                with self.subTest(shape=shape, block_size=block_size):
                    mask = attn.BlockMask.from_dense(visible, block_size=block_size)
                    self.assertEqual(mask.shape, ((1, 1) + shape)[-4:])
                    self.assertEqual(mask.block_size, (block_size,) * 2 if isinstance(block_size, int) else block_size)
                    self.assertEqual(mask.device, "cpu")
                    self.holds(mask, visible)
                    self.holds(attn.BlockMask.from_dense(visible.astype(np.uint8) * 3, block_size=block_size), visible)

    def test_intervals(self):
        first = np.sort(self.rng.integers(0, SQ + 1, (SKV, 2)), axis=-1)
        second = np.sort(self.rng.integers(0, SQ + 1, (SKV, 2)), axis=-1)
        i = np.arange(SQ)[:, None]
        one, two = ((i >= f[:, 0]) & (i < f[:, 1]) for f in (first, second))
        both = np.stack([first, second], axis=1).astype(np.int32)
        self.holds(attn.BlockMask.from_intervals(both[:, :1].copy(), SQ, block_size=16), one)
        self.holds(attn.BlockMask.from_intervals(both, SQ, block_size=16), one | two)
        heads = np.broadcast_to(both, (1, 4, SKV, 2, 2)).copy()
        heads[0, 2, :, 1] = 0
        visible = np.broadcast_to(one | two, (1, 4, SQ, SKV)).copy()
        visible[0, 2] = one
        self.holds(attn.BlockMask.from_intervals(heads, SQ, block_size=(16, 8)), visible)

    def test_documents(self):
        lengths = [13, 1, 31]
        arrays = self.q, self.k[:, :SQ], self.v[:, :SQ]
        document = np.repeat(range(3), lengths)
        same = document[:, None] == document
        self.holds(attn.BlockMask.from_documents(lengths, block_size=16), same, arrays)
        self.holds(attn.BlockMask.from_documents(np.array(lengths), causal=True, block_size=16),
                   same & np.tri(SQ, dtype=bool), arrays)

    def test_window(self):
        self.holds(attn.BlockMask.from_window(SQ, SKV, (9, 2), block_size=16), window(9, 2))
        self.holds(attn.BlockMask.from_window(SQ, SKV, (5, 0), global_tokens=3, block_size=16), window(5, 0, 3))
        self.holds(attn.BlockMask.from_window(SQ, SKV, (-1, 4), block_size=16), window(SKV, 4))

    def test_prefix(self):
        visible = np.tri(SKV, dtype=bool) | (np.arange(SKV) < 20)
        arrays = self.normal(2, SKV, 4, 16), self.k, self.v
        self.holds(attn.BlockMask.from_prefix(SKV, SKV, 20, block_size=16), visible, arrays)

    def test_kinds(self):
        kinds = np.array([[2, 0, 3], [3, 1, 0]], np.uint8)  # blocks of 32 x 32 over 45 x 70
        index = np.array([[-1, -1, 1], [0, -1, -1]], np.int32)
        bits = self.rng.random((2, 32, 32)) < 0.5
        visible = np.zeros((64, 96), bool)
        for (row, column), kind in np.ndenumerate(kinds):
            i, j = np.arange(row * 32, row * 32 + 32)[:, None], np.arange(column * 32, column * 32 + 32)
            visible[row * 32:row * 32 + 32, column * 32:column * 32 + 32] = \
                {0: False, 1: j <= i + SKV - SQ, 2: True, 3: bits[index[row, column]]}[int(kind)]
        visible = visible[:SQ, :SKV]
        mask = attn.BlockMask.from_kinds(kinds, SQ, SKV, block_size=32, index=index, bits=bits)
        self.holds(mask, visible)
        apart = np.zeros((2, 64, 96), bool)[:, ::2, ::3]
        apart[...] = bits
        self.holds(attn.BlockMask.from_kinds(kinds, SQ, SKV, block_size=32, index=index, bits=apart), visible)
        words = np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)
        self.holds(attn.BlockMask.from_kinds(kinds[None, None], SQ, SKV, block_size=32, index=index[None, None],
                                             bits=words), visible)
        full = np.full((3, 4), attn.BlockMask.FULL, np.uint8)
        self.holds(attn.BlockMask.from_kinds(full, SQ, SKV, block_size=(20, 20)), None)

    def test_union_and_intersection(self):
        a, b = self.rng.random((2, SQ, SKV)) < 0.5
        heads = self.rng.random((1, 4, SQ, SKV)) < 0.5
        masks = [attn.BlockMask.from_dense(x, block_size=16) for x in (a, b, heads)]
        self.holds(masks[0] | masks[1], a | b)
        self.holds(masks[0] & masks[1], a & b)
        both = masks[2] & masks[0]
        self.assertEqual(both.shape, (1, 4, SQ, SKV))
        self.holds(both, heads & a)
        with self.assertRaises(TypeError):
            masks[0] | a

    def test_with_other_rules(self):
        visible = self.rng.random((SQ, SKV)) < 0.5
        mask = attn.BlockMask.from_dense(visible, block_size=16)
        out = attn.forward(self.q, self.k, self.v, block_mask=mask, causal=True, window=(30, 0))
        self.close(out, softmax_attention(self.q, self.k, self.v, visible & window(30, 0))[0])
        parts = [self.k[:, :33], self.k[:, 33:]], [self.v[:, :33], self.v[:, 33:]]
        self.close(attn.forward(self.q, *parts, block_mask=mask), softmax_attention(self.q, self.k, self.v, visible)[0])

    def test_equal_shapes_share_a_plan(self):
        attn.cache_clear()
        for seed in range(3):
            mask = attn.BlockMask.from_window(SQ, SKV, (5 + seed, 0), block_size=16)
            attn.forward(self.q, self.k, self.v, block_mask=mask)
        self.assertLessEqual(attn.cache_info()["plans"], 3)

    def test_sizes_that_mean_a_default(self):
        """attn.h takes a batch or heads of 0 for 1."""
        mask = attn.BlockMask
        for shape in (0, 1), (1, 0), (0, 0):
            self.refuses(ValueError, ["dense has shape [", "1 or more"], mask.from_dense, np.ones((*shape, SQ, SKV), bool))
            self.refuses(ValueError, ["intervals has shape ["], mask.from_intervals, np.zeros((*shape, SKV, 1, 2), np.int32),
                         SQ)
            self.refuses(ValueError, ["kinds has shape ["], mask.from_kinds, np.zeros((*shape, 1, 1), np.uint8), SQ, SKV)
        for count in 0, 3, 2 ** 32 + 1:
            intervals = np.broadcast_to(np.zeros((1, 1, 2), np.int32), (0, count, 2))
            self.refuses(ValueError, ["intervals has shape"], mask.from_intervals, intervals, SQ)
        self.refuses(ValueError, ["block_size is 4294967312"], mask.from_window, SQ, SKV, (1, 0), block_size=2 ** 32 + 16)
        self.refuses(ValueError, ["block_size is (16, 4294967312)"], mask.from_window, SQ, SKV, (1, 0),
                     block_size=(16, 2 ** 32 + 16))
        for length in -1, -SQ, 2 ** 63 - 1, 2 ** 80:
            self.refuses(ValueError, ["seqlen_"], mask.from_kinds, np.zeros((1, 1), np.uint8), length, SKV)
            self.refuses(ValueError, ["seqlen_"], mask.from_kinds, np.zeros((1, 1), np.uint8), SQ, length)

    def test_kinds_of_numbers(self):
        mask = attn.BlockMask
        want = window(9, 2)
        for size in np.int64(16), np.array(16), np.array([16, 16]), [16, np.uint8(16)]:
            self.holds(mask.from_dense(want, block_size=size), want)
        self.holds(mask.from_window(np.int64(SQ), np.uint16(SKV), np.array([9, 2]), global_tokens=np.int8(0), block_size=16),
                   want)
        same = np.tri(SQ, dtype=bool)
        self.holds(mask.from_documents(np.array([SQ]), causal=np.True_, block_size=16), same,
                   (self.q, self.k[:, :SQ], self.v[:, :SQ]))
        self.refuses(TypeError, ["lengths[1] is a float"], mask.from_documents, [3, 4.5])
        self.refuses(TypeError, ["causal is a int"], mask.from_documents, [3], causal=1)
        self.refuses(TypeError, ["block_size is a float"], mask.from_dense, want, block_size=16.0)
        self.refuses(TypeError, ["kinds is a list", "array"], mask.from_kinds, [[2]], SQ, SKV)
        self.refuses(TypeError, ["bits is a list"], mask.from_kinds, np.zeros((1, 1), np.uint8), SQ, SKV, bits=[[[1]]])

    def test_sentences(self):
        mask = attn.BlockMask
        self.refuses(ValueError, ["lengths[1] is -4", "accepted: 0 and above"], mask.from_documents, [3, -4])
        dense = np.ones((SQ, SKV), bool)
        self.refuses(ValueError, ["dense is f32", "accepted: bool"], mask.from_dense, dense.astype(np.float32))
        self.refuses(ValueError, ["dense has shape [45]"], mask.from_dense, dense[:, 0].copy())
        self.refuses(ValueError, ["dense is not contiguous"], mask.from_dense, dense[:, ::2])
        self.refuses(ValueError, ["block_q is 0"], mask.from_dense, dense, block_size=0)
        self.refuses(ValueError, ["window"], mask.from_window, SQ, SKV, (-2, 0))
        self.refuses(ValueError, ["device is tpu", "accepted: cpu"], mask.from_window, SQ, SKV, (1, 0), device="tpu")
        for device in None, "", "cpu:", "cuda:x", "\ud800", np.zeros((3, 3)):
            said = self.refuses(ValueError, ["device is", "accepted: cpu"], mask.from_window, SQ, SKV, (1, 0), device=device)
            self.assertNotIn("\n", str(said))
        self.refuses(ValueError, ["interval 0 of key 0", "accepted"], mask.from_intervals, np.full((SKV, 1, 2), 99, np.int32),
                     SQ)
        self.refuses(ValueError, ["intervals has shape [70, 1, 3]"], mask.from_intervals, np.zeros((SKV, 1, 3), np.int32), SQ)
        self.refuses(ValueError, ["kinds"], mask.from_kinds, np.full((1, 1), 7, np.uint8), SQ, SKV)
        self.refuses(ValueError, ["kinds has shape [2, 1]", "[1, 1]"], mask.from_kinds,
                     np.zeros((2, 1), np.uint8), SQ, SKV)
        self.refuses(ValueError, ["partial (3)"], mask.from_kinds, np.full((1, 1), 3, np.uint8), SQ, SKV)
        self.refuses(ValueError, ["length"], mask.from_documents, [3, -1])
        good = mask.from_dense(dense)
        self.refuses(ValueError, ["seqlen_q 45", "44"], attn.forward, self.q[:, 1:], self.k, self.v, block_mask=good)
        self.refuses(ValueError, ["block_q"], lambda: good | mask.from_dense(dense, block_size=64))
        with self.assertRaises(TypeError):
            mask(dense)


if __name__ == "__main__":
    unittest.main()
