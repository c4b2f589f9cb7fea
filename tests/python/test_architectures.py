"""attn_implementation="libattn" in 25 architectures of transformers, small and with random weights, against their eager attention."""
import unittest

from models import DEVICE, DTYPE, HAVE, NAME, SIZES, ModelCase, launches, pair

if HAVE:
    import torch
    import transformers

HEADS = {"head_dim": 16}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
# Decoders: the configuration besides SIZES.
CAUSAL = {
    "Llama": {},
    "Qwen3": HEADS,
    "Mistral": {"sliding_window": 5},
    "Phi3": {},
    "Gemma2": {**HEADS, "sliding_window": 5, "attn_logit_softcapping": 3.0},
    "Gemma3": {**HEADS, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {**HEADS, **EXPERTS, "sliding_window": 5},
    "Olmo2": {},
    "Cohere2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "Mixtral": EXPERTS,
    "DeepseekV3": {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                   "n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
                   "first_k_dense_replace": 1},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "Llama4": {**HEADS, **EXPERTS, "intermediate_size_mlp": 96, "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"]},
    "Qwen3Next": {**HEADS, "layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
                  "linear_num_value_heads": 4},
}
NAMES = {"Gemma3": "Gemma3Text", "Llama4": "Llama4Text"}  # of configurations
CLASSES = {"GPT2": "GPT2LMHeadModel"}
ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SEQUENCES = {"vocab_size": 80, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}
BART = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
IMAGE = {**ENCODER, "image_size": 32, "patch_size": 8}


def layers(kind):
    """How often one pass of a decoder calls attention."""
    return 2 - CAUSAL[kind].get("layer_types", []).count("linear_attention")


class Architectures(ModelCase):
    def made(self, name, config):
        """(eager, libattn's) or a skip where this version of transformers has none."""
        make = getattr(transformers, name, None)
        if make is None:
            self.skipTest(f"transformers {transformers.__version__} has no {name}")
        return pair(make, config, "eager", NAME)

    def counted(self, least, run, *arguments, **options):
        before = launches()
        with torch.no_grad():
            result = run(*arguments, **options)
        self.assertGreaterEqual(launches() - before, least)
        return result

    def test_decoders(self):
        """Logits with padding on either side; greedy tokens after prompts of other lengths, with dynamic and static caches."""
        for kind, more in CAUSAL.items():
            with self.subTest(kind):
                config = getattr(transformers, f"{NAMES.get(kind, kind)}Config", None)
                eager, ours = self.made(CLASSES.get(kind, f"{kind}ForCausalLM"), lambda: config(**{**SIZES, **more}))
                tokens = self.tokens(3, 17)
                for side in None, "left", "right":
                    mask = None if side is None else self.padded(3, 17, side)
                    got = self.counted(layers(kind), ours, tokens, attention_mask=mask)
                    with torch.no_grad():
                        want = eager(tokens, attention_mask=mask)
                    seen = slice(None) if mask is None else mask.bool()
                    self.like(got.logits[seen], want.logits[seen])
                mask = self.padded(3, 17, "left")
                for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
                    if options and kind in ("Qwen3Next", "Llama4"):  # linear layers have none; transformers 5.17 fails with every attention
                        continue
                    answer = lambda model: model.generate(tokens, attention_mask=mask, max_new_tokens=7, do_sample=False, **options)
                    self.greedy(eager, self.counted(7 * layers(kind), answer, ours), answer(eager), 17, mask)

    def test_text_encoders(self):
        for name, config in (("Bert", ENCODER), ("ModernBert", {**ENCODER, "local_attention": 8, "global_attn_every_n_layers": 2})):
            with self.subTest(name):
                eager, ours = self.made(f"{name}Model", lambda: getattr(transformers, f"{name}Config")(**config, vocab_size=80, pad_token_id=0))
                tokens = self.tokens(3, 17)
                for mask in None, self.padded(3, 17, "right"):
                    got = self.counted(2, ours, tokens, attention_mask=mask).last_hidden_state
                    with torch.no_grad():
                        want = eager(tokens, attention_mask=mask).last_hidden_state
                    seen = slice(None) if mask is None else mask.bool()
                    self.like(got[seen], want[seen])

    def test_sequences_to_sequences(self):
        """Encoder, cross attention and decoder: logits, and greedy tokens."""
        gemma = {**SIZES, "head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}
        for name, config in (("T5", {**SEQUENCES, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}),
                             ("T5Gemma", {"encoder": gemma, "decoder": gemma, **SEQUENCES}),
                             ("Bart", {**SEQUENCES, **BART, "forced_eos_token_id": None})):
            with self.subTest(name):
                eager, ours = self.made(f"{name}ForConditionalGeneration", lambda: getattr(transformers, f"{name}Config")(**config))
                tokens, mask, start = self.tokens(3, 17), self.padded(3, 17, "right"), self.tokens(3, 5)
                got = self.counted(6, ours, tokens, attention_mask=mask, decoder_input_ids=start).logits
                with torch.no_grad():
                    want = eager(tokens, attention_mask=mask, decoder_input_ids=start).logits
                self.like(got, want)
                self.answers(eager, ours, tokens, attention_mask=mask)

    def answers(self, eager, ours, given, **options):
        """Greedy tokens of an encoder's input."""
        def answer(model):  # not WhisperForConditionalGeneration.generate, which wants texts that end
            inputs = given.to(model.dtype) if given.is_floating_point() else given
            return transformers.GenerationMixin.generate(model, inputs, max_new_tokens=7, do_sample=False, **options)
        got, want = self.counted(2 + 7 * 4, answer, ours), answer(eager)
        given_too = {key: x for key, x in options.items() if key == "attention_mask"}
        self.greedy(lambda got: eager(given, decoder_input_ids=got, **given_too), got, want, 1)

    def test_whisper(self):
        """Sound: the encoder's bidirectional attention, cross attention, greedy tokens with dynamic and static caches."""
        config = {**SEQUENCES, **BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32, "suppress_tokens": None,
                  "begin_suppress_tokens": None}
        eager, ours = self.made("WhisperForConditionalGeneration", lambda: transformers.WhisperConfig(**config))
        sound, start = torch.from_numpy(self.normal(3, 8, 40)).to(DEVICE), self.tokens(3, 5)
        got = self.counted(6, ours, sound.to(DTYPE), decoder_input_ids=start).logits
        with torch.no_grad():
            self.like(got, eager(sound, decoder_input_ids=start).logits)
        self.answers(eager, ours, sound)
        self.answers(eager, ours, sound, cache_implementation="static", disable_compile=True)

    def test_images_and_sound(self):
        image, sound = (torch.from_numpy(x).to(DEVICE) for x in (self.normal(2, 3, 32, 32), self.normal(2, 400)))
        text = {**ENCODER, "vocab_size": 80, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        both = {"text_config": text, "vision_config": IMAGE}
        wave = {**ENCODER, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
                "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "layer", "vocab_size": 80}
        for name, config, least, given in (("ViT", IMAGE, 2, {"pixel_values": image}),
                                           ("DINOv3ViT", IMAGE, 2, {"pixel_values": image}),
                                           ("CLIP", {**both, "projection_dim": 32}, 4, {"pixel_values": image, "input_ids": self.tokens(3, 9)}),
                                           ("Siglip", both, 4, {"pixel_values": image, "input_ids": self.tokens(3, 9)}),
                                           ("Wav2Vec2", wave, 2, {"input_values": sound})):
            with self.subTest(name):
                eager, ours = self.made(f"{name}Model", lambda: getattr(transformers, f"{name}Config")(**config))
                cast = {key: x.to(DTYPE) if x.is_floating_point() else x for key, x in given.items()}
                got = self.counted(least, ours, **cast)
                with torch.no_grad():
                    want = eager(**given)
                found = [key for key, x in want.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
                self.assertTrue(found)
                for key in found:
                    self.like(got[key], want[key])


if __name__ == "__main__":
    unittest.main()
