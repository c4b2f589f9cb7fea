"""attn.transformers: masks as flags and lengths against transformers' own masks, generation and its server against eager attention."""
import contextlib
import inspect
import itertools
import unittest
import unittest.mock

import numpy as np

from models import BOUND, DEVICE, HAVE, KINDS, ModelCase, launches, models, pair
from support import attn

if HAVE:
    import torch
    import transformers
    from transformers import masking_utils as masking

    import attn.flash
    import attn.transformers
    from attn.transformers import FLASH, NAME, Mask, libattn_mask
    from models import DTYPE


class TransformersCase(ModelCase):
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

    def test_gradients_of_cuda_take_no_kv_begin(self):
        """There padding on the left stays a mask in memory; on the right it is lengths."""
        rule = lambda padding, device: attn.transformers._rule((True, (-1, -1)), 2, 1, 7, 6, 0, padding, torch.device(device))
        left, right = (torch.tensor([2, 0]), torch.tensor([7, 7])), (torch.tensor([0, 0]), torch.tensor([4, 7]))
        self.assertIsNone(rule(left, "cuda"))
        self.assertEqual(rule(left, "cpu")["kv_begin"].tolist(), [2, 0])
        self.assertEqual(rule(right, "cuda")["seqlens_kv"].tolist(), [4, 7])
        self.assertIsNone(rule(right, "cuda")["kv_begin"])
        with torch.no_grad():
            self.assertEqual(rule(left, "cuda")["kv_begin"].tolist(), [2, 0])

    def test_other_patterns_are_dense(self):
        chunks = masking.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
        either = masking.or_masks(masking.causal_mask_function, lambda b, h, i, j: j < 2)
        for function in chunks, either:
            options = dict(batch_size=2, q_length=7, kv_length=7, mask_function=function)
            got = libattn_mask(**options, allow_is_causal_skip=False)
            self.assertNotIsInstance(got, Mask)
            self.assertTrue(torch.equal(got, masking.sdpa_mask(**options, allow_is_causal_skip=False)))

    def test_operations_make_it_dense(self):
        made = libattn_mask(batch_size=2, q_length=5, kv_length=5, attention_mask=self.padded(2, 5, "left").bool().cpu())
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
    def sums(self, model, tokens, prompt, mask):
        """What the log probabilities of each sequence's tokens after a prompt add up to."""
        mask = torch.cat((mask, mask.new_ones(len(tokens), tokens.shape[1] - prompt)), 1)
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[:, prompt - 1:-1]
        return logits.log_softmax(-1).gather(-1, tokens[:, prompt:, None]).sum((1, 2))

    def test_no_biases(self):
        """Padding, windows and static caches reach the kernels as flags and lengths; logits as those of eager attention."""
        for kind, side in itertools.product(KINDS, (None, "left", "right")):
            eager, ours = models(kind, "eager", NAME)
            tokens = self.tokens(3, 17)
            mask = None if side is None else self.padded(3, 17, side)
            with self.subTest(kind, side=side), torch.no_grad():
                calls, before = self.calls(), launches()
                got, want = (m(tokens, attention_mask=mask, use_cache=True) for m in (ours, eager))
                self.assertGreaterEqual(launches() - before, 2)
                seen = slice(None) if mask is None else mask.bool()
                self.like(got.logits[seen], want.logits[seen])
                self.assertEqual([c["bias"] for c in calls], [None] * 2)
                if side == "right":
                    continue
                step = tokens[:, :2]
                longer = None if mask is None else torch.cat((mask, mask.new_ones(3, 2)), 1)
                got, want = (m(step, attention_mask=longer, past_key_values=o.past_key_values) for m, o in ((ours, got), (eager, want)))
                self.like(got.logits, want.logits)
                self.assertEqual([c["bias"] for c in calls], [None] * 4)

    def test_encoder(self):
        config = lambda: transformers.BertConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=80)
        eager, ours = pair(transformers.BertModel, config, "eager", NAME)
        tokens, mask = self.tokens(3, 17), self.padded(3, 17, "right")
        calls = self.calls()
        with torch.no_grad():
            got, want = (m(tokens, attention_mask=mask).last_hidden_state for m in (ours, eager))
        self.like(got[mask.bool()], want[mask.bool()])
        for call in calls:
            self.assertIsNone(call["bias"])
            self.assertEqual(call["seqlens_kv"].tolist(), mask.sum(1).tolist())

    def test_generate(self):
        """Greedy tokens with padding on the left, dynamic and static caches, beams."""
        for kind in KINDS:
            eager, ours = models(kind, "eager", NAME)
            tokens, mask = self.tokens(3, 11), self.padded(3, 11, "left")
            for options in ({}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 2}):
                if options and kind in ("Qwen3", "Mistral"):
                    continue
                with self.subTest(kind, **options):
                    calls = self.calls()
                    got, want = (m.generate(tokens, attention_mask=mask, max_new_tokens=9, do_sample=False, **options) for m in (ours, eager))
                    if "num_beams" in options and DEVICE != "cpu":  # other beams may be as good
                        least = self.sums(eager, got, 11, mask) - self.sums(eager, want, 11, mask)
                        self.assertGreater(float(least.min()), -9 * BOUND)
                        continue
                    self.greedy(eager, got, want, 11, mask)
                    self.assertFalse([c for c in calls if c["bias"] is not None])

    def test_compiled_step_over_a_static_cache(self):
        eager, ours = models("Llama", "eager", NAME)
        tokens, mask = self.tokens(2, 9), self.padded(2, 9, "left")
        cache, other = (transformers.StaticCache(config=ours.config, max_cache_len=24) for _ in range(2))
        with torch.no_grad():
            want = eager(tokens, attention_mask=mask, past_key_values=other).logits
            self.like(ours(tokens, attention_mask=mask, past_key_values=cache).logits[mask.bool()], want[mask.bool()])
            step = torch.compile(ours, fullgraph=True, backend="aot_eager" if DEVICE == "cpu" else "inductor")
            for n in range(3):
                mask = torch.cat((mask, mask.new_ones(2, 1)), 1)
                want = eager(tokens[:, n:n + 1], attention_mask=mask, past_key_values=other).logits
                prepared = masking.create_causal_mask(ours.config, torch.zeros(2, 1, 64, device=DEVICE, dtype=DTYPE), mask.bool(), cache)
                given, before = (mask, prepared)[n % 2], launches()
                self.like(step(tokens[:, n:n + 1], attention_mask=given, past_key_values=cache).logits, want)
                self.assertGreaterEqual(launches() - before, 2)

    @unittest.skipIf(DEVICE == "cpu", "on the CPU generate() does not compile")
    def test_generate_that_compiles(self):
        """generate() with a static cache, which transformers compiles on GPUs by itself, in CUDA graphs."""
        eager, ours = models("Llama", "eager", NAME)
        tokens, mask = self.tokens(2, 9), self.padded(2, 9, "left")
        options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": mask}
        before = launches()
        got = ours.generate(tokens, **options, cache_implementation="static")
        self.assertGreaterEqual(launches() - before, 4)
        self.greedy(eager, got, eager.generate(tokens, **options), 9, mask)

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
        self.assertEqual(len(calls), 2)
        if DEVICE == "cpu":
            self.assertTrue(all(c["bias"] is None and c["kv_begin"] is not None for c in calls))
        for name, want in gradients[0].items():
            self.like(gradients[1][name], want, 1e-5 if DEVICE == "cpu" else 5e-3)

    def test_autocast(self):
        """Attention in autocast's type over weights of f32, where rotary embeddings leave q and k in f32 and v is not."""
        eager, ours = (model.float() for model in models("Llama", "eager", NAME))
        tokens, mask, types = self.tokens(2, 9), self.padded(2, 9, "left"), []
        forward = attn.transformers.forward

        def noting(*arrays, **options):
            types.extend(x.dtype for x in (*arrays, options["bias"]) if x is not None)
            return forward(*arrays, **options)
        with torch.no_grad(), unittest.mock.patch.object(attn.transformers, "forward", noting):
            for dense in mask, torch.zeros(2, 1, 9, 9, device=DEVICE):
                with torch.autocast(DEVICE, torch.bfloat16):
                    got = ours(tokens, attention_mask=dense).logits
                want = eager(tokens, attention_mask=dense).logits
                self.close(got[:, -1].float().cpu(), want[:, -1].cpu(), 0.15)
        self.assertEqual(set(types), {torch.bfloat16})

    def test_training(self):
        """Losses and gradients as with eager attention, and twice the same bits, with windows, softcap, sinks, padding. On a GPU weights of
        f32 under autocast to bf16, which by itself moves losses by 0.002 to 0.04, from one draw of weights to the next: over four draws
        gradients, and over those of all models together losses, are no farther from training in f32 than eager attention's under the same
        autocast. For one draw the ratio of both distances of losses is between 0.3 and 3.5, so that of four draws says little."""
        self.addCleanup(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True, warn_only=True)
        rounded = DEVICE != "cpu"
        steps, draws = (50, 4) if rounded else (10, 1)

        data = []
        for _ in range(draws):
            tokens, mask = self.tokens(2, 17), self.padded(2, 17, "left")
            labels = tokens.masked_fill(mask == 0, -100)
            labels[0, :9] = -100  # what the last token of the padding says is not the same: eager attention lets it see all
            data.append((tokens, mask, labels))

        def train(kind, name, draw, rounded):
            """Losses, the gradients of the first step, and the model."""
            tokens, mask, labels = data[draw]
            _, model = models(kind, "eager", name, seed=1 + draw)
            optimizer = torch.optim.SGD(model.float().train().parameters(), 0.02)
            losses, first = [], None
            for _ in range(steps):
                optimizer.zero_grad()
                with torch.autocast(DEVICE, torch.bfloat16, enabled=rounded):
                    loss = model(tokens, attention_mask=mask, labels=labels).loss
                loss.backward()
                if first is None:
                    first = torch.cat([p.grad.flatten() for p in model.parameters()])
                optimizer.step()
                losses.append(loss.detach())
            return torch.stack(losses).cpu(), first, model

        def far(got, want):
            """Of the losses, the largest difference; of the gradients, all together, the relative one."""
            return np.array([float((got[0] - want[0]).abs().max()), float((got[1] - want[1]).norm() / want[1].norm())])
        ratios = []
        for kind in ("Llama", "Mistral", "Gemma2", "GptOss"):
            with self.subTest(kind):
                ours, noise = [], []
                for draw in range(draws):
                    before = launches("backward")
                    want, got = train(kind, "eager", draw, False), train(kind, NAME, draw, rounded)
                    self.assertGreaterEqual(launches("backward") - before, 2 * steps)
                    self.assertLess(got[0][-1], got[0][0])
                    ours.append(far(got, want))
                    if rounded:
                        noise.append(far(train(kind, "eager", draw, True), want))
                if rounded:
                    ratios.append(np.log(ours) - np.log(noise))  # draws, (losses, gradients)
                    print(f"{kind}: from f32, losses and gradients of each draw: {ours}, eager attention {noise}", flush=True)
                    self.assertLess(np.exp(ratios[-1].mean(axis=0)[1]), 1.15)
                else:
                    self.assertTrue((ours[0] < [2e-3, 1e-5]).all(), ours)
                again = train(kind, NAME, draws - 1, rounded)
                self.assertTrue(torch.equal(again[0], got[0]))
                for a, b in zip(got[2].parameters(), again[2].parameters()):
                    self.assertTrue(torch.equal(a, b))
        if rounded:
            losses = np.array(ratios)[..., 0]
            print(f"losses, libattn's distance over eager attention's: {np.exp(losses.mean(axis=1))}, all {np.exp(losses.mean())}, "
                  f"standard error of its logarithm {losses.std(ddof=1) / losses.size**0.5}")
            self.assertLess(np.exp(losses.mean()), 1.5)


class Server(TransformersCase):
    @contextlib.contextmanager
    def late_resets(self):
        """On a GPU, resets of the server's inputs that come late, as beside other processes."""
        kinds = attn.transformers._server_inputs()
        if DEVICE == "cpu" or not kinds or not hasattr(kinds[0], "_reset_static_tensors"):
            yield
            return
        reset = kinds[0]._reset_static_tensors

        def late(inputs, full_reset=False):
            if full_reset and inputs.device.type == "cuda":
                torch.cuda._sleep(100_000_000)  # clocks, about 50 ms
            return reset(inputs, full_reset)
        with unittest.mock.patch.object(kinds[0], "_reset_static_tensors", late):
            yield

    def test_inputs_after_resets(self):
        """The streams that copy a batch's inputs and compute it wait for the current stream, and before they copy."""
        kinds = attn.transformers._server_inputs()
        if not kinds:
            self.skipTest(f"transformers {transformers.__version__} has no server with streams")
        server, wait = unittest.mock.Mock(), unittest.mock.call
        with unittest.mock.patch.object(torch.cuda, "current_stream", lambda device: "current"):
            attn.transformers._in_order(server.inputs)(server, use_padding=True)
        self.assertEqual(server.mock_calls, [wait.h2d_stream.wait_stream("current"), wait.compute_stream.wait_stream("current"),
                                             wait.inputs(server, use_padding=True)])
        attn.transformers.register()
        for kind in kinds:  # registered, once
            self.assertFalse(hasattr(kind.get_model_kwargs.attn_wraps, "attn_wraps"))

    def test_generate_batch(self):
        """transformers' server with continuous batching: tokens as those of generate() with eager attention, one request at a time."""
        if not hasattr(transformers.LlamaForCausalLM, "generate_batch"):
            self.skipTest(f"transformers {transformers.__version__} has no generate_batch")
        requests = [self.tokens(n).tolist() for n in (5, 17, 30, 3)]
        known = inspect.signature(transformers.ContinuousBatchingConfig).parameters
        sizes = {"page_size": 32, "block_size": 32, "num_blocks": 16, "max_batch_tokens": 32}  # versions differ in the first two
        small = lambda **more: transformers.ContinuousBatchingConfig(**{key: x for key, x in {**sizes, **more}.items() if key in known})
        options = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
        for kind, graphs in itertools.product(("Llama", "Qwen3", "Gemma2", "GptOss"), (False,) if DEVICE == "cpu" else (False, True)):
            if kind == "GptOss" and graphs:  # PyTorch's grouped products of f16 cannot be captured
                continue
            with self.subTest(kind, graphs=graphs):
                eager, ours = models(kind, "eager", FLASH)
                self.assertEqual(ours.config._attn_implementation, FLASH)
                before, appends = launches(), launches("kv_append")
                with self.late_resets():
                    answers = ours.generate_batch(inputs=requests, generation_config=options, progress_bar=False,
                                                  continuous_batching_config=small(use_cuda_graph=graphs))
                self.assertGreater(launches() - before, 2)
                if DEVICE != "cpu" and "sliding_window" not in KINDS[kind]:  # decoding over pages, which transformers does for these alone
                    self.assertGreater(launches("kv_append"), appends)
                got = {tuple(answer.prompt_ids): list(answer.generated_tokens) for answer in answers.values()}
                for request in requests:
                    want = eager.generate(torch.tensor([request], device=DEVICE), max_new_tokens=6, do_sample=False, eos_token_id=None)
                    self.greedy(eager, torch.tensor([[*request, *got[tuple(request)]]], device=DEVICE), want, len(request))

    def test_pool_of_pages(self):
        """The decode fast path's call: k and v are views of one pool, v's pages after k's, layers side by side."""
        layers, pages, size, heads, dim, batch = 2, 6, 4, 2, 16, 3
        made = dict(device=DEVICE, dtype=DTYPE)
        pool = torch.randn(layers * 2 * pages, size, heads, dim, **made)
        want = pool.clone()
        table = torch.from_numpy(self.rng.permutation(pages)[:batch * 2].reshape(batch, 2)).int().to(DEVICE) * 2 * layers
        lengths = torch.tensor([1, 3, 6], dtype=torch.int32, device=DEVICE)
        for layer in range(layers):
            k_cache, v_cache = pool[2 * layer:], pool[2 * layer + 1:]
            count = len(v_cache)
            q, k, v = (torch.randn(batch, 1, n, dim, **made) for n in (4, heads, heads))
            sinks = torch.randn(4, device=DEVICE)
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
                self.close(out[b, 0].cpu(), torch.einsum("hn,nhd->hd", weights, values).cpu(), 2e-6 if DEVICE == "cpu" else 2e-3)
        self.assertTrue(torch.equal(pool, want))


if __name__ == "__main__":
    unittest.main()
