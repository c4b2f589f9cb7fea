// Where the queries and keys of a problem with ATTN_QUERY_POSITIONS are.
#ifndef ATTN_KERNELS_SHARED_POSITIONS_H
#define ATTN_KERNELS_SHARED_POSITIONS_H

struct attn_positions {
  const long long* query_start;  // [batch]; null: the queries are at the last keys
  const long long* key_start;    // [batch or 1], of the one segment; null: 0
  int key_batch;                 // between entries of key_start
  int interleave, period;        // of attn::KeyPlaces; both 0: positions of keys are consecutive
  long long first_key;           // position of key 0, after key_start
};

#endif
