"""Small models of transformers with random weights, on the CPU or on a GPU, and what it means that their outputs are those of eager attention.

ATTN_TEST_DEVICE=cuda runs the tests of models on a GPU: models with libattn in f16, the eager ones in f32 with the same weights."""
import importlib.util
import os
import unittest

from support import Case, attn

HAVE = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
DEVICE = os.environ.get("ATTN_TEST_DEVICE", "cpu")
NAME = DTYPE = None
if HAVE:
    import torch
    import transformers

    import attn.transformers
    from attn.transformers import NAME

    DTYPE = torch.float32 if DEVICE == "cpu" else torch.float16
EXACT = DEVICE == "cpu"  # tokens are compared, not how likely they are
# Of logits, whose standard deviation is about 1. A key too many or too few changes them by 0.1 and more.
BOUND = 2e-5 if DEVICE == "cpu" else 4e-2

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 80, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
# Experts: all are taken, since a rounding error could change the choice.
KINDS = {"Llama": {}, "Qwen3": {"head_dim": 16}, "Mistral": {"sliding_window": 5},
         "Gemma2": {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 3.0},
         "GptOss": {"head_dim": 16, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 2}}


def randomise(model, seed=1):
    """Weights that keep the size of what they multiply, so that attention matters; sinks and biases that are not 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, x in model.named_parameters():
        if x.dim() > 1:
            x.data.copy_(torch.randn(x.shape, generator=generator) / (x[0].numel() if x.dim() != 3 else x.shape[-1]) ** 0.5)
        elif name.endswith(("bias", "sinks")):
            x.data.copy_(torch.randn(x.shape, generator=generator) / 4)


def pair(make, config, *names, seed=1):
    """Equal models, made by make(config), each with its attn_implementation: the first, of eager attention, in f32."""
    made = []
    for name in names:
        torch.manual_seed(1)
        model = make._from_config(config(), attn_implementation=name).eval()
        if not made:
            randomise(model, seed)
        else:
            model.load_state_dict(made[0].state_dict())
        model.to(DEVICE, DTYPE)
        made.append(model.float() if name == "eager" else model)
    return made


def models(kind, *names, seed=1):
    """Equal causal language models of one of KINDS."""
    return pair(getattr(transformers, f"{kind}ForCausalLM"), lambda: getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind]), *names,
                seed=seed)


def launches(op="forward"):
    """How often a kernel of DEVICE for this operation was launched."""
    return sum(attn._attn.launch_count(k["name"]) for k in attn.info()["kernels"] if k["backend"] == DEVICE and k["op"] == op)


@unittest.skipUnless(HAVE, "torch or transformers is not installed")
class ModelCase(Case):
    def setUp(self):
        super().setUp()
        if DEVICE != "cpu":
            self.gpu(DEVICE)

    def tokens(self, *shape):
        return torch.from_numpy(self.rng.integers(3, 80, shape)).to(DEVICE)

    def padded(self, batch, length, side):
        """Ones with zeros on a side, none in the last sequence."""
        mask = torch.ones(batch, length, dtype=torch.long)
        for b in range(batch - 1):
            count = int(self.rng.integers(1, length // 2 + 1))
            mask[b, slice(None, count) if side == "left" else slice(length - count, None)] = 0
        return mask.to(DEVICE)

    def like(self, got, want, bound=BOUND):
        """Outputs of two models, as the largest ones of the latter allow."""
        self.close(got.double().cpu(), want.double().cpu(), bound * max(1.0, float(want.abs().max()) / 4))

    def greedy(self, eager, got, want, prompt, mask=None):
        """Tokens [B, N] after a prompt are eager attention's. On a GPU, where a rounding error decides between logits that are nearly
        equal, each token's logit in the f32 model is the largest but for the bound."""
        if EXACT or torch.equal(got, want):
            self.assertTrue(torch.equal(got, want), f"{got}\n{want}")
            return
        self.assertEqual(got.shape, want.shape)
        options = {}
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(len(got), got.shape[1] - mask.shape[1])), 1)
            options = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        with torch.no_grad():
            logits = eager(got, **options).logits[:, prompt - 1:-1]
        chosen = logits.gather(-1, got[:, prompt:, None])[..., 0]
        self.assertLess(float((logits.amax(-1) - chosen).max()), 2 * BOUND, f"{got}\n{want}")
