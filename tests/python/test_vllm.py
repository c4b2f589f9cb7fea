"""attn.vllm in vLLM itself: greedy tokens of models with random weights against transformers' eager attention, and the parts that no
small model reaches."""
import importlib.metadata
import importlib.util
import os
import pathlib
import tempfile
import threading
import types
import unittest
import unittest.mock

from support import Case, attn, causal, np, softmax_attention

HAVE = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "vllm"))
if HAVE:
    for _name, _value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                          "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}.items():
        os.environ.setdefault(_name, _value)
    import tokenizers
    import torch
    import transformers
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    import attn.torch
    import attn.vllm
    attn.vllm.register()

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
WINDOW = {"sliding_window": 32}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
KINDS = {"Llama": ("Llama", {}), "Qwen3": ("Qwen3", {}), "Mistral": ("Mistral", WINDOW),
         "Gemma2": ("Gemma2", {**WINDOW, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 32}),
         "Gemma3": ("Gemma3Text", {**WINDOW, **MIXED, "query_pre_attn_scalar": 32}),
         "GptOss": ("GptOss", {**WINDOW, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
         "Bloom": ("Bloom", {})}
LENGTHS = (1, 5, 17, 33, 64, 150, 300)
NEW = 12


def randomize(model):
    """Weights with which tokens depend on all keys, and no two logits are close."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 0.1 if p.dim() == 1 else 3 / p.shape[-1] ** 0.5 if "embed" in name or "lm_head" in name else 1.5 / p.shape[-1] ** 0.5
            p.copy_(torch.randn(p.shape, generator=generator) * scale + (1 if "norm" in name and p.dim() == 1 else 0))


def tokenizer():
    """vLLM wants one for some models; the tests' prompts are tokens."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(128)}, unk_token="0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="0")


def launches(op):
    return sum(attn._attn.launch_count(k["name"]) for k in attn.info()["kernels"] if k["backend"] != "reference" and k["op"] == op)


@unittest.skipUnless(HAVE, "vllm, torch or transformers is not installed")
class Engine(Case):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.made = {}
        cls.addClassCleanup(attn.set_num_threads, attn.get_num_threads())
        torch.set_num_threads(1)  # the models are too small for more

    def model(self, kind):
        """(folder, prompts, greedy tokens by eager attention) of a model with random weights."""
        if kind not in self.made:
            name, more = KINDS[kind]
            config = getattr(transformers, f"{name}Config")(**SIZES, **more)
            model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
            randomize(model)
            folder = f"{self.folder.name}/{kind}"
            model.save_pretrained(folder)
            prompts = [self.rng.integers(3, 128, n).tolist() for n in LENGTHS]
            self.made[kind] = folder, prompts, [self.greedy(model, p) for p in prompts]
        return self.made[kind]

    def greedy(self, model, prompt):
        model.generation_config.eos_token_id = None
        return model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt):].tolist()

    def engine(self, folder, **options):
        options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_batched_tokens": 512, "block_size": 16,
                   "skip_tokenizer_init": True, "disable_log_stats": True, "attention_backend": attn.vllm.NAME, **options}
        self.doCleanups()  # one engine at a time: vLLM's groups are those of the first
        llm = vllm.LLM(folder, **options)

        def close():
            llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()
        self.addCleanup(close)
        return llm

    def generate(self, llm, prompts):
        sampling = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
        before = launches("forward"), launches("kv_append")
        outputs = llm.generate([p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        self.ran = launches("forward") - before[0], launches("kv_append") - before[1]
        return [list(o.outputs[0].token_ids) for o in outputs]


class Decoders(Engine):
    def test_tokens(self):
        """Requests that come and go, prompts in chunks, and prefixes that the cache has: each step's tokens are those of eager attention."""
        for kind in KINDS:
            folder, prompts, want = self.model(kind)
            with self.subTest(kind):
                llm = self.engine(folder, max_num_seqs=3, max_num_batched_tokens=64, enable_prefix_caching=True)
                for order in (slice(None), slice(None, None, -1)):  # the second time from the cache
                    self.assertEqual(self.generate(llm, prompts[order]), want[order])
                    self.assertGreater(self.ran[0], 2 * NEW)
                    self.assertEqual(self.ran[1], self.ran[0])

    def test_whole_prompts(self):
        """All prompts in one step, without prefix caching; bigger pages; speculated tokens."""
        folder, prompts, want = self.model("Llama")
        for name, options in {"plain": {"enable_prefix_caching": False}, "bigger pages": {"block_size": 128},
                              "speculation": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
                              }.items():
            with self.subTest(name):
                llm = self.engine(folder, max_num_batched_tokens=1024, **options)
                self.assertEqual(self.generate(llm, prompts), want)
                self.assertGreater(self.ran[0], 0)

    def test_fp8_cache(self):
        """Tokens of eager attention over keys and values rounded to fp8."""
        folder, prompts, _ = self.model("Llama")
        for name, stored in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
            def rounded(module, query, key, value, mask, stored=stored, **options):
                key, value = (x.to(stored).float() for x in (key, value))
                return transformers.models.llama.modeling_llama.eager_attention_forward(module, query, key, value, mask, **options)
            transformers.AttentionInterface.register("rounded", rounded)
            transformers.AttentionMaskInterface.register("rounded", transformers.masking_utils.eager_mask)
            model = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="rounded").eval()
            with self.subTest(name):
                self.assertEqual(self.generate(self.engine(folder, kv_cache_dtype=name), prompts), [self.greedy(model, p) for p in prompts])
                self.assertGreater(self.ran[0], 0)

    def test_encoder(self):
        """BERT: embeddings as those of eager attention."""
        config = transformers.BertConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                         architectures=["BertModel"])
        model = transformers.BertModel._from_config(config, attn_implementation="eager").eval()
        randomize(model)
        folder = f"{self.folder.name}/Bert"
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        prompts = [self.rng.integers(3, 128, n).tolist() for n in (1, 5, 64, 300)]
        llm = self.engine(folder, runner="pooling", skip_tokenizer_init=False)
        before = launches("forward")
        got = [np.array(o.outputs.embedding) for o in llm.embed([{"prompt_token_ids": p} for p in prompts], use_tqdm=False)]
        self.assertGreaterEqual(launches("forward") - before, 2)
        for prompt, one in zip(prompts, got):
            with torch.no_grad():
                want = model(torch.tensor([prompt])).last_hidden_state[0, 0]
            self.close(one, torch.nn.functional.normalize(want, dim=0), 1e-4)

    def test_whisper(self):
        """Sound through an encoder, cross attention and a decoder. The encoder's own attention is vLLM's, which calls PyTorch's: patched, it
        is libattn's too."""
        config = transformers.WhisperConfig(
            vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=100, max_target_positions=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1, architectures=["WhisperForConditionalGeneration"])
        model = transformers.WhisperForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
        randomize(model)
        with torch.no_grad():  # logits are products with the token's own row: without this it would be repeated
            for name, p in model.named_parameters():
                if name.endswith("norm.bias"):
                    p -= 1
            model.model.decoder.embed_tokens.weight *= 0.3
            for layer in model.model.decoder.layers:
                layer.encoder_attn.out_proj.weight *= 4
                layer.encoder_attn.q_proj.weight *= 3
        folder = f"{self.folder.name}/Whisper"
        model.save_pretrained(folder)
        sound = transformers.WhisperFeatureExtractor(chunk_length=2)
        transformers.WhisperProcessor(sound, tokenizer()).save_pretrained(folder)
        waves = [self.normal(int(16000 * seconds)) for seconds in (0.3, 2, 1.1, 1.1)]
        prompts = [[1], [1, 5, 9, 77], [1, *range(20, 50)], [1, *range(20, 50)]]
        want = []
        for wave, prompt in zip(waves, prompts):
            features, tokens = sound(wave, sampling_rate=16000, return_tensors="pt").input_features, list(prompt)
            for _ in range(NEW):
                with torch.no_grad():
                    tokens.append(int(model(input_features=features, decoder_input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            want.append(tokens[len(prompt):])
        self.assertNotEqual(want[2], want[3])  # the sound counts
        llm = self.engine(folder, max_model_len=64, max_num_seqs=2, skip_tokenizer_init=False, limit_mm_per_prompt={"audio": 1},
                          mm_processor_cache_gb=0)
        asked = [{"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (wave, 16000)}}, "decoder_prompt": {"prompt_token_ids": prompt}}
                 for wave, prompt in zip(waves, prompts)]
        with attn.torch.patch() as taken:
            self.assertEqual(self.generate(llm, asked), want)
        self.assertGreaterEqual(self.ran[0], 4 * NEW + 2)  # two layers each of self attention, of cross attention and of the encoder
        self.assertGreaterEqual(self.ran[1], 2 * NEW + 2)
        self.assertGreaterEqual(taken.taken, 2, taken)

    def test_not_served(self):
        """Refused where the model is made, with what, why and the way back."""
        folder, *_ = self.model("Llama")
        self.refuses(ValueError, ["attention_backend LIBATTN", "kv_cache_dtype int8_per_token_head", "vLLM takes its own attention"],
                     self.engine, folder, kv_cache_dtype="int8_per_token_head")


@unittest.skipUnless(HAVE, "vllm, torch or transformers is not installed")
class Steps(Case):
    """One step of one layer, as vLLM calls it, against float64."""
    HEADS, HEADS_KV, DIM, PAGE = 4, 2, 32, 16
    DEVICE, TYPE, BOUND = "cpu", "float32", 4e-6

    def layer(self, cross=False, **options):
        """(impl, builder) of a layer."""
        backend = attn.vllm.Backend
        if cross:
            from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
            backend = create_cross_attention_backend(backend)
            options["attn_type"] = "encoder_decoder"
        impl = backend.get_impl_cls()(self.HEADS, self.DIM, 0.2, self.HEADS_KV, **options)
        dtype = getattr(torch, self.TYPE)
        impl.process_weights_after_loading(dtype)
        from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec
        spec = (CrossAttentionSpec if cross else FullAttentionSpec)(block_size=self.PAGE, num_kv_heads=self.HEADS_KV, head_size=self.DIM,
                                                                    dtype=dtype)
        config = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(static_forward_context={"a.layer": types.SimpleNamespace(impl=impl)}),
            parallel_config=types.SimpleNamespace(cp_kv_cache_interleave_size=1), model_config=types.SimpleNamespace(dtype=dtype))
        return impl, backend.get_builder_cls()(spec, ["a.layer"], config, torch.device(self.DEVICE))

    def scales(self, k=1.0, v=1.0):
        return types.SimpleNamespace(_k_scale=torch.tensor(k, device=self.DEVICE), _v_scale=torch.tensor(v, device=self.DEVICE),
                                     kv_sharing_target_layer_name=None)

    def tensors(self, *shape):
        return torch.from_numpy(self.normal(*shape)).to(self.DEVICE, getattr(torch, self.TYPE))

    def attention(self, q, k, v, *options):
        return softmax_attention(*(x.double().cpu() for x in (q, k, v)), *options)

    def expect(self, out, want):
        self.close(out.float().cpu(), want, self.BOUND)

    def batch(self, new, lengths, is_causal=True, **options):
        """vLLM's metadata of requests with `new` tokens, of `lengths` with them; pages in random order."""
        from vllm.v1.attention.backend import CommonAttentionMetadata
        pages = [-(-n // self.PAGE) for n in lengths]
        order, table, at = self.rng.permutation(sum(pages)), np.zeros((len(new), max(pages)), np.int32), 0
        slots = []
        for b, count in enumerate(pages):
            table[b, :count], at = order[at:at + count], at + count
            places = np.arange(lengths[b] - new[b], lengths[b])
            slots.append(table[b, places // self.PAGE].astype(np.int64) * self.PAGE + places % self.PAGE)
        starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
        there = torch.tensor(lengths, dtype=torch.int32, device=self.DEVICE)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.DEVICE), query_start_loc_cpu=starts, seq_lens=there, num_reqs=len(new),
            num_actual_tokens=sum(new), max_query_len=max(new), max_seq_len=max(lengths), block_table_tensor=torch.from_numpy(table).to(self.DEVICE),
            slot_mapping=torch.from_numpy(np.concatenate(slots)).to(self.DEVICE), causal=is_causal,
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32), **options), sum(pages)

    def cache(self, pages, layout):
        """vLLM's [pages, Hkv, page, 2 D], in a layout of memory."""
        order = {"heads": (0, 1, 2, 3), "tokens": (0, 2, 1, 3)}[layout]
        sizes = (pages, self.HEADS_KV, self.PAGE, 2 * self.DIM)
        return self.tensors(*(sizes[n] for n in order)).permute(order)

    def keys_of(self, cache, table, length):
        """(k, v) [1, length, Hkv, D] of one request."""
        rows = cache[table.long()].transpose(1, 2).reshape(-1, self.HEADS_KV, 2 * self.DIM)[None, :length].float()
        return rows.split(self.DIM, -1)

    def test_layouts_windows_and_causal_by_request(self):
        new, lengths, of = (3, 1, 20), (40, 17, 20), torch.tensor([1, 0, 0], dtype=torch.int32)
        for layout, window, is_causal in (("heads", None, True), ("tokens", 8, True), ("heads", 8, of), ("tokens", None, of), ("tokens", 8, False)):
            if is_causal is of and self.DEVICE != "cpu":
                continue  # docs/vllm.md
            with self.subTest(layout, window=window, causal=is_causal):
                sinks = self.tensors(self.HEADS)
                impl, builder = self.layer(sliding_window=window, sinks=torch.nn.Parameter(sinks))
                common, pages = self.batch(new, lengths, is_causal)
                cache = self.cache(pages, layout)
                q, k, v = (self.tensors(24, heads, self.DIM) for heads in (self.HEADS, self.HEADS_KV, self.HEADS_KV))
                out = torch.full_like(q, np.nan)
                impl.do_kv_cache_update(self.scales(), k, v, cache, common.slot_mapping)
                impl.forward(self.scales(), q, k, v, cache, builder.build(0, common), out)
                for b, (count, length) in enumerate(zip(new, lengths)):
                    rows = slice(sum(new[:b]), sum(new[:b + 1]))
                    keys, values = self.keys_of(cache, common.block_table_tensor[b], length)
                    self.assertTrue(torch.equal(keys[0, -count:], k[rows].float()) and torch.equal(values[0, -count:], v[rows].float()))
                    i, j = np.arange(count)[:, None] + length - count, np.arange(length)
                    seen = np.ones((count, length), bool)
                    if is_causal is True or is_causal is of and of[b]:
                        seen &= j <= i
                    if window:
                        seen &= (j > i - window) & (j < i + window)
                    got, lse = self.attention(q[None, rows], keys, values, seen, 0.2)
                    share = 1 / (1 + np.exp(sinks.cpu().numpy()[None, :, None] - lse))  # what sinks leave
                    self.expect(out[rows], (got * share.transpose(0, 2, 1)[..., None])[0])

    def test_slots_of_minus_one(self):
        impl, _ = self.layer()
        common, pages = self.batch((4,), (4,))
        cache = self.cache(pages, "tokens")
        before = cache.clone()
        slots = common.slot_mapping.clone()
        slots[1] = -1
        k, v = self.tensors(6, 2, self.DIM), self.tensors(6, 2, self.DIM)  # two tokens of padding after the slots
        impl.do_kv_cache_update(self.scales(), k, v, cache, slots)
        want = before.clone()
        for t in (0, 2, 3):
            want[0, :, t] = torch.cat((k[t], v[t]), -1)
        self.assertTrue(torch.equal(cache, want))

    def test_cross_attention(self):
        """vLLM's own cross attention over LIBATTN: encoder keys are written in the first step and read in later ones."""
        impl, builder = self.layer(cross=True)
        encoded = (30, 17)
        k, v = (self.tensors(47, self.HEADS_KV, self.DIM) for _ in range(2))
        common, _ = self.batch((3, 2), (3, 2), encoder_seq_lens=torch.tensor(encoded, dtype=torch.int32, device=self.DEVICE),
                               encoder_seq_lens_cpu=np.array(encoded))
        common.block_table_tensor = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=self.DEVICE)
        cache = self.cache(4, "tokens")
        for new, keys, values in ((3, 2), k, v), ((1, 1), None, None):
            if keys is None:
                later, _ = self.batch(new, (4, 3))
                common = common.replace(query_start_loc=later.query_start_loc, query_start_loc_cpu=later.query_start_loc_cpu, max_query_len=1,
                                        num_actual_tokens=2, seq_lens=later.seq_lens, seq_lens_cpu_upper_bound=later.seq_lens.cpu())
            q = self.tensors(sum(new), self.HEADS, self.DIM)
            out = torch.empty_like(q)
            impl.forward(self.scales(), q, keys, values, cache, builder.build(0, common), out)
            for b, rows, of in ((0, slice(0, new[0]), slice(0, 30)), (1, slice(new[0], None), slice(30, 47))):
                self.expect(out[rows], self.attention(q[None, rows], k[None, of], v[None, of], None, 0.2)[0][0])

    def test_fp8_scales(self):
        impl, builder = self.layer(kv_cache_dtype="fp8")
        common, pages = self.batch((3, 5), (20, 5))
        cache = torch.zeros(pages, self.PAGE, self.HEADS_KV, 2 * self.DIM, dtype=torch.uint8, device=self.DEVICE).transpose(1, 2)
        q, k, v = (self.tensors(8, heads, self.DIM) for heads in (self.HEADS, self.HEADS_KV, self.HEADS_KV))
        scales, out = self.scales(0.5, 2.0), torch.empty_like(q)
        impl.do_kv_cache_update(scales, k, v, cache, common.slot_mapping)
        impl.forward(scales, q, k, v, cache, builder.build(0, common), out)
        stored = cache.view(torch.float8_e4m3fn)
        for b, rows, length in ((0, slice(0, 3), 20), (1, slice(3, 8), 5)):
            keys, values = self.keys_of(stored.float(), common.block_table_tensor[b], length)
            self.assertTrue(torch.equal(keys[0, -(rows.stop - rows.start):], (k[rows] / 0.5).to(torch.float8_e4m3fn).float()))
            want = self.attention(q[None, rows], keys * 0.5, values * 2, causal(rows.stop - rows.start, length), 0.2)[0][0]
            self.expect(out[rows], want)

    def test_shared_prefix(self):
        """Requests whose tables begin with the same pages: read once, where that is worth it."""
        impl, builder = self.layer()
        common, pages = self.batch((1,) * 5, (70, 50, 65, 49, 64))
        common.block_table_tensor[:, :3] = common.block_table_tensor[0, :3]
        cache, q = self.cache(pages, "heads"), self.tensors(5, self.HEADS, self.DIM)
        self.assertEqual(builder.build(0, common).shared_pages, 0)  # too little
        with unittest.mock.patch.object(attn.vllm, "_PREFIX_BYTES", 1):
            built = builder.build(0, common)
            self.assertEqual(built.shared_pages, 3)
            out = torch.empty_like(q)
            impl.forward(self.scales(), q, None, None, cache, built, out)
            common.block_table_tensor[3, 1] = 0 if common.block_table_tensor[0, 1] else 1
            self.assertEqual(builder.build(0, common).shared_pages, 1)
            common.block_table_tensor[3, 1] = common.block_table_tensor[0, 1]
        for b, length in enumerate(common.seq_lens.tolist()):
            keys, values = self.keys_of(cache, common.block_table_tensor[b], length)
            self.expect(out[b:b + 1], self.attention(q[None, b:b + 1], keys, values, None, 0.2)[0][0])

    def test_decode_context_parallelism(self):
        """Two ranks, each with every second key before the step's tokens and with two of four heads, of one K/V head."""
        self.HEADS_KV = 1
        common, pages = self.batch((1, 3), (40, 20))
        cache = self.cache(pages, "tokens")
        q, k, v = (self.tensors(4, heads, self.DIM) for heads in (self.HEADS, 1, 1))
        ranks, heads, wall, results = 2, self.HEADS // 2, threading.Barrier(2), {}
        sinks = self.tensors(self.HEADS)
        shelf = [None] * ranks

        class Group:
            def __init__(self, rank):
                self.rank_in_group = rank

            def exchange(self, x):
                shelf[self.rank_in_group] = x
                wall.wait()
                parts = list(shelf)
                wall.wait()
                return parts

            def all_gather(self, x, dim):
                return torch.cat(self.exchange(x), dim)

            def reduce_scatter(self, x, dim):
                return sum(self.exchange(x)).chunk(ranks, dim)[self.rank_in_group]
        group = threading.local()

        def rank(r):
            group.value = Group(r)
            impl = attn.vllm.Impl(heads, self.DIM, 0.2, 1, sinks=sinks[r * heads:(r + 1) * heads])
            impl.process_weights_after_loading(torch.float32)
            impl.dcp_world_size, impl.dcp_rank = ranks, r
            _, builder = self.layer()
            builder.impls = [impl]
            built = builder.build(0, common)
            mine = torch.zeros_like(cache)
            table = torch.zeros_like(common.block_table_tensor)
            at = 0
            for b, context in enumerate((39, 17)):  # this rank's keys, from a page of its own on
                kept = torch.cat(self.keys_of(cache, common.block_table_tensor[b], context), -1)[0, r::ranks]
                for n in range(0, len(kept), self.PAGE):
                    table[b, n // self.PAGE] = at
                    mine[at, :, :len(kept[n:n + self.PAGE])] = kept[n:n + self.PAGE].transpose(0, 1)
                    at += 1
                self.assertEqual(int(built.context_lens[b]), len(kept))
            built.block_table = table
            out = torch.empty(4, heads, self.DIM)
            impl.forward(self.scales(), q[:, r * heads:(r + 1) * heads], k, v, mine, built, out)
            results[r] = out
        with unittest.mock.patch.object(attn.vllm, "get_dcp_group", lambda: group.value):
            threads = [threading.Thread(target=rank, args=(r,)) for r in range(ranks)]
            [t.start() for t in threads]
            [t.join(60) for t in threads]
        out = torch.cat([results[r] for r in range(ranks)], 1)
        for b, rows, context in ((0, slice(0, 1), 39), (1, slice(1, 4), 17)):
            keys, values = self.keys_of(cache, common.block_table_tensor[b], context)
            keys, values = (torch.cat((x, y[None, rows]), 1) for x, y in ((keys, k), (values, v)))
            count = rows.stop - rows.start
            want, lse = self.attention(q[None, rows], keys, values, causal(count, context + count), 0.2)
            share = 1 / (1 + np.exp(sinks.numpy()[None, :, None] - lse))
            self.expect(out[rows], (want * share.transpose(0, 2, 1)[..., None])[0])

    def test_refuses_with_the_layers_name(self):
        impl, _ = self.layer()
        with unittest.mock.patch.object(attn, "explain", side_effect=attn.Unsupported("no kernel takes it")):
            error = self.refuses(ValueError, ["layer a.layer cannot run", "no kernel takes it", attn.vllm.WAY_BACK], self.layer)
        self.assertNotIn("\n", str(error))
        self.refuses(ValueError, ["LIBATTN does not take chunk_lookback", attn.vllm.WAY_BACK], self.layer, chunk_lookback=2)

    def test_chosen_only_where_asked_for(self):
        from vllm.platforms import current_platform
        from vllm.v1.attention.selector import AttentionSelectorConfig
        ask = lambda name, **options: current_platform.get_attn_backend_cls(
            name and attn.vllm.AttentionBackendEnum[name],
            AttentionSelectorConfig(**{"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": None, **options}))
        with unittest.mock.patch.dict(os.environ):
            os.environ.pop("ATTN_VLLM", None)
            self.assertNotIn("attn.vllm", ask(None))
            self.assertEqual(ask("LIBATTN"), "attn.vllm.Backend")
            os.environ["ATTN_VLLM"] = "1"
            self.assertEqual(ask(None), "attn.vllm.Backend")
            self.assertNotIn("attn.vllm", ask("CPU_ATTN"))
            for option in ("use_mla", "use_mm_prefix", "use_rswa", "use_pcp", "use_batch_invariant"):
                if option in AttentionSelectorConfig._fields:
                    self.refuses(ValueError, ["cannot run with attention_backend LIBATTN", "not supported", attn.vllm.WAY_BACK], ask, None,
                                 **{option: True})

    def test_entry_point(self):
        import tomllib
        text = (pathlib.Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
        points = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]
        loaded = [importlib.metadata.EntryPoint(name, value, "vllm.general_plugins").load() for name, value in points.items()]
        self.assertEqual(loaded, [attn.vllm.register])

    def test_registered_once_and_the_version(self):
        attn.vllm.register()
        name = attn.vllm.AttentionBackendEnum.__members__
        with unittest.mock.patch.dict(attn.vllm.AttentionBackendEnum._member_map_), \
                unittest.mock.patch.object(attn.vllm, "NAME", "LIBATTN_AGAIN"), unittest.mock.patch.object(vllm, "__version__", "0.99.0"), \
                unittest.mock.patch.object(attn.vllm._logger, "warning") as warned:
            attn.vllm.register()
        self.assertIn("LIBATTN", name)
        self.assertIn("0.99.0", warned.call_args.args)


@unittest.skipUnless(HAVE and torch.cuda.is_available(), "vllm, torch or transformers is not installed, or there is no GPU")
class StepsOnGpu(Steps):
    DEVICE, TYPE, BOUND = "cuda", "float16", 4e-3
    test_shared_prefix = test_decode_context_parallelism = None  # by tables and threads of the host
    test_refuses_with_the_layers_name = test_chosen_only_where_asked_for = test_entry_point = test_registered_once_and_the_version = None

    def test_graph(self):
        """One graph serves all lengths and tables of its size, with requests of no tokens after the others."""
        impl, builder = self.layer()
        size = 8
        common, pages = self.batch((1,) * size, (64,) * size)
        cache = self.cache(pages, "tokens")
        q, k, v = (self.tensors(size, heads, self.DIM) for heads in (self.HEADS, self.HEADS_KV, self.HEADS_KV))
        out, scales, graph = torch.empty_like(q), self.scales(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            impl.do_kv_cache_update(scales, k, v, cache, common.slot_mapping)
            impl.forward(scales, q, k, v, cache, builder.build_for_cudagraph_capture(common), out)
        for _ in range(20):
            lengths = self.rng.integers(1, 65, int(self.rng.integers(1, size + 1))).tolist()
            count = len(lengths)
            other, _ = self.batch((1,) * count, lengths)
            table = torch.zeros_like(common.block_table_tensor)
            table[:count, :other.block_table_tensor.shape[1]] = other.block_table_tensor
            common.block_table_tensor.copy_(table)
            common.slot_mapping.fill_(-1)[:count] = other.slot_mapping
            common.query_start_loc.fill_(count)[:count + 1] = other.query_start_loc
            common.seq_lens.zero_()[:count] = other.seq_lens
            for x in (q, k, v):
                x.copy_(self.tensors(*x.shape))
            graph.replay()
            for b, length in enumerate(lengths):
                keys, values = self.keys_of(cache, table[b], length)
                self.assertTrue(torch.equal(keys[0, -1], k[b].float()))
                self.expect(out[b:b + 1], self.attention(q[None, b:b + 1], keys, values, None, 0.2)[0][0])


@unittest.skipUnless(HAVE and torch.cuda.is_available(), "vllm, torch or transformers is not installed, or there is no GPU")
class DecodersOnGpu(Engine):
    def test_tokens(self):
        """Each token of f16 in vLLM is, within rounding, the best one of eager attention in f32 after the same tokens: whole prompts and
        chunks, from the prefix cache, in CUDA graphs and in compiled code."""
        config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 256, "num_attention_heads": 8, "head_dim": 64})
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
        randomize(model)
        folder = f"{self.folder.name}/OnGpu"
        model.half().save_pretrained(folder)
        model.float().cuda()
        prompts = [self.rng.integers(3, 128, n).tolist() for n in LENGTHS]
        graphs = {"enforce_eager": False, "max_num_seqs": 8}
        for name, options in {
                "eager": {}, "chunks": {"max_num_seqs": 3, "max_num_batched_tokens": 64, "enable_prefix_caching": True},
                "graphs": {**graphs, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
                "all batches in graphs": {**graphs, "compilation_config": {"cudagraph_mode": "FULL"}}, "compiled": graphs}.items():
            with self.subTest(name):
                llm = self.engine(folder, dtype="float16", kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.1, **options)
                for order in (slice(None), slice(None, None, -1)):
                    got = self.generate(llm, prompts[order])
                    if not options:
                        self.assertGreaterEqual(self.ran[0], 2 * NEW)
                        self.assertEqual(self.ran[1], self.ran[0])
                    for prompt, tokens in zip(prompts[order], got):
                        with torch.no_grad():
                            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1:-1].cpu()
                        chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
                        self.assertLess(float((logits.amax(-1) - chosen).max()), 0.03)


if __name__ == "__main__":
    unittest.main()
