"""attn.transformers: masks as flags and lengths against transformers' own masks, generation and its server against eager attention."""
import importlib.util
import inspect
import itertools
import unittest
import unittest.mock

from support import Case, attn, np

HAVE = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
if HAVE:
    import torch
    import transformers
    from transformers import masking_utils as masking

    import attn.flash
    import attn.transformers
    from attn.transformers import FLASH, NAME, Mask, libattn_mask

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 80, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
KINDS = {"Llama": {}, "Qwen3": {"head_dim": 16}, "Mistral": {"sliding_window": 5},
         "Gemma2": {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 3.0},
         "GptOss": {"head_dim": 16, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}}


def models(kind, *names):
    """Equal models of random weights, each with its attn_implementation."""
    made = []
    for name in names:
        torch.manual_seed(1)
        config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind])
        made.append(getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation=name).eval())
        made[-1].load_state_dict(made[0].state_dict())
    return made


def launches():
    return sum(attn._attn.launch_count(k["name"]) for k in attn.info()["kernels"] if k["backend"] == "cpu" and k["op"] == "forward")


@unittest.skipUnless(HAVE, "torch or transformers is not installed")
class TransformersCase(Case):
    def tokens(self, *shape):
        return torch.from_numpy(self.rng.integers(3, 80, shape))

    def padded(self, batch, length, side):
        """Ones with zeros on a side, none in the last sequence."""
        mask = torch.ones(batch, length, dtype=torch.long)
        for b in range(batch - 1):
            count = int(self.rng.integers(1, length // 2 + 1))
            mask[b, slice(None, count) if side == "left" else slice(length - count, None)] = 0
        return mask

    def calls(self):
        """What libattn passes to forward(), as a list that grows."""
        calls = []
        forward = attn.transformers.forward

        def noting(*arrays, **options):
            calls.append(options)
            return forward(*arrays, **options)
        patch = unittest.mock.patch.object(attn.transformers, "forward", noting)
        patch.start()
        self.addCleanup(patch.stop)
        return calls


class Masks(TransformersCase):
    def rules(self):
        causal, window = masking.causal_mask_function, masking.sliding_window_causal_mask_function
        both, around = masking.bidirectional_mask_function, masking.sliding_window_bidirectional_mask_function
        return {"causal": causal, "window": window(3), "wide window": window(99), "bidirectional": both, "around": around(2)}

    def test_against_transformers(self):
        """All patterns, places of the queries and sides of padding; a Mask in memory is transformers' mask."""
        seen, total = {}, 0
        for (name, function), (queries, q_offset, keys, kv_offset), side in itertools.product(
                self.rules().items(),
                ((7, 0, 7, 0), (1, 6, 7, 0), (3, 4, 7, 0), (4, 0, 9, 0), (1, 4, 9, 0), (2, 6, 6, 2), (1, 9, 4, 6), (5, 0, 8, 0)),
                (None, "left", "right", "both", "holes", "all", "none of one")):
            if name in ("bidirectional", "around") and (q_offset or kv_offset):
                continue
            length = keys + kv_offset if side != "all" else q_offset + queries
            mask = torch.ones(3, length, dtype=torch.bool)
            if side in ("left", "both"):
                mask[0, :2], mask[1, :kv_offset + 1] = False, False
            if side in ("right", "both"):
                mask[0, -2:], mask[2, -1:] = False, False
            if side == "holes":
                mask[1, kv_offset + keys // 2] = False
            if side == "none of one":
                mask[1] = False
            for offset in (q_offset, torch.tensor(q_offset)):
                options = dict(batch_size=3, q_length=queries, kv_length=keys, q_offset=offset, kv_offset=kv_offset, mask_function=function,
                               attention_mask=None if side is None else mask, allow_is_causal_skip=False)
                with self.subTest(name, queries=queries, q_offset=offset, keys=keys, kv_offset=kv_offset, side=side):
                    got, want = libattn_mask(**options), masking.sdpa_mask(**options)
                    total += 1
                    if isinstance(got, Mask):
                        seen[name, side] = seen.get((name, side), 0) + 1
                        self.assertEqual(got.shape, want.shape)
                        got = got.dense()
                        if "window" in name and queries > 1 and q_offset == kv_offset and side is not None:  # rows of padding differ
                            real = mask[:, q_offset:q_offset + queries][:, None, :, None]
                            self.assertTrue(torch.equal(got & real, want & real), f"{got}\n{want}")
                            continue
                    self.assertTrue(torch.equal(got, want), f"{got}\n{want}")
        print(f"masks: {sum(seen.values())} of {total} are flags and lengths")
        for case in itertools.product(("causal", "wide window", "window"), (None, "left", "right", "both", "all", "none of one")):
            self.assertIn(case, seen)
        for case in itertools.product(("causal", "bidirectional"), (None, "left", "right", "both", "all", "none of one")):
            self.assertIn(case, seen)
        self.assertIn(("around", None), seen)
        self.assertFalse([case for case in seen if case[1] == "holes"])

    def test_windows_of_a_query_before_the_last_key(self):
        """Padding after a query's keys: the window is a first key."""
        mask = torch.ones(3, 9, dtype=torch.bool)
        mask[0, 5:], mask[1, 7:], mask[2, :6] = False, False, False
        options = dict(batch_size=3, q_length=1, kv_length=9, q_offset=8, kv_offset=0, attention_mask=mask,
                       mask_function=masking.sliding_window_causal_mask_function(4))
        got, want = libattn_mask(**options), masking.sdpa_mask(**options)
        self.assertIsInstance(got, Mask)
        self.assertEqual((got.rule["seqlens_kv"].tolist(), got.rule["kv_begin"].tolist()), ([5, 7, 9], [5, 5, 6]))
        self.assertTrue(torch.equal(got.dense(), want))

    def test_gpus_take_no_kv_begin(self):
        """Of CUDA padding on the left stays a mask in memory; on the right it is lengths."""
        rule = lambda padding, device: attn.transformers._rule((True, (-1, -1)), 2, 1, 7, 6, 0, padding, torch.device(device))
        left, right = (torch.tensor([2, 0]), torch.tensor([7, 7])), (torch.tensor([0, 0]), torch.tensor([4, 7]))
        self.assertIsNone(rule(left, "cuda"))
        self.assertEqual(rule(left, "cpu")["kv_begin"].tolist(), [2, 0])
        self.assertEqual(rule(right, "cuda")["seqlens_kv"].tolist(), [4, 7])
        self.assertIsNone(rule(right, "cuda")["kv_begin"])

    def test_other_patterns_are_dense(self):
        chunks = masking.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
        either = masking.or_masks(masking.causal_mask_function, lambda b, h, i, j: j < 2)
        for function in chunks, either:
            options = dict(batch_size=2, q_length=7, kv_length=7, mask_function=function)
            got = libattn_mask(**options, allow_is_causal_skip=False)
            self.assertNotIsInstance(got, Mask)
            self.assertTrue(torch.equal(got, masking.sdpa_mask(**options, allow_is_causal_skip=False)))

    def test_operations_make_it_dense(self):
        made = libattn_mask(batch_size=2, q_length=5, kv_length=5, attention_mask=self.padded(2, 5, "left").bool())
        self.assertIsInstance(made, Mask)
        dense = made.dense()
        for do in (lambda x: x[..., :3], lambda x: ~x, lambda x: torch.cat((x, x), -1), lambda x: x.to(torch.float32), lambda x: x.clone(),
                   lambda x: torch.where(x, 1.0, 0.0), lambda x: x & x.transpose(-1, -2)):
            got = do(made)
            self.assertIs(type(got), torch.Tensor)
            self.assertTrue(torch.equal(got, do(dense)))
        self.assertIn("causal", repr(made))

    def test_no_mask_is_needed(self):
        for options in (dict(q_length=7, kv_length=7), dict(q_length=1, kv_length=7, q_offset=6), dict(q_length=1, kv_length=7, q_offset=6,
                        mask_function=masking.sliding_window_causal_mask_function(9))):
            self.assertIsNone(libattn_mask(batch_size=2, **options) if "mask_function" not in options else
                              masking.sdpa_mask(batch_size=2, local_size=9, **options))
        self.assertIsNone(libattn_mask(batch_size=2, q_length=7, kv_length=7, mask_function=masking.bidirectional_mask_function,
                                       allow_is_causal_skip=False, allow_is_bidirectional_skip=True))


class Models(TransformersCase):
    def test_no_biases(self):
        """Padding, windows and static caches reach the kernels as flags and lengths; logits as those of eager attention."""
        for kind, side in itertools.product(KINDS, (None, "left", "right")):
            eager, ours = models(kind, "eager", NAME)
            tokens = self.tokens(3, 17)
            mask = None if side is None else self.padded(3, 17, side)
            with self.subTest(kind, side=side), torch.no_grad():
                calls, before = self.calls(), launches()
                got, want = (m(tokens, attention_mask=mask, use_cache=True) for m in (ours, eager))
                self.assertEqual(launches() - before, 2)
                seen = slice(None) if mask is None else mask.bool()
                self.close(got.logits[seen], want.logits[seen], 2e-5)
                self.assertEqual([c["bias"] for c in calls], [None] * 2)
                if side == "right":
                    continue
                step = tokens[:, :2]
                longer = None if mask is None else torch.cat((mask, mask.new_ones(3, 2)), 1)
                got, want = (m(step, attention_mask=longer, past_key_values=o.past_key_values) for m, o in ((ours, got), (eager, want)))
                self.close(got.logits, want.logits, 2e-5)
                self.assertEqual([c["bias"] for c in calls], [None] * 4)

    def test_encoder(self):
        config = transformers.BertConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=80)
        torch.manual_seed(1)
        eager, ours = (transformers.BertModel._from_config(config, attn_implementation=name).eval() for name in ("eager", NAME))
        ours.load_state_dict(eager.state_dict())
        tokens, mask = self.tokens(3, 17), self.padded(3, 17, "right")
        calls = self.calls()
        with torch.no_grad():
            got, want = (m(tokens, attention_mask=mask).last_hidden_state for m in (ours, eager))
        self.close(got[mask.bool()], want[mask.bool()], 2e-5)
        for call in calls:
            self.assertIsNone(call["bias"])
            self.assertEqual(call["seqlens_kv"].tolist(), mask.sum(1).tolist())

    def test_generate(self):
        """Greedy tokens with padding on the left, dynamic and static caches, beams."""
        for kind in KINDS:
            eager, ours = models(kind, "eager", NAME)
            tokens, mask = self.tokens(3, 11), self.padded(3, 11, "left")
            for options in ({}, {"cache_implementation": "static"}, {"num_beams": 2}):
                if options and kind in ("Qwen3", "Mistral"):
                    continue
                with self.subTest(kind, **options):
                    calls = self.calls()
                    got, want = (m.generate(tokens, attention_mask=mask, max_new_tokens=9, do_sample=False, **options) for m in (ours, eager))
                    self.assertTrue(torch.equal(got, want), f"{got}\n{want}")
                    self.assertFalse([c for c in calls if c["bias"] is not None])

    def test_compiled_step_over_a_static_cache(self):
        eager, ours = models("Llama", "eager", NAME)
        tokens, mask = self.tokens(2, 9), self.padded(2, 9, "left")
        cache, other = (transformers.StaticCache(config=ours.config, max_cache_len=24) for _ in range(2))
        with torch.no_grad():
            want = eager(tokens, attention_mask=mask, past_key_values=other).logits
            self.close(ours(tokens, attention_mask=mask, past_key_values=cache).logits[mask.bool()], want[mask.bool()], 2e-5)
            step = torch.compile(ours, fullgraph=True, backend="aot_eager")
            for n in range(3):
                mask = torch.cat((mask, mask.new_ones(2, 1)), 1)
                want = eager(tokens[:, n:n + 1], attention_mask=mask, past_key_values=other).logits
                prepared = masking.create_causal_mask(ours.config, torch.zeros(2, 1, 64), mask.bool(), cache)
                for given in (mask, prepared)[n % 2:n % 2 + 1]:
                    self.close(step(tokens[:, n:n + 1], attention_mask=given, past_key_values=cache).logits, want, 2e-5)

    def test_output_attentions_warns(self):
        _, ours = models("Llama", "eager", NAME)
        with torch.no_grad(), self.assertLogs("transformers", "WARNING") as logged:
            ours(self.tokens(1, 5), output_attentions=True)
        self.assertIn("libattn returns no attention weights", "\n".join(logged.output))

    def test_models_with_their_own_attention_are_refused(self):
        config = transformers.BloomConfig(vocab_size=80, hidden_size=64, n_layer=1, n_head=4)
        for name in NAME, FLASH:
            self.refuses(ValueError, [f"attn_implementation is {name}", "accepted for BloomForCausalLM", "eager"],
                         transformers.BloomForCausalLM._from_config, config, attn_implementation=name)

    def test_training_with_padding(self):
        """Gradients through lengths and kv_begin, as through eager attention's masks."""
        tokens, mask = self.tokens(3, 9), self.padded(3, 9, "left")
        labels = tokens.masked_fill(mask == 0, -100)
        labels[:, :6] = -100  # a row of padding predicts nothing
        gradients = []
        for model in models("Mistral", "eager", NAME):
            model.train()
            calls = self.calls()
            model(tokens, attention_mask=mask, labels=labels).loss.backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
        self.assertTrue(calls and all(c["bias"] is None and c["kv_begin"] is not None for c in calls))
        for name, want in gradients[0].items():
            self.close(gradients[1][name], want, 1e-5)


class Server(TransformersCase):
    def test_generate_batch(self):
        """transformers' server with continuous batching: tokens as those of generate() with eager attention, one request at a time."""
        if not hasattr(transformers.LlamaForCausalLM, "generate_batch"):
            self.skipTest(f"transformers {transformers.__version__} has no generate_batch")
        requests = [self.tokens(n).tolist() for n in (5, 17, 30, 3)]
        for kind in ("Llama", "Qwen3", "Gemma2", "GptOss"):
            eager, ours = models(kind, "eager", FLASH)
            self.assertEqual(ours.config._attn_implementation, FLASH)
            options = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
            sizes = {"page_size": 32, "block_size": 32, "num_blocks": 16, "max_batch_tokens": 32}  # versions differ in the first two
            known = inspect.signature(transformers.ContinuousBatchingConfig).parameters
            small = transformers.ContinuousBatchingConfig(**{name: size for name, size in sizes.items() if name in known})
            with self.subTest(kind):
                before = launches()
                answers = ours.generate_batch(inputs=requests, generation_config=options, progress_bar=False,
                                              continuous_batching_config=small)
                self.assertGreater(launches() - before, 2)
                got = {tuple(answer.prompt_ids): list(answer.generated_tokens) for answer in answers.values()}
                for request in requests:
                    want = eager.generate(torch.tensor([request]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, len(request):].tolist()
                    self.assertEqual(got[tuple(request)], want)

    def test_pool_of_pages(self):
        """The decode fast path's call: k and v are views of one pool, v's pages after k's, layers side by side."""
        layers, pages, size, heads, dim, batch = 2, 6, 4, 2, 16, 3
        pool = torch.randn(layers * 2 * pages, size, heads, dim)
        want = pool.clone()
        table = torch.from_numpy(self.rng.permutation(pages)[:batch * 2].reshape(batch, 2)).int() * 2 * layers
        lengths = torch.tensor([1, 3, 6], dtype=torch.int32)
        for layer in range(layers):
            k_cache, v_cache = pool[2 * layer:], pool[2 * layer + 1:]
            count = len(v_cache)
            q, k, v = torch.randn(batch, 1, 4, dim), torch.randn(batch, 1, heads, dim), torch.randn(batch, 1, heads, dim)
            sinks = torch.randn(4)
            out = attn.flash.flash_attn_with_kvcache(q, k_cache[:count], v_cache[:count], k, v, causal=True, block_table=table,
                                                     cache_seqlens=lengths, window_size=(4, 4), s_aux=sinks)
            for b in range(batch):
                n = int(lengths[b])
                page = int(table[b, n // size]) + 2 * layer
                want[page, n % size], want[page + 1, n % size] = k[b, 0], v[b, 0]
                rows = [want[table[b].long() + 2 * layer + i].reshape(-1, heads, dim)[max(0, n - 4):n + 1].double() for i in (0, 1)]
                keys, values = (x.repeat_interleave(2, 1) for x in rows)
                scores = torch.einsum("hd,nhd->hn", q[b, 0].double(), keys) / 4
                weights = torch.softmax(torch.cat((scores, sinks[:, None].double()), 1), 1)[:, :-1]
                self.close(out[b, 0], torch.einsum("hn,nhd->hd", weights, values), 2e-6)
        self.assertTrue(torch.equal(pool, want))


if __name__ == "__main__":
    unittest.main()
