"""attn as the attention backend LIBATTN of vLLM. vLLM calls register() itself, by the entry point of the installed distribution; then

    LLM(model, attention_backend="LIBATTN")     vllm serve MODEL --attention-backend LIBATTN     ATTN_VLLM=1

each turn it on, on CPUs and on CUDA. Without one of these nothing changes."""
import os
from dataclasses import dataclass

import torch
import vllm
from vllm.distributed.parallel_state import get_dcp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, AttentionType,
                                       MultipleOf)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.kv_cache_interface import CrossAttentionSpec

import attn

__all__ = ["Backend", "Builder", "Impl", "Metadata", "NAME", "TRIED", "register"]

NAME = "LIBATTN"
TRIED = ("0.26.0", "0.32.0")  # of vLLM, by tests/python/test_vllm.py
WAY_BACK = "without attention_backend=\"LIBATTN\" and ATTN_VLLM, vLLM takes its own attention"

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_PREFIX_BYTES = 32 << 20  # from where prefix_* read a shared prefix once (docs/decode.md)
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

_logger = init_logger("vllm.attn")


class Backend(AttentionBackend):
    """What vLLM asks before it makes a layer. Caches may have any layout: k and v are views with strides."""
    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *_FP8]

    @staticmethod
    def get_name():
        return NAME

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        """Versions before 0.32 ask for this and the next one; later ones give the same shape in an order of their own."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        """Pages [page, Hkv, 2 D] in memory, with the layers of a page next to each other if there is one array for all layers."""
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @classmethod
    def supports_attn_type(cls, attn_type):
        return True

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def supports_sliding_window(cls):
        return True

    @classmethod
    def supports_non_causal(cls):
        return True

    @classmethod
    def supports_per_head_quant_scales(cls):
        return True


@dataclass
class Metadata:
    """A step's batch, B requests with T tokens, for all layers of one kind.

    query_start_loc i32 [B + 1], seq_lens i32 [B], block_table i32 [B, pages] and slot_mapping i64 [T] are in the device's memory; the
    numbers are the host's, so that a captured graph serves every batch of its size.
    max_seq_len        the most keys of a request, or more; 0: as many as the table has room for
    causal_sequences   None, or i32 [B]: 0 where a request is not causal
    shared_pages       pages at the start of every request's table that are the same
    context_lens       with decode context parallelism: i32 [B], this rank's keys before the step's tokens"""
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    causal_sequences: torch.Tensor | None
    shared_pages: int
    context_lens: torch.Tensor | None


def _start_threads(device):
    """On the host: as many threads as PyTorch has, on the cores of all threads of this process. vLLM binds each of PyTorch's threads to
    a core, and threads that start later would share that of the thread that starts them."""
    if device.type != "cpu" or not hasattr(os, "sched_setaffinity"):
        return
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, set().union(*(os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task"))))
        attn.set_num_threads(torch.get_num_threads())
        x = torch.zeros(1, 1, 1, 8)
        attn.forward(x, x, x)
    except (OSError, ValueError):  # a thread that ended, cores that are not ours
        pass
    finally:
        os.sched_setaffinity(0, mine)


class Builder(AttentionMetadataBuilder[Metadata]):
    """Makes a step's Metadata. It reads nothing that is on a GPU, so graphs may capture batches of requests with equally many tokens. In
    other batches a replay may have longer requests than the capture, whose max_query_len is in the graph."""
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.cross = isinstance(kv_cache_spec, CrossAttentionSpec)
        layers = vllm_config.compilation_config.static_forward_context
        self.impls = [layers[name].impl for name in layer_names]
        self.interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        _start_threads(device)
        for name in layer_names:
            layers[name].impl.check(name, kv_cache_spec, vllm_config.model_config.dtype, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        m = common_attn_metadata
        by_request = m.causal if isinstance(m.causal, torch.Tensor) else None
        impl = self.impls[0]
        context = None
        if impl.dcp_world_size > 1:
            before = m.seq_lens[:m.num_reqs] - (m.query_start_loc[1:m.num_reqs + 1] - m.query_start_loc[:m.num_reqs])
            context = get_dcp_local_seq_lens(before, impl.dcp_world_size, impl.dcp_rank, self.interleave).int()
        longest = 0 if self.cross else m.max_seq_len
        return Metadata(m.num_actual_tokens, m.max_query_len, longest, m.query_start_loc, m.seq_lens, m.block_table_tensor,
                        m.slot_mapping, by_request is not None or bool(m.causal) and not self.cross, by_request,
                        self._shared_pages(m, common_prefix_len), context)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        captured = super().build_for_cudagraph_capture(common_attn_metadata)
        captured.max_seq_len = 0  # replays may have longer requests
        return captured

    def _shared_pages(self, m, common_prefix_len):
        """Pages of a prefix that is worth reading once for the batch; 0 if there is none. Where the table is the host's it is looked
        at, since vLLM 0.32 no longer says what requests share."""
        size = getattr(self.kv_cache_spec, "block_size", 0)
        one_each = m.max_query_len == 1 and m.num_actual_tokens == m.num_reqs > 1
        if self.cross or not one_each or not size or not all(impl.may_share for impl in self.impls):
            return 0
        most = common_prefix_len // size
        key_bytes = getattr(self.kv_cache_spec, "page_size_bytes", 0) // size
        if m.block_table_tensor.device.type == "cpu":
            if (m.num_reqs - 1) * m.max_seq_len * key_bytes < _PREFIX_BYTES:
                return 0
            most = (int(m.seq_lens[:m.num_reqs].min()) - 1) // size  # one key at least is each request's own
            table = m.block_table_tensor[:m.num_reqs, :most]
            other = (table != table[0]).any(0)
            most = int(other.int().argmax()) if bool(other.any()) else most
        return most if (m.num_reqs - 1) * most * size * key_bytes >= _PREFIX_BYTES else 0


class Impl(AttentionImpl[Metadata]):
    """A layer: writes its new keys and values by their slots, and attends."""
    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
                 logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None, **others):
        if any(value is not None and value != -1 for value in others.values()):
            raise ValueError(f"LIBATTN does not take {', '.join(others)} of a layer of {num_heads} heads; accepted: layers without; {WAY_BACK}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.may_share = sliding_window is None and alibi_slopes is None and self.dcp_world_size == 1
        self._sinks = None

    def process_weights_after_loading(self, act_dtype):
        self._sinks = None if self.sinks is None else self.sinks.detach().float()

    def check(self, name, spec, dtype, device):
        """Raises ValueError, with the layer's name, if libattn has no kernel for the layer on this device."""
        cached = self.attn_type not in _ENCODERS
        if self.dcp_world_size > 1 and not (cached and self.sliding_window is None and self.alibi_slopes is None):
            self._refuse(name, "it has a sliding window, ALiBi or no cache, which decode_context_parallel_size above 1 does not take")
        new = lambda *shape, dtype=torch.int32: torch.zeros(shape, dtype=dtype, device=device)
        heads_v = getattr(spec, "head_size_v", None) or self.head_size
        stored = _FP8.get(self.kv_cache_dtype, getattr(spec, "dtype", dtype)) if cached else dtype
        rows = (1, spec.block_size) if cached else (1,)
        k, v = (torch.empty(*rows, self.num_kv_heads, size, dtype=stored, device=device) for size in (self.head_size, heads_v))
        where = {"block_table": new(1, 1), "seqlens_kv": new(1)} if cached else {"cu_seqlens_kv": new(2)}
        if self.kv_cache_dtype in _FP8 and cached:
            where.update(k_descale=new(1, dtype=torch.float32), v_descale=new(1, dtype=torch.float32))
        try:
            attn.explain(torch.empty(1, self.num_heads, self.head_size, dtype=dtype, device=device), k, v, cu_seqlens_q=new(2),
                         causal=cached, window=self._window(True), scale=self.scale, softcap=self.softcap, alibi_slopes=self.alibi_slopes,
                         sinks=None if self.sinks is None else new(self.num_heads, dtype=torch.float32), **where)
        except attn.Error as error:
            self._refuse(name, str(error))

    def _refuse(self, name, why):
        raise ValueError(f"layer {name} cannot run with attention_backend LIBATTN: {why}; {WAY_BACK}")

    def _window(self, causal):
        if self.sliding_window is None:
            return (-1, -1)
        left = self.sliding_window - 1
        return (left, 0 if causal and self.attn_type not in _ENCODERS else left)

    def _cache(self, kv_cache, layer):
        """(k, v, scales) as attn takes them: pages [blocks, block, Hkv, D] whatever their order in memory."""
        if self.kv_cache_dtype in _FP8:
            kv_cache = kv_cache.view(_FP8[self.kv_cache_dtype])
        pages = kv_cache.transpose(1, 2)
        return pages[..., :self.head_size], pages[..., self.head_size:]

    def _scales(self, layer, batch):
        if self.kv_cache_dtype not in _FP8:
            return {}
        return {name: scale.reshape(1) if scale.numel() == 1 else scale.reshape(1, -1).expand(batch, -1).contiguous()
                for name, scale in (("k_descale", layer._k_scale), ("v_descale", layer._v_scale))}

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """Writes token t to slot_mapping[t]; negative: nowhere."""
        if self.attn_type in _ENCODERS or slot_mapping.numel() == 0:
            return
        k, v = self._cache(kv_cache, layer)
        count = slot_mapping.shape[0]
        attn.kv_append(key[:count], value[:count], k, v, slot_mapping=slot_mapping, **self._scales(layer, 1))

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        """query [T, Hq, D], key and value [T, Hkv, D] -> output [T, Hq, Dv]; rows after num_actual_tokens are not written."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("output_scale is given; accepted: None, LIBATTN does not announce fused output quantisation")
        m = attn_metadata
        if m is None:  # a profile run
            return output.zero_()
        n = m.num_actual_tokens
        q, out = query[:n], output[:n].view(n, self.num_heads, -1)
        options = {"scale": self.scale, "softcap": self.softcap, "alibi_slopes": self.alibi_slopes, "sinks": self._sinks}
        causal = {"causal": m.causal} if m.causal_sequences is None else {"causal": True, "causal_sequences": m.causal_sequences}
        packed = {"cu_seqlens_q": m.query_start_loc, "max_seqlen_q": m.max_query_len}
        if self.attn_type in _ENCODERS:
            attn.forward(q, key[:n], value[:n], cu_seqlens_kv=m.query_start_loc, window=self._window(False), out=out, **packed, **options)
            return output
        k, v = self._cache(kv_cache, layer)
        scales = self._scales(layer, m.seq_lens.shape[0])
        if m.context_lens is not None:
            self._context_parallel(q, key[:n], value[:n], k, v, m, out, packed, options, causal, scales)
        elif m.shared_pages:
            self._shared(q, k, v, m, out, options, scales)
        else:
            longest = min(m.max_seq_len, m.block_table.shape[1] * k.shape[1]) or None
            attn.forward(q, k, v, block_table=m.block_table, seqlens_kv=m.seq_lens, max_seqlen_kv=longest, out=out,
                         window=self._window(m.causal and m.causal_sequences is None), **causal, **packed, **options, **scales)
        return output

    def _shared(self, q, k, v, m, out, options, scales):
        """One query a request: the pages that all tables begin with are read once for the batch."""
        first = m.shared_pages
        keys = first * k.shape[1]
        scales = {name: [x[:1], x] for name, x in scales.items()}
        attn.forward(q[:, None], [k, k], [v, v], block_table=[m.block_table[:1, :first], m.block_table[:, first:].contiguous()],
                     seqlens_kv=[torch.full((1,), keys, dtype=torch.int32, device=q.device), m.seq_lens - keys], shared_segments=1,
                     out=out[:, None], **options, **scales)

    def _context_parallel(self, q, key, value, k, v, m, out, packed, options, causal, scales):
        """Decode context parallelism: each rank has some of the keys before the step's tokens. All heads attend to this rank's keys, the
        ranks' results are weighted by their lse, and the step's own tokens, which every rank has, are merged in. Sinks count there."""
        group = get_dcp_group()
        before, lse = attn.forward(group.all_gather(q.contiguous(), dim=1), k, v, block_table=m.block_table, seqlens_kv=m.context_lens,
                                   return_lse=True, **packed, **{**options, "sinks": None}, **scales)
        total = torch.logsumexp(group.all_gather(lse[None], dim=0), 0)  # [H of all ranks, T]
        weight = torch.where(total == -torch.inf, 0, torch.exp(lse - total))
        before = group.reduce_scatter((before * weight.t()[..., None]).contiguous(), dim=1)
        mine = slice(group.rank_in_group * self.num_heads, (group.rank_in_group + 1) * self.num_heads)
        own = attn.forward(q, key, value, cu_seqlens_kv=m.query_start_loc, return_lse=True, **causal, **packed, **options)
        out.copy_(attn.merge([(before.to(q.dtype).contiguous(), total[mine].contiguous()), own], out_dtype=out.dtype)[0])


def _choose(platform):
    """The platform's choice of a backend, which knows LIBATTN. CPUs take no other name, and check nothing."""
    choose = platform.get_attn_backend_cls.__func__

    def chosen(cls, selected_backend, attn_selector_config, num_heads=None):
        ours = AttentionBackendEnum[NAME]
        if selected_backend is None and os.environ.get("ATTN_VLLM", "0") == "1":
            selected_backend = ours
        if selected_backend is not ours:
            return choose(cls, selected_backend, attn_selector_config, num_heads)
        config = attn_selector_config
        reasons = Backend.validate_configuration(device_capability=cls.get_device_capability(), **config._asdict())
        if reasons:
            raise ValueError(f"a layer of {config.attn_type} attention with head_size {config.head_size}, {config.dtype} and kv_cache_dtype "
                             f"{config.kv_cache_dtype} cannot run with attention_backend LIBATTN: {', '.join(reasons)}; {WAY_BACK}")
        _logger.info_once("Using LIBATTN, libattn %s.", attn.__version__)
        return ours.get_path()
    chosen.attn_wraps = choose
    platform.get_attn_backend_cls = classmethod(chosen)


def _add_member():
    """Makes NAME a member of vLLM's enumeration of backends, which register_backend does from 0.32 on."""
    member = object.__new__(AttentionBackendEnum)
    member._name_, member._value_, member._sort_order_ = NAME, f"{__name__}.Backend", len(AttentionBackendEnum)
    AttentionBackendEnum._member_map_[NAME] = AttentionBackendEnum._value2member_map_[member._value_] = member
    AttentionBackendEnum._member_names_.append(NAME)


def register():
    """Adds LIBATTN to vLLM's attention backends; a second time has no effect. Another version of vLLM than those tried is a warning."""
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, f"{__name__}.Backend")
        if NAME not in AttentionBackendEnum.__members__:
            _add_member()
        if vllm.__version__.split("+")[0] not in TRIED:
            _logger.warning("libattn: LIBATTN was tried with vLLM %s, and this is %s; compare its results before you use it.",
                            ", ".join(TRIED), vllm.__version__)
    platform = type(current_platform)
    if not hasattr(platform.get_attn_backend_cls, "attn_wraps"):
        _choose(platform)
