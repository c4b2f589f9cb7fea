// What libattn-hipemu.so exports beside the HIP functions. Found by dlsym; nobody links it.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// What tells this library from AMD's.
extern const int attn_emu_marker;

// Why the last HIP call of this thread failed, as a sentence; "" if it did not, or if its code says
// it all. Valid until the thread's next HIP call.
const char* attn_emu_last_fault(void);

// How launches from now on are executed, in this process. Zeroed: the default.
struct attn_emu_options {
  int32_t checks_off;           // 1: run fast and trust the code
  int32_t hazards_off;          // 1: do not look at wait states
  uint64_t seed;                // not 0: waves and loads come in a random order
  uint64_t instruction_budget;  // of one wave
  int32_t threads;              // of the host; 0: all cores
  int32_t level;                // what checks ask: 0 strict, 1 isa (gfx9emu::Level)
  int32_t compute_units;  // that properties say from now on; 0: ATTN_EMU_COMPUTE_UNITS, or as usual
  int32_t memory_model_off;  // 1: do not look at races and caches of device memory
  int32_t gfx;               // the device: 942 or 950; 0: ATTN_EMU_ARCH (gfx950), or gfx942
};
void attn_emu_configure(const struct attn_emu_options* options);

// What the last launch of this thread executed, as one line of JSON; "" if there was none. Valid
// until the thread's next launch.
const char* attn_emu_last_counters(void);

#ifdef __cplusplus
}
#endif
