"""attn for PyTorch: scaled_dot_product_attention with the interface of torch.nn.functional's, patch() for models that call torch's, and
the operators torch.ops.attn.* for torch.compile. scaled_dot_product_attention and forward have gradients on the CPU and on CUDA."""
from ._operators import forward, kv_append
from ._patch import patch
from ._sdpa import scaled_dot_product_attention

__all__ = ["forward", "kv_append", "patch", "scaled_dot_product_attention"]
