#define GFX9EMU_TARGET avx2
#include "gfx9emu/valu.inl"
