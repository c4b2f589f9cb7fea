// The parameter struct of read_cuda, for its host side and for the kernel.
#ifndef ATTN_KERNELS_SHARED_READ_ARGS_H
#define ATTN_KERNELS_SHARED_READ_ARGS_H

enum { attn_read_threads = 512, attn_read_unroll = 8, attn_read_blocks_per_sm = 2 };

struct attn_read_kernarg {
  const void* data;
  long long vectors;  // of 16 bytes; a multiple of attn_read_threads * attn_read_unroll
  unsigned* sum;      // gets the sum of the buffer's 32-bit words, modulo 2^32, added
};

#endif
