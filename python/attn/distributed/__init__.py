"""Attention over sequences that are spread over the ranks of a torch.distributed group: NCCL for CUDA tensors, gloo for the CPU's.

attention() is prefill and training: every rank has the same number of tokens of each sequence, and gets its own rows of the result.
decode() is for caches that are spread over ranks. Partial results are f32 and merged exactly; the result is rounded once. All ranks
of the group call these functions with equal options, and in backward too. A rank whose arguments differ or are refused makes the call
fail on every rank; compare="once" checks this only for calls unlike earlier ones. A rank that is gone makes it fail within the group's
time-out, as torch.distributed does; synchronize() notices one for which GPUs wait.
"""
import contextlib
import functools
import hashlib
import itertools
import math
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from .. import backward as _backward
from .. import forward as _forward
from .. import merge as _merge
from .._errors import InvalidArgument, Unsupported
from ._estimate import Machine, are_pieces, estimate, pieces_of_heads, splits
from ._layouts import Order, check_layout, checked_offsets, chunks, of_documents
from ._rectangles import Rectangle, calls_of, mask_slice, packed_calls, pairs_of_documents

__all__ = ["Machine", "attention", "chunks", "decode", "estimate", "gather", "shard", "synchronize"]

_SCHEMES = "all_gather", "ring", "ulysses"


# ---- layouts -----------------------------------------------------------------------------------

def shard(x, *, group=None, layout="zigzag", dim=1, cu_seqlens=None):
    """This rank's tokens of x, which has all of them along `dim`: a copy. cu_seqlens: with layout documents. Sends nothing."""
    rank, ranks, total = dist.get_rank(group), dist.get_world_size(group), x.shape[dim]
    offsets = check_layout(layout, cu_seqlens, total)
    multiple = 2 * ranks if layout == "zigzag" else ranks
    if total == 0 or total % multiple:
        raise InvalidArgument(f"x has {total} tokens along dimension {dim}; accepted: a multiple of {multiple}, for {ranks} ranks "
                              f"in layout {layout}")
    return torch.cat([x.narrow(dim, start, n) for start, n in chunks(layout, rank, ranks, total // ranks, offsets)], dim)


def gather(x, *, group=None, layout="zigzag", dim=1, cu_seqlens=None):
    """All tokens, in order, of shards x that have as many tokens along `dim` on every rank. cu_seqlens: with layout documents."""
    mine = _of_group(group)
    total = x.shape[dim] * mine.ranks
    order = Order(layout, mine.ranks, total, check_layout(layout, cu_seqlens, total), x.device)
    return order.whole(_of_all_ranks(x, mine), dim)


# ---- what is kept of a group ---------------------------------------------------------------------

_MOST_CALLS, _MOST_COMPARED = 128, 1024  # of a group


class _Kept(OrderedDict):
    """At most `most` entries; the one that was used longest ago goes first."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def find(self, key):
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

    def keep(self, key, value):
        self[key] = value
        if len(self) > self.most:
            self.popitem(last=False)


class _Group:
    """A group of torch.distributed, and what its calls leave for later ones: parts that depend on shapes and options alone.

    Only calls that all ranks agreed on change `compared`, so it is the same on all ranks that make the same calls."""

    def __init__(self, group):
        self._group = weakref.ref(group)  # which this must not keep from ending
        self._takes_cpu, self._side = "cpu:" in dist.get_backend_config(group), None
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidArgument("this process is not a rank of the group; accepted: groups that it is in")
        self.after, self.before = (dist.get_global_rank(group, (self.rank + step) % self.ranks) for step in (1, -1))
        self.calls = _Kept(_MOST_CALLS)
        self.of_masks = weakref.WeakKeyDictionary()  # what depends on a mask goes with it
        self.compared = _Kept(_MOST_COMPARED)
        self.failed = None  # why no call can use the group any more
        self.peers = {}  # by device and use: memory that all ranks read
        self.streams = {}  # by device

    @property
    def group(self):
        return self._group()

    @property
    def channel(self):
        """The group if it takes the CPU's tensors, else one of gloo with the same ranks: comparisons do not wait for a GPU."""
        if self._takes_cpu:
            return self.group
        if self._side is None:
            self._side = dist.new_group(dist.get_process_group_ranks(self.group), timeout=_time_out(self.group), backend="gloo",
                                        use_local_synchronization=True, group_desc="attn.distributed")
        return self._side

    def streams_aside(self, device, count):
        """Streams of a GPU for kernels that run at the same time as those of the current one, None for the CPU."""
        if device.type != "cuda":
            return None
        streams = self.streams.setdefault(device, [])
        while len(streams) < count:
            streams.append(torch.cuda.Stream(device))
        return streams[:count]

    def agree(self, facts, number, error, once):
        """Compares facts {name: value}, whose hash is number, over the ranks. Where one has an error, or they differ, every rank raises."""
        if self.failed:
            raise dist.DistBackendError(self.failed)
        if once and error is None and self.compared.find(number):
            return
        mine = torch.tensor([[error is not None, number]], dtype=torch.int64, device="cpu")
        rows = mine.new_empty(self.ranks, 2)
        dist.all_gather_into_tensor(rows, mine, group=self.channel)
        rows = rows.tolist()
        if error is not None:
            raise error
        for r, (refused, _) in enumerate(rows):
            if refused:
                raise InvalidArgument(f"rank {r} of the group refused its arguments; its own error says why")
        if any(row != rows[0] for row in rows):
            self.differ(facts)
        self.compared.keep(number, True)

    def differ(self, facts):
        """Raises an error that says in what the ranks differ."""
        of_ranks = [None] * self.ranks
        dist.all_gather_object(of_ranks, facts, group=self.channel)
        for name in of_ranks[0]:
            for r, others in enumerate(of_ranks):
                if others.get(name) != of_ranks[0][name]:
                    raise InvalidArgument(f"{name} is {of_ranks[0][name]} on rank 0 and {others.get(name)} on rank {r} of the group; accepted: "
                                          "the same on all ranks")
        raise InvalidArgument("the ranks of the group differ in their arguments; accepted: the same on all ranks")


_groups = weakref.WeakKeyDictionary()
_USUAL = dist.constants.default_pg_timeout


def _of_group(group):
    group = group or dist.group.WORLD
    found = _groups.get(group) if group else None
    if found is None:
        found = _Group(group)
        _groups[group] = found
    return found


def _time_out(group):
    """A group's time-out, or None for gloo's own. torch.distributed keeps it, but has no public name for it."""
    for device in group._device_types:
        found = getattr(group._get_backend(device).options, "_timeout", None)
        if found is not None:
            return found
    return None


def _number(facts):
    """63 bits that are the same for equal facts in every process."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little") >> 1


# ---- ranks that are gone ---------------------------------------------------------------------------

_PAUSE, _ROUND, _ENDING = 5e-5, 0.02, 5.0  # seconds between looks at the GPU, between rounds of the hosts, and for kernels to end


def synchronize(group=None, *, timeout=None):
    """Waits until the GPUs of all ranks have done what their current streams were given. Every rank of the group calls it.

    NCCL's kernels wait for ever for a rank whose process ended, and nothing watches those of a CUDA graph. If a process ends, this raises
    torch.distributed.DistBackendError on all other ranks at once; if a rank does not call it or its GPU does not get there, after
    `timeout` seconds (None: half of the group's time-out, before torch's watchdog ends the process). NCCL's kernels are then ended:
    results of calls since the last synchronize() are not valid, and the group can only be destroyed. The first call of a group makes its
    group of gloo, and there waits for a rank that is gone until the group's time-out. Call it instead of torch.cuda.synchronize(), or
    before anything that waits for the GPU."""
    mine = _of_group(group)
    if mine.failed:
        raise dist.DistBackendError(mine.failed)
    given = timeout if timeout is not None else (_time_out(mine.group) or _USUAL).total_seconds() / 2
    end = time.monotonic() + given
    event = None
    if torch.cuda.is_initialized():
        event = torch.cuda.Event()
        event.record()
    try:
        while True:
            next_round = time.monotonic() + _ROUND
            while not (done := event is None or event.query()) and time.monotonic() < next_round:
                time.sleep(_PAUSE)
            flags = torch.empty(mine.ranks, dtype=torch.uint8, device="cpu")
            flag = torch.tensor([done], dtype=torch.uint8, device="cpu")
            work = dist.all_gather_into_tensor(flags, flag, group=mine.channel, async_op=True)
            while not work.is_completed():
                if time.monotonic() > end:
                    raise TimeoutError(f"another rank did not come within {given:g} s")
                time.sleep(_PAUSE)
            work.wait()
            if flags.all():
                return
            if time.monotonic() > end:
                raise TimeoutError(f"the GPUs of ranks {(flags == 0).nonzero().flatten().tolist()} are not done after {given:g} s")
    except (RuntimeError, TimeoutError) as error:
        mine.failed = f"a rank of the group is gone, and the group cannot be used any more: {error}"
        _end_kernels(mine.group, event)
        raise dist.DistBackendError(mine.failed) from error


def _end_kernels(group, event):
    """Ends those of NCCL that wait for other ranks, and waits for the event after them.

    NCCL tells its kernels at once, but returns only when CUDA graphs that contain its calls are gone: hence a thread."""
    backends = [group._get_backend(device) for device in group._device_types if device.type == "cuda"] if dist.is_nccl_available() else []
    threads = [threading.Thread(target=x.abort, daemon=True) for x in backends if isinstance(x, dist.ProcessGroupNCCL)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _ENDING
    try:
        while threads and event is not None and not event.query() and time.monotonic() < end:
            time.sleep(_PAUSE)
    except RuntimeError:  # the GPU has failed, and waits for nothing
        pass


# ---- communication -----------------------------------------------------------------------------

@functools.lru_cache(256)
def _places(kinds):
    """((first byte, end, type, shape) of each array in a buffer, its bytes); arrays begin at multiples of 16 bytes, as kernels like them."""
    places, end = [], 0
    for dtype, shape in kinds:
        size = math.prod(shape) * dtype.itemsize
        places.append((end, end + size, dtype, shape))
        end += -(-size // 16) * 16
    return tuple(places), end


def _is_wide(x):
    """Whether x consists of pieces of 16 bytes, by which GPUs copy faster."""
    size = x.element_size()
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(n * size % 16 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))


class _Packed:
    """Arrays that travel together: in `buffer`, bytes [*lead, size]. kinds: (type, shape) of each, without the dimensions `lead`."""

    def __init__(self, like, kinds, lead=(), buffer=None):
        self.kinds = tuple(kinds)
        self.places, size = _places(self.kinds)
        self.buffer = like.new_empty((*lead, size), dtype=torch.uint8) if buffer is None else buffer

    def arrays(self):
        lead = self.buffer.shape[:-1]
        return [self.buffer[..., first:end].view(dtype).view(lead + shape) for first, end, dtype, shape in self.places]

    def fill(self, arrays):
        for into, x in zip(self.arrays(), arrays):
            if into.dim() and _is_wide(into) and _is_wide(x):
                into, x = into.view(torch.complex128), x.view(torch.complex128)
            into.copy_(x)
        return self

    def like(self, lead=None):
        return _Packed(self.buffer, self.kinds, self.buffer.shape[:-1] if lead is None else lead)


def _pack(arrays, lead=0):
    """lead: how many dimensions of the arrays are those of the buffer."""
    return _Packed(arrays[0], [(x.dtype, tuple(x.shape[lead:])) for x in arrays], arrays[0].shape[:lead]).fill(arrays)


def _all_gather(packed, group, asynchronous=False):
    """(those of all ranks, the work to wait for or None)."""
    out = packed.like((group.ranks, *packed.buffer.shape[:-1]))
    return out, dist.all_gather_into_tensor(out.buffer.flatten(), packed.buffer.flatten(), group=group.group, async_op=asynchronous)


def _of_all_ranks(x, group):
    """[ranks, ...]"""
    whole = x.new_empty(group.ranks, *x.shape)
    dist.all_gather_into_tensor(whole.flatten().view(torch.uint8), x.contiguous().flatten().view(torch.uint8), group=group.group)
    return whole


def _exchange(packed, group):
    """Element r of [ranks, elements] goes to rank r; the result's element r came from there."""
    out = packed.like()
    dist.all_to_all_single(out.buffer, packed.buffer, group=group.group)
    return out


def _sums_of_ranks(arrays, group):
    """This rank's sums of all ranks' x[rank] for f32 x in arrays, in the order of ranks whatever the network does: equal bits in every run."""
    parts = _exchange(_pack(arrays, 1), group)
    total = parts.like(())
    total.buffer.copy_(parts.buffer[0])
    numbers = total.buffer.view(torch.float32)
    for part in parts.buffer[1:]:
        numbers += part.view(torch.float32)
    return total.arrays()


class _Passing:
    """A buffer on its way to the next rank of the ring, while that of the rank before arrives."""

    def __init__(self, packed, group):
        self.arriving = packed.like()
        self.leaving = packed
        self.works = dist.batch_isend_irecv([dist.P2POp(dist.isend, packed.buffer, group.after, group.group),
                                             dist.P2POp(dist.irecv, self.arriving.buffer, group.before, group.group)])

    def wait(self):
        for work in self.works:
            work.wait()
        return self.arriving


class _Peers:
    """Memory of this rank's GPU that all ranks read, and theirs, over NVLink or PCIe: torch's symmetric memory."""

    def __init__(self, group, device, size):
        if device.type != "cuda":
            raise Unsupported(f"peers with tensors on {device}; accepted: GPUs of one host")
        from torch.distributed import _symmetric_memory as symmetric  # torch has no public name for it
        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        self.handle = symmetric.rendezvous(memory, group.group)
        self.buffers = [memory if r == group.rank else self.handle.get_remote_tensor(r, (size,), torch.uint8) for r in range(group.ranks)]
        self.streams = [torch.cuda.Stream(device) for _ in range(group.ranks - 1)]  # copies from the others
        self.device = device
        self.limit = int((_time_out(group.group) or _USUAL).total_seconds() * 1000)

    def meet(self, channel):
        """The stream goes on when those of all ranks have got here."""
        self.handle.barrier(channel=channel, timeout_ms=self.limit)

    def fill_beside(self, channel, filled):
        """Fills each packed with arrays of [(packed, arrays), ...] -> events: the ranks have met, this one after that. The stream does not wait."""
        if not filled:
            return []
        stream = self.streams[0]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for packed, arrays in filled:
                packed.fill(arrays)
            self.meet(channel)
        return [stream.record_event()]

    def meet_beside(self, channel, after):
        """An event: the ranks have met, this one after the events `after` and when the stream has got here. The stream does not wait."""
        stream = self.streams[0]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            self.meet(channel)
        return stream.record_event()

    def captures(self):
        """Whether calls become part of a graph, so that the host's time does not count."""
        return torch.cuda.is_current_stream_capturing()

    def wait(self, events):
        """The current stream goes on after them."""
        for event in events:
            torch.cuda.current_stream(self.device).wait_event(event)

    def copy_beside(self, pieces, after):
        """Begins pieces[n][i] = [(into, from), ...], from the i-th rank after this one, when the stream has got here and after the events `after` ->
        of each piece the events of its end.

        Copies of contiguous memory are the copy engines', so kernels keep all multiprocessors. In a graph they are one chain, piece by piece: of
        several, one would be done to its last piece before the next begins."""
        streams = self.streams[:1] * len(self.streams) if self.captures() else self.streams
        here = torch.cuda.current_stream(self.device).record_event()
        for stream in set(streams):
            for event in (here, *after):
                stream.wait_event(event)
        ends = []
        for copies in pieces:
            for stream, pairs in zip(streams, copies):
                with torch.cuda.stream(stream):
                    for into, x in pairs:
                        into.copy_(x)
            ends.append([stream.record_event() for stream in set(streams)])
        return ends


def _peers_of(group, device, what, size):
    """(peers, size or more, views that are kept), of memory that serves `what`. A graph may need memory that is too small for later calls."""
    kept = group.peers.setdefault((device, what), [])
    if not kept or kept[-1][1] < size:
        kept.append((_Peers(group, device, size), size, _Kept(_MOST_CALLS)))
    return kept[-1]


# ---- this rank's part --------------------------------------------------------------------------

@dataclass(frozen=True)
class _Step:
    """A call of attn.forward in one place of a rank's queries. Slices are None where they are all."""
    place: int
    rows: slice | None  # of the rank's queries
    inner: slice | None  # of the place's
    keys: slice | None
    packed: bool  # cu_seqlens are among the options
    options: dict
    sequences: int = 0  # if not 0: how many sequences read the same keys. The i-th one sees them from row i on
    aside: bool = False  # on GPUs at the same time as another one, whose work fills multiprocessors that this one leaves idle at its end


class _Call:
    """What calls of attention() with equal shapes, types and options have in common. `facts` are what all ranks must agree on."""

    def __init__(self, group, facts, *, scheme, layout, left, right, scale, softcap, offsets, block_mask, slopes, head_pieces, peers, q, k, v):
        self.group, self.facts, self.number = group, facts, _number(facts)
        self.scheme, self.layout, self.left, self.right, self.scale, self.softcap = scheme, layout, left, right, scale, softcap
        self.documents = None if offsets is None else list(zip(offsets, offsets[1:]))  # [(begin, end), ...] of packed tokens, None: sequences
        self.slopes = slopes  # whether there are ALiBi slopes
        self.head_pieces, self.peers = head_pieces, peers  # of K and V: how many heads each piece has
        self.batch, self.device = (q.shape[0] if offsets is None else 1), q.device
        self.heads, self.heads_kv, self.dim, self.dim_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
        n = q.shape[-3]
        self.tokens, self.total = n, n * group.ranks
        self.order = Order(layout, group.ranks, self.total, offsets, self.device)
        self.room = 0  # tokens before and after the gathered ones
        self.aside = False  # whether steps are aside
        self.rows = self.total if scheme == "ulysses" else n
        self.heads_here = self.heads // (group.ranks if scheme == "ulysses" else 1)
        self.masked = block_mask is not None
        if layout == "documents" and scheme != "ulysses":
            self.places = [(0, n)]  # of this rank's own numbers
            self.held = [[(step, slice(None))] for step in range(group.ranks)]
            self._steps, self._steps_back = {}, {}
            for held in range(group.ranks) if scheme == "ring" else [(0, self.total)]:
                self._steps[held, None], self._steps_back[held, None] = self._steps_of_documents(held)
            self.aside = any(x.aside for steps in self._steps.values() for x in steps)
            return
        # Of the queries that this rank computes: all of the sequence for some heads, or its own.
        self.places = [(0, self.total)] if scheme == "ulysses" else self.order.pieces(group.rank)
        self.held = []  # at each step of a ring: where the keys are that this rank holds, and their rows
        for step in range(group.ranks if scheme == "ring" else 0):
            begin, held = 0, []
            for place in self.order.pieces((group.rank - step) % group.ranks):
                held.append((place, slice(begin, begin + place[1])))
                begin += place[1]
            self.held.append(held)
        # By keys (start, tokens) and, if there is a mask, query heads (first, count). The mask itself is not kept.
        k_places = [place for held in self.held for place, _ in held] if scheme == "ring" else [(0, self.total)]
        self._steps = {(k_place, heads): list(self._make_steps(k_place, heads, block_mask))
                       for k_place in k_places for heads in (self.heads_of_parts() if block_mask else [None])}
        self._steps_back = self._steps
        if scheme == "all_gather":
            self._steps = {name: [replace(steps[0], aside=True), steps[1]] if len(steps) == 2 and not any(x.inner or x.packed for x in steps) else steps
                           for name, steps in self._steps.items()}
            self.aside = any(x.aside for steps in self._steps.values() for x in steps)

    def gathered(self, k, v, room=0):
        return (_gathered_from_peers if self.peers and self.group.ranks > 1 else _gathered)(k, v, self, room)

    def heads_of_parts(self):
        """(first, count) of each part's query heads."""
        if self.scheme == "ulysses":
            return [(self.group.rank * self.heads_here, self.heads_here)]
        counts = [n * (self.heads // self.heads_kv) for n in self.head_pieces]
        return [(sum(counts[:i]), n) for i, n in enumerate(counts)]

    def steps(self, k_place, heads, back=False):
        """The calls of this rank's queries over keys at k_place, for query heads (first, count). back: those of attn.backward."""
        return (self._steps_back if back else self._steps)[k_place, heads if self.masked else None]

    def _make_steps(self, k_place, heads, mask):
        def cut(first, end, size):
            return None if (first, end) == (0, size) else slice(first, end)
        documents = self.documents if self.documents is not None else [(0, 1 << 40)]
        align = mask.block_size if mask else (1, 1)
        first = 0
        for number, place in enumerate(self.places):
            for call in calls_of(place, k_place, documents, self.left, self.right, align):
                begin, end = call.qa - place[0], call.qb - place[0]
                yield _Step(number, cut(first + begin, first + end, self.rows), cut(begin, end, place[1]),
                            cut(call.ka - k_place[0], call.kb - k_place[0], k_place[1]), len(call.cu_q) > 2, self._options(call, heads, mask))
            first += place[1]

    def _steps_of_documents(self, held):
        """(steps, those of gradients) over the keys of a step of the ring, or of whole documents."""
        ranks, rank = self.group.ranks, self.group.rank
        pieces = [[x for x in of_rank if x[0] < len(self.documents)] for of_rank in of_documents(self.order.offsets, ranks, self.total)]
        whole = self.scheme != "ring"
        pairs = pairs_of_documents(pieces[rank], None if whole else pieces[(rank - held) % ranks], held == 0, self.documents, self.left, self.right)
        back = [_Step(0, None, None, None, True, self._options(call, None, None, True)) for call in packed_calls(pairs)]
        aside = whole and len(self.head_pieces) > 1
        if not whole or len(back) < 2:
            return [replace(x, aside=aside) for x in back], back
        if len({(x.left, x.right) for x in pairs}) > 1:
            return [_Step(0, slice(x.qa, x.qb), slice(x.qa, x.qb), slice(x.ka, x.kb), False, self._options(x, None, None)) for x in pairs], back
        # Both pieces of a document see its first keys: each piece is a sequence of one call.
        ends = [x.qb for x in pairs]
        self.room = max(self.room, len(pairs) - 1)
        options = self._options(Rectangle(0, ends[-1], 0, self.total, pairs[0].left, pairs[0].right, [0, *ends], []), None, None, True)
        for name, keys in ("kv_begin", [x.ka for x in pairs]), ("seqlens_kv", [x.kb for x in pairs]):
            options[name] = torch.tensor([self.room + key - i for i, key in enumerate(keys)], dtype=torch.int32, device=self.device)
        return [_Step(0, None, None, None, True, options, len(pairs), aside)], back

    def _options(self, call, heads, mask, packed=False):
        options = {"scale": self.scale, "softcap": self.softcap}
        left, right = call.left, call.right
        if self.slopes and call.kb != call.qb:  # else the call's positions are the sequence's
            options["query_start"] = torch.full((self.batch,), call.qa - call.ka, dtype=torch.int64, device=self.device)
            shift = call.kb - call.qb
            left, right = (left - shift if left >= 0 else -1), (right + shift if right >= 0 else -1)
            if left >= 0 or right >= 0:
                options["window"] = left, right
        elif left >= 0 or right > 0:
            options["window"] = left, right
        elif right == 0:
            options["causal"] = True
        if packed or len(call.cu_q) > 2:
            for name, cu in ("cu_seqlens_q", call.cu_q), ("cu_seqlens_kv", call.cu_k):
                if cu:
                    options[name] = torch.tensor(cu, dtype=torch.int32, device=self.device)
            options["max_seqlen_q"] = max(b - a for a, b in zip(call.cu_q, call.cu_q[1:]))
        if mask:
            options["block_mask"] = mask_slice(mask, call.qa, call.qb, call.ka, call.kb, heads)
        return options

    def by_place(self, lse):
        """lse [B, H, n] as parts have it: of each piece of heads [places, B, H of the piece, rows of a place]."""
        return [x.unflatten(2, (len(self.places), -1)).permute(2, 0, 1, 3).contiguous() for x in _pieces(lse, self.head_pieces, 1)]


_MOST_RUNS = 256  # of tokens, that are fetched to their places: each costs the host some microseconds
_TOGETHER = 4  # results over a ring's keys that are merged at once: each takes the memory of f32 rows, each merge that of a pass over them


def _accumulates(q):
    """Whether attn.forward adds to earlier results for q's device. On GPUs they are merged afterwards, the way that has run with NCCL."""
    return q.device.type == "cpu"


def _cut(x, rows, dim=1):
    if rows is None:
        return x
    return x[:, rows] if dim == 1 else x[:, :, rows]


def _for_sequences(x, sequences):
    """[rows, H, D] -> [sequences, rows - sequences + 1, H, D], whose i-th sequence begins at row i: CUDA takes no stride of 0 between sequences."""
    return x.as_strided((sequences, x.shape[0] - sequences + 1, *x.shape[1:]), (x.stride(0), *x.stride()))


class _Part:
    """Query rows of one rank and some heads, whose calls see more and more keys. q [B, n, H, D]; heads (first, count) among all."""

    def __init__(self, call, q, slopes, heads):
        self.call, self.q, self.heads = call, q, heads
        self.extra = {} if slopes is None else {"alibi_slopes": slopes}

    def into(self, out, lse):
        """out [B, n, H, Dv], f32 where rows see keys in several calls, and lse f32 [places, B, H, rows of a place], not initialised."""
        self.out, self.lse = out, lse.unbind(0)
        self.done = [[] for _ in self.lse]  # of each place: rows that hold something
        self.waiting = [[] for _ in self.lse]  # of each place: results that are to be merged into its rows
        return self

    def _merge_waiting(self, place):
        if self.waiting[place]:
            n, lse = self.lse[place].shape[2], self.lse[place]
            into = self.out[:, place * n:(place + 1) * n]
            merged, total = _merge([(into.contiguous(), lse), *self.waiting[place]])
            into.copy_(merged)
            lse.copy_(total)
            self.waiting[place].clear()

    def _clear(self, place):
        n = self.lse[place].shape[2]
        self.out[:, place * n:(place + 1) * n].zero_()
        self.lse[place].fill_(-math.inf)

    def add_keys(self, k, v, k_place, aside=None):
        """Keys and values [B, m, Hkv, D] at one place. aside: a stream for steps that say so, which must be waited for."""
        for step in self.call.steps(k_place, self.heads):
            done, whole = self.done[step.place], self.lse[step.place]
            rows = (0, whole.shape[2]) if step.inner is None else (step.inner.start, step.inner.stop)
            if not done and step.inner is not None:
                self._clear(step.place)
            fresh = not any(a < rows[1] and rows[0] < b for a, b in done)
            waits = not fresh and step.inner is None and not _accumulates(self.q)
            if not waits:
                self._merge_waiting(step.place)
            lse = whole if step.inner is None else whole[:, :, step.inner].contiguous()
            arrays = [_cut(self.q, step.rows), _cut(k, step.keys), _cut(v, step.keys), _cut(self.out, step.rows), lse]
            if step.packed:
                arrays = [x[0] for x in arrays]
            if step.sequences:
                arrays[1:3] = (_for_sequences(x, step.sequences) for x in arrays[1:3])
            *qkv, into, given = arrays
            if aside and step.aside:  # all of a place's rows, for the first time
                aside.wait_stream(torch.cuda.current_stream(self.q.device))
                with torch.cuda.stream(aside):
                    _forward(*qkv, out=into, lse=given, **step.options, **self.extra)
                done.append(rows)
                continue
            if waits:
                found = _forward(*qkv, out_dtype="f32", return_lse=True, **step.options, **self.extra)
                self.waiting[step.place].append(tuple(x[None] for x in found) if step.packed else found)
                done.append(rows)
                if len(self.waiting[step.place]) == _TOGETHER:
                    self._merge_waiting(step.place)
                continue
            if fresh or _accumulates(self.q):
                _forward(*qkv, out=into, lse=given, accumulate=not fresh, **step.options, **self.extra)
                if step.inner is not None:
                    whole[:, :, step.inner] = lse
            else:
                merged, total = _merge([(into.contiguous(), given), _forward(*qkv, out_dtype="f32", return_lse=True, **step.options, **self.extra)])
                into.copy_(merged)
                _cut(whole, step.inner, 2).copy_(total)
            done.append(rows)

    def finish(self):
        """What is to be merged, and rows of places that saw no key."""
        for place, done in enumerate(self.done):
            self._merge_waiting(place)
            if not done:
                self._clear(place)

    def of_result(self, d_out, d_lse, out, lse, dq):
        """For gradients: dq f32, which they are added to, and the others as into() has them, d_lse or None."""
        if self.q.device.type == "cuda":
            d_out = d_out.to(self.q.dtype)  # as its kernels want it, and as it came
        self.d_out, self.d_lse, self.out, self.lse, self.dq = d_out, d_lse, out, lse, dq
        return self

    def add_gradients(self, k, v, dk, dv, k_place):
        """Adds to dq, and to dk and dv f32 of k's and v's shapes."""
        for step in self.call.steps(k_place, self.heads, back=True):
            arrays = [_cut(x, step.rows) for x in (self.d_out, self.q, self.out, self.dq)] + [_cut(x, step.keys) for x in (k, v, dk, dv)]
            statistics = [None if x is None else _cut(x[step.place], step.inner, 2).contiguous() for x in (self.lse, self.d_lse)]
            if step.packed:
                arrays, statistics = ([None if x is None else x[0] for x in list_of] for list_of in (arrays, statistics))
            d_out, q, out, dq, keys, values, d_keys, d_values = arrays
            _backward(d_out, q, keys, values, out, statistics[0], d_lse=statistics[1], dq=dq, dk=d_keys, dv=d_values, accumulate=True, dtype="f32",
                      **step.options, **self.extra)


def _with_sinks(out, lse, sinks):
    """out f32 [B, n, H, Dv] and lse [B, H, n] with the sinks' part of the denominator, which comes last, once."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks[:, None].to(torch.float32))
    weight = torch.where(lse == -math.inf, 0.0, torch.exp(lse - total))
    return out.mul_(weight.transpose(1, 2)[..., None]), total


def _results(call, q, slopes, dtype=torch.float32):
    """(parts, out, lse as parts have it) for all of q [B, n, H, D]."""
    out = q.new_empty(*q.shape[:3], call.dim_v, dtype=dtype)
    places = len(call.places)
    of_pieces = _pieces(out, call.head_pieces)
    lse = [q.new_empty(places, q.shape[0], x.shape[2], q.shape[1] // places, dtype=torch.float32) for x in of_pieces]
    return [part.into(x, y) for part, x, y in zip(_parts(call, q, slopes), of_pieces, lse)], out, lse


def _parts(call, q, slopes):
    """A part for each piece of heads of q."""
    of_pieces = itertools.repeat(None) if slopes is None else _pieces(slopes, call.head_pieces, 0)
    return [_Part(call, *part) for part in zip(_pieces(q, call.head_pieces), of_pieces, call.heads_of_parts())]


def _finished(parts, out, lse, sinks, wants_lse=True):
    """(out, lse of all places), the latter None if it is not wanted."""
    for part in parts:
        part.finish()
    if not wants_lse and sinks is None:
        return out, None
    of_pieces = [x.permute(1, 2, 0, 3).flatten(2) for x in lse]
    return _with_sinks(out, of_pieces[0] if len(of_pieces) == 1 else torch.cat(of_pieces, 1), sinks)


def _parts_of_result(call, q, slopes, d_out, d_lse, out, lse, dq):
    """Parts for gradients. out .. of all of q; lse and d_lse [B, H, n]."""
    lse, d_lse = (None if x is None else call.by_place(x) for x in (lse, d_lse))
    pieces = [_pieces(x, call.head_pieces) for x in (d_out, out, dq)]
    return [part.of_result(pieces[0][i], None if d_lse is None else d_lse[i], pieces[1][i], lse[i], pieces[2][i])
            for i, part in enumerate(_parts(call, q, slopes))]


def _pieces(x, heads, dim=2):
    """x in pieces of its heads, which are in dimension `dim`: of each as many parts as `heads` says."""
    of_one = x.shape[dim] // sum(heads)
    return (x,) if len(heads) == 1 else x.split([n * of_one for n in heads], dim)


def _gathered(k, v, call, room=0):
    """Yields K and V [B, S, heads, D] of the whole sequence, some heads at a time; the next heads arrive meanwhile. room: as in Order.whole()."""
    pending = None
    for pair in [*zip(_pieces(k, call.head_pieces), _pieces(v, call.head_pieces)), None]:
        started = pair and _all_gather(_pack(pair, 2), call.group, asynchronous=True)
        if pending:
            came, work = pending
            work.wait()
            yield _Packed(k, came.kinds, buffer=call.order.whole(came.buffer, 1, room)).arrays()
        pending = started


def _gathered_from_peers(k, v, call, room=0):
    """_gathered() from the other GPUs' memory. A kernel fetches the first piece of heads, for nothing else can run yet; copy engines fetch the
    others, while kernels compute.

    Ranks meet when all have written the first piece, beside this when they have written the others, and beside the computation when they have
    read all, before one writes the next call's. The caller asks for one more piece than there are, for the current stream has to wait for the second."""
    group, (b, n), ranks = call.group, k.shape[:2], call.group.ranks
    of_pieces = [*zip(_pieces(k, call.head_pieces), _pieces(v, call.head_pieces))]
    kinds = [tuple((x.dtype, tuple(x.shape[2:])) for x in pair) for pair in of_pieces]
    rows = [_places(x)[1] for x in kinds]
    peers, _, views = _peers_of(group, k.device, "attention", 1 << max(16, (b * n * sum(rows) - 1).bit_length()))
    name = b, n, *rows
    found = views.find(name)
    if found is None:  # of each rank its pieces
        found = [[x.view(b, n, row) for x, row in zip(memory.split([*(b * n * row for row in rows), memory.numel() - b * n * sum(rows)]), rows)]
                 for memory in peers.buffers]
        views.keep(name, found)
    mine = [_Packed(k, *packed) for packed in zip(kinds, itertools.repeat(()), found[group.rank])]
    runs = call.order.runs
    first = 1 if len(runs) <= _MOST_RUNS else 0
    late = peers.fill_beside(2, [*zip(mine, of_pieces)][1:]) if first else []
    for packed, pair in [*zip(mine, of_pieces)][:1 if first else None]:
        packed.fill(pair)
    peers.meet(0)
    if first:
        whole = k.new_empty((b, call.total + 2 * room, rows[0]), dtype=torch.uint8)
        wide = [x[0].view(torch.complex128) for x in found]  # 16 bytes at a time
        torch.cat([wide[r].narrow(1, at, tokens) for r, at, tokens in runs], 1, out=whole.narrow(1, room, call.total).view(torch.complex128))
        arrived = _Packed(k, kinds[0], buffer=whole)
    # To their places in the sequence. Runs of documents are many, and a copy takes the host long: but for graphs they come rank by rank, and get
    # to their places afterwards.
    in_order = call.layout != "documents" or first and peers.captures()
    arriving = []
    for i in range(first, len(rows)):
        whole = k.new_empty((b, call.total + 2 * room, rows[i]) if in_order else (ranks, b, n, rows[i]), dtype=torch.uint8)
        copies = []
        for r in ((group.rank + step) % ranks for step in range(1, ranks + 1)):
            theirs, into_from, at = found[r][i], [], 0
            for start, tokens in call.order.pieces(r) if in_order else ():
                into_from += [(whole[entry, room + start:][:tokens], theirs[entry, at:][:tokens]) for entry in range(b)]
                at += tokens
            copies.append(into_from if in_order else [(whole[r], theirs)])
        arriving.append((whole, copies))
    copied = peers.copy_beside([copies[:-1] for _, copies in arriving], late)
    all_read = peers.meet_beside(1, [event for events in copied for event in events])
    if first:
        yield arrived.arrays()
    for (whole, copies), events, of_kinds in zip(arriving, copied, kinds[first:]):
        peers.wait(late)
        for into, x in copies[-1]:
            into.copy_(x)
        peers.wait(events)
        yield _Packed(k, of_kinds, buffer=whole if in_order else call.order.whole(whole, 1, room)).arrays()
    peers.wait([all_read])


def _all_gather_forward(call, q, k, v, slopes, dtype):
    parts, out, lse = _results(call, q, slopes, dtype)
    # On GPUs calls at the same time: those of pieces of heads that are copied, and of a rank's two pieces of the sequence.
    copied = call.peers and call.group.ranks > 1
    aside = call.group.streams_aside(q.device, 2 * len(parts) if copied else 2) if call.aside else None
    for stream in aside or ():
        stream.wait_stream(torch.cuda.current_stream(q.device))
    gathered, kept = call.gathered(k, v, call.room), []
    for number, part in enumerate(parts):
        with torch.cuda.stream(aside[2 * number]) if aside and copied and number else contextlib.nullcontext():
            kv = next(gathered)
            part.add_keys(*kv, (0, call.total), aside[2 * number + 1 if copied else 1] if aside and len(call.places) == 2 else None)
        kept.append(kv)  # until it has been read in all streams
    for stream in aside or ():
        torch.cuda.current_stream(q.device).wait_stream(stream)
    next(gathered, None)
    return parts, out, lse


def _all_gather_backward(call, q, k, v, out, lse, d_out, d_lse, slopes):
    dq, found = torch.zeros(q.shape, dtype=torch.float32, device=q.device), []
    for kv, part in zip(call.gathered(k, v), _parts_of_result(call, q, slopes, d_out, d_lse, out, lse, dq)):
        gradients = [torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format) for x in kv]
        part.add_gradients(*kv, *gradients, (0, call.total))
        found.append(_sums_of_ranks([call.order.by_rank(x) for x in gradients], call.group))
    return dq, *(x[0] if len(x) == 1 else torch.cat(x, 2) for x in zip(*found))


def _ring_forward(call, q, k, v, slopes, _):
    parts, out, lse = _results(call, q, slopes)
    held, ranks = _pack((k, v)), call.group.ranks
    for step in range(ranks):
        passing = _Passing(held, call.group) if step < ranks - 1 else None
        keys, values = held.arrays()
        for place, rows in call.held[step]:
            parts[0].add_keys(keys[:, rows], values[:, rows], place)
        if passing:
            held = passing.wait()
    return parts, out, lse


def _ring_backward(call, q, k, v, out, lse, d_out, d_lse, slopes):
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    part, = _parts_of_result(call, q, slopes, d_out, d_lse, out, lse, dq)
    held, ranks = _pack((k, v)), call.group.ranks
    gradients = _Packed(k, [(torch.float32, shape) for _, shape in held.kinds])
    gradients.buffer.zero_()
    for step in range(ranks):
        passing = _Passing(held, call.group) if step < ranks - 1 else None
        arrays = *held.arrays(), *gradients.arrays()
        for place, rows in call.held[step]:
            part.add_gradients(*(x[:, rows] for x in arrays), place)
        if passing:
            held = passing.wait()
        if ranks > 1:  # after the last step they are where they belong
            gradients = _Passing(gradients, call.group).wait()
    return dq, *gradients.arrays()


def _to_heads(arrays, call):
    """Each [B, n, H, D] of this rank's tokens -> [B, S, H / ranks, D] of its heads. Fewer heads than ranks are repeated."""
    ranks = call.group.ranks
    arrays = [x.repeat_interleave(ranks // x.shape[2], 2) if x.shape[2] < ranks else x for x in arrays]
    sent = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in arrays]
    came = _exchange(_pack(sent, 1), call.group)
    return [call.order.whole(x, 1) for x in came.arrays()]


def _to_tokens(arrays, call, heads):
    """The reverse. Where an array's heads, of which there are `heads`, were repeated: the sums."""
    sent = [call.order.by_rank(x) for x in arrays]
    came = _exchange(_pack(sent, 1), call.group)
    back = [x.movedim(0, 2).flatten(2, 3) for x in came.arrays()]
    return [x if x.shape[2] == n else x.unflatten(2, (n, -1)).sum(3) for x, n in zip(back, heads)]


def _of_my_heads(x, call):
    """The slice of [Hq] numbers."""
    if x is None:
        return None
    n = call.heads_here
    return x[call.group.rank * n:][:n].contiguous()


def _column(lse):
    """[B, H, n] -> [B, n, H, 1], as tokens travel."""
    return lse.transpose(1, 2)[..., None]


def _ulysses_forward(call, q, k, v, sinks, slopes, dtype):
    """((out, lse) of this rank's tokens, q, k, v, out, lse of its heads)."""
    mine = _to_heads((q, k, v), call)
    parts, out, lse = _results(call, mine[0], _of_my_heads(slopes, call), dtype)
    parts[0].add_keys(*mine[1:], (0, call.total))
    of_heads = _finished(parts, out, lse, _of_my_heads(sinks, call))
    out, column = _to_tokens((of_heads[0], _column(of_heads[1])), call, (call.heads, call.heads))
    return (out, column[..., 0].transpose(1, 2).contiguous()), (*mine, *of_heads)


def _ulysses_backward(call, q, k, v, out, lse, d_out, d_lse, slopes):
    """d_out and d_lse of heads."""
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    part, = _parts_of_result(call, q, _of_my_heads(slopes, call), d_out, d_lse, out, lse, dq)
    gradients = [torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format) for x in (k, v)]
    part.add_gradients(k, v, *gradients, (0, call.total))
    return _to_tokens((dq, *gradients), call, (call.heads, call.heads_kv, call.heads_kv))


def _compute(call, q, k, v, sinks, slopes, dtype=torch.float32, wants_lse=True):
    """((out, lse) of this rank's queries, what gradients need of q, k, v, out and lse). out is of dtype if one call computes a row, else f32."""
    if sinks is not None:
        dtype = torch.float32
    if call.scheme == "ulysses":
        return _ulysses_forward(call, q, k, v, sinks, slopes, dtype)
    found = _finished(*(_ring_forward if call.scheme == "ring" else _all_gather_forward)(call, q, k, v, slopes, dtype), sinks, wants_lse)
    return found, (q, k, v, *found)


class _Attention(torch.autograd.Function):
    """(out f32, lse) of this rank's queries."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, slopes, call):
        ctx.call, ctx.slopes = call, slopes
        ctx.set_materialize_grads(False)
        found, kept = _compute(call, q, k, v, sinks, slopes)
        ctx.save_for_backward(*kept, sinks)
        return found

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse, sinks = ctx.saved_tensors
        call, group = ctx.call, ctx.call.group
        if d_out is None:
            d_out = out.new_zeros(call.batch, call.tokens, call.heads, call.dim_v)
        if call.scheme == "ulysses":
            given = (d_out,) if d_lse is None else (d_out, _column(d_lse))
            d_out, *column = _to_heads(given, call)
            d_lse = column[0][..., 0].transpose(1, 2) if column else None
            run = _ulysses_backward
        else:
            run = _ring_backward if call.scheme == "ring" else _all_gather_backward
        d_out = d_out.contiguous()
        dq, dk, dv = run(call, q, k, v, out, lse, d_out, d_lse, ctx.slopes)
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            delta = (d_out * out).sum(3).transpose(1, 2)
            if d_lse is not None:
                delta = delta - d_lse
            mine = sinks if call.scheme != "ulysses" else _of_my_heads(sinks, call)
            of_heads = -(torch.exp(mine[:, None] - lse) * delta).nan_to_num().sum((0, 2))
            d_sinks = of_heads
            if call.scheme == "ulysses":
                d_sinks = torch.zeros_like(sinks)
                d_sinks[group.rank * call.heads_here:][:call.heads_here] = of_heads
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None


# ---- prefill and training ------------------------------------------------------------------------

_COMPARE = ("always", "once")


def _check_compare(compare):
    if compare not in _COMPARE:
        raise InvalidArgument(f"compare is {compare!r}; accepted: {', '.join(_COMPARE)}")


def _attention_call(group, q, k, v, slopes, sinks, gradients, block_mask, offsets, scheme, layout, causal, window, scale, softcap, head_pieces,
                    out_dtype, peers):
    """Checks the arguments of attention() -> a _Call."""
    if scheme != "auto" and scheme not in _SCHEMES:
        raise InvalidArgument(f"scheme is {scheme!r}; accepted: auto, {', '.join(_SCHEMES)}")
    dims = 4 if offsets is None else 3
    for name, x in ("q", q), ("k", k), ("v", v):
        if x.dim() != dims:
            raise InvalidArgument(f"{name} has shape {list(x.shape)}; accepted: {'[B, n, H, D]' if dims == 4 else '[n, H, D], with cu_seqlens'}")
        if x.shape[:-2] != q.shape[:-2] or x.device != q.device:
            raise InvalidArgument(f"{name} has shape {list(x.shape)} on {x.device}; accepted: q's batch and tokens, {list(q.shape[:-2])}, on "
                                  f"{q.device}")
    n, heads, heads_kv, ranks = q.shape[-3], q.shape[-2], k.shape[-2], group.ranks
    if n == 0 or layout == "zigzag" and n % 2:
        raise InvalidArgument(f"q has {n} tokens on this rank; accepted in layout {layout}: {'an even number' if n else '1 or more'}")
    if heads_kv == 0 or heads % heads_kv or v.shape[-2] != heads_kv:
        raise InvalidArgument(f"q has {heads} heads, k {heads_kv}, v {v.shape[-2]}; accepted: k's for v, a multiple for q")
    if peers and scheme not in ("all_gather", "auto"):
        raise InvalidArgument(f"peers with scheme {scheme}; accepted: all_gather, auto")
    if scheme == "ulysses" and not splits(heads, heads_kv, ranks):
        raise InvalidArgument(f"scheme is ulysses with {heads} and {heads_kv} heads on {ranks} ranks; accepted: query heads that are a "
                              "multiple of the ranks, K/V heads too or a divisor of them")
    if head_pieces is not None and not are_pieces(head_pieces, heads_kv):
        raise InvalidArgument(f"head_pieces is {head_pieces}; accepted: divisors of {heads_kv}, the heads of k, or tuples of numbers of heads that "
                              "add up to them")
    check_layout(layout, offsets, n * ranks)
    if offsets is not None:
        checked_offsets(offsets, n * ranks)
        if block_mask is not None:
            raise InvalidArgument("block_mask is given with cu_seqlens; accepted: one of them")
    if block_mask is not None and tuple(block_mask.shape[2:]) != (n * ranks, n * ranks):
        raise InvalidArgument(f"block_mask has shape {block_mask.shape}; accepted: {n * ranks} queries and keys")
    part = n if layout == "contiguous" else n // 2
    if block_mask is not None and any(part % size for size in block_mask.block_size):
        raise InvalidArgument(f"block_mask has blocks of {block_mask.block_size}, and parts of the sequence have {part} tokens; accepted: "
                              "blocks that divide them")
    for name, x in ("alibi_slopes", slopes), ("sinks", sinks):
        if x is not None and tuple(x.shape) != (heads,):
            raise InvalidArgument(f"{name} has shape {list(x.shape)}; accepted: [Hq] = [{heads}]")
    left, right = window
    if causal:
        right = 0

    def seconds(pieces):
        return estimate(ranks, n * ranks, heads_q=heads, heads_kv=heads_kv, head_dim=q.shape[-1], head_dim_v=v.shape[-1],
                        batch=q.shape[0] if dims == 4 else 1, causal=right == 0, bytes_per_element=q.element_size(), head_pieces=pieces,
                        layout=layout, cu_seqlens=offsets, peers=peers)
    if scheme == "auto":
        found = seconds(head_pieces)
        scheme = "ulysses" if slopes is not None and "ulysses" in found else "all_gather" if peers else min(found, key=found.get)
    if scheme != "all_gather":
        head_pieces = 1
    elif head_pieces is None:
        head_pieces = min(pieces_of_heads(heads_kv), key=lambda pieces: seconds(pieces)["all_gather"])
    if not isinstance(head_pieces, tuple):
        head_pieces = (heads_kv // head_pieces,) * head_pieces
    if slopes is not None and scheme != "ulysses":
        if gradients:
            raise Unsupported(f"alibi_slopes with gradients in scheme {scheme}; accepted: scheme ulysses, or torch.no_grad()")
        if offsets is not None:
            raise Unsupported(f"alibi_slopes with cu_seqlens in scheme {scheme}; accepted: scheme ulysses")
        if q.device.type != "cpu":
            raise Unsupported(f"alibi_slopes on {q.device} in scheme {scheme}; accepted: scheme ulysses, or tensors of the CPU")
    facts = {"function": "attention", **_sizes(q=q, k=k, v=v), **{f"{name}.dtype": str(x.dtype) for name, x in (("q", q), ("k", k), ("v", v))},
             "scheme": scheme, "layout": layout, "window[0]": int(left), "window[1]": int(right), **_numbers(scale, softcap),
             "alibi_slopes given": slopes is not None, "sinks given": sinks is not None, "block_mask given": block_mask is not None,
             "head_pieces": head_pieces, "out_dtype": str(out_dtype or q.dtype), "cu_seqlens": offsets, "gradients wanted": gradients,
             "peers": bool(peers)}
    return _Call(group, facts, scheme=scheme, layout=layout, left=left, right=right, scale=scale, softcap=softcap, offsets=offsets,
                 block_mask=block_mask, slopes=slopes is not None, head_pieces=head_pieces, peers=peers, q=q, k=k, v=v)


def _sizes(**arrays):
    return {f"{name}.shape[{i}]": size for name, x in arrays.items() for i, size in enumerate(x.shape)}


def _numbers(scale, softcap):
    return {"scale": None if scale is None else float(scale), "softcap": float(softcap)}


def _shape(x):
    return None if x is None else x.shape


def _kept_call(group, compare, mask, key, make):
    """What is kept of an earlier call with this key(), else make(*key()); compared over the group. Both may raise: then all ranks do."""
    call = known = error = None
    try:
        _check_compare(compare)
        name = key()
        kept = group.calls if mask is None else group.of_masks.setdefault(mask, _Kept(_MOST_CALLS))
        call = known = kept.find(name)
        if call is None:
            call = make()
    except Exception as caught:
        error = caught
    if error is not None:
        group.agree({}, 0, error, False)
    group.agree(call.facts, call.number, None, compare == "once")
    if known is None:
        kept.keep(name, call)
    return call


def attention(q, k, v, *, group=None, scheme="auto", layout="zigzag", causal=False, window=(-1, -1), scale=None, softcap=0.0,
              alibi_slopes=None, sinks=None, block_mask=None, cu_seqlens=None, out_dtype=None, return_lse=False, head_pieces=None,
              peers=False, compare="always"):
    """attn.forward(q, k, v) over sequences of which every rank of `group` has the same number of tokens -> its rows of out, or (out, lse).

    q [B, n, Hq, D], k [B, n, Hkv, D], v [B, n, Hkv, Dv] on this rank, as shard() with `layout` cuts them; out [B, n, Hq, Dv],
    lse f32 [B, Hq, n]. Differentiable in q, k, v and sinks: dk and dv are on the rank of their keys. The gradient of sinks is that of
    this rank's queries (ulysses: heads); their sum over ranks is the whole. Equal calls give equal bits, forward and backward.

    group              of torch.distributed, None: the default one
    scheme             "all_gather": K and V come to every rank, some heads at a time, and the next ones while these are computed.
                       "ring": K and V pass from rank to rank while the last ones are computed; results are merged. Takes the least
                       memory. "ulysses": queries, keys and values are exchanged so that each rank has some heads of all tokens;
                       Hq is a multiple of the ranks, and Hkv too or a divisor of them. "auto": the fastest by estimate()
    layout             "zigzag", "contiguous", or "documents" with cu_seqlens, see chunks()
    causal, window, scale, softcap  as in attn.forward, on the whole sequence
    alibi_slopes       f32 [Hq]; schemes other than ulysses take them on the CPU alone, without gradients and cu_seqlens
    sinks              f32 [Hq], the same on all ranks
    block_mask         a BlockMask of the whole sequence on this device, whose blocks divide the n tokens of a rank (zigzag: n / 2)
    cu_seqlens         a list of integers from 0 up to at most ranks * n: documents, one after the other in the whole sequence. q, k, v are
                       then packed, [n, H, D], out [n, Hq, Dv], lse [Hq, n]; tokens after the last document have out 0 and lse -inf
    out_dtype          a torch.dtype, None: q's. Partial results are f32 in any case
    head_pieces        all_gather: in how many equal pieces of heads, a divisor of Hkv, or a tuple of how many of Hkv each piece has;
                       None: 1, 2 or 4, the fastest by estimate()
    peers              True: GPUs of one host copy K and V from each other's memory, without NCCL, which leaves all multiprocessors to the
                       computation. all_gather, and other ranks' part of its gradients, which goes over the group. The memory, that of
                       k and v rounded up to a power of two, is kept with the group. A call of larger sizes than those before makes
                       it, so make one before a graph is captured. All calls are in one stream
    compare            "always": each call first compares shapes, types and options over the group, on the host. "once": a call with
                       shapes, types and options that were compared before does not. You promise that all ranks make the same calls
                       in the same order; a rank that does not leaves the others waiting until the group's time-out

    Errors: attn.InvalidArgument or attn.Unsupported on every rank if arguments are refused on one or differ; those of
    torch.distributed if a rank is gone."""
    mine = _of_group(group)
    gradients = offsets = None

    def key():
        nonlocal gradients, offsets
        gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
        if cu_seqlens is not None:
            offsets = tuple(int(x) for x in cu_seqlens)
        return ("attention", q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, gradients, _shape(alibi_slopes),
                _shape(sinks), offsets, scheme, layout, bool(causal), *window, scale, softcap, head_pieces, out_dtype, peers)

    call = _kept_call(mine, compare, block_mask, key, lambda: _attention_call(
        mine, q, k, v, alibi_slopes, sinks, gradients, block_mask, offsets, scheme, layout, causal, window, scale, softcap, head_pieces,
        out_dtype, peers))
    if offsets is not None:
        q, k, v = q[None], k[None], v[None]
    if gradients:
        out, lse = _Attention.apply(q, k, v, sinks, alibi_slopes, call)
    else:
        dtype = q.dtype if out_dtype in (None, q.dtype) and q.dtype in _MERGED else torch.float32
        with torch.no_grad():
            (out, lse), _ = _compute(call, q, k, v, sinks, alibi_slopes, dtype, return_lse)
    out = out.to(out_dtype or q.dtype)
    if offsets is not None:
        out, lse = out[0], lse[0] if return_lse else None
    return (out, lse) if return_lse else out


# ---- decode --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Decode:
    """What calls of decode() with equal shapes and options have in common."""
    facts: dict
    number: int


_MOST_GATHERED = 1 << 18  # bytes of a rank's partial results that go to all ranks, of which each merges its heads; more are sent by heads
_MERGED = (torch.float32, torch.float16, torch.bfloat16)  # what merge() rounds to


def _partial(q, k, v, options):
    """out f32 and lse of q over this rank's keys, packed."""
    if v.dtype == torch.uint8:  # blocks: the head dimension is not in v's shape
        return _pack(_forward(q, k, v, out_dtype="f32", return_lse=True, **options))
    b, n, heads, _ = q.shape
    found = _Packed(q, [(torch.float32, (b, n, heads, v.shape[-1])), (torch.float32, (b, heads, n))])
    out, lse = found.arrays()
    _forward(q, k, v, out=out, lse=lse, **options)
    return found


def _parts_of_ranks(q, k, v, group, heads, options):
    """(outs, lses) of the ranks, of the heads that this rank merges."""
    n, split = q.shape[2], heads == "split"
    if split:
        q = _of_all_ranks(q, group).movedim(0, 2).flatten(2, 3)
    found = _partial(q, k, v, options)
    if split and found.buffer.numel() > _MOST_GATHERED:
        out, lse = found.arrays()
        sent = out.unflatten(2, (group.ranks, -1)).movedim(2, 0), lse.unflatten(1, (group.ranks, -1)).movedim(1, 0)
        outs, lses = _exchange(_pack(sent, 1), group).arrays()
    else:
        outs, lses = _all_gather(found, group)[0].arrays()
        if split:
            first, end = group.rank * n, (group.rank + 1) * n
            outs, lses = outs[:, :, :, first:end], lses[:, :, first:end]
            if not lses[0].is_contiguous():
                lses = lses.contiguous()
    return outs.unbind(0), lses.unbind(0)


def _of_peers(group, device, *kinds):
    """(_Peers, for each of two kinds the arrays in each rank's memory). Those of one kind never overlap those of the other, in no call."""
    half = 1 << max(16, (max(_places(x)[1] for x in kinds) - 1).bit_length())
    peers, size, views = _peers_of(group, device, "decode", 2 * half)
    half, found = size // 2, views.find(kinds)
    if found is None:
        found = [[[x[base + first:base + end].view(dtype).view(shape) for first, end, dtype, shape in _places(kind)[0]] for x in peers.buffers]
                 for base, kind in zip((0, half), kinds)]
        views.keep(kinds, found)
    return peers, *found


def _parts_of_peers(q, k, v, group, heads, options):
    """(outs, lses) of the ranks, of the heads that this rank merges.

    Ranks meet twice: all have read the last call's results before one writes its own, and this call's q before one writes the next call's."""
    b, n, mine, _ = q.shape
    split = heads == "split"
    total = mine * group.ranks if split else mine
    by_rank = split and b > 1  # of lse: as merge() takes it
    of_lse = (group.ranks, b, mine, n) if by_rank else (b, total, n)
    peers, queries, results = _of_peers(group, q.device, ((q.dtype, tuple(q.shape)),),
                                        ((torch.float32, (b, n, total, v.shape[-1])), (torch.float32, of_lse)))
    if split:
        queries[group.rank][0].copy_(q)
    peers.meet(0)
    if split:
        q = torch.cat([x for x, in queries], 2)
    out, lse = results[group.rank]
    found = lse.new_empty(b, total, n) if by_rank else lse
    _forward(q, k, v, out=out, lse=found, **options)
    if by_rank:
        lse.copy_(found.unflatten(1, (group.ranks, -1)).movedim(1, 0))
    peers.meet(1)
    outs, lses = zip(*results)
    if split:
        first, end = group.rank * mine, (group.rank + 1) * mine
        outs, lses = [x[:, :, first:end] for x in outs], [x[group.rank] if by_rank else x[:, first:end] for x in lses]
    return outs, lses


def _decode_call(group, q, k, v, heads, positions, interleave, total_seqlens, causal, window, scale, softcap, slopes, sinks, peers):
    """Checks the arguments of decode() -> a _Decode."""
    if heads not in ("split", "all"):
        raise InvalidArgument(f"heads is {heads!r}; accepted: split, all")
    if q.dim() != 4:
        raise InvalidArgument(f"q has shape {list(q.shape)}; accepted: [B, Sq, Hq, D]")
    if positions and (interleave is None or total_seqlens is None):
        raise InvalidArgument("interleave or total_seqlens is None; accepted where positions count (several causal queries, a window, "
                              "alibi_slopes): both")
    if peers and v.dtype == torch.uint8:
        raise Unsupported("peers with v in uint8; accepted: types whose elements are those of v's shape")
    total = q.shape[2] * (group.ranks if heads == "split" else 1)
    for name, x in ("alibi_slopes", slopes), ("sinks", sinks):
        if x is not None and tuple(x.shape) != (total,):
            raise InvalidArgument(f"{name} has shape {list(x.shape)}; accepted: [{total}], all query heads")
    facts = {"function": "decode", **_sizes(q=q), "q.dtype": str(q.dtype), "k's heads": k.shape[-2], "k.shape[-1]": k.shape[-1],
             "v.shape[-1]": v.shape[-1], "heads": heads, "causal": bool(causal), "window[0]": int(window[0]), "window[1]": int(window[1]),
             **_numbers(scale, softcap), "interleave": interleave, "alibi_slopes given": slopes is not None, "sinks given": sinks is not None,
             "peers": bool(peers)}
    return _Decode(facts, _number(facts))


def decode(q, k, v, *, group=None, heads="split", seqlens_kv=None, block_table=None, interleave=None, total_seqlens=None, causal=True,
           window=(-1, -1), scale=None, softcap=0.0, alibi_slopes=None, sinks=None, k_descale=None, v_descale=None, k_type=None, v_type=None,
           k_scale=None, v_scale=None, out_dtype=None, return_lse=False, peers=False, compare="always"):
    """Attention of a few queries of each sequence over a cache whose keys are spread over the ranks of `group` -> out, or (out, lse).

    q [B, Sq, Hq, D]; k [B, S, Hkv, D] and v, or pages with block_table, with all K/V heads and this rank's keys; a rank may have none
    of a sequence. Each rank computes all heads over its keys; f32 results go to the rank that wants them, which merges them exactly,
    in the order of ranks. No gradients.

    heads              "split": q has this rank's query heads, in the order of ranks, and so has out [B, Sq, Hq, Dv]; lse f32 [B, Hq, Sq].
                       alibi_slopes and sinks have all heads, ranks * Hq. "all": every rank has all query heads, and gets all of out
    seqlens_kv         i32 [B]: this rank's keys of each sequence
    interleave         key c of rank r is at position (c // interleave * ranks + r) * interleave + c % interleave: 1 token by token, or
                       a page's size. With total_seqlens i32 [B], the keys of each sequence on all ranks: needed by several queries
                       with causal, by windows and by alibi_slopes, which compare positions
    causal             query i is at position total_seqlens - Sq + i; a single query sees all keys without positions
    peers              True: GPUs of one host read q and results in each other's memory, without NCCL, which is faster. The memory is kept
                       with the group. A call of larger sizes than those before makes it, so make one before a graph is captured. All calls
                       are in one stream
    compare            "always" or "once", as in attention(). The sizes of k and v and their types are not compared: ranks may differ in them
    others             as in attn.forward; the cache may have any of its types

    Errors as attention()."""
    mine = _of_group(group)
    rank, ranks = mine.rank, mine.ranks
    positions = None

    def key():
        nonlocal positions
        positions = causal and q.shape[1] > 1 or tuple(window) != (-1, -1) or alibi_slopes is not None
        return ("decode", q.shape, q.dtype, k.shape[-2:], v.shape[-1], heads, positions, interleave, total_seqlens is None, bool(causal),
                *window, scale, softcap, _shape(alibi_slopes), _shape(sinks), peers)

    _kept_call(mine, compare, None, key, lambda: _decode_call(
        mine, q, k, v, heads, positions, interleave, total_seqlens, causal, window, scale, softcap, alibi_slopes, sinks, peers))
    options = dict(seqlens_kv=seqlens_kv, block_table=block_table, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
                   k_descale=k_descale, v_descale=v_descale, k_type=k_type, v_type=v_type, k_scale=k_scale, v_scale=v_scale)
    if positions:
        start = total_seqlens.to(torch.int64) - q.shape[1]
        options.update(causal=causal, window=window, query_start=start, key_start=torch.zeros_like(start),
                       key_places=(interleave, ranks, rank))
    if rank == 0:  # a sink is one more key
        options["sinks"] = sinks
    dtype = out_dtype or q.dtype
    with torch.no_grad():
        outs, lses = (_parts_of_peers if peers and ranks > 1 else _parts_of_ranks)(q, k, v, mine, heads, options)
        out, lse = _merge(list(zip(outs, lses)), out_dtype=dtype if dtype in _MERGED else None)
    out = out.to(dtype)
    return (out, lse) if return_lse else out
