"""Block masks."""
import numpy

from . import _attn


def _device(device):
    """The device as text. torch calls AMD's devices cuda, and its "cuda" without a number is the current device."""
    text = str(device)
    if type(device).__module__ == "torch":
        import torch
        if text == "cuda":
            text = f"cuda:{torch.cuda.current_device()}"
        return text.replace("cuda", "hip") if torch.version.hip else text
    return text


def _unpickled(cls, kinds, index, bits, shape, block_size, device):
    return cls.from_kinds(kinds, *shape[2:], block_size=block_size, index=index, bits=bits, device=device)


class BlockMask:
    """A mask in blocks of block_size = (bq, bk) queries and keys, counted from position 0, for forward(block_mask=...).

    An element is visible only if the mask and all other rules of the call allow it. Blocks are 64 or 128 on GPUs, of any size on the
    host; one number means both. A mask is on one device, which must be that of the call's arrays. Make masks with the from_
    functions; a | b and a & b are union and intersection. A mask does not change, so copying returns the mask itself. Pickling keeps
    its blocks and its device.
    """

    def __init__(self, mask):
        if not isinstance(mask, _attn.Mask):
            raise TypeError("a BlockMask is made by BlockMask.from_dense and its siblings")
        self._mask = mask

    @classmethod
    def from_dense(cls, dense, *, block_size=128):
        """dense: bool or uint8 [Sq, Skv] or [B or 1, Hq or 1, Sq, Skv], contiguous; not 0 = visible. Built on the array's device."""
        return cls(_attn.mask_from_dense(dense, block_size))

    @classmethod
    def from_intervals(cls, intervals, seqlen_q, *, block_size=128):
        """intervals: for each key the queries that see it, as one or two half-open ranges within [0, Sq]: i32 [Skv, 1 or 2, 2] or
        [B or 1, Hq or 1, Skv, 1 or 2, 2], contiguous (FlashMask, arXiv 2410.01359). Built on the array's device."""
        return cls(_attn.mask_from_intervals(intervals, seqlen_q, block_size))

    @classmethod
    def from_documents(cls, lengths, *, causal=False, block_size=128, device="cpu"):
        """Documents one after the other: a query sees its own document, with `causal` up to itself. The lengths add up to
        Sq = Skv. device: "cpu", "cuda", "cuda:1", "hip" ..., or a torch.device."""
        try:
            lengths = list(lengths)
        except TypeError:
            raise TypeError(f"lengths is a {type(lengths).__name__}; accepted: integers, one for each document") from None
        return cls(_attn.mask_from_documents(lengths, causal, block_size, _device(device)))

    @classmethod
    def from_window(cls, seqlen_q, seqlen_kv, window, *, global_tokens=0, block_size=128, device="cpu"):
        """window: (left, right) as in forward(), with these Sq and Skv. Every query also sees the first global_tokens
        keys."""
        return cls(_attn.mask_from_window(seqlen_q, seqlen_kv, window, global_tokens, 0, block_size, _device(device)))

    @classmethod
    def from_prefix(cls, seqlen_q, seqlen_kv, prefix_tokens, *, block_size=128, device="cpu"):
        """Prefix-LM: causal, but every query sees the first prefix_tokens keys."""
        return cls(_attn.mask_from_window(seqlen_q, seqlen_kv, (-1, 0), 0, prefix_tokens, block_size, _device(device)))

    @classmethod
    def from_kinds(cls, kinds, seqlen_q, seqlen_kv, *, block_size=128, index=None, bits=None, device="cpu"):
        """The blocks directly, from host memory. kinds: u8 [rows, columns] or [B or 1, Hq or 1, rows, columns], each EMPTY, CAUSAL,
        FULL or PARTIAL. index: i32 of the same shape, for PARTIAL blocks the index into bits, else -1. bits: bool [P, bq, bk], or
        u32 [P, bq, ceil(bk / 32)] with column c in bit c % 32 of word c / 32."""
        return cls(_attn.mask_from_kinds(kinds, index, bits, seqlen_q, seqlen_kv, block_size, _device(device)))

    @classmethod
    def from_lists(cls, lists, seqlen_q, seqlen_kv, *, block_size=128, device="cpu"):
        """lists: i32 [rows, n] or [B or 1, Hq or 1, rows, n] in host memory, contiguous: for each block of queries the numbers of the
        blocks of keys that it sees, in any order; -1 is none."""
        return cls(_attn.mask_from_lists(lists, seqlen_q, seqlen_kv, block_size, _device(device)))

    EMPTY, CAUSAL, FULL, PARTIAL = range(4)

    def __or__(self, other):
        return self._combined(other, True)

    def __and__(self, other):
        return self._combined(other, False)

    def _combined(self, other, unite):
        if not isinstance(other, BlockMask):
            return NotImplemented
        return BlockMask(_attn.mask_combine(self._mask, other._mask, unite))

    @property
    def shape(self):
        """(B or 1, Hq or 1, Sq, Skv)"""
        return self._mask.shape

    @property
    def block_size(self):
        return self._mask.block_size

    @property
    def device(self):
        return self._mask.device

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        kinds, index, bits = map(numpy.frombuffer, _attn.mask_arrays(self._mask), ("u1", "i4", "u4"))
        (bq, bk), (batch, heads, seqlen_q, seqlen_kv) = self.block_size, self.shape
        grid = batch, heads, -(-seqlen_q // bq), -(-seqlen_kv // bk)
        words = -(-bk // 32)
        return _unpickled, (type(self), kinds.reshape(grid), index.reshape(grid), bits.reshape(-1, bq, words), self.shape,
                            self.block_size, self.device)

    def __repr__(self):
        return f"<attn.BlockMask {self.shape} in blocks of {self.block_size} on {self.device}>"
