#define GFX9EMU_TARGET baseline
#include "gfx9emu/valu.inl"
