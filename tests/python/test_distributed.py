"""attn.distributed under gloo, against float64 formulas with dense masks. Needs torch, which CI does not have.

Each test starts an interpreter with this file, which forks the ranks: torch is imported once, before there are threads."""
import datetime
import gc
import importlib.util
import itertools
import math
import os
import subprocess
import sys
import tempfile
import traceback
import unittest

REPEATS = int(os.environ.get("ATTN_REPEATS", 50))


@unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed")
class Distributed(unittest.TestCase):
    def run_ranks(self, ranks, function, *arguments, codes=None):
        """Runs function(rank, ranks, *arguments) of this file on ranks; codes: the exit codes that are expected, all 0 by default."""
        done = subprocess.run([sys.executable, __file__, str(ranks), function, *map(str, arguments)], capture_output=True, text=True,
                              timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.split()[-ranks:], [str(c) for c in codes or [0] * ranks], done.stdout + done.stderr)

    def test_one_rank(self):
        self.run_ranks(1, "schemes")

    def test_two_ranks(self):
        self.run_ranks(2, "schemes")

    def test_three_ranks(self):
        self.run_ranks(3, "schemes")

    def test_four_ranks(self):
        self.run_ranks(4, "schemes")

    def test_eight_ranks(self):
        self.run_ranks(8, "schemes")

    def test_bf16(self):
        self.run_ranks(2, "rounded_once")

    def test_merged(self):
        self.run_ranks(2, "merged")

    def test_gradients(self):
        for ranks in 1, 2, 4:
            self.run_ranks(ranks, "gradients")

    def test_decode(self):
        for ranks in 1, 2, 3, 4:
            self.run_ranks(ranks, "decodes")

    def test_peers(self):
        for ranks in 2, 3:
            self.run_ranks(ranks, "by_peers")

    def test_documents(self):
        self.run_ranks(1, "divided_documents")
        for ranks in 2, 4:
            self.run_ranks(ranks, "documents")

    def test_equal_bits(self):
        self.run_ranks(2, "repeats")

    def test_refusals(self):
        self.run_ranks(3, "refusals")

    def test_dead_rank(self):
        for when in "before", "within":
            for scheme in "all_gather", "ring", "ulysses":
                self.run_ranks(3, "dies", when, scheme, codes=[0, 3, 0])
        self.run_ranks(3, "dies", "later", "ring", codes=[0, 3, 0])

    def test_absent_rank(self):
        self.run_ranks(2, "absent")

    def test_synchronize(self):
        self.run_ranks(3, "synchronizes", "dies", codes=[0, 3, 0])
        self.run_ranks(3, "synchronizes", "absent")

    def test_subgroup(self):
        self.run_ranks(4, "subgroup")

    def test_kept_parts(self):
        self.run_ranks(2, "kept_parts")

    def test_ranks_out_of_step(self):
        self.run_ranks(3, "out_of_step")

    def test_bounded(self):
        self.run_ranks(2, "bounded")

    def test_group_without_the_cpu(self):
        self.run_ranks(4, "without_the_cpu")

    def test_estimate(self):
        self.run_ranks(1, "estimates")


# ---- on the ranks --------------------------------------------------------------------------------

def launch(ranks, name, arguments):
    """Forks the ranks, waits for all of them, and prints their exit codes."""
    import torch
    import attn.distributed  # noqa: F401: before the fork
    torch.set_num_threads(1)
    attn.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os._exit(run_rank(rank, ranks, folder, globals()[name], arguments))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(*codes)


def run_rank(rank, ranks, folder, function, arguments):
    import torch.distributed as dist
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
                                timeout=datetime.timedelta(seconds=5 if function is absent else 60))
        SharedFiles.folder = folder
        function(rank, ranks, *arguments)
        sys.stderr.flush()
        return 0
    except BaseException:
        print(f"rank {rank}:", traceback.format_exc(), file=sys.stderr, flush=True)
        return 1


def dense(q, k, v, visible, *, scale=None, softcap=0.0, slopes=None, sinks=None):
    """(out, lse) in float64 of q [B, S, Hq, D] ...; visible [.., S, S]; positions from 0."""
    import torch
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or 1 / math.sqrt(q.shape[3]))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if slopes is not None:
        i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        s = s - slopes.double()[:, None, None] * (i - j).abs()
    s = torch.where(visible, s, -math.inf)
    columns = s if sinks is None else torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], 3)
    lse = torch.logsumexp(columns, 3)
    p = torch.where(visible & (lse > -math.inf)[..., None], torch.exp(s - torch.where(lse > -math.inf, lse, 0.0)[..., None]), 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def band(total, left, right):
    import torch
    i, j = torch.arange(total)[:, None], torch.arange(total)
    return ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))


def cases(ranks):
    """(name, options of attention(), whether each query sees each key, options of dense())."""
    import torch
    import attn
    total = 12 * ranks
    heads = 8
    full = torch.ones(total, total, dtype=torch.bool)
    below = band(total, -1, 0)
    yield "full", {}, full, {}
    yield "causal", {"causal": True}, below, {}
    yield "window", {"causal": True, "window": (7, -1)}, band(total, 7, 0), {}
    yield "wide", {"window": (5, 3)}, band(total, 5, 3), {}
    yield "right", {"window": (-1, 4)}, band(total, -1, 4), {}
    yield "softcap", {"causal": True, "softcap": 1.5, "scale": 0.5}, below, {"softcap": 1.5, "scale": 0.5}
    sinks = torch.linspace(-2, 3, heads)
    yield "sinks", {"window": (2, 0), "sinks": sinks}, band(total, 2, 0), {"sinks": sinks.double()}
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    yield "alibi", {"causal": True, "alibi_slopes": slopes}, below, {"slopes": slopes}
    yield "alibi both", {"alibi_slopes": slopes, "window": (9, 6)}, band(total, 9, 6), {"slopes": slopes}
    mask = attn.BlockMask.from_dense((torch.arange(total * total).reshape(total, total) * 2654435761 % 7 < 4).numpy(), block_size=(3, 2))
    bits = torch.arange(total * total).reshape(total, total) * 2654435761 % 7 < 4
    yield "block mask", {"block_mask": mask}, bits, {}
    yield "block mask causal", {"block_mask": mask, "causal": True, "window": (11, -1)}, bits & band(total, 11, 0), {}
    kinds = (torch.arange(total // 6 * (total // 6)).reshape(total // 6, -1) % 3).to(torch.uint8).numpy()
    by_kind = torch.from_numpy(kinds).repeat_interleave(6, 0).repeat_interleave(6, 1)
    yield "kinds", {"block_mask": attn.BlockMask.from_kinds(kinds, total, total, block_size=6)}, (by_kind == 2) | (by_kind == 1) & below, {}
    ends = sorted({0, 1, 2, total // 3, total // 3 + 5, total - 7, total - 2})
    number = torch.bucketize(torch.arange(total), torch.tensor(ends[1:]), right=True)
    same = (number[:, None] == number) & (torch.arange(total) < ends[-1])
    yield "documents", {"cu_seqlens": ends, "causal": True}, same & below, {}
    yield "documents full", {"cu_seqlens": ends}, same, {}
    yield "documents window", {"cu_seqlens": ends, "window": (4, 2)}, same & band(total, 4, 2), {}


def tensors(total, heads=8, heads_kv=4, dim=16, dim_v=24, batch=2, dtype=None):
    import torch
    g = torch.Generator().manual_seed(5)
    return [torch.randn(batch, total, h, d, generator=g, dtype=torch.float64).to(dtype or torch.float32)
            for h, d in ((heads, dim), (heads_kv, dim), (heads_kv, dim_v))]


def near(got, want, bound, what):
    import torch
    assert got.shape == want.shape, (what, got.shape, want.shape)
    finite = torch.isfinite(want)
    assert torch.equal(torch.isfinite(got), finite), what
    error = (got.double() - want)[finite].abs().max().item() if finite.any() else 0
    assert error < bound, f"{what}: {error}"


def mine(x, layout, dim=1, cu_seqlens=None):
    import attn.distributed as ad
    return ad.shard(x, layout=layout, dim=dim, cu_seqlens=cu_seqlens)


def variants(ranks, number, packed=False):
    """(scheme, layout) pairs of a case; with many ranks they take turns."""
    layouts = ("zigzag", "contiguous", "documents") if packed else ("zigzag", "contiguous")
    found = [(s, y) for s, y in itertools.product(("all_gather", "ring", "ulysses"), layouts) if s != "ulysses" or 8 % ranks == 0]
    return found if ranks < 4 else found[number % 2::2]


def schemes(rank, ranks):
    import torch
    import attn
    import attn.distributed as ad
    for number, (name, options, visible, rules) in enumerate(cases(ranks)):
        packed = "cu_seqlens" in options
        q, k, v = tensors(12 * ranks, batch=1 if packed or number % 2 else 2)
        want, want_lse = dense(q.double(), k.double(), v.double(), visible, **rules)
        cu = options.get("cu_seqlens")
        for scheme, layout in variants(ranks, number, packed):
            local = [mine(x[0] if packed else x, layout, 0 if packed else 1, cu) for x in (q, k, v)]
            counts = {x["name"]: attn._attn.launch_count(x["name"]) for x in attn.info()["kernels"] if x["backend"] == "cpu"}
            pieces = (4, (1, 3), (2, 1, 1))[number % 3] if (scheme, layout) == ("all_gather", "zigzag") else None
            out, lse = ad.attention(*local, scheme=scheme, layout=layout, return_lse=True, head_pieces=pieces, **options)
            assert any(attn._attn.launch_count(n) > c for n, c in counts.items())
            if packed:
                out, lse = out[None], lse[None]
            what = f"{name} {scheme} {layout} on {ranks}"
            near(out, mine(want, layout, 1, cu), 1e-5, what)
            near(lse, mine(want_lse, layout, 2, cu), 1e-5, what + " lse")
    q, k, v = tensors(12 * ranks)
    whole = attn.forward(q, k, v, causal=True)
    for layout in "zigzag", "contiguous":
        out = ad.attention(*(mine(x, layout) for x in (q, k, v)), causal=True, layout=layout)  # scheme auto
        assert (ad.gather(out, layout=layout) - whole).abs().max() < 1e-5
        for pieces in 1, 2:
            out = ad.attention(*(mine(x, layout) for x in (q, k, v)), causal=True, layout=layout, scheme="all_gather", head_pieces=pieces)
            assert (ad.gather(out, layout=layout) - whole).abs().max() < 1e-5
    assert torch.equal(ad.gather(mine(q, "zigzag")), q)


def merged(rank, ranks):
    """Where kernels do not accumulate, as on GPUs, results are merged afterwards."""
    import attn.distributed as ad
    ad._accumulates = lambda q: False
    merges, forward = Counted(ad, "_merge"), ad._forward

    def without(*arrays, accumulate=False, **options):
        assert not accumulate
        return forward(*arrays, **options)
    ad._forward = without
    for name, options, visible, rules in cases(ranks):
        packed = "cu_seqlens" in options
        q, k, v = tensors(12 * ranks, batch=1 if packed else 2)
        want, want_lse = dense(q.double(), k.double(), v.double(), visible, **rules)
        cu = options.get("cu_seqlens")
        for layout in ("zigzag", "contiguous", "documents")[:3 if packed else 2]:
            local = [mine(x[0] if packed else x, layout, 0 if packed else 1, cu) for x in (q, k, v)]
            out, lse = ad.attention(*local, scheme="ring", layout=layout, return_lse=True, **options)
            if packed:
                out, lse = out[None], lse[None]
            near(out, mine(want, layout, 1, cu), 1e-5, f"{name} {layout}")
            near(lse, mine(want_lse, layout, 2, cu), 1e-5, f"{name} {layout} lse")
    assert merges.calls


def rounded_once(rank, ranks):
    """bf16 q, k, v: an f32 out is as good as one process's, and a bf16 out is that, rounded."""
    import torch
    import attn.distributed as ad
    q, k, v = tensors(12 * ranks, dtype=torch.bfloat16)
    want, _ = dense(q.double(), k.double(), v.double(), band(12 * ranks, -1, 0))
    for scheme in "all_gather", "ring", "ulysses":
        local = [mine(x, "zigzag") for x in (q, k, v)]
        exact = ad.attention(*local, causal=True, scheme=scheme, out_dtype=torch.float32)
        near(exact, mine(want, "zigzag"), 1e-5, scheme)
        assert torch.equal(ad.attention(*local, causal=True, scheme=scheme), exact.to(torch.bfloat16))


def gradients(rank, ranks):
    """dq, dk, dv and the sinks' against autograd of the float64 formula over the whole sequence."""
    import torch
    import torch.distributed as dist
    import attn
    import attn.distributed as ad
    for number, (name, options, visible, rules) in enumerate(cases(ranks)):
        packed = "cu_seqlens" in options
        whole = [x.double().requires_grad_() for x in tensors(12 * ranks, batch=1 if packed else 2)]
        sinks = options.get("sinks")
        if sinks is not None:
            rules = {**rules, "sinks": sinks.double().requires_grad_()}
        want, want_lse = dense(*whole, visible, **rules)
        g = torch.Generator().manual_seed(9)
        d_out, d_lse = (torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (want, want_lse))
        d_lse = torch.where(torch.isfinite(want_lse), d_lse, 0.0)
        wanted = torch.autograd.grad((want * d_out).sum() + torch.where(torch.isfinite(want_lse), want_lse * d_lse, 0.0).sum(),
                                     [*whole, *([rules["sinks"]] if sinks is not None else [])])
        cu = options.get("cu_seqlens")
        for scheme, layout in variants(ranks, number, packed):
            what = f"{name} {scheme} {layout} on {ranks}"
            dim = 0 if packed else 1
            local = [mine(x.detach().float()[0] if packed else x.detach().float(), layout, dim, cu).requires_grad_() for x in whole]
            if sinks is not None:
                options = {**options, "sinks": sinks.clone().requires_grad_()}
            leaves = [*local, *([options["sinks"]] if sinks is not None else [])]
            pieces = (4, (1, 3), (2, 1, 1))[number % 3] if (scheme, layout) == ("all_gather", "zigzag") else None
            try:
                out, lse = ad.attention(*local, scheme=scheme, layout=layout, return_lse=True, head_pieces=pieces, **options)
            except attn.Unsupported as error:  # on every rank
                assert "alibi" in name and scheme != "ulysses", (what, error)
                continue
            of_out, of_lse = mine(d_out.float(), layout, 1, cu), mine(d_lse.float(), layout, 2, cu)
            loss = (out * (of_out[0] if packed else of_out)).sum() + torch.where(torch.isfinite(lse), lse * (of_lse[0] if packed else of_lse), 0.0).sum()
            got = torch.autograd.grad(loss, leaves)
            for x, y, letter in zip(got, wanted, "qkvs"):
                if letter == "s":
                    dist.all_reduce(x)
                    near(x, y, 1e-4, what + " sinks")
                else:
                    near(x[None] if packed else x, mine(y, layout, 1, cu), 3e-5, f"{what} d{letter}")


def decodes(rank, ranks):
    """Caches by tokens and by pages, of lengths that leave ranks without keys, against all keys in one dense call."""
    import torch
    import attn.distributed as ad
    ad._Peers = SharedFiles
    lengths = torch.tensor([1, 5, 33, 4 * ranks])
    heads, heads_kv, longest = 2 * ranks, 2, 40
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    sinks = torch.linspace(-1, 1, heads)
    for interleave, queries, options in ((1, 1, {}), (4, 1, {"sinks": sinks}), (1, 3, {}), (4, 3, {"window": (6, -1)}), (4, 2, {"alibi_slopes": slopes})):
        q, k, v = tensors(longest, heads, heads_kv, batch=4)
        q = q[:, :queries]
        position = torch.arange(longest)
        place = (lengths - queries)[:, None] + torch.arange(queries)  # of queries
        seen = (position < lengths[:, None])[:, None, :] & (position <= place[:, :, None])
        if "window" in options:
            seen &= position >= place[:, :, None] - options["window"][0]
        wide = torch.zeros(4, longest, heads, 16, dtype=torch.float64)
        wide[:, :queries] = q.double()
        rules = {"sinks": sinks.double()} if "sinks" in options else {}
        if "alibi_slopes" in options:  # positions from the queries' own
            outs = [dense_at(q[b:b + 1].double(), k[b:b + 1].double(), v[b:b + 1].double(), seen[b], place[b], slopes) for b in range(4)]
            want, want_lse = (torch.cat(x) for x in zip(*outs))
        else:
            visible = torch.zeros(4, 1, longest, longest, dtype=torch.bool)
            visible[:, 0, :queries] = seen
            want, want_lse = dense(wide, k.double(), v.double(), visible, **rules)
            want, want_lse = want[:, :queries], want_lse[:, :, :queries]
        mine_of = [p for p in range(longest) if p // interleave % ranks == rank]
        local = torch.tensor([sum(p < n for p in mine_of) for n in lengths.tolist()], dtype=torch.int32)
        cache = [x[:, mine_of].contiguous() for x in (k, v)]
        shared = dict(interleave=interleave, total_seqlens=lengths.to(torch.int32), seqlens_kv=local, return_lse=True, **options)
        n = heads // ranks
        for ad._MOST_GATHERED, peers in (0, False), (1 << 20, False), (0, True):  # all ways of partial results
            out, lse = ad.decode(q[:, :, rank * n:(rank + 1) * n].contiguous(), *cache, peers=peers, **shared)
            near(out, want[:, :, rank * n:(rank + 1) * n], 1e-5, f"decode {interleave} {queries} {options} on {ranks}")
            near(lse, want_lse[:, rank * n:(rank + 1) * n], 1e-5, "lse")
        for peers in False, True:
            out, lse = ad.decode(q, *cache, heads="all", peers=peers, **shared)
            near(out, want, 1e-5, "all heads")
        pages = -(-len(mine_of) // 4)
        pool = [torch.full((4 * pages, 4, *x.shape[2:]), math.nan) for x in cache]
        table = torch.randperm(4 * pages, generator=torch.Generator().manual_seed(3)).to(torch.int32).reshape(4, pages)
        for x, y in zip(cache, pool):
            for b, p in itertools.product(range(4), range(pages)):
                rows = x[b, 4 * p:4 * p + 4]
                y[table[b, p], :rows.shape[0]] = rows
        paged, _ = ad.decode(q, *pool, heads="all", block_table=table, **shared)
        near(paged, want, 1e-5, "pages")


def by_peers(rank, ranks):
    """The bits of the same call over the group, forward and backward, when sizes grow and shrink too."""
    import torch
    import attn
    import attn.distributed as ad
    ad._Peers = SharedFiles
    made = SharedFiles.made
    for total, batch in (12 * ranks, 2), (2400 * ranks, 1), (24 * ranks, 1):
        for name, options, _, _ in cases(total // 12) if total < 1000 else [("causal", {"causal": True}, 0, 0), ("documents", {
                "causal": True, "cu_seqlens": [0, 1000, 1001, 2047, total - 5]}, 0, 0)]:
            packed = "cu_seqlens" in options
            if "alibi" in name:
                continue
            q, k, v = (x[0] if packed else x for x in tensors(total, batch=1 if packed else batch))
            for layout, pieces in itertools.product(("zigzag", "contiguous", "documents")[:3 if packed else 2], (1, 2, (1, 3))):
                found = []
                for peers in False, True:
                    leaves = [mine(x, layout, 0 if packed else 1, options.get("cu_seqlens")).requires_grad_() for x in (q, k, v)]
                    out = ad.attention(*leaves, layout=layout, scheme="all_gather", head_pieces=pieces, peers=peers, **options)
                    found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
                assert all(torch.equal(x, y) for x, y in zip(*found)), (name, layout, pieces)
    assert SharedFiles.made == made + 2, "memory grows once"
    try:
        ad.attention(*tensors(24), scheme="ring", peers=True)
    except attn.InvalidArgument as error:
        assert str(error) == "peers with scheme ring; accepted: all_gather, auto"
    else:
        raise AssertionError("peers with ring")


def random_documents(seed, total, longest):
    import torch
    g = torch.Generator().manual_seed(seed)
    ends = [0]
    while ends[-1] < total - longest:
        ends.append(ends[-1] + int(torch.randint(0, longest, (1,), generator=g)))
    return ends


def divided_documents(rank, ranks):
    """Pieces of documents are all tokens, the same number for each rank, and nearly the same work."""
    import attn.distributed as ad
    for ranks, longest, total in itertools.product((1, 2, 3, 4, 8), (5, 200, 3000, 20000), (48, 4800, 48000)):
        ends = random_documents(ranks, total, longest)
        of_ranks = [ad.chunks("documents", r, ranks, total // ranks, ends) for r in range(ranks)]
        assert all(sum(n for _, n in x) == total // ranks for x in of_ranks)
        assert sorted(t for x in of_ranks for start, n in x for t in range(start, start + n)) == list(range(total))
        begin_of = {t: begin for begin, end in zip(ends, ends[1:]) for t in range(begin, end)}
        work = [sum(t - begin_of.get(t, t) + 1 for start, n in x for t in range(start, start + n)) for x in of_ranks]
        assert total < 48000 or max(work) * ranks < 1.06 * sum(work), (ranks, longest, total, work)
    for bad in None, [], [0, 5, 3], [1, 5], [0, 49]:
        try:
            ad.chunks("documents", 0, 2, 24, bad)
        except ad.InvalidArgument as error:
            assert "cu_seqlens is" in str(error)
        else:
            raise AssertionError(bad)


def documents(rank, ranks):
    """Layout documents with pieces of several tiles, against the float64 formula: the calls that are made, out, lse and gradients."""
    import torch
    import attn.distributed as ad
    ad._layouts._TILE = 4
    kinds = set()
    for seed, longest in enumerate((3, 40, 90)):
        total = 48 * ranks
        ends = random_documents(seed, total, longest)
        number = torch.bucketize(torch.arange(total), torch.tensor(ends[1:]), right=True)
        same = (number[:, None] == number) & (torch.arange(total) < ends[-1])
        for name, options, visible in (("causal", {"causal": True}, band(total, -1, 0)), ("full", {}, band(total, -1, -1)),
                                       ("window", {"causal": True, "window": (9, -1)}, band(total, 9, 0)), ("left", {"window": (6, -1)}, band(total, 6, -1)),
                                       ("both", {"window": (11, 5)}, band(total, 11, 5))):
            whole = [x.double().requires_grad_() for x in tensors(total, batch=1)]
            want, want_lse = dense(*whole, visible & same)
            wanted = torch.autograd.grad(want.square().sum(), whole)
            for scheme in "all_gather", "ring", "ulysses":
                what = f"{name} {scheme} {longest}"
                local = [mine(x.detach().float()[0], "documents", 0, ends).requires_grad_() for x in whole]
                out, lse = ad.attention(*local, scheme=scheme, layout="documents", cu_seqlens=ends, return_lse=True, **options)
                near(out[None], mine(want, "documents", 1, ends), 1e-5, what)
                near(lse[None], mine(want_lse, "documents", 2, ends), 1e-5, what)
                for x, y, letter in zip(torch.autograd.grad(out.square().sum(), local), wanted, "qkv"):
                    near(x[None], mine(y, "documents", 1, ends), 3e-5, f"{what} d{letter}")
            x = mine(whole[0].detach(), "documents", 1, ends)
            assert torch.equal(ad.gather(x, layout="documents", cu_seqlens=ends), whole[0])
    for call in ad._of_group(None).calls.values():
        if call.scheme != "ulysses" and call.layout == "documents" and call.left < 0:
            steps = list(call._steps.values())
            assert all(len(x) <= 1 for x in steps), "one call for all documents"
            kinds.add((call.scheme, max(x.sequences > 0 for of_keys in steps for x in of_keys)))
    # The last rank's two pieces are one, and so may be those of short documents.
    assert {("all_gather", rank < ranks - 1), ("ring", False)} <= kinds, kinds


class SharedFiles:
    """Instead of GPUs that read each other's memory: files that the ranks map."""
    made = 0

    def __init__(self, group, device, size):
        import torch
        import torch.distributed as dist
        name, SharedFiles.made = f"{SharedFiles.folder}/{SharedFiles.made}", SharedFiles.made + 1
        self.buffers, self.barrier = [torch.from_file(f"{name}.{r}", shared=True, size=size, dtype=torch.uint8) for r in range(group.ranks)], dist.barrier

    def meet(self, channel):
        self.barrier()

    def fill_beside(self, channel, filled):
        for packed, arrays in filled:
            packed.fill(arrays)
        self.barrier()
        return []

    def copy_beside(self, pieces, after):
        for copies in pieces:
            for into, x in itertools.chain(*copies):
                into.copy_(x)
        return [[] for _ in pieces]

    def meet_beside(self, channel, after):
        self.barrier()

    def captures(self):
        return self.made % 2 == 0

    def wait(self, events):
        pass


def dense_at(q, k, v, visible, place, slopes):
    """dense() of queries at places, with ALiBi."""
    import torch
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[3])
    s = s - slopes.double()[:, None, None] * (place[:, None] - torch.arange(k.shape[1])).abs()
    s = torch.where(visible, s, -math.inf)
    lse = torch.logsumexp(s, 3)
    p = torch.where(visible, torch.exp(s - torch.where(lse > -math.inf, lse, 0.0)[..., None]), 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def repeats(rank, ranks):
    import torch
    import attn.distributed as ad
    q, k, v = (mine(x, "zigzag") for x in tensors(12 * ranks, heads=4, heads_kv=2, batch=1))
    d_out = torch.ones(1, 12, 4, 24)
    for scheme in "all_gather", "ring", "ulysses":
        first = None
        for _ in range(REPEATS):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = ad.attention(*leaves, causal=True, scheme=scheme)
            got = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
            first = first or got
            assert all(torch.equal(x, y) for x, y in zip(got, first)), scheme
    first = None
    for _ in range(REPEATS):
        got = ad.decode(q[:, :1, :2].contiguous(), k, v)
        first = got if first is None else first
        assert torch.equal(got, first)


def refusals(rank, ranks):
    """Where ranks differ, or one refuses its arguments, all of them raise, and the group still works."""
    import torch
    import attn
    import attn.distributed as ad

    def refused(words, **options):
        q, k, v = tensors(options.pop("tokens", 6), heads=options.pop("heads", 6), heads_kv=2, batch=1)
        try:
            ad.attention(q, k, v, **options)
        except attn.InvalidArgument as error:
            assert any(word in str(error) for word in words), str(error)
        else:
            raise AssertionError(f"{words} was not refused")

    odd = rank == 1
    refused(["q.shape[1] is 6 on rank 0 and 8 on rank 1"], tokens=8 if odd else 6)
    refused(["q.shape[2] is 6 on rank 0"], heads=4 if odd else 6, scheme="ring")
    refused(["rank 1 of the group refused", "q has 0 tokens on this rank"], tokens=0 if odd else 6)
    refused(["rank 1 of the group refused", "scheme is 'rings'"], scheme="rings" if odd else "ring")
    refused(["scheme is ulysses with 6 and 2 heads on 3 ranks"], scheme="ulysses")
    refused(["window[0] is -1 on rank 0 and 4 on rank 1"], window=(4, -1) if odd else (-1, -1))
    refused(["scheme is"], scheme="all_gather" if odd else "ring")
    refused(["q has 5 tokens"], tokens=5)
    refused(["cu_seqlens"], cu_seqlens=[0, 4])
    refused(["block_mask has shape"], block_mask=attn.BlockMask.from_window(6, 6, (1, 1)))
    refused(["head_pieces is 3"], head_pieces=3)
    refused(["head_pieces is (1, 2)"], head_pieces=(1, 2))
    refused(["blocks of (64, 64)"], block_mask=attn.BlockMask.from_window(18, 18, (1, 1), block_size=64))
    q, k, v = tensors(6, heads=6, heads_kv=2, batch=1)
    try:
        ad.decode(q, k, v, window=(3, -1))
    except attn.InvalidArgument as error:
        assert "interleave" in str(error)
    out = ad.attention(q, k, v)
    everything = [torch.cat([x] * ranks, 1).double() for x in (q, k, v)]
    near(out, dense(*everything, torch.ones(18, 18, dtype=torch.bool))[0][:, :6], 1e-5, "after the refusals")


def dies(rank, ranks, when, scheme):
    """Rank 1 ends before the call, in it, or after it; the others raise torch.distributed's error, there or in the next call."""
    import attn.distributed as ad
    if rank == 1 and when == "before":
        os._exit(3)
    if rank == 1 and when == "within":
        ad._forward = lambda *_, **__: os._exit(3)
    q, k, v = tensors(6, heads=6, heads_kv=3, batch=1)
    try:
        ad.attention(q, k, v, scheme=scheme, compare="once")
    except RuntimeError:
        return
    if rank == 1:
        os._exit(3)
    # What rank 1 sends before it ends may be all that a rank needs. The next call needs more.
    try:
        ad.attention(q, k, v, scheme=scheme, compare="once")
    except RuntimeError:
        return
    raise AssertionError("no error")


def absent(rank, ranks):
    """Rank 1 lives, and does not call: the time-out ends the other's wait."""
    import torch.distributed as dist
    import attn.distributed as ad
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set_timeout(datetime.timedelta(seconds=60))
        store.get("over")
        return
    q, k, v = tensors(6, batch=1)
    try:
        ad.attention(q, k, v)
    except RuntimeError:
        store.set("over", "1")
        return
    raise AssertionError("no error")


def synchronizes(rank, ranks, how):
    """Rank 1 ends, or does not call: the others raise, and their group cannot be used any more."""
    import torch.distributed as dist
    import attn.distributed as ad
    store = dist.distributed_c10d._get_default_store()
    q, k, v = tensors(6, heads=6, heads_kv=3, batch=1)
    for turn in range(3):
        ad.attention(q, k, v, compare="once")
        ad.synchronize()
    if rank == 1 and how == "dies":
        os._exit(3)
    if rank == 1:
        store.set_timeout(datetime.timedelta(seconds=60))
        for other in 0, 2:
            store.get(f"over{other}")
        return
    for call, words in (lambda: ad.synchronize(timeout=1), "a rank of the group is gone"), (lambda: ad.attention(q, k, v, compare="once"), "any more"):
        try:
            call()
        except dist.DistBackendError as error:
            assert words in str(error), str(error)
        else:
            raise AssertionError("no error")
    if how == "absent":
        store.set(f"over{rank}", "1")


def subgroup(rank, ranks):
    """Two groups of two ranks at once, and one of the ranks 3 and 1, in this order."""
    import torch.distributed as dist
    import attn.distributed as ad
    groups = [dist.new_group(x) for x in ([0, 1], [2, 3])]
    q, k, v = tensors(24)
    want, _ = dense(q.double(), k.double(), v.double(), band(24, -1, 0))
    for scheme in "all_gather", "ring", "ulysses":
        out = ad.attention(*(ad.shard(x, group=groups[rank // 2]) for x in (q, k, v)), group=groups[rank // 2], causal=True, scheme=scheme)
        near(out, ad.shard(want, group=groups[rank // 2]), 1e-5, scheme)


class Counted:
    """Counts the calls of a function of a module or class."""

    def __init__(self, owner, name):
        self.calls, function = 0, getattr(owner, name)

        def counted(*arguments, **options):
            self.calls += 1
            return function(*arguments, **options)
        setattr(owner, name, counted)


def kept_parts(rank, ranks):
    """Calls alike use what the first one left, and compare nothing with compare="once". Other tensors give their own results."""
    import torch
    import torch.distributed as dist
    import attn
    import attn.distributed as ad
    made, compared = Counted(ad._Call, "__init__"), Counted(ad._Group, "agree")
    gathers = Counted(dist, "all_gather_into_tensor")  # "ring" and "ulysses" have them for comparisons alone
    whole = tensors(12 * ranks)
    mask = attn.BlockMask.from_kinds((torch.arange(16 * ranks * ranks).reshape(4 * ranks, -1) % 3).to(torch.uint8).numpy(), 12 * ranks, 12 * ranks,
                                     block_size=3)
    for scheme in "all_gather", "ring", "ulysses":
        for options in {"causal": True}, {"window": (5, 0), "sinks": torch.linspace(-2, 3, 8)}, {"block_mask": mask}:
            first, before = {}, made.calls
            for turn in range(4):
                sign = -1 if turn % 2 else 1
                leaves = [mine(sign * x, "zigzag").requires_grad_() for x in whole]
                calls, asked = gathers.calls, compared.calls
                out = ad.attention(*leaves, scheme=scheme, compare="once" if turn else "always", **options)
                assert compared.calls == asked + 1
                assert scheme == "all_gather" or gathers.calls == calls + (turn == 0), "a kept call was compared"
                got = [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]
                # q k^T is as with the other sign, and so are the gradients; out is a sum of v.
                expected = first.setdefault("all", got)
                for x, y, odd in zip(got, expected, (True, False, False, False)):
                    assert torch.equal(x, sign * y if odd else y), (scheme, options, turn)
            assert made.calls == before + 1, (scheme, options, made.calls)
            ad.attention(*leaves, scheme=scheme, scale=0.7, **options)
            assert made.calls == before + 2
    q, k, v = whole
    calls = gathers.calls
    for turn in range(3):
        ad.decode(q[:, :1], k, v, heads="all", compare="once")
    assert gathers.calls == calls + 4, "3 of results and one comparison"
    try:
        ad.attention(q, k, v, compare="never")
    except attn.InvalidArgument as error:
        assert str(error) == "compare is 'never'; accepted: always, once"


def out_of_step(rank, ranks):
    """Ranks that make different calls, all of which they had agreed on before, raise on every rank; and the group still works."""
    import torch
    import attn
    import attn.distributed as ad
    q, k, v = tensors(6, heads=6, heads_kv=3, batch=1)
    calls = {"ring": lambda: ad.attention(q, k, v, scheme="ring"), "window": lambda: ad.attention(q, k, v, scheme="ring", window=(2, -1)),
             "short": lambda: ad.attention(q[:, :4], k[:, :4], v[:, :4], scheme="ring"), "ulysses": lambda: ad.attention(q, k, v, scheme="ulysses"),
             "bf16": lambda: ad.attention(*(x.to(torch.bfloat16) for x in (q, k, v)), scheme="ring"),
             "f16": lambda: ad.attention(*(x.to(torch.float16) for x in (q, k, v)), scheme="ring"),
             "decode": lambda: ad.decode(q[:, :1], k, v), "all": lambda: ad.decode(q[:, :1], k, v, heads="all")}
    wanted = {name: call() for name, call in calls.items()}
    for mine_of, others, words in (("window", "ring", "window[0] is -1 on rank 0 and 2 on rank 1"), ("short", "ring", "q.shape[1] is 6 on rank 0 and 4 on"),
                                   ("ulysses", "ring", "scheme is ring on rank 0 and ulysses on rank 1"), ("decode", "ring", "function is attention on"),
                                   ("bf16", "f16", "q.dtype is torch.float16 on rank 0 and torch.bfloat16"), ("all", "decode", "heads is split on rank 0")):
        for turn in range(2):
            try:
                calls[mine_of if rank == 1 else others]()
            except attn.InvalidArgument as error:
                assert words in str(error), str(error)
            else:
                raise AssertionError(f"{mine_of} and {others} went on")
        assert all(torch.equal(call(), wanted[name]) for name, call in calls.items())
    try:  # new to all ranks
        ad.attention(q, k, v, scheme="ring", scale=0.5 + rank, compare="once")
    except attn.InvalidArgument as error:
        assert "scale is 0.5 on rank 0 and 1.5 on rank 1" in str(error), str(error)
    else:
        raise AssertionError("different scales went on")


def bounded(rank, ranks):
    """Kept parts and comparisons are bounded, and those of a mask end with it. What was dropped is compared again."""
    import torch.distributed as dist
    import attn
    import attn.distributed as ad
    ad._MOST_CALLS = ad._MOST_COMPARED = 4
    gathers = Counted(dist, "all_gather_into_tensor")
    q, k, v = (mine(x, "zigzag") for x in tensors(12 * ranks))
    for turn in range(3):
        for n in range(6):
            ad.attention(q, k, v, scheme="ring", scale=1 + n, compare="once")
    group = ad._of_group(None)
    assert (len(group.calls), len(group.compared), gathers.calls) == (4, 4, 18), (len(group.calls), len(group.compared), gathers.calls)
    for n in range(2, 6):
        ad.attention(q, k, v, scheme="ring", scale=1 + n, compare="once")
    assert gathers.calls == 18
    for n in range(3):
        mask = attn.BlockMask.from_window(12 * ranks, 12 * ranks, (n, 0), block_size=3)
        for scheme in "all_gather", "ring", "ulysses":
            ad.attention(q, k, v, scheme=scheme, block_mask=mask)
        assert len(group.of_masks[mask]) == 3
        del mask
    gc.collect()
    assert not group.of_masks and len(group.calls) == 4
    other = dist.new_group([0, 1])
    ad.attention(q, k, v, group=other)
    assert len(ad._groups) == 2
    dist.destroy_process_group(other)
    del other
    gc.collect()
    assert len(ad._groups) == 1


def without_the_cpu(rank, ranks):
    """A group that takes no CPU tensors, as NCCL's, is compared over one of gloo. Here gloo serves both, as there is no NCCL."""
    import torch
    import torch.distributed as dist
    import attn
    import attn.distributed as ad
    groups = [dist.new_group(x, timeout=datetime.timedelta(seconds=70)) for x in ([0, 1], [2, 3])]
    group = groups[rank // 2]
    config, dist.get_backend_config = dist.get_backend_config, lambda group: "cuda:nccl"
    q, k, v = (ad.shard(x, group=group) for x in tensors(24))
    wanted = attn.forward(*tensors(24), causal=True)
    for compare in "always", "once":
        out = ad.attention(q, k, v, group=group, causal=True, compare=compare)
        near(ad.gather(out, group=group), wanted.double(), 1e-5, compare)
    channel = ad._of_group(group).channel
    assert channel is not group and "cpu:gloo" in config(channel)
    assert dist.get_process_group_ranks(channel) == dist.get_process_group_ranks(group)
    assert channel._get_backend(torch.device("cpu")).options._timeout == datetime.timedelta(seconds=70)
    for _ in range(2):
        try:
            ad.attention(q, k, v, group=group, causal=rank % 2 == 0)
        except attn.InvalidArgument as error:
            assert "window[1] is 0 on rank 0 and -1 on rank 1" in str(error), str(error)
        else:
            raise AssertionError("different masks went on")
    ad.attention(*tensors(8), compare="once")  # of all ranks, a channel of its own
    assert ad._of_group(None).channel not in (channel, dist.group.WORLD)


def estimates(rank, ranks):
    """A call's fixed cost is in every estimate, and decides what short sequences do."""
    import dataclasses
    import attn.distributed as ad
    shape = dict(heads_q=32, heads_kv=8, head_dim=128)
    free = dataclasses.replace(ad.Machine(), call=0, piece=0)
    for tokens in 1024, 1 << 17:
        gpu = ad.estimate(4, tokens, machine=free, **shape)
        host = ad.estimate(4, tokens, head_pieces=2, machine=dataclasses.replace(free, call=0.5, piece=1), **shape)
        assert all(0 < gpu[s] < 0.1 for s in gpu) and host == {"all_gather": 2.5, "ring": 4.5, "ulysses": 2.5}
        busy = ad.estimate(4, tokens, machine=dataclasses.replace(free, call=1e-9), **shape)
        assert busy == gpu, "a host that is faster than the GPUs costs nothing"
    for tokens, pieces in (1024, 1), (1 << 17, 2):
        best = ad.estimate(4, tokens, **shape)["all_gather"]
        assert best == ad.estimate(4, tokens, head_pieces=pieces, **shape)["all_gather"]
    ends = [0, 20000, 21000, 33000, 65536]
    long = dataclasses.replace(free, latency=0, bandwidth=1e30, pair=1e30, peers=1e30, half_tokens=0)
    whole, *found = (ad.estimate(ranks, 65536, layout=layout, cu_seqlens=ends, peers=peers, head_pieces=1, machine=long, **shape)
                     for ranks, layout, peers in ((1, "zigzag", False), (4, "documents", False), (4, "documents", True), (4, "zigzag", False)))
    assert 0.24 < found[0]["all_gather"] / whole["all_gather"] < 0.26 and found[1]["all_gather"] == found[0]["all_gather"]
    assert found[2]["all_gather"] > 1.2 * found[0]["all_gather"] and found[2]["ulysses"] == found[0]["ulysses"]
    pairs = sum((b - a) ** 2 / 2 for a, b in zip(ends, ends[1:]))
    assert math.isclose(whole["all_gather"], 2 * 32 * pairs * 256 / long.flops)


if __name__ == "__main__":
    launch(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
