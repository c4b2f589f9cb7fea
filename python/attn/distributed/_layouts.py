"""Where the tokens of each rank are in a sequence."""
import functools
import math

import numpy
import torch

from .._errors import InvalidArgument

LAYOUTS = "contiguous", "zigzag", "documents"


def chunks(layout, rank, ranks, length, cu_seqlens=None):
    """[(start, tokens), ...]: where the `length` tokens of a rank are in a sequence of ranks * length, in the rank's order.

    contiguous: rank r has tokens [r length, (r + 1) length). zigzag: of 2 ranks pieces, rank r has number r and, after it, number
    2 ranks - 1 - r, so that all ranks have the same work under a causal mask. documents: the same of each document of cu_seqlens, one
    document after the other, and of the tokens after the last one. Pieces of documents end at multiples of 128 tokens where that
    leaves all ranks the same number of tokens; a rank may have none of a document."""
    if layout == "contiguous":
        return [(rank * length, length)]
    if layout == "documents":
        return [(start, tokens) for _, start, tokens in of_documents(checked_offsets(cu_seqlens, ranks * length), ranks, ranks * length)[rank]]
    half = length // 2
    return [(rank * half, half), ((2 * ranks - 1 - rank) * half, length - half)]


def checked_offsets(cu_seqlens, total):
    """cu_seqlens as a tuple."""
    offsets = tuple(int(x) for x in cu_seqlens) if cu_seqlens is not None else ()
    if not offsets or offsets[0] != 0 or any(a > b for a, b in zip(offsets, offsets[1:])) or offsets[-1] > total:
        raise InvalidArgument(f"cu_seqlens is {list(offsets[:8]) if offsets else cu_seqlens}{' ...' if len(offsets) > 8 else ''}; accepted: "
                              f"integers from 0 that do not decrease, up to {total}")
    return offsets


_TILE = 128  # queries of a kernel's tile: a piece that does not end with one wastes the rest


@functools.lru_cache(32)
def of_documents(offsets, ranks, total):
    """For each rank [(document, start, tokens), ...], all with equally many tokens; the last document is what follows offsets[-1]."""
    ends = [*offsets[1:], total]
    pieces = 2 * ranks
    sizes = [[(end - begin) // _TILE // pieces * _TILE] * pieces for begin, end in zip(offsets, ends)]
    tokens = [sum(x[r] + x[-1 - r] for x in sizes) for r in range(ranks)]
    work = [0.0] * ranks  # pairs of queries and keys under a causal mask, less what all ranks have

    def give(size, rank, piece, count):
        if size is not sizes[-1]:
            work[rank] += count * (sum(size[:piece + 1]) + 0.5 * count)
            for later in range(piece + 1, pieces):
                work[min(later, pieces - 1 - later)] += size[later] * count
        size[piece] += count
        tokens[rank] += count

    longest = sorted(range(len(sizes)), key=lambda d: offsets[d] - ends[d])
    for d in longest:
        size, left, given = sizes[d], ends[d] - offsets[d] - sum(sizes[d]), set()
        while left:
            # Of the ranks with few tokens the one with the least work, of its two pieces the one that brings it nearer to the others'.
            some = [r for r in range(ranks) if r not in given]
            few = min(tokens[r] for r in some) + _TILE
            rank = min((r for r in some if tokens[r] < few), key=lambda r: (work[r], tokens[r]))
            given.add(rank)
            if len(given) == ranks:
                given.clear()
            count = min(left, _TILE)
            give(size, rank, rank if work[rank] * ranks > sum(work) else pieces - 1 - rank, count)
            left -= count
    # Ranks differ by some tiles at most now. Tokens that see few keys even them out, of long documents if there are.
    want = total // ranks
    for d in longest:
        for rank in range(ranks):
            for other in range(ranks):
                for piece in rank, pieces - 1 - rank:
                    count = min(tokens[rank] - want, want - tokens[other], sizes[d][piece])
                    if count > 0:
                        give(sizes[d], rank, piece, -count)
                        give(sizes[d], other, other, count)
        if all(n == want for n in tokens):
            break
    found = [[] for _ in range(ranks)]
    for d, size in enumerate(sizes):
        start = offsets[d]
        for piece, n in enumerate(size):
            of_rank = found[min(piece, pieces - 1 - piece)]
            if n and of_rank and of_rank[-1][0] == d and sum(of_rank[-1][1:]) == start:
                of_rank[-1] = d, of_rank[-1][1], of_rank[-1][2] + n
            elif n:
                of_rank.append((d, start, n))
            start += n
    return tuple(tuple(x) for x in found)


@functools.lru_cache(32)
def _order_of_documents(offsets, ranks, total):
    """(of each token its place among all ranks' tokens, rank by rank; of each such place its token), i64 on the host."""
    token = numpy.concatenate([numpy.arange(start, start + n) for rank in of_documents(offsets, ranks, total) for _, start, n in rank])
    place = numpy.empty_like(token)
    place[token] = numpy.arange(total)
    return torch.from_numpy(place), torch.from_numpy(token)


def _select(x, dim, index, out):
    """torch.index_select, by 16 bytes at a time where a token's elements are in one piece: on GPUs its time is by elements."""
    wide, into = x, out
    if math.prod(x.shape[dim + 1:]) * x.element_size() % 16 == 0 and x.is_contiguous():
        wide, into = (y.flatten(dim + 1).view(torch.uint8).view(torch.complex128) if y.dim() > dim + 1 else y for y in (x, out))
    torch.index_select(wide, dim, index, out=into)
    return out


class Order:
    """Where the tokens of ranks are in the sequence. offsets: cu_seqlens, of layout documents."""

    def __init__(self, layout, ranks, total, offsets, device):
        self.layout, self.ranks, self.total, self.offsets = layout, ranks, total, offsets
        if layout == "documents":
            self.place, self.token = (x.to(device) for x in _order_of_documents(offsets, ranks, total))

    def pieces(self, rank):
        return chunks(self.layout, rank, self.ranks, self.total // self.ranks, self.offsets)

    @functools.cached_property
    def runs(self):
        """[(rank, the first of its tokens, how many), ...] in the order of the sequence."""
        found = []
        for rank in range(self.ranks):
            at = 0
            for start, n in self.pieces(rank):
                found.append((start, rank, at, n))
                at += n
        return [x[1:] for x in sorted(found)]

    def whole(self, x, dim, room=0):
        """[ranks, ...] -> [...] with the tokens along `dim` in the order of the sequence. A view where no element need move.

        room: this many tokens before and after them that hold anything, with layout documents."""
        if x.shape[0] == 1 and room == 0:
            return x[0]
        if self.layout == "contiguous":
            return x.movedim(0, dim).flatten(dim, dim + 1)
        if self.layout == "documents":
            x = x.movedim(0, dim).flatten(dim, dim + 1)
            out = x.new_empty(*x.shape[:dim], x.shape[dim] + 2 * room, *x.shape[dim + 1:])
            _select(x, dim, self.place, out.narrow(dim, room, self.total))
            return out
        first, second = x.unflatten(dim + 1, (2, -1)).unbind(dim + 1)
        return torch.cat([*first.unbind(0), *reversed(second.unbind(0))], dim)

    def by_rank(self, x):
        """The reverse for tokens in dimension 1: [B, S, ...] -> [ranks, B, S / ranks, ...]."""
        if self.layout == "contiguous":
            return x.unflatten(1, (self.ranks, -1)).movedim(1, 0)
        if self.layout == "documents":
            return _select(x, 1, self.token, torch.empty_like(x, memory_format=torch.contiguous_format)).unflatten(1, (self.ranks, -1)).movedim(1, 0)
        pieces = x.unflatten(1, (2 * self.ranks, -1)).unbind(1)
        by_rank = torch.stack([piece for r in range(self.ranks) for piece in (pieces[r], pieces[-1 - r])])
        return by_rank.unflatten(0, (self.ranks, 2)).transpose(1, 2).flatten(2, 3)


def check_layout(layout, cu_seqlens, total):
    """cu_seqlens as a tuple with layout documents, else None."""
    if layout not in LAYOUTS:
        raise InvalidArgument(f"layout is {layout!r}; accepted: {', '.join(LAYOUTS)}")
    if layout != "documents":
        return None
    if cu_seqlens is None:
        raise InvalidArgument("cu_seqlens is None; accepted in layout documents: a list of integers")
    return checked_offsets(cu_seqlens, total)
