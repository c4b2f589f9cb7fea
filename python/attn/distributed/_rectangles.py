"""Which calls of attn.forward compute what a rank's queries see of some keys, and the slices of block masks for them."""
import weakref
from dataclasses import dataclass

import numpy

from .._masks import BlockMask


@dataclass
class Rectangle:
    """A call of attn.forward: queries [qa, qb) and keys [ka, kb) of the sequence, and its window: its last query is at its last key."""
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
    return Rectangle(qa, qb, ka, kb, left + shift if left >= 0 else -1, right - shift if right >= 0 else -1, [0, qb - qa], [0, kb - ka])


def calls_of(queries, keys, documents, left, right, align=(1, 1)):
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


def pairs_of_documents(queries, keys, own, documents, left, right):
    """What this rank's pieces [(document, start, tokens), ...] see of a rank's pieces, or of whole documents with keys None.

    As Rectangle, with queries numbered as this rank has them, and keys as their rank does. own: the keys are this rank's too."""
    of_ranks = [{}, {}]
    for by_document, pieces in zip(of_ranks, (queries, keys or ())):
        at = 0
        for d, start, n in pieces:
            by_document.setdefault(d, []).append((start, n, at))
            at += n
    found = []
    for d, (begin, end) in enumerate(documents):
        mine = of_ranks[0].get(d, [])
        theirs = [(begin, end - begin, begin)] if keys is None else of_ranks[1].get(d, [])
        seen = []
        for start, n, at in mine:
            for k_start, k_n, k_at in theirs:
                pair = _rectangle(start, start + n, k_start, k_start + k_n, left, right, (1, 1))
                if pair:
                    pair.qa, pair.qb = (x - start + at for x in (pair.qa, pair.qb))
                    pair.ka, pair.kb = (x - k_start + k_at for x in (pair.ka, pair.kb))
                    seen.append(pair)
        if seen and keys is not None and left < 0 and right <= 0:  # all of these queries see all of these keys, or all before them
            diagonal = 0 if own and right == 0 else -1
            seen = [Rectangle(seen[0].qa, seen[-1].qb, min(x.ka for x in seen), max(x.kb for x in seen), -1, diagonal, [], [])]
        found += seen
    return found


def packed_calls(pairs):
    """Packed calls over these pairs, whose queries are all of a rank's: sequences without keys or without queries are what is between.

    A call's pairs have one window, and increasing queries and keys."""
    calls = []
    for pair in pairs:
        fitting = (x for x in calls if (x.left, x.right) == (pair.left, pair.right) and x.qb <= pair.qa and x.kb <= pair.ka)
        call = next(fitting, None)
        if call is None:
            call = Rectangle(0, 0, 0, 0, pair.left, pair.right, [0], [0])
            calls.append(call)
        for qb, kb in (pair.qa, call.kb), (pair.qa, pair.ka), (pair.qb, pair.kb):
            if (qb, kb) != (call.qb, call.kb):
                call.qb, call.kb = qb, kb
                call.cu_q.append(qb)
                call.cu_k.append(kb)
    return calls


_slices = weakref.WeakKeyDictionary()  # of a mask: those made for its calls


def mask_slice(mask, qa, qb, ka, kb, heads):
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
