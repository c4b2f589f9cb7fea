"""How long calls take: arithmetic on what a Machine does in a second."""
import functools
from dataclasses import dataclass

from ._layouts import chunks


@dataclass
class Machine:
    """What estimate() knows of the GPUs. Rates are those of a long call; docs/distributed.md says what they were fitted to."""
    flops: float = 707e12  # bf16 forward of one GPU over a long sequence
    half_tokens: float = 250  # a call of this many queries runs at half that rate
    pair: float = 150e9  # bytes/s from one GPU of a host to another one
    bandwidth: float = 200e9  # bytes/s that one GPU receives from all GPUs of its host, copies that put them in order included
    hidden: float = 0.2  # part of an all-gather's time within a host that a computation hides: NCCL takes multiprocessors from it
    latency: float = 60e-6  # of one collective or one step of a ring
    memory: float = 2.5e12  # bytes/s of merging
    ranks_of_host: int = 8
    network: float = 40e9  # bytes/s of a GPU between hosts: 80 % of 400 Gbit/s
    call: float = 900e-6  # of the host for a call, whatever its tokens: arguments and comparison. 300e-6 with compare="once"
    piece: float = 400e-6  # of the host for each piece of heads (all_gather), step (ring) or exchange (ulysses)
    peers: float = 230e9  # bytes/s that one GPU copies from all others of its host by peers=True, while it computes


def estimate(ranks, tokens, *, heads_q, heads_kv, head_dim, head_dim_v=None, batch=1, causal=True, bytes_per_element=2, machine=Machine(),
             head_pieces=None, layout="zigzag", cu_seqlens=None, peers=False):
    """{scheme: seconds} of a forward call over `tokens` tokens of each sequence in all; a scheme that cannot run is not in it.

    It is that of calls one after the other: GPUs compute one while hosts prepare the next, and the slower of both counts.
    head_pieces: of all_gather; None: the best of those that attention() chooses from. cu_seqlens: documents. The rank that the layout
    gives the most work counts."""
    dim_v = head_dim_v or head_dim
    pairs, most = _work(ranks, tokens, layout, causal, None if cu_seqlens is None else tuple(cu_seqlens))
    work = 2 * batch * heads_q * pairs * (head_dim + dim_v)
    rows = tokens / ranks
    rate = machine.flops * rows / (rows + machine.half_tokens)
    compute = work * most / rate
    width, hop, hidden = min(machine.bandwidth, machine.pair * (ranks - 1)), machine.pair, machine.hidden
    if ranks > machine.ranks_of_host:
        width, hop, hidden = machine.network, machine.network, 1
    elif peers:
        width, hidden = machine.peers, 1
    of_rank = batch * rows * heads_kv * (head_dim + dim_v) * bytes_per_element  # K and V
    arrive = (ranks - 1) * of_rank / width if ranks > 1 else 0

    def call(gpu, pieces):
        return max(gpu, machine.call + machine.piece * pieces)

    def gathered(pieces):  # the first piece of heads is waited for, and what no computation hides
        sizes = pieces if isinstance(pieces, tuple) else (1,) * pieces
        first = sizes[0] / sum(sizes)
        meanwhile = max(arrive, compute + (1 - hidden) * arrive)
        return call(machine.latency * len(sizes) + arrive * first + meanwhile * (1 - first) + compute * first, len(sizes))
    found = {"all_gather": min(gathered(n) for n in ([head_pieces] if head_pieces else pieces_of_heads(heads_kv)))}
    # A step is a call over 1 / ranks of the keys; all but the first read, merge and write f32 rows.
    merge = 3 * batch * rows * heads_q * dim_v * 4 / machine.memory
    sequences = 2 * (len(cu_seqlens) - 1) if layout == "documents" else 1  # of a step's call, which are short
    step = compute / ranks * (1 + machine.half_tokens * max(1, sequences) / rows)
    found["ring"] = call(ranks * machine.latency + step + (ranks - 1) * max(step + merge, of_rank / hop), ranks)
    if splits(heads_q, heads_kv, ranks):
        repeated = max(1, ranks // heads_kv)
        there = (heads_q * head_dim + heads_kv * repeated * (head_dim + dim_v)) * bytes_per_element
        back = heads_q * (dim_v * bytes_per_element + 4)  # out and lse
        sent = batch * rows * (there + back) * (ranks - 1) / ranks
        whole = work / ranks / (machine.flops * tokens / (tokens + machine.half_tokens))
        found["ulysses"] = call(2 * machine.latency + (sent / width if ranks > 1 else 0) + whole, 2)
    return found


@functools.lru_cache(256)
def _work(ranks, tokens, layout, causal, offsets):
    """(pairs of queries and keys that see each other, the part of them that the rank with the most has)."""
    documents = [(0, tokens)] if offsets is None else list(zip(offsets, offsets[1:]))
    if offsets is None and (layout == "zigzag" or not causal):
        return tokens * tokens * (0.5 if causal else 1), 1 / ranks

    def pairs(start, end):
        """Of queries [start, end)."""
        found = 0
        for begin, stop in documents:
            a, b = max(start, begin) - begin, min(end, stop) - begin
            if a < b:
                found += (b * b - a * a) / 2 if causal else (b - a) * (stop - begin)
        return found
    of_ranks = [sum(pairs(start, start + n) for start, n in chunks(layout, r, ranks, tokens // ranks, offsets)) for r in range(ranks)]
    return sum(of_ranks), max(of_ranks) / sum(of_ranks) if any(of_ranks) else 1 / ranks


def pieces_of_heads(heads_kv):
    """In how many pieces of heads an all-gather may be divided unasked: up to four, so that a quarter of it is waited for."""
    return [n for n in (1, 2, 4) if heads_kv % n == 0]


def are_pieces(head_pieces, heads_kv):
    """Whether it says how K/V heads are divided: in how many equal pieces, or how many heads each has."""
    if isinstance(head_pieces, tuple):
        return min(head_pieces, default=0) > 0 and sum(head_pieces) == heads_kv
    return head_pieces > 0 and heads_kv % head_pieces == 0


def splits(heads_q, heads_kv, ranks):
    return heads_q % ranks == 0 and (heads_kv % ranks == 0 or ranks % heads_kv == 0)
