"""From padded batches to packed tokens and back, for PyTorch tensors; differentiable."""
import torch

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences"]


def index_first_axis(x, indices):
    """x [rows, ...] -> its rows `indices`."""
    return x[indices]


def index_put_first_axis(values, indices, first_axis_dim):
    """[first_axis_dim, ...] with `values` in rows `indices`, 0 elsewhere."""
    out = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return out.index_copy(0, indices, values)


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """hidden_states [B, S, ...], masks [B, S], non-zero for tokens that are there, and for those that have room without being used ->
    (tokens [total, ...], their indices in [B * S], cu_seqlens i32 [B + 1], the longest sequence, used tokens i32 [B])."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    return (*_kept(hidden_states, kept.flatten().nonzero().flatten(), kept.sum(1, dtype=torch.int32)),
            attention_mask.sum(1, dtype=torch.int32))


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """unpad_input for rows of several sequences: attention_mask_in_length [B, S] has the lengths of a row's sequences, then zeros."""
    lengths = attention_mask_in_length.sum(1)
    kept = torch.arange(hidden_states.shape[1], device=hidden_states.device) < lengths[:, None]
    sequences = attention_mask_in_length.flatten()
    return _kept(hidden_states, kept.flatten().nonzero().flatten(), sequences[sequences > 0].to(torch.int32))


def _kept(hidden_states, indices, lengths):
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1)[indices], indices, offsets, longest


def pad_input(hidden_states, indices, batch, seqlen):
    """tokens [total, ...] -> [batch, seqlen, ...], 0 where there is none."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
