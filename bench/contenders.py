"""What peers.py times: libattn through its C ABI, and the peers that are importable. q, k, v are [B, S, H, D]."""
import ctypes as c

import torch

# ---- libattn through ctypes: attn.h, field by field -------------------------------------------------------------------

DTYPES = {"f16": (2, torch.float16), "bf16": (3, torch.bfloat16), "f8_e4m3fn": (4, torch.float8_e4m3fn)}
TYPE_OF = {tensor_type: number for number, tensor_type in DTYPES.values()}
BYTE_TYPES = {"q8_0": 7, "q4_0": 8, "q4_1": 10, "q5_0": 11, "q5_1": 12, "iq4_nl": 13, "i8": 14, "i4": 15, "nvfp4": 17}  # of which tensors have the bytes
CAUSAL = 1
FP8_PRECISE = 1 << 10
DESCALE_BLOCK = 3
CUDA = 3


class Strides(c.Structure):
    _fields_ = [(n, c.c_int64) for n in ("batch", "seq", "head")]


class Segment(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("k_type", c.c_int), ("v_type", c.c_int), ("layout", c.c_int),
                ("has_seqlens", c.c_int32), ("seqlen", c.c_int64), ("total", c.c_int64), ("num_pages", c.c_int64),
                ("page_size", c.c_int32), ("max_pages", c.c_int32), ("k_stride", Strides), ("v_stride", Strides),
                ("k_descale", c.c_int), ("v_descale", c.c_int), ("descale_block_keys", c.c_int32),
                ("k_scale_stride", Strides), ("v_scale_stride", Strides)]


class Problem(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("batch", c.c_int64), ("heads_q", c.c_int64), ("heads_kv", c.c_int64),
                ("head_dim", c.c_int64), ("head_dim_v", c.c_int64), ("seqlen_q", c.c_int64), ("total_q", c.c_int64),
                ("q_layout", c.c_int), ("q_type", c.c_int), ("out_type", c.c_int), ("q_descale", c.c_int),
                ("q_stride", Strides), ("out_stride", Strides), ("num_segments", c.c_int32),
                ("segments", c.POINTER(Segment)), ("scale", c.c_float), ("softcap", c.c_float), ("flags", c.c_uint32),
                ("window_left", c.c_int64), ("window_right", c.c_int64), ("bias_type", c.c_int),
                ("bias_stride", c.c_int64 * 4), ("block_q", c.c_int32), ("block_k", c.c_int32), ("mask_batch", c.c_int64),
                ("mask_heads", c.c_int64), ("mask_partials", c.c_int64), ("fixed_split", c.c_int64), ("max_sms", c.c_int32),
                ("kernel", c.c_char_p), ("tree_keys", c.c_int64)]


class SegmentArgs(c.Structure):
    _fields_ = [("struct_size", c.c_size_t)] + [(n, c.c_void_p) for n in (
        "k", "v", "seqlens", "cu_seqlens", "block_table", "k_descale", "v_descale", "k_scale", "v_scale")]


class Args(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("q", c.c_void_p), ("out", c.c_void_p), ("lse", c.c_void_p),
                ("cu_seqlens_q", c.c_void_p), ("num_segments", c.c_int32), ("segments", c.POINTER(SegmentArgs))] + [
                    (n, c.c_void_p) for n in ("bias", "alibi_slopes", "sinks", "q_descale", "out_scale", "block_kinds",
                                              "block_index", "block_bits", "tree")]


class KvAppendProblem(c.Structure):
    _fields_ = [("struct_size", c.c_size_t)] + [(n, c.c_int64) for n in (
        "batch", "heads_kv", "head_dim", "head_dim_v", "seqlen_new", "total_new")] + [
            ("new_layout", c.c_int), ("new_type", c.c_int), ("k_new_stride", Strides), ("v_new_stride", Strides),
            ("segment", Segment), ("kernel", c.c_char_p), ("advance_seqlens", c.c_int32),
            ("rotary_interleaved", c.c_int32), ("rotary_dim", c.c_int64), ("rotary_positions", c.c_int64),
            ("heads_q", c.c_int64), ("q_stride", Strides), ("q_out_stride", Strides)]


class KvAppendArgs(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("k_new", c.c_void_p), ("v_new", c.c_void_p), ("cu_seqlens_new", c.c_void_p),
                ("cache", SegmentArgs)] + [(n, c.c_void_p) for n in ("rotary_cos", "rotary_sin", "q", "q_out", "seqlens_out")]


def make(kind, **fields):
    return kind(struct_size=c.sizeof(kind), **fields)


class MaskShape(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("batch", c.c_int64), ("heads", c.c_int64), ("seqlen_q", c.c_int64),
                ("seqlen_kv", c.c_int64), ("block_q", c.c_int32), ("block_k", c.c_int32)]


class BlockMask:
    """A block mask of the library from a dense tensor of bytes [Sq, Skv], for all batch entries and heads."""

    def __init__(self, library, dense, block):
        self.library, self.mask = library, c.c_void_p()
        shape = make(MaskShape, seqlen_q=dense.shape[0], seqlen_kv=dense.shape[1], block_q=block, block_k=block)
        library.check(library.lib.attn_block_mask_from_dense(library.context, c.byref(shape), c.c_void_p(dense.data_ptr()),
                                                             stream(), c.byref(self.mask)))

    def apply(self, problem=None, args=None):
        self.library.check(self.library.lib.attn_block_mask_apply(self.mask, problem and c.byref(problem),
                                                                  args and c.byref(args)))

    def __del__(self):
        self.library.lib.attn_block_mask_destroy(self.mask)


class ContextOptions(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("device", c.c_int32), ("cpu_threads", c.c_int32), ("driver_path", c.c_char_p),
                ("kernel_file", c.c_char_p), ("has_device", c.c_int32), ("interrupted", c.c_void_p),
                ("interrupted_user", c.c_void_p)]


class Libattn:
    """One build of the library. `kernel`: None, or a name to demand, in which {dim} and {dtype} are the cell's.
    `kernel_file`: device code in place of the library's own."""

    def __init__(self, path, kernel=None, kernel_file=None):
        self.lib, self.kernel = c.CDLL(path), kernel
        for name in ("attn_last_error", "attn_plan_kernel", "attn_version"):
            getattr(self.lib, name).restype = c.c_char_p
        self.lib.attn_plan_workspace.restype = c.c_size_t
        for name in ("attn_plan_kernel", "attn_plan_workspace", "attn_plan_destroy", "attn_block_mask_destroy"):
            getattr(self.lib, name).argtypes = [c.c_void_p]
        self.lib.attn_plan_destroy.restype = self.lib.attn_block_mask_destroy.restype = None
        self.context = c.c_void_p()
        options = make(ContextOptions, kernel_file=kernel_file.encode() if kernel_file else None)
        self.check(self.lib.attn_context_create(CUDA, c.byref(options), c.byref(self.context)))

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.attn_last_error().decode())

    def forward(self, cell, inputs, mask=None, flags=0, descale_keys=0, out_dtype=None):
        """Per set of inputs a call that launches on PyTorch's current stream and returns the output, which all share.
        descale_keys: K and V have a descale of 0.75 to 1.25 for each block of this many keys."""
        q, k, v = inputs[0]
        kind = TYPE_OF[q.dtype]
        segment = make(Segment, k_type=kind, v_type=kind, seqlen=cell.seqlen)
        descales = {}
        if descale_keys:
            blocks = -(-cell.seqlen // descale_keys)
            descales = {name: torch.rand(cell.batch, cell.heads_kv, blocks, device="cuda") * 0.5 + 0.75
                        for name in ("k_descale", "v_descale")}
            segment.k_descale = segment.v_descale = DESCALE_BLOCK
            segment.descale_block_keys = descale_keys
        fp8 = q.dtype == torch.float8_e4m3fn
        out = torch.empty(q.shape, dtype=out_dtype or (torch.bfloat16 if fp8 else q.dtype), device=q.device)
        kernel = self.kernel.format(dim=cell.dim, dtype="fp8" if fp8 else cell.dtype).encode() if self.kernel else None
        problem = make(Problem, batch=cell.batch, heads_q=cell.heads, heads_kv=cell.heads_kv, head_dim=cell.dim,
                       head_dim_v=cell.dim, seqlen_q=cell.seqlen, q_type=kind, out_type=TYPE_OF[out.dtype], num_segments=1,
                       segments=c.pointer(segment), flags=flags | (CAUSAL if cell.causal else 0), kernel=kernel)
        if mask:
            mask.apply(problem=problem)
        plan = Plan(self, problem, mask)
        return [plan.call(q, k, v, out, **descales) for q, k, v in inputs], plan.kernel


class KvAppend:
    """A plan of attn_kv_append."""

    def __init__(self, library, problem):
        self.library, self.plan = library, c.c_void_p()
        library.check(library.lib.attn_plan_create_kv_append(library.context, c.byref(problem), c.byref(self.plan)))
        self.kernel = library.lib.attn_plan_kernel(self.plan).decode()

    def __del__(self):
        self.library.lib.attn_plan_destroy(self.plan)

    def run(self, args):
        self.library.check(self.library.lib.attn_run_kv_append(self.plan, c.byref(args), stream()))


class Plan:
    def __init__(self, library, problem, mask=None):
        self.library, self.lib, self.mask = library, library.lib, mask
        self.plan = c.c_void_p()
        library.check(self.lib.attn_plan_create(library.context, c.byref(problem), c.byref(self.plan)))
        self.kernel = self.lib.attn_plan_kernel(self.plan).decode()
        self.bytes = c.c_size_t(self.lib.attn_plan_workspace(self.plan))
        self.space = torch.empty(max(self.bytes.value, 1), dtype=torch.uint8, device="cuda")
        self.memory = c.c_void_p(self.space.data_ptr())
        if self.bytes.value:
            library.check(self.lib.attn_workspace_init(self.plan, self.memory, self.bytes, stream()))

    def __del__(self):
        self.lib.attn_plan_destroy(self.plan)

    def call(self, q, k, v, out, **descales):
        segment_args = make(SegmentArgs, k=k.data_ptr(), v=v.data_ptr(), **{name: x.data_ptr() for name, x in descales.items()})
        args = make(Args, q=q.data_ptr(), out=out.data_ptr(), num_segments=1, segments=c.pointer(segment_args))
        if self.mask:
            self.mask.apply(args=args)

        def call(keep=(q, k, v, segment_args, descales)):
            self.run(args)
            return out
        return call

    def run(self, args):
        self.library.check(self.lib.attn_run(self.plan, c.byref(args), self.memory, self.bytes, stream()))


def stream():
    return c.c_void_p(torch.cuda.current_stream().cuda_stream)


# ---- peers ------------------------------------------------------------------------------------------------------------
# Each takes a cell and one set of inputs and returns the call; ImportError: not here. The fp8 ones take fp8 inputs.

def sdpa(backend):
    def peer(cell, q, k, v):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))

        def call():
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=cell.causal, enable_gqa=cell.heads != cell.heads_kv).transpose(1, 2)
        return call
    return peer


def flex(cell, q, k, v):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    torch._dynamo.reset()  # else the shapes of earlier cells make this one's dynamic
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, cell.seqlen, cell.seqlen) if cell.causal else None
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=cell.heads != cell.heads_kv).transpose(1, 2)


def fa3(cell, q, k, v):
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        from fa3_fwd_interface import flash_attn_func  # the package fa3-fwd: the same, forward alone, without f16

    def call():
        out = flash_attn_func(q, k, v, causal=cell.causal)
        return out[0] if isinstance(out, tuple) else out  # builds before mid-2025 return lse too
    return call


def flashinfer(cell, q, k, v):
    import flashinfer as fi
    if cell.batch != 1:
        raise ImportError("timed at batch 1 only, where a single request is its whole input")
    return lambda: fi.single_prefill_with_kv_cache(q[0], k[0], v[0], causal=cell.causal)[None]


def built_by_cudnn(graph):
    """The workspace of a graph of cudnn-frontend, which is built; raises what cuDNN does not take."""
    import cudnn
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")


def cudnn_fp8(cell, q, k, v):
    """cuDNN's fp8 forward through nvidia-cudnn-frontend: fp8 output, which on Hopper is the only one."""
    import cudnn
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FP8_E4M3, intermediate_data_type=cudnn.data_type.FLOAT,
                          compute_data_type=cudnn.data_type.FLOAT, handle=handle)

    def tensor(like, kind):
        return graph.tensor(dim=list(like.shape), stride=list(like.stride()), data_type=kind)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float32, device="cuda")
    inputs = [tensor(x, cudnn.data_type.FP8_E4M3) for x in heads_first]
    scales = {name: tensor(one, cudnn.data_type.FLOAT)
              for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")}
    o, _, amax_s, amax_o = graph.sdpa_fp8(q=inputs[0], k=inputs[1], v=inputs[2], **scales, is_inference=True,
                                          attn_scale=cell.dim ** -0.5, use_causal_mask=cell.causal, name="sdpa")
    out = torch.empty_like(q)
    o.set_output(True).set_dim(list(heads_first[0].shape)).set_stride(list(out.transpose(1, 2).stride()))
    o.set_data_type(cudnn.data_type.FP8_E4M3)
    for amax in (amax_s, amax_o):
        amax.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(cudnn.data_type.FLOAT)
    space = built_by_cudnn(graph)
    maxima = [torch.zeros_like(one) for _ in range(2)]
    pack = {**dict(zip(inputs, heads_first)), **{scale: one for scale in scales.values()},
            o: out.transpose(1, 2), amax_s: maxima[0], amax_o: maxima[1]}

    def call():
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(pack, space, handle=handle)
        return out
    return call


ANCHOR = "cudnn"
PEERS = {"cudnn": sdpa("CUDNN_ATTENTION"), "fa2": sdpa("FLASH_ATTENTION"), "fa3": fa3, "flashinfer": flashinfer,
         "flex": flex}
PEERS_FP8 = {"cudnn": sdpa("CUDNN_ATTENTION"), "cudnn_fp8": cudnn_fp8, "fa3_fp8": fa3}
