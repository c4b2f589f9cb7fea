#define GFX9EMU_TARGET avx512
#include "gfx9emu/valu.inl"
