// Data-parallel primitives: which lane's value a lane gets.
#pragma once
#include "gfx9emu/inst.h"

namespace gfx9emu {

// The lane that DPP takes lane `i`'s operand from; -1: none.
// Static for the reason given in convert.h.
static inline int dpp_source(const Inst& in, int i) {
  const int row = i & ~15, in_row = i & 15, n = in.dpp_arg;
  switch (in.dpp) {
    case Dpp::QuadPerm:
      return (i & ~3) | (n >> (2 * (i & 3)) & 3);
    case Dpp::RowShl:
      return in_row + n < 16 ? i + n : -1;
    case Dpp::RowShr:
      return in_row - n >= 0 ? i - n : -1;
    case Dpp::RowRor:
      return row | ((in_row - n) & 15);
    case Dpp::WaveShl:
      return i + 1 < 64 ? i + 1 : -1;
    case Dpp::WaveRol:
      return (i + 1) & 63;
    case Dpp::WaveShr:
      return i - 1;
    case Dpp::WaveRor:
      return (i - 1) & 63;
    case Dpp::RowMirror:
      return row | (15 - in_row);
    case Dpp::RowHalfMirror:
      return (i & ~7) | (7 - (i & 7));
    case Dpp::RowBcast15:
      return i >= 16 ? row - 1 : -1;
    case Dpp::RowBcast31:
      return i >= 32 ? 31 : -1;
    case Dpp::RowNewbcast:
      return row | n;
    case Dpp::None:
      break;
  }
  return i;
}

}  // namespace gfx9emu
