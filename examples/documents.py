"""A batch of documents packed into sequences of one length, as training data and embeddings are, where none sees another.

    python3 examples/documents.py [--seqlen TOKENS]

Documents are packed first fit; for each key of each sequence the mask is told which queries see it, and one call serves the batch. The
result is compared with every document attended to alone.
"""
import argparse
import sys

import attn
import numpy as np

HEADS, HEADS_KV, DIM = 4, 2, 32


def pack(lengths, seqlen):
    """[[length, ...] of each sequence], the longest documents first."""
    sequences = []
    for length in sorted(lengths, reverse=True):
        place = next((s for s in sequences if sum(s) + length <= seqlen), None)
        if place is None:
            sequences.append(place := [])
        place.append(length)
    return sequences


def mask_of(sequences, seqlen):
    """A key is seen from its own position to the end of its document; those after the last document by no query."""
    queries = np.zeros((len(sequences), 1, seqlen, 1, 2), np.int32)
    for b, lengths in enumerate(sequences):
        ends = np.repeat(np.cumsum(lengths), lengths)
        queries[b, 0, :len(ends), 0] = np.stack([np.arange(len(ends)), ends], axis=-1)
    return attn.BlockMask.from_intervals(queries, seqlen)


def largest_difference(q, k, v, out, sequences):
    """From each document alone."""
    worst = 0
    for b, lengths in enumerate(sequences):
        begin = 0
        for length in lengths:
            part = np.s_[b:b + 1, begin:begin + length]
            worst = max(worst, np.abs(attn.forward(q[part], k[part], v[part], causal=True) - out[part]).max())
            begin += length
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seqlen", type=int, default=512, help="tokens of a packed sequence (%(default)s)")
    options = parser.parse_args()
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 300, size=24).tolist()
    if options.seqlen < max(lengths):
        parser.error(f"--seqlen is {options.seqlen}; accepted: {max(lengths)}, the longest document, or more")
    sequences = pack(lengths, options.seqlen)
    q, k, v = (rng.standard_normal((len(sequences), options.seqlen, heads, DIM), np.float32) for heads in (HEADS, HEADS_KV, HEADS_KV))
    mask = mask_of(sequences, options.seqlen)
    out = attn.forward(q, k, v, block_mask=mask)
    print(f"{len(lengths)} documents of up to {max(lengths)}, {sum(lengths)} tokens, in {len(sequences)} sequences of {options.seqlen}: "
          f"{sum(lengths) / q.shape[0] / q.shape[1]:.0%} full, each for itself {sum(lengths) / len(lengths) / max(lengths):.0%}")
    difference = largest_difference(q, k, v, out, sequences)
    print(f"largest difference from each document alone: {difference:.1e}")
    return 0 if difference < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
