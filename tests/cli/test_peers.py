"""The parts of bench/peers.py that need no GPU: python3 tests/cli/test_peers.py SOURCE_DIR"""
import json
import sys
import unittest
from pathlib import Path

SOURCE = Path(sys.argv[1])
sys.path.insert(0, str(SOURCE / "bench"))
import peers  # noqa: E402

PUBLISHED = json.loads((SOURCE / "bench" / "published.json").read_text())


def cell(name):
    return next(cell for cell in peers.all_cells() if cell.name == name)


class Peers(unittest.TestCase):
    def test_cells(self):
        cells = peers.all_cells()
        self.assertEqual(len({c.name for c in cells}), len(cells))
        grid = peers.select(cells, "grid")
        self.assertEqual(len(grid), 36)
        for c in grid:
            self.assertEqual((c.batch * c.seqlen, c.heads * c.dim), (16384, 2048))
        self.assertEqual([c.name for c in peers.select(cells, "grid,d128,causal,8k,16k")],
                         ["d128 causal 8k", "d128 causal 16k"])
        self.assertEqual(len(peers.select(cells, "32k")), 2)
        with self.assertRaises(SystemExit):
            peers.select(cells, "d96")

    def test_operations(self):
        # 32 heads, 16 batches, 1024 x 1024 pairs, 64 + 64 multiply-adds of 2 operations each
        self.assertEqual(cell("d64 full 1k").operations, 32 * 16 * 1024 * 1024 * 128 * 2)
        self.assertEqual(cell("d64 causal 1k").operations, 32 * 16 * 1024 * 1024 * 128)

    def test_derived(self):
        for row in PUBLISHED["rows"]:
            for name in set(row) - {"group", "head_dim", "causal", "seqlens"}:
                self.assertEqual(len(row[name]), len(row["seqlens"]), (row["group"], name))
        for c in peers.select(peers.all_cells(), "grid"):
            for name in ("fa2", "fa3", "fa3_fp8", "cudnn_fp8"):
                self.assertIsNotNone(peers.derived(c, 1, name, PUBLISHED), (c.name, name))
        # cuDNN 612, FlashAttention-3 675 TFLOP/s: the faster one takes less time.
        us, host_bound = peers.derived(cell("d128 full 16k"), 1000, "fa3", PUBLISHED)
        self.assertAlmostEqual(us, 1000 * 612 / 675)
        self.assertFalse(host_bound)
        self.assertTrue(peers.derived(cell("d128 full 512"), 1000, "fa3", PUBLISHED)[1])
        self.assertIsNone(peers.derived(cell("d128 full 2k 64/8"), 1000, "fa3", PUBLISHED))
        # 9.4 and 12.6 us
        us, host_bound = peers.derived(cell("d64 full 512 f16"), 9.4, "fa3", PUBLISHED)
        self.assertAlmostEqual(us, 12.6, places=1)
        self.assertFalse(host_bound)

    def test_ratio(self):
        ours, theirs = [10.0, 20.0, 40.0], [20.0, 20.0, 20.0]
        self.assertEqual(peers.ratio(ours, theirs, "median"), 1)
        self.assertEqual(peers.ratio(ours, theirs, "worst"), 0.5)

    def test_summary(self):
        rows = [{"group": "grid", "name": name, "derived": derived, "best_of": ["fa3", "cudnn"],
                 "ratio": {"a": {"cudnn": cudnn, "best": cudnn}}}
                for name, cudnn, derived in (("x", 0.5, ["fa3"]), ("y", 2.0, ["fa3", "cudnn"]))]
        lines = peers.summary({"libraries": {"a": {}}, "cells": rows})
        self.assertEqual([line["peer"] for line in lines], ["cudnn", "best"])
        self.assertAlmostEqual(lines[0]["geometric_mean"], 1)
        self.assertEqual((lines[0]["worst"], lines[0]["worst_cell"], lines[0]["derived_cells"]), (0.5, "x", 1))
        self.assertEqual(lines[1]["best_of"], {"fa3 cudnn": 2})


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
