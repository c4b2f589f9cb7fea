"""attn for PyTorch: scaled_dot_product_attention as torch.nn.functional has it, patch() for models that call that one, and
the operators torch.ops.attn.*, which torch.compile takes as they are. No gradients: attn is for inference."""
from ._operators import forward, kv_append
from ._patch import patch
from ._sdpa import scaled_dot_product_attention

__all__ = ["forward", "kv_append", "patch", "scaled_dot_product_attention"]
