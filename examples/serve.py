"""A toy server: continuous batching over paged K/V caches, on a decoder of random weights.

Sequences come and go. A step takes the next token of each running sequence and up to --chunk tokens of prompts:
kv_append writes their keys and values into pages, forward attends over the pages. The rest of the model is NumPy, on
cuda PyTorch: there a step of either shape is captured once as a CUDA graph, and replayed as tokens, lengths and pages
change on the device.
--check compares every token with what the model gives for the whole sequence, without caches and without libattn.
"""
import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass

import attn
import numpy as np

HEADS, HEADS_KV, HEAD_DIM, VOCAB = 8, 2, 32, 256
DIM, DIM_KV = HEADS * HEAD_DIM, HEADS_KV * HEAD_DIM


class Model:
    def __init__(self, layers, rng):
        def matrix(rows, columns):
            return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(rows**0.5)
        shapes = [(DIM, DIM), (DIM, DIM_KV), (DIM, DIM_KV), (DIM, DIM), (DIM, 2 * DIM), (2 * DIM, DIM)]
        self.embedding = rng.standard_normal((VOCAB, DIM), dtype=np.float32)
        self.layers = [[matrix(*shape) for shape in shapes] for _ in range(layers)]
        self.head = matrix(DIM, VOCAB)

    def on(self, put):
        """The same with put(matrix) for each of its matrices."""
        model = Model.__new__(Model)
        model.embedding, model.head = put(self.embedding), put(self.head)
        model.layers = [[put(w) for w in layer] for layer in self.layers]
        return model

    def hidden(self, tokens, attend):
        """[tokens, DIM]; attend(layer, q, k, v) is the attention, all [tokens, heads, HEAD_DIM]."""
        x = self.embedding[tokens]
        for layer, (wq, wk, wv, wo, up, down) in enumerate(self.layers):
            y = norm(x)
            q, k, v = ((y @ w).reshape(len(x), -1, HEAD_DIM) for w in (wq, wk, wv))
            x = x + attend(layer, q, k, v).reshape(len(x), DIM) @ wo
            x = x + (norm(x) @ up).clip(0) @ down
        return norm(x)


def norm(x):
    return x / ((x * x).mean(axis=-1, keepdims=True) + 1e-6) ** 0.5


def rotary_tables(positions):
    angle = np.outer(np.arange(positions), 10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


class Pages:
    """The free pages of a pool, and those that each slot of the batch holds."""

    def __init__(self, num_pages, page_size, slots, max_pages):
        self.page_size = page_size
        self.free = list(range(num_pages))
        self.held = [0] * slots
        self.block_table = np.zeros((slots, max_pages), np.int32)

    def reserve(self, slot, tokens):
        """Makes room for `tokens` tokens in all; False if too few pages are free."""
        missing = -(-tokens // self.page_size) - self.held[slot]
        if missing > len(self.free):
            return False
        for _ in range(missing):
            self.block_table[slot, self.held[slot]] = self.free.pop()
            self.held[slot] += 1
        return True

    def release(self, slot):
        self.free += self.block_table[slot, :self.held[slot]].tolist()
        self.held[slot] = 0


@dataclass
class Sequence:
    number: int   # in the order of arrival
    tokens: list  # the prompt and what was generated
    end: int      # tokens when it is finished
    cached: int = 0


class Server:
    def __init__(self, model, options):
        self.model, self.batch, self.chunk = model, options.batch, options.chunk
        max_pages = -(-(options.prompt + options.tokens) // options.page_size)
        # By default half of what the batch could need; one sequence must fit.
        num_pages = max(options.pages or options.batch * max_pages // 2, max_pages)
        self.pages = Pages(num_pages, options.page_size, self.batch, max_pages)
        self.waiting, self.running = deque(), {}  # slot: sequence
        self.steps = self.preempted = 0

        self.device = Device() if options.backend == "cpu" else Cuda()
        put = self.device.put
        self.model = model.on(put)
        pool = np.zeros((len(model.layers), num_pages, options.page_size, HEADS_KV, HEAD_DIM), np.float32)
        self.k, self.v = put(pool, cache=True), put(pool.copy(), cache=True)
        # Each layer's append advances its own.
        self.seqlens = put(np.zeros((len(model.layers), self.batch), np.int32))
        self.cu_seqlens, self.block_table = put(np.zeros(self.batch + 1, np.int32)), put(self.pages.block_table.copy())
        cos, sin = rotary_tables(max_pages * options.page_size)
        self.rotary = {"rotary_cos": put(cos), "rotary_sin": put(sin)}
        self.plans, self.graphs = {}, {}  # by tokens of the step

    def admit(self):
        while self.waiting and len(self.running) < self.batch:
            slot = next(s for s in range(self.batch) if s not in self.running)
            if not self.pages.reserve(slot, len(self.waiting[0].tokens)):
                break
            self.running[slot] = self.waiting.popleft()

    def leave(self, slot):
        self.pages.release(slot)
        self.seqlens[:, slot] = 0
        return self.running.pop(slot)

    def preempt(self, slot):
        """Its pages are for older sequences; it comes back with all of its tokens as a prompt."""
        sequence = self.leave(slot)
        sequence.cached = 0
        self.waiting.appendleft(sequence)
        self.preempted += 1

    def choose(self):
        """How many tokens of each slot the step takes. Oldest sequences first, so that these always get on."""
        counts, room = np.zeros(self.batch, np.int32), self.chunk

        def age(slot):
            return self.running[slot].number
        for slot in sorted(self.running, key=age):
            while slot in self.running and not self.pages.reserve(slot, len(self.running[slot].tokens)):
                self.preempt(max(self.running, key=age))
            if slot in self.running:
                pending = len(self.running[slot].tokens) - self.running[slot].cached
                counts[slot] = 1 if pending == 1 else min(pending, room)
                room -= counts[slot] if pending > 1 else 0
        return counts

    def step(self):
        self.admit()
        counts = self.choose()
        # Steps have one of two shapes, for which libattn keeps plans; rows after the last token belong to no sequence.
        rows, self.longest = (self.batch, 1) if counts.max() == 1 else (self.batch + self.chunk, self.chunk)
        ends = np.cumsum(counts)
        self.cu_seqlens[1:] = self.device.put(ends.astype(np.int32))
        self.block_table[:] = self.device.put(self.pages.block_table)
        tokens = np.zeros(rows, np.int64)
        for slot, sequence in self.running.items():
            new = slice(sequence.cached, sequence.cached + counts[slot])
            tokens[ends[slot] - counts[slot]:ends[slot]] = sequence.tokens[new]

        logits = self.device.run(self, tokens)
        for slot, sequence in list(self.running.items()):
            sequence.cached += counts[slot]
            if sequence.cached == len(sequence.tokens):
                sequence.tokens.append(int(logits[ends[slot] - 1].argmax()))
                if len(sequence.tokens) == sequence.end:
                    self.leave(slot)
        self.steps += 1

    def logits(self, tokens):
        return self.model.hidden(tokens, self.attend) @ self.model.head

    def attend(self, layer, q, k, v):
        q, k, v = (self.device.cached(x) for x in (q, k, v))
        pages, arrays = (self.k[layer], self.v[layer]), {"block_table": self.block_table}
        q = attn.kv_append(k, v, *pages, self.seqlens[layer], cu_seqlens_new=self.cu_seqlens, max_seqlen_new=self.longest,
                           q=q, q_out=q, advance_seqlens=True, **arrays, **self.rotary)
        arrays.update(cu_seqlens_q=self.cu_seqlens, seqlens_kv=self.seqlens[layer])
        # A graph needs the plan's workspace for as long as it is replayed: the plan is kept here.
        if len(q) not in self.plans:
            self.plans[len(q)] = attn.Plan(q, *pages, causal=True, max_seqlen_q=self.longest, **arrays)
        return self.device.computed(self.plans[len(q)](q, *pages, **arrays))


class Device:
    """The host: NumPy's arrays, and nothing to capture."""

    def put(self, x, cache=False):
        return x

    def cached(self, x):
        """In the type of the caches."""
        return x

    def computed(self, x):
        """In the type of the rest of the model."""
        return x

    def run(self, server, tokens):
        return server.logits(tokens)


class Cuda:
    """PyTorch's tensors, those of the caches in bf16, and a graph of each shape of a step."""

    def __init__(self):
        import torch
        self.torch, self.stream = torch, torch.cuda.Stream()

    def put(self, x, cache=False):
        x = self.torch.from_numpy(x).to("cuda")
        return self.cached(x) if cache else x

    def cached(self, x):
        return x.to(self.torch.bfloat16)

    def computed(self, x):
        return x.float()

    def run(self, server, tokens):
        if len(tokens) not in server.graphs:
            server.graphs[len(tokens)] = self.capture(server, tokens)
        graph, inputs, logits = server.graphs[len(tokens)]
        inputs.copy_(self.torch.from_numpy(tokens))
        graph.replay()
        return logits.cpu().numpy()

    def capture(self, server, tokens):
        """(graph, its tokens, its logits). What is made on first use is made before, by a step of no tokens."""
        inputs, cu_seqlens = self.put(tokens.copy()), server.cu_seqlens.clone()
        server.cu_seqlens.zero_()
        self.stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(self.stream):
            server.logits(inputs)
        self.torch.cuda.current_stream().wait_stream(self.stream)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.stream):
            logits = server.logits(inputs)
        server.cu_seqlens.copy_(cu_seqlens)
        return graph, inputs, logits


def logits_without_cache(model, tokens):
    """Behind each token, all at once: under a causal mask they are those of a run that starts anew for each token."""
    n, half = len(tokens), HEAD_DIM // 2
    cos, sin = (table[:, None] for table in rotary_tables(n))

    def rotate(x):
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def attend(layer, q, k, v):
        k, v = np.repeat(rotate(k), HEADS // HEADS_KV, axis=1), np.repeat(v, HEADS // HEADS_KV, axis=1)
        s = np.einsum("ihd,jhd->hij", rotate(q), k) / np.float32(HEAD_DIM**0.5)
        s = np.where(np.tri(n, dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        return np.einsum("hij,jhd->ihd", p / p.sum(axis=-1, keepdims=True), v)
    return model.hidden(tokens, attend) @ model.head


def wrong_tokens(model, sequence, generated, tie):
    """Of those generated, how many a run without cache would not choose; logits closer than `tie` may change places."""
    logits = logits_without_cache(model, sequence.tokens[:-1])[-generated:]
    chosen = logits[np.arange(generated), sequence.tokens[-generated:]]
    return int((chosen < logits.max(axis=-1) - tie).sum())


def positive(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


def progress(done, total):
    if sys.stderr.isatty():
        bar = "#" * (40 * done // total)
        print(f"\r[{bar:40}] {done}/{total} sequences", end="" if done < total else "\n", file=sys.stderr, flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value, text in (("--sequences", 64, "sequences to serve"),
                              ("--tokens", 32, "tokens to generate for a sequence, at most"),
                              ("--prompt", 64, "tokens of a prompt, at most"),
                              ("--batch", 16, "sequences that run at a time"),
                              ("--chunk", 64, "tokens of prompts in a step, at most"),
                              ("--layers", 2, "layers of the model"),
                              ("--page-size", 16, "tokens of a page"),
                              ("--pages", None, "pages of the pool; None: half of what the batch could need"),
                              ("--seed", 1, "of weights and prompts")):
        parser.add_argument(name, type=positive, default=value, metavar="N", help=text)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu", help="cuda needs PyTorch")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a token is another one without cache")
    options = parser.parse_args(arguments)

    rng = np.random.default_rng(options.seed)
    model = Model(options.layers, rng)
    sequences, prompts = [], rng.integers(1, options.prompt, options.sequences, endpoint=True)
    for number, length in enumerate(prompts):
        end = length + rng.integers(1, options.tokens, endpoint=True)
        sequences.append(Sequence(number, rng.integers(VOCAB, size=length).tolist(), end))

    server = Server(model, options)
    server.waiting.extend(sequences)
    start = time.perf_counter()
    while server.waiting or server.running:
        server.step()
        progress(len(sequences) - len(server.waiting) - len(server.running), len(sequences))
    seconds = time.perf_counter() - start

    generated = [len(sequence.tokens) - length for sequence, length in zip(sequences, prompts)]
    total = sum(generated)
    print(f"{len(sequences)} sequences, {total} tokens in {seconds:.2f} s: {total / seconds:.0f} tokens/s; "
          f"{server.steps} steps, {server.preempted} preempted")
    if not options.check:
        return 0
    tie = 1e-4 if options.backend == "cpu" else 0.1  # bf16
    wrong = sum(wrong_tokens(model, sequence, n, tie) for sequence, n in zip(sequences, generated))
    print(f"{total - wrong} of {total} tokens as without cache")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (attn.Error, ImportError) as error:
        sys.exit(f"serve.py: {error}")
