"""Attention over sequences that are spread over the ranks of a torch.distributed group: NCCL for CUDA tensors, gloo for the CPU's.

attention() is prefill and training: every rank has the same number of tokens of each sequence, and gets its own rows of the result.
decode() is for caches that are spread over ranks. Partial results are f32 and merged exactly; the result is rounded once. All ranks
of the group call these functions with equal options, and in backward too. A rank whose arguments differ or are refused makes the call
fail on every rank. A rank that is gone makes it fail within the group's time-out, as torch.distributed does.
"""
import math
import weakref
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist

from . import backward as _backward
from . import forward as _forward
from . import merge as _merge
from ._errors import InvalidArgument, Unsupported
from ._masks import BlockMask

__all__ = ["Machine", "attention", "chunks", "decode", "estimate", "gather", "shard"]

_LAYOUTS, _SCHEMES = ("contiguous", "zigzag"), ("all_gather", "ring", "ulysses")


# ---- layouts -----------------------------------------------------------------------------------

def chunks(layout, rank, ranks, length):
    """[(start, tokens), ...]: where the `length` tokens of a rank are in a sequence of ranks * length.

    contiguous: rank r has tokens [r length, (r + 1) length). zigzag: of 2 ranks pieces, rank r has number r and, after it, number
    2 ranks - 1 - r, so that all ranks have the same work under a causal mask."""
    if layout == "contiguous":
        return [(rank * length, length)]
    half = length // 2
    return [(rank * half, half), ((2 * ranks - 1 - rank) * half, length - half)]


def _of_sequence(layout, ranks):
    """The pieces of all ranks, (rank, number within the rank), in the order of the sequence."""
    if layout == "contiguous":
        return [(r, 0) for r in range(ranks)]
    return [(r, 0) for r in range(ranks)] + [(r, 1) for r in reversed(range(ranks))]


def _check_layout(layout):
    if layout not in _LAYOUTS:
        raise InvalidArgument(f"layout is {layout!r}; accepted: {', '.join(_LAYOUTS)}")


def shard(x, *, group=None, layout="zigzag", dim=1):
    """This rank's tokens of x, which has all of them along `dim`: a copy. Sends nothing."""
    _check_layout(layout)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = len(_of_sequence(layout, ranks))
    if x.shape[dim] == 0 or x.shape[dim] % pieces:
        raise InvalidArgument(f"x has {x.shape[dim]} tokens along dimension {dim}; accepted: a multiple of {pieces}, for {ranks} ranks "
                              f"in layout {layout}")
    return torch.cat([x.narrow(dim, start, n) for start, n in chunks(layout, rank, ranks, x.shape[dim] // ranks)], dim)


def gather(x, *, group=None, layout="zigzag", dim=1):
    """All tokens, in order, of shards x that have as many tokens along `dim` on every rank."""
    _check_layout(layout)
    return _ordered(_all_gather(x, group)[0], layout, dim)


def _ordered(x, layout, dim):
    """[ranks, ...] -> [...] with the pieces along `dim` in the order of the sequence."""
    pieces = x.unflatten(dim + 1, (-1, x.shape[dim + 1])) if layout == "contiguous" else x.unflatten(dim + 1, (2, -1))
    return torch.cat([pieces[r].select(dim, half) for r, half in _of_sequence(layout, x.shape[0])], dim)


def _by_owner(x, layout, ranks, dim):
    """The reverse: [...] -> [ranks, ...]."""
    pieces = x.unflatten(dim, (len(_of_sequence(layout, ranks)), -1)).unbind(dim)
    owned = [[] for _ in range(ranks)]
    for piece, (r, half) in sorted(zip(pieces, _of_sequence(layout, ranks)), key=lambda entry: entry[1]):
        owned[r].append(piece)
    return torch.stack([torch.cat(of_rank, dim) for of_rank in owned])


# ---- communication -----------------------------------------------------------------------------

def _all_gather(x, group, asynchronous=False):
    """([ranks, *x.shape], the work to wait for or None)."""
    x = x.contiguous()
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    return out, dist.all_gather_into_tensor(out.flatten(), x.flatten(), group=group, async_op=asynchronous)


def _exchange(x, group):
    """[ranks, ...]: element r goes to rank r; the result's element r came from there."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _sum_of_ranks(x, group):
    """This rank's sum of all ranks' x[rank], in the order of ranks whatever the network does: equal bits in every run."""
    parts = _exchange(x, group)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _Passing:
    """Tensors on their way to the next rank of the ring, while those of the rank before arrive."""

    def __init__(self, tensors, group):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        after, before = (dist.get_global_rank(group or dist.group.WORLD, (rank + step) % ranks) for step in (1, -1))
        self.arriving = [torch.empty_like(x) for x in tensors]
        self.leaving = tensors
        self.works = dist.batch_isend_irecv(
            [operation for x, y in zip(tensors, self.arriving)
             for operation in (dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, y, before, group))])

    def wait(self):
        for work in self.works:
            work.wait()
        return self.arriving


def _agree(group, device, call):
    """Compares what call() -> {name: integer} returns on all ranks. Where it raises, or ranks differ, every rank raises."""
    mine, error = {}, None
    try:
        mine = call()
    except Exception as caught:
        error = caught
    ranks = dist.get_world_size(group)
    row = torch.zeros(48, dtype=torch.int64)
    row[0] = error is not None
    for n, value in enumerate(mine.values(), 1):
        row[n] = value
    rows = _all_gather(row.to(device), group)[0].cpu()
    if error is not None:
        raise error
    refused = [r for r in range(ranks) if rows[r, 0]]
    if refused:
        raise InvalidArgument(f"rank {refused[0]} of the group refused its arguments; its own error says why")
    for n, name in enumerate(mine, 1):
        for r in range(1, ranks):
            if rows[r, n] != rows[0, n]:
                raise InvalidArgument(f"{name} is {rows[0, n]} on rank 0 and {rows[r, n]} on rank {r} of the group; accepted: the same on "
                                      "all ranks")


def _number(value):
    """An integer that tells options apart."""
    if value is None:
        return -(1 << 40)
    if isinstance(value, float):
        return int(numpy.float64(value).view(numpy.int64))
    if isinstance(value, str):
        return int.from_bytes(value.encode()[:7], "little")
    return int(value)


# ---- which calls compute a rectangle of queries and keys -----------------------------------------

@dataclass
class _Call:
    """Queries [qa, qb) and keys [ka, kb) of the sequence, and the window of attn.forward for them: its last query is at its last key."""
    qa: int
    qb: int
    ka: int
    kb: int
    left: int
    right: int
    cu_q: list
    cu_k: list


def _rectangle(qa, qb, ka, kb, left, right, align):
    """The smallest call for what queries [qa, qb) see of keys [ka, kb) under a window on positions, or None."""
    if right >= 0:
        kb = min(kb, qb + right)
        qa = max(qa, (ka - right) // align[0] * align[0])
    if left >= 0:
        qb = min(qb, kb + left)
        if right >= 0:
            kb = min(kb, qb + right)
        ka = max(ka, (qa - left) // align[1] * align[1])
    if qa >= qb or ka >= kb:
        return None
    shift = kb - qb  # of the call's diagonal
    return _Call(qa, qb, ka, kb, left + shift if left >= 0 else -1, right - shift if right >= 0 else -1, [0, qb - qa], [0, kb - ka])


def _calls(queries, keys, documents, left, right, align=(1, 1)):
    """The calls for queries (start, tokens) and keys (start, tokens). Neighbouring documents with equal windows are one packed call."""
    calls = []
    for begin, end in documents:
        call = _rectangle(max(queries[0], begin), min(sum(queries), end), max(keys[0], begin), min(sum(keys), end), left, right, align)
        if call is None:
            continue
        last = calls[-1] if calls else None
        if last and (last.qb, last.kb, last.left, last.right) == (call.qa, call.ka, call.left, call.right):
            last.qb, last.kb = call.qb, call.kb
            last.cu_q.append(call.qb - last.qa)
            last.cu_k.append(call.kb - last.ka)
        else:
            calls.append(call)
    for call in calls:
        if len(call.cu_q) == 2:  # a side that hides nothing costs a kernel's time
            if call.left >= 0 and call.qb - 1 - (call.left - (call.kb - call.qb)) <= call.ka:
                call.left = -1
            if call.right >= 0 and call.qa + call.right + (call.kb - call.qb) >= call.kb - 1:
                call.right = -1
    return calls


# ---- block masks -------------------------------------------------------------------------------

_slices = weakref.WeakKeyDictionary()  # of a mask: those made for its calls


def _mask_slice(mask, qa, qb, ka, kb, heads):
    """The part of a mask for these queries, keys and query heads (first, count) or None for all."""
    key = qa, qb, ka, kb, heads
    made = _slices.setdefault(mask, {})
    if key not in made:
        kinds, index, bits, _, (bq, bk), device = mask.__reduce__()[1][1:]
        kinds, index, bits = kinds.copy(), index.copy(), list(bits)
        causal = {}  # diagonal of a block: its bits
        for row, column in sorted({(int(r), int(c)) for r, c in zip(*numpy.nonzero((kinds == BlockMask.CAUSAL).any((0, 1))))}):
            seen = numpy.arange(bk) + column * bk <= (numpy.arange(bq) + row * bq)[:, None]
            of_block = kinds[:, :, row, column]
            are = of_block == BlockMask.CAUSAL
            if seen.all() or not seen.any():
                of_block[are] = BlockMask.FULL if seen.all() else BlockMask.EMPTY
                continue
            offset = row * bq - column * bk
            if offset not in causal:
                causal[offset] = len(bits)
                words = numpy.zeros((bq, -(-bk // 32) * 32), bool)
                words[:, :bk] = seen
                bits.append(numpy.packbits(words, axis=1, bitorder="little").view("<u4"))
            of_block[are] = BlockMask.PARTIAL
            index[:, :, row, column][are] = causal[offset]
        rows, columns = slice(qa // bq, -(-qb // bq)), slice(ka // bk, -(-kb // bk))
        of_heads = slice(None) if heads is None or kinds.shape[1] == 1 else slice(heads[0], sum(heads))
        made[key] = BlockMask.from_kinds(numpy.ascontiguousarray(kinds[:, of_heads, rows, columns]), qb - qa, kb - ka, block_size=(bq, bk),
                                         index=numpy.ascontiguousarray(index[:, of_heads, rows, columns]) if bits else None,
                                         bits=numpy.stack(bits) if bits else None, device=device)
    return made[key]


# ---- this rank's part --------------------------------------------------------------------------

@dataclass
class _Options:
    """Those of a call of attention() that all of its parts have."""
    group: object
    scheme: str
    layout: str
    left: int
    right: int
    scale: float | None
    softcap: float
    documents: list | None  # [(begin, end), ...] of packed tokens, None: sequences
    block_mask: BlockMask | None
    head_pieces: int

    def places(self, q, rank=None):
        """The chunks of a rank's tokens."""
        ranks = dist.get_world_size(self.group)
        return chunks(self.layout, dist.get_rank(self.group) if rank is None else rank, ranks, q.shape[1])

    def calls(self, queries, keys):
        documents = self.documents if self.documents is not None else [(0, 1 << 40)]
        return _calls(queries, keys, documents, self.left, self.right, self.block_mask.block_size if self.block_mask else (1, 1))


class _Part:
    """Query rows of one rank and heads, whose calls see more and more keys. q [B, n, H, D]; chunks as chunks() returns them."""

    def __init__(self, options, places, q, slopes=None, heads=None):
        self.options, self.places, self.q, self.slopes, self.heads = options, places, q, slopes, heads

    def _each(self, k, v, k_place):
        """Calls of this rank's queries over keys k, v [B, m, Hkv, D] at one place: (call, rows of q, rows of k, arguments)."""
        first = 0
        for queries in self.places:
            for call in self.options.calls(queries, k_place):
                rows = slice(first + call.qa - queries[0], first + call.qb - queries[0])
                keys = slice(call.ka - k_place[0], call.kb - k_place[0])
                yield call, rows, keys, self._arguments(call)
            first += queries[1]

    def _arguments(self, call):
        options = {"scale": self.options.scale, "softcap": self.options.softcap}
        if call.left >= 0 or call.right > 0:
            options["window"] = call.left, call.right
        elif call.right == 0:
            options["causal"] = True
        if len(call.cu_q) > 2:
            options["cu_seqlens_q"], options["cu_seqlens_kv"] = (torch.tensor(x, dtype=torch.int32, device=self.q.device)
                                                                 for x in (call.cu_q, call.cu_k))
            options["max_seqlen_q"] = max(b - a for a, b in zip(call.cu_q, call.cu_q[1:]))
        if self.slopes is not None:
            options["alibi_slopes"] = self.slopes
            if call.kb != call.qb:  # else the call's positions are the sequence's
                options["query_start"] = torch.full((self.q.shape[0],), call.qa - call.ka, dtype=torch.int64, device=self.q.device)
                if call.left >= 0 or call.right >= 0:
                    shift = call.kb - call.qb
                    options.pop("causal", None)
                    options["window"] = (call.left - shift if call.left >= 0 else -1, call.right + shift if call.right >= 0 else -1)
        if self.options.block_mask:
            options["block_mask"] = _mask_slice(self.options.block_mask, call.qa, call.qb, call.ka, call.kb, self.heads)
        return options

    def start(self, dim_v):
        b, n, h, _ = self.q.shape
        self.out = self.q.new_zeros(b, n, h, dim_v, dtype=torch.float32)
        self.lse = self.q.new_full((b, h, n), -math.inf, dtype=torch.float32)
        self.done = []  # rows that hold something

    def add_keys(self, k, v, k_place):
        for call, rows, keys, options in self._each(k, v, k_place):
            out = self.out[:, rows]
            arrays = [self.q[:, rows], k[:, keys], v[:, keys], out]
            lse = self.lse[:, :, rows].contiguous()
            given = lse
            if len(call.cu_q) > 2:
                arrays, given = [x[0] for x in arrays], lse[0]
            *qkv, into = arrays
            fresh = not any(a < rows.stop and rows.start < b for a, b in self.done)
            if fresh or self.q.device.type == "cpu":
                _forward(*qkv, out=into, lse=given, accumulate=not fresh, **options)
                self.lse[:, :, rows] = lse
            else:
                merged, total = _merge([(into, given), _forward(*qkv, out_dtype="f32", return_lse=True, **options)])
                into.copy_(merged)
                self.lse[:, :, rows] = total
            self.done.append((rows.start, rows.stop))

    def result(self, sinks):
        """out f32 [B, n, H, Dv] and lse; the sinks' part of the denominator comes last, once."""
        if sinks is not None:
            lse = torch.logaddexp(self.lse, sinks[:, None].to(torch.float32))
            weight = torch.where(self.lse == -math.inf, 0.0, torch.exp(self.lse - lse))
            self.out *= weight.transpose(1, 2)[..., None]
            self.lse = lse
        return self.out, self.lse

    def start_gradients(self, d_out, d_lse, out, lse):
        if self.q.device.type == "cuda":
            d_out = d_out.to(self.q.dtype)  # as its kernels want it, and as it came
        self.d_out, self.d_lse, self.out, self.lse = d_out, d_lse, out, lse
        self.dq = torch.zeros_like(self.q, dtype=torch.float32, memory_format=torch.contiguous_format)

    def add_gradients(self, k, v, dk, dv, k_place):
        """Adds to dq, and to dk and dv f32 of k's and v's shapes."""
        for call, rows, keys, options in self._each(k, v, k_place):
            arrays = [self.d_out[:, rows], self.q[:, rows], k[:, keys], v[:, keys], self.out[:, rows]]
            statistics = [self.lse[:, :, rows].contiguous(), None if self.d_lse is None else self.d_lse[:, :, rows].contiguous()]
            into = [self.dq[:, rows], dk[:, keys], dv[:, keys]]
            if len(call.cu_q) > 2:
                arrays, into = ([x[0] for x in list_of] for list_of in (arrays, into))
                statistics = [x if x is None else x[0] for x in statistics]
            _backward(*arrays, statistics[0], d_lse=statistics[1], dq=into[0], dk=into[1], dv=into[2], accumulate=True, dtype="f32", **options)


def _pieces(x, n):
    """x [B, n, H, D] in n pieces of its heads."""
    return x.unflatten(2, (n, -1)).unbind(2)


def _gathered(k, v, options):
    """Yields K and V [B, S, heads, D] of the whole sequence, some heads at a time; the next heads arrive meanwhile."""
    pending = None
    for pair in [*zip(_pieces(k, options.head_pieces), _pieces(v, options.head_pieces)), None]:
        started = pair and [_all_gather(x, options.group, asynchronous=True) for x in pair]
        if pending:
            for _, work in pending:
                work.wait()
            yield [_ordered(x, options.layout, 1) for x, _ in pending]
        pending = started


def _parts_of_heads(options, q, slopes):
    """A _Part for each piece of heads, with its own slice of q."""
    n = q.shape[2] // options.head_pieces
    return [_Part(options, options.places(q), piece, None if slopes is None else slopes[i * n:(i + 1) * n].contiguous(), (i * n, n))
            for i, piece in enumerate(_pieces(q, options.head_pieces))]


def _all_gather_forward(options, q, k, v, slopes):
    parts = _parts_of_heads(options, q, slopes)
    for part, (all_k, all_v) in zip(parts, _gathered(k, v, options)):
        part.start(v.shape[3])
        part.add_keys(all_k, all_v, (0, all_k.shape[1]))
    return parts


def _all_gather_backward(options, q, k, v, out, lse, d_out, d_lse, slopes):
    ranks, dk, dv = dist.get_world_size(options.group), [], []
    parts = _parts_of_heads(options, q, slopes)
    pieces = [_pieces(x, options.head_pieces) for x in (d_out, out)]
    h = parts[0].q.shape[2]
    for i, (part, kv) in enumerate(zip(parts, _gathered(k, v, options))):
        part.start_gradients(pieces[0][i], None if d_lse is None else d_lse[:, i * h:(i + 1) * h], pieces[1][i], lse[:, i * h:(i + 1) * h])
        gradients = [torch.zeros_like(x, dtype=torch.float32) for x in kv]
        part.add_gradients(*kv, *gradients, (0, kv[0].shape[1]))
        for into, x in zip((dk, dv), gradients):
            into.append(_sum_of_ranks(_by_owner(x, options.layout, ranks, 1), options.group))
    return torch.cat([part.dq for part in parts], 2), torch.cat(dk, 2), torch.cat(dv, 2)


def _held(options, q, step):
    """Where the keys are that this rank holds at a step of the ring, and their rows in what it holds."""
    ranks = dist.get_world_size(options.group)
    first = 0
    for place in options.places(q, (dist.get_rank(options.group) - step) % ranks):
        yield place, slice(first, first + place[1])
        first += place[1]


def _ring_forward(options, q, k, v, slopes):
    part, held, ranks = _Part(options, options.places(q), q, slopes), [k.contiguous(), v.contiguous()], dist.get_world_size(options.group)
    part.start(v.shape[3])
    for step in range(ranks):
        passing = _Passing(held, options.group) if step < ranks - 1 else None
        for place, rows in _held(options, q, step):
            part.add_keys(held[0][:, rows], held[1][:, rows], place)
        if passing:
            held = passing.wait()
    return [part]


def _ring_backward(options, q, k, v, out, lse, d_out, d_lse, slopes):
    part, held, ranks = _Part(options, options.places(q), q, slopes), [k.contiguous(), v.contiguous()], dist.get_world_size(options.group)
    part.start_gradients(d_out, d_lse, out, lse)
    gradients = [torch.zeros_like(x, dtype=torch.float32) for x in held]
    for step in range(ranks):
        passing = _Passing(held, options.group) if step < ranks - 1 else None
        for place, rows in _held(options, q, step):
            part.add_gradients(held[0][:, rows], held[1][:, rows], gradients[0][:, rows], gradients[1][:, rows], place)
        if passing:
            held = passing.wait()
        if ranks > 1:  # after the last step they are where they belong
            gradients = _Passing(gradients, options.group).wait()
    return part.dq, *gradients


def _to_heads(x, options):
    """[B, n, H, D] of this rank's tokens -> [B, S, H / ranks, D] of its heads. Fewer heads than ranks are repeated."""
    ranks = dist.get_world_size(options.group)
    if x.shape[2] < ranks:
        x = x.repeat_interleave(ranks // x.shape[2], 2)
    return _ordered(_exchange(torch.stack(_pieces(x, ranks)), options.group), options.layout, 1)


def _to_tokens(x, options, heads):
    """The reverse. Of `heads` heads that were repeated, the sums."""
    ranks = dist.get_world_size(options.group)
    back = torch.cat(_exchange(_by_owner(x, options.layout, ranks, 1), options.group).unbind(0), 2)
    return back if back.shape[2] == heads else back.unflatten(2, (heads, -1)).sum(3)


def _of_my_heads(x, options):
    """The slice of [Hq] numbers."""
    if x is None:
        return None
    n = x.shape[0] // dist.get_world_size(options.group)
    return x[dist.get_rank(options.group) * n:][:n].contiguous()


def _ulysses_part(options, q, slopes):
    n = q.shape[2]
    return _Part(options, [(0, q.shape[1])], q, slopes, (dist.get_rank(options.group) * n, n))


class _Attention(torch.autograd.Function):
    """(out f32, lse) of this rank's queries."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, slopes, options):
        ctx.options, ctx.slopes = options, slopes
        ctx.set_materialize_grads(False)
        if options.scheme == "ulysses":
            mine = [_to_heads(x, options) for x in (q, k, v)]
            ctx.slopes = _of_my_heads(slopes, options)
            part = _ulysses_part(options, mine[0], ctx.slopes)
            part.start(v.shape[3])
            part.add_keys(*mine[1:], (0, mine[1].shape[1]))
            of_heads, lse_of_heads = part.result(_of_my_heads(sinks, options))
            ctx.kv_heads = k.shape[2]
            ctx.save_for_backward(*mine, of_heads, lse_of_heads, sinks)
            out = _to_tokens(of_heads, options, q.shape[2])
            lse = _to_tokens(lse_of_heads.transpose(1, 2)[..., None], options, q.shape[2])[..., 0].transpose(1, 2).contiguous()
            return out, lse
        run = _ring_forward if options.scheme == "ring" else _all_gather_forward
        parts, n = run(options, q, k, v, slopes), q.shape[2] // options.head_pieces
        results = [part.result(None if sinks is None else sinks[i * n:(i + 1) * n] if len(parts) > 1 else sinks)
                   for i, part in enumerate(parts)]
        out, lse = (torch.cat(x, dim) if len(x) > 1 else x[0] for x, dim in zip(zip(*results), (2, 1)))
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse, sinks = ctx.saved_tensors
        options = ctx.options
        if options.scheme == "ulysses":
            ranks = dist.get_world_size(options.group)
            shape = out.shape[0], out.shape[1] // ranks, out.shape[2] * ranks, out.shape[3]
            d_out = _to_heads(out.new_zeros(shape) if d_out is None else d_out, options)
            if d_lse is not None:
                d_lse = _to_heads(d_lse.transpose(1, 2)[..., None], options)[..., 0].transpose(1, 2)
            part = _ulysses_part(options, q, ctx.slopes)
            part.start_gradients(d_out.contiguous(), d_lse, out, lse)
            gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
            part.add_gradients(k, v, *gradients, (0, k.shape[1]))
            dq, dk, dv = (_to_tokens(x, options, heads)
                          for x, heads in zip((part.dq, *gradients), (shape[2], ctx.kv_heads, ctx.kv_heads)))
        else:
            d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
            run = _ring_backward if options.scheme == "ring" else _all_gather_backward
            dq, dk, dv = run(options, q, k, v, out, lse, d_out, d_lse, ctx.slopes)
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            delta = (d_out * out).sum(3).transpose(1, 2)
            if d_lse is not None:
                delta = delta - d_lse
            of_heads = -(torch.exp(_my(sinks, out, options)[:, None] - lse) * delta).nan_to_num().sum((0, 2))
            d_sinks = of_heads
            if options.scheme == "ulysses":
                d_sinks = torch.zeros_like(sinks)
                n, rank = of_heads.shape[0], dist.get_rank(options.group)
                d_sinks[rank * n:(rank + 1) * n] = of_heads
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None


def _my(sinks, out, options):
    return sinks if sinks.shape[0] == out.shape[2] else _of_my_heads(sinks, options)


# ---- choice --------------------------------------------------------------------------------------

@dataclass
class Machine:
    """What estimate() knows of the GPUs. Rates are those of a long call; docs/distributed.md says what they were fitted to."""
    flops: float = 737e12  # bf16 forward of one GPU over a long sequence
    half_tokens: float = 250  # a call of this many queries runs at half that rate
    pair: float = 65e9  # bytes/s from one GPU of a host to another one
    bandwidth: float = 130e9  # bytes/s that one GPU receives from all GPUs of its host
    latency: float = 60e-6  # of one collective or one step of a ring
    memory: float = 2.5e12  # bytes/s of merging
    ranks_of_host: int = 8
    network: float = 40e9  # bytes/s of a GPU between hosts: 80 % of 400 Gbit/s


def estimate(ranks, tokens, *, heads_q, heads_kv, head_dim, head_dim_v=None, batch=1, causal=True, bytes_per_element=2, machine=Machine(),
             head_pieces=None):
    """{scheme: seconds} of a forward call over `tokens` tokens of each sequence in all; a scheme that cannot run is not in it."""
    dim_v = head_dim_v or head_dim
    work = 2 * batch * heads_q * tokens * tokens * (head_dim + dim_v) * (0.5 if causal else 1)
    rows = tokens / ranks
    rate = machine.flops * rows / (rows + machine.half_tokens)
    compute = work / ranks / rate
    width, hop = min(machine.bandwidth, machine.pair * (ranks - 1)), machine.pair
    if ranks > machine.ranks_of_host:
        width = hop = machine.network
    of_rank = batch * rows * heads_kv * (head_dim + dim_v) * bytes_per_element  # K and V
    arrive = (ranks - 1) * of_rank / width if ranks > 1 else 0
    pieces = head_pieces or _default_pieces(heads_kv)
    # Of the gather, the first piece of heads and what no computation hides is waited for.
    found = {"all_gather": machine.latency * pieces + arrive / pieces + max(arrive * (pieces - 1) / pieces, compute * (pieces - 1) / pieces)
             + compute / pieces}
    # A step is a call over 1 / ranks of the keys; all but the first read, merge and write f32 rows.
    merge = 3 * batch * rows * heads_q * dim_v * 4 / machine.memory
    step = compute / ranks * (1 + machine.half_tokens / rows)
    found["ring"] = ranks * machine.latency + step + (ranks - 1) * max(step + merge, of_rank / hop)
    if _splits(heads_q, heads_kv, ranks):
        repeated = max(1, ranks // heads_kv)
        sent = batch * rows * ((heads_q + heads_kv * repeated) * (head_dim + dim_v)) * bytes_per_element * (ranks - 1) / ranks
        whole = work / ranks / (machine.flops * tokens / (tokens + machine.half_tokens))
        found["ulysses"] = 4 * machine.latency + (sent / width if ranks > 1 else 0) + whole
    return found


def _default_pieces(heads_kv):
    """Head pieces of an all-gather: up to four, so that a quarter of it is waited for."""
    return math.gcd(heads_kv, 4)


def _splits(heads_q, heads_kv, ranks):
    return heads_q % ranks == 0 and (heads_kv % ranks == 0 or ranks % heads_kv == 0)


# ---- prefill and training ------------------------------------------------------------------------

def attention(q, k, v, *, group=None, scheme="auto", layout="zigzag", causal=False, window=(-1, -1), scale=None, softcap=0.0,
              alibi_slopes=None, sinks=None, block_mask=None, cu_seqlens=None, out_dtype=None, return_lse=False, head_pieces=None):
    """attn.forward(q, k, v) over sequences of which every rank of `group` has the same number of tokens -> its rows of out, or (out, lse).

    q [B, n, Hq, D], k [B, n, Hkv, D], v [B, n, Hkv, Dv] on this rank, as shard() with `layout` cuts them; out [B, n, Hq, Dv],
    lse f32 [B, Hq, n]. Differentiable in q, k, v and sinks: dk and dv are on the rank of their keys. The gradient of sinks is that of
    this rank's queries (ulysses: heads); their sum over ranks is the whole. Equal calls give equal bits, forward and backward.

    group              of torch.distributed, None: the default one
    scheme             "all_gather": K and V come to every rank, some heads at a time, and the next ones while these are computed.
                       "ring": K and V pass from rank to rank while the last ones are computed; results are merged. Takes the least
                       memory. "ulysses": queries, keys and values are exchanged so that each rank has some heads of all tokens;
                       Hq is a multiple of the ranks, and Hkv too or a divisor of them. "auto": the fastest by estimate()
    layout             "zigzag" or "contiguous", see chunks()
    causal, window, scale, softcap  as in attn.forward, on the whole sequence
    alibi_slopes       f32 [Hq]; schemes other than ulysses take them on the CPU alone, without gradients and cu_seqlens
    sinks              f32 [Hq], the same on all ranks
    block_mask         a BlockMask of the whole sequence on this device, whose blocks divide the n tokens of a rank (zigzag: n / 2)
    cu_seqlens         a list of integers from 0 up to at most ranks * n: documents, one after the other in the whole sequence. q, k, v are
                       then packed, [n, H, D], out [n, Hq, Dv], lse [Hq, n]; tokens after the last document have out 0 and lse -inf
    out_dtype          a torch.dtype, None: q's. Partial results are f32 in any case
    head_pieces        all_gather: in how many pieces of heads, a divisor of Hkv; None: up to 4

    Errors: attn.InvalidArgument or attn.Unsupported on every rank if arguments are refused on one or differ; those of
    torch.distributed if a rank is gone."""
    rank_options = {}

    def check():
        _check_layout(layout)
        if scheme != "auto" and scheme not in _SCHEMES:
            raise InvalidArgument(f"scheme is {scheme!r}; accepted: auto, {', '.join(_SCHEMES)}")
        dims = 4 if cu_seqlens is None else 3
        for name, x in ("q", q), ("k", k), ("v", v):
            if x.dim() != dims:
                raise InvalidArgument(f"{name} has shape {list(x.shape)}; accepted: {'[B, n, H, D]' if dims == 4 else '[n, H, D], with cu_seqlens'}")
            if x.shape[:-2] != q.shape[:-2] or x.device != q.device:
                raise InvalidArgument(f"{name} has shape {list(x.shape)} on {x.device}; accepted: q's batch and tokens, {list(q.shape[:-2])}, on "
                                      f"{q.device}")
        n, heads, heads_kv = q.shape[-3], q.shape[-2], k.shape[-2]
        ranks = dist.get_world_size(group)
        if n == 0 or layout == "zigzag" and n % 2:
            raise InvalidArgument(f"q has {n} tokens on this rank; accepted in layout {layout}: {'an even number' if n else '1 or more'}")
        if heads_kv == 0 or heads % heads_kv or v.shape[-2] != heads_kv:
            raise InvalidArgument(f"q has {heads} heads, k {heads_kv}, v {v.shape[-2]}; accepted: k's for v, a multiple for q")
        if scheme == "ulysses" and not _splits(heads, heads_kv, ranks):
            raise InvalidArgument(f"scheme is ulysses with {heads} and {heads_kv} heads on {ranks} ranks; accepted: query heads that are a "
                                  "multiple of the ranks, K/V heads too or a divisor of them")
        pieces = _default_pieces(heads_kv) if head_pieces is None else head_pieces
        if pieces < 1 or heads_kv % pieces:
            raise InvalidArgument(f"head_pieces is {pieces}; accepted: divisors of {heads_kv}, the heads of k")
        documents = None
        if cu_seqlens is not None:
            offsets = [int(x) for x in cu_seqlens]
            if not offsets or offsets[0] != 0 or any(a > b for a, b in zip(offsets, offsets[1:])) or offsets[-1] > n * ranks:
                raise InvalidArgument(f"cu_seqlens is {offsets[:8]}{' ...' if len(offsets) > 8 else ''}; accepted: integers from 0 that do not "
                                      f"decrease, up to {n * ranks}")
            if block_mask is not None:
                raise InvalidArgument("block_mask is given with cu_seqlens; accepted: one of them")
            documents = list(zip(offsets, offsets[1:]))
        if block_mask is not None and tuple(block_mask.shape[2:]) != (n * ranks, n * ranks):
            raise InvalidArgument(f"block_mask has shape {block_mask.shape}; accepted: {n * ranks} queries and keys")
        part = n if layout == "contiguous" else n // 2
        if block_mask is not None and any(part % size for size in block_mask.block_size):
            raise InvalidArgument(f"block_mask has blocks of {block_mask.block_size}, and parts of the sequence have {part} tokens; accepted: "
                                  "blocks that divide them")
        for name, x in ("alibi_slopes", alibi_slopes), ("sinks", sinks):
            if x is not None and tuple(x.shape) != (heads,):
                raise InvalidArgument(f"{name} has shape {list(x.shape)}; accepted: [Hq] = [{heads}]")
        left, right = window
        if causal:
            right = 0
        chosen = scheme
        if scheme == "auto":
            seconds = estimate(ranks, n * ranks, heads_q=heads, heads_kv=heads_kv, head_dim=q.shape[-1], head_dim_v=v.shape[-1],
                               batch=q.shape[0] if dims == 4 else 1, causal=right == 0, bytes_per_element=q.element_size(),
                               head_pieces=pieces)
            chosen = min(seconds, key=seconds.get)
            if alibi_slopes is not None and "ulysses" in seconds:
                chosen = "ulysses"
        gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
        if alibi_slopes is not None and chosen != "ulysses":
            if gradients:
                raise Unsupported(f"alibi_slopes with gradients in scheme {chosen}; accepted: scheme ulysses, or torch.no_grad()")
            if documents is not None:
                raise Unsupported(f"alibi_slopes with cu_seqlens in scheme {chosen}; accepted: scheme ulysses")
            if q.device.type != "cpu":
                raise Unsupported(f"alibi_slopes on {q.device} in scheme {chosen}; accepted: scheme ulysses, or tensors of the CPU")
        rank_options.update(group=group, scheme=chosen, layout=layout, left=left, right=right, scale=scale, softcap=softcap,
                            documents=documents, block_mask=block_mask, head_pieces=pieces if chosen == "all_gather" else 1)
        numbers = {f"{name}.shape[{i}]": size for name, x in (("q", q), ("k", k), ("v", v)) for i, size in enumerate(x.shape)}
        numbers.update({"q.dtype": q.element_size() * 2 + q.dtype.is_floating_point, "scheme": _number(chosen), "layout": _number(layout),
                        "window[0]": left, "window[1]": right, "scale": _number(scale), "softcap": _number(float(softcap)),
                        "alibi_slopes given": alibi_slopes is not None, "sinks given": sinks is not None,
                        "block_mask given": block_mask is not None, "head_pieces": pieces,
                        "cu_seqlens": hash(tuple(documents)) if documents is not None else 0,
                        "gradients wanted": gradients})
        return numbers

    _agree(group, q.device, check)
    options = _Options(**rank_options)
    tensors = (q, k, v) if cu_seqlens is None else tuple(x[None] for x in (q, k, v))
    out, lse = _Attention.apply(*tensors, sinks, alibi_slopes, options)
    out = out.to(out_dtype or q.dtype)
    if cu_seqlens is not None:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


# ---- decode --------------------------------------------------------------------------------------

def decode(q, k, v, *, group=None, heads="split", seqlens_kv=None, block_table=None, interleave=None, total_seqlens=None, causal=True,
           window=(-1, -1), scale=None, softcap=0.0, alibi_slopes=None, sinks=None, k_descale=None, v_descale=None, k_type=None, v_type=None,
           k_scale=None, v_scale=None, out_dtype=None, return_lse=False):
    """Attention of a few queries of each sequence over a cache whose keys are spread over the ranks of `group` -> out, or (out, lse).

    q [B, Sq, Hq, D]; k [B, S, Hkv, D] and v, or pages with block_table, with all K/V heads and this rank's keys; a rank may have none
    of a sequence. Each rank computes all heads over its keys; f32 results go to the rank that wants them, which merges them exactly,
    in the order of ranks. No gradients.

    heads              "split": q has this rank's query heads, in the order of ranks, and so has out [B, Sq, Hq, Dv]; lse f32 [B, Hq, Sq].
                       alibi_slopes and sinks have all heads, ranks * Hq. "all": every rank has all query heads, and gets all of out
    seqlens_kv         i32 [B]: this rank's keys of each sequence
    interleave         key c of rank r is at position (c // interleave * ranks + r) * interleave + c % interleave: 1 token by token, or
                       a page's size. With total_seqlens i32 [B], the keys of each sequence on all ranks: needed by several queries
                       with causal, by windows and by alibi_slopes, which compare positions (on the CPU only)
    causal             query i is at position total_seqlens - Sq + i; a single query sees all keys without positions
    others             as in attn.forward; the cache may have any of its types

    Errors as attention()."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    positions = causal and q.shape[1] > 1 or tuple(window) != (-1, -1) or alibi_slopes is not None

    def check():
        if heads not in ("split", "all"):
            raise InvalidArgument(f"heads is {heads!r}; accepted: split, all")
        if q.dim() != 4:
            raise InvalidArgument(f"q has shape {list(q.shape)}; accepted: [B, Sq, Hq, D]")
        if positions and (interleave is None or total_seqlens is None):
            raise InvalidArgument("interleave or total_seqlens is None; accepted where positions count (several causal queries, a window, "
                                  "alibi_slopes): both")
        total = q.shape[2] * (ranks if heads == "split" else 1)
        for name, x in ("alibi_slopes", alibi_slopes), ("sinks", sinks):
            if x is not None and tuple(x.shape) != (total,):
                raise InvalidArgument(f"{name} has shape {list(x.shape)}; accepted: [{total}], all query heads")
        return {**{f"q.shape[{i}]": n for i, n in enumerate(q.shape)}, "q.dtype": q.element_size(), "k's heads": k.shape[-2],
                "k.shape[-1]": k.shape[-1], "v.shape[-1]": v.shape[-1], "heads": _number(heads), "causal": bool(causal),
                "window[0]": window[0], "window[1]": window[1], "scale": _number(scale), "softcap": _number(float(softcap)),
                "interleave": _number(interleave), "alibi_slopes given": alibi_slopes is not None, "sinks given": sinks is not None}

    _agree(group, q.device, check)
    all_q = torch.cat(_all_gather(q, group)[0].unbind(0), 2) if heads == "split" else q
    options = dict(seqlens_kv=seqlens_kv, block_table=block_table, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
                   k_descale=k_descale, v_descale=v_descale, k_type=k_type, v_type=v_type, k_scale=k_scale, v_scale=v_scale)
    if positions:
        start = total_seqlens.to(torch.int64) - q.shape[1]
        options.update(causal=causal, window=window, query_start=start, key_start=torch.zeros_like(start),
                       key_places=(interleave, ranks, rank))
    with torch.no_grad():
        out, lse = _forward(all_q, k, v, out_dtype="f32", return_lse=True, **options)
        if heads == "split":
            out, lse = (_exchange(torch.stack(x.chunk(ranks, dim)), group) for x, dim in ((out, 2), (lse, 1)))
        else:
            out, lse = (_all_gather(x, group)[0] for x in (out, lse))
        part = _Part(None, None, q)
        part.out, part.lse = _merge([(x, y) for x, y in zip(out, lse)])
        if sinks is not None and heads == "split":
            sinks = sinks[rank * q.shape[2]:][:q.shape[2]]
        out, lse = part.result(sinks)
    out = out.to(out_dtype or q.dtype)
    return (out, lse) if return_lse else out
