// How a wave goes from instruction to instruction: fetch, check, execute, account.
#include "gfx9emu/wave.h"

#include <algorithm>
#include <bit>
#include <cfenv>

#include "gfx9emu/decode.h"
#include "gfx9emu/ops.h"

namespace gfx9emu {

Wave::Wave(Workgroup& group_, const LaunchContext& context_, uint32_t index_)
    : context(context_), group(group_), index(index_), hazards_(context_.options->level) {
  const Descriptor& d = context.kernel->descriptor;
  file_.resize(d.vgprs);
  v = file_.data();
  a = v + d.accum_offset;
  checks = context.options->checks;
  late = context.options->seed != 0;
  track = checks || late;
  defined.resize(d.vgprs);
  in_flight_.resize(d.vgprs);
  next = static_cast<uint32_t>(context.program->find(context.kernel->entry));
  set_mode(d.mode);
  if (context.memory_model) view = std::make_unique<MemoryView>(*context.memory_model, *this);
}

void Wave::set_mode(uint32_t value) {
  mode = value;
  static constexpr int roundings[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  rounding = roundings[mode & 3];
  // 0 flush both, 1 flush results, 2 flush operands, 3 keep both.
  const uint32_t denorm = mode >> 4 & 3;
  flush_f32_in = denorm == 0 || denorm == 2;
  flush_f32_out = denorm == 0 || denorm == 1;
  gpr_index = mode >> 27 & 1;
  if ((mode >> 2 & 3) != 0) {
    fail(FaultKind::UnknownInstruction,
         "rounding of f16 and f64 other than to nearest is not known");
  }
  if ((mode >> 6 & 3) != 3) {
    fail(FaultKind::UnknownInstruction, "flushing of f16 and f64 subnormals is not known");
  }
}

void refuse(WaveRegisters& w, const char* message) {
  static_cast<Wave&>(w).fail(FaultKind::UnknownInstruction, message);
}

Where Wave::where(const Inst& inst) const {
  Where w;
  w.instruction = inst.text;
  w.offset = inst.offset - context.kernel->entry;
  w.source = context.kernel->object->lines().find(inst.offset);
  return w;
}

void Wave::fail(FaultKind kind, std::string message, const Inst* earlier) {
  if (failed) return;
  warn(kind, std::move(message), earlier);
  group.faults.back().warning = false;
  failed = true;
}

void Wave::warn(FaultKind kind, std::string message, const Inst* earlier) {
  Fault f;
  f.kind = kind;
  f.warning = true;
  f.message = std::move(message);
  f.kernel = context.kernel->name;
  f.workgroup = group.id;
  f.wave = index;
  if (current) f.where = where(*current);
  if (earlier) {
    f.has_earlier = true;
    f.earlier = where(*earlier);
  }
  group.faults.push_back(std::move(f));
}

bool Wave::fetch() {
  const std::vector<Inst>& insts = context.program->insts;
  if (next >= insts.size()) {
    fail(FaultKind::BadJump, "runs past the end of the code");
    return false;
  }
  const Inst& inst = insts[next];
  current = &inst;
  entry = {next, 0, 0};
  if (!inst.run) {
    fail(FaultKind::UnknownInstruction, "the emulator does not know this instruction");
    return false;
  }
  if (context.bad_registers[next]) {
    fail(FaultKind::RegisterRange,
         bad_register_message(*context.kernel, inst, context.options->level));
    return false;
  }
  if (executed >= context.options->instruction_budget) {
    fail(FaultKind::Budget, "the wave has executed " + std::to_string(executed) +
                                " instructions, its budget; an endless loop?");
    return false;
  }
  ++next;
  ++executed;
  const bool is_vector_alu = inst.lanes || inst.own_lanes || inst.cls == Class::Mfma;
  if ((gpr_index && is_vector_alu) || inst.flags & (moves_src | moves_dst)) {
    const Inst* indexed = moved(inst);
    if (!indexed) return false;
    current = indexed;
  }
  return true;
}

// The instruction with M0 added to its register numbers, or null after a fault.
const Inst* Wave::moved(const Inst& inst) {
  const bool by_mode = inst.cls != Class::Salu;
  if (checks && !check_defined({RegFile::Scalar, scalar::m0, 1}, 3, 0)) return nullptr;
  const uint32_t m0 = s[scalar::m0];
  const uint32_t by = by_mode ? m0 & 0xff : std::min(m0, 1024u);
  uint32_t which = inst.flags & moves_src ? 1 : gpr_idx_dst;
  if (by_mode) which = m0 >> 12 & 15;
  const uint64_t key = uint64_t{entry.inst} << 32 | by << 4 | which;
  const auto known = moved_.find(key);
  if (known != moved_.end()) return &known->second;
  if (by_mode && (!inst.lanes || inst.is_sdwa || inst.dpp != Dpp::None)) {
    fail(FaultKind::UnknownInstruction, "not known while s_set_gpr_idx is on");
    return nullptr;
  }
  const RegFile file = by_mode ? RegFile::Vgpr : RegFile::Scalar;
  Inst made = move_registers(inst, file, static_cast<uint16_t>(by), which);
  const std::string outside = bad_register_message(*context.kernel, made, context.options->level);
  if (outside.empty()) return &moved_.emplace(key, std::move(made)).first->second;
  fail(FaultKind::RegisterRange, outside + ", with M0 " + std::to_string(m0));
  return nullptr;
}

void Wave::execute(const Inst& inst) {
  if (rounding != FE_TONEAREST && inst.cls != Class::Mfma) {
    std::fesetround(rounding);
    inst.run(*this, inst);
    std::fesetround(FE_TONEAREST);
  } else {
    inst.run(*this, inst);
  }
}

void Wave::run(uint64_t limit) {
  for (uint64_t n = 0; n < limit && !done && !at_barrier; ++n) {
    if (!fetch()) return;
    const Inst& inst = *current;
    if (checks) {
      const uint64_t active = exec();
      if (!check_before(inst)) return;
      execute(inst);
      if (failed) return;
      define_after(inst, active);
    } else {
      execute(inst);
      if (failed) return;
    }
    if (late && !operations_.empty()) deliver_some();
    count(inst);
  }
}

void Wave::count(const Inst& inst) {
  ++counters.instructions[static_cast<int>(inst.cls)];
  counters.mfma_passes += inst.passes;
  if (inst.cls == Class::Nop) counters.wait_states += static_cast<uint64_t>(inst.imm) + 1;
  if (context.options->trace && group.id.x + group.id.y + group.id.z == 0) trace.push_back(entry);
}

// --- Outstanding operations.

Outstanding& Wave::issue(const Inst& inst, Counts counts) {
  if (spare_.empty()) {
    operations_.emplace_back();
  } else {
    operations_.push_back(std::move(spare_.back()));
    spare_.pop_back();
  }
  Outstanding& op = operations_.back();
  op.id = next_id_++;
  op.inst = &inst;
  op.counters = (counts.vm ? 1 : 0) + (counts.lgkm ? 1 : 0);
  op.delivered = false;
  op.dst = {};
  op.halves = 3;
  op.lanes = 0;
  op.data.clear();
  op.scalars.clear();
  op.lds_offsets.clear();
  op.lds_data.clear();
  if (counts.vm) vm_queue_.push_back({op.id, 1, counts.unordered});
  if (counts.lgkm) {
    lgkm_queue_.push_back({op.id, static_cast<uint8_t>(counts.lgkm), counts.unordered});
    lgkm_count_ += counts.lgkm;
  }
  return op;
}

void Wave::mark_in_flight(const Outstanding& op) {
  for (int i = 0; i < op.dst.count; ++i) {
    if (op.dst.file == RegFile::Scalar) {
      scalar_in_flight_[op.dst.first + i] = op.id;
    } else {
      in_flight_[physical(op.dst) + i] = op.id;
    }
  }
}

void Wave::issue_load(const Inst& inst, Counts counts, const RegRange& dst, uint8_t halves,
                      std::span<const Row> data, uint64_t lanes) {
  Outstanding now;
  Outstanding& op = track ? issue(inst, counts) : now;
  op.dst = dst;
  op.halves = halves;
  op.lanes = lanes;
  op.data.assign(data.begin(), data.end());
  if (!late) deliver(op);
  if (track) mark_in_flight(op);
}

void Wave::issue_scalar_load(const Inst& inst, Counts counts, const RegRange& dst,
                             std::span<const uint32_t> data) {
  Outstanding now;
  Outstanding& op = track ? issue(inst, counts) : now;
  op.dst = dst;
  op.scalars.assign(data.begin(), data.end());
  if (!late) deliver(op);
  if (track) mark_in_flight(op);
}

void Wave::issue_other(const Inst& inst, Counts counts) {
  if (track) issue(inst, counts).delivered = true;
}

void Wave::issue_lds(const Inst& inst, Counts counts, std::span<const uint32_t> offsets,
                     uint32_t bytes, bool write) {
  if (!track) return;
  // A load has its operation already; its LDS bytes join it.
  const bool joins = !operations_.empty() && operations_.back().inst == &inst &&
                     operations_.back().id == next_id_ - 1 && inst.is_load && !write;
  Outstanding& op = joins ? operations_.back() : issue(inst, counts);
  if (!joins) op.delivered = true;
  op.lds_offsets.assign(offsets.begin(), offsets.end());
  op.lds_bytes = bytes;
  op.lds_write = write;
}

void Wave::issue_lds_dma(const Inst& inst, std::span<const uint32_t> offsets, uint32_t bytes,
                         std::span<const uint32_t> data) {
  Outstanding now;
  Outstanding& op = track ? issue(inst, {.vm = true}) : now;
  op.lds_offsets.assign(offsets.begin(), offsets.end());
  op.lds_bytes = bytes;
  op.lds_write = true;
  op.lds_data.assign(data.begin(), data.end());
  if (!late) deliver(op);
}

void Wave::deliver(Outstanding& op) {
  if (op.delivered) return;
  op.delivered = true;
  for (size_t i = 0; i < op.data.size(); ++i) {
    uint32_t* to = row(op.dst, static_cast<int>(i)).lane;
    const uint32_t* from = op.data[i].lane;
    const uint32_t keep = op.halves == 1 ? 0xffff0000 : op.halves == 2 ? 0x0000ffff : 0;
    for (int l = 0; l < wave_lanes; ++l) {
      if (op.lanes >> l & 1) to[l] = (to[l] & keep) | (from[l] & ~keep);
    }
  }
  for (size_t i = 0; i < op.scalars.size(); ++i) s[op.dst.first + i] = op.scalars[i];
  for (size_t i = 0; i < op.lds_data.size(); ++i) {
    std::memcpy(group.lds.data() + op.lds_offsets[i], &op.lds_data[i], op.lds_bytes);
  }
}

// In order: what came first arrives first, but at a time that nobody knows.
void Wave::deliver_some() {
  if (group.random() % 16 != 0) return;
  for (Outstanding& op : operations_) {
    if (op.delivered) continue;
    deliver(op);
    return;
  }
}

Outstanding* Wave::find(uint64_t id) {
  const auto at =
      std::lower_bound(operations_.begin(), operations_.end(), id,
                       [](const Outstanding& op, uint64_t value) { return op.id < value; });
  return at != operations_.end() && at->id == id ? &*at : nullptr;
}

void Wave::retire(uint64_t id) {
  Outstanding* op = find(id);
  if (!op || op->counters == 0 || --op->counters > 0) return;
  deliver(*op);
  for (int i = 0; i < op->dst.count; ++i) {
    uint64_t& mark = op->dst.file == RegFile::Scalar ? scalar_in_flight_[op->dst.first + i]
                                                     : in_flight_[physical(op->dst) + i];
    if (mark == id) mark = 0;
  }
  if (!op->lds_data.empty()) {
    for (const uint32_t offset : op->lds_offsets) group.land_lds_dma(offset, op->lds_bytes);
  }
}

void Wave::drop_retired() {
  while (!operations_.empty() && operations_.front().counters == 0) {
    spare_.push_back(std::move(operations_.front()));
    operations_.pop_front();
  }
}

void Wave::wait(int vmcnt, int lgkmcnt) {
  if (!track) return;
  // Memory operations return in order, but for flat ones: those are covered by a wait for 0 alone.
  while (static_cast<int>(vm_queue_.size()) > vmcnt) {
    if (vmcnt > 0 && vm_queue_.front().unordered) break;
    retire(vm_queue_.front().id);
    vm_queue_.pop_front();
  }
  // Scalar loads return out of order: while one is out, a count above 0 says nothing.
  const bool unordered = std::any_of(lgkm_queue_.begin(), lgkm_queue_.end(),
                                     [](const Queued& q) { return q.unordered; });
  while (lgkm_count_ > lgkmcnt && !(unordered && lgkmcnt > 0)) {
    retire(lgkm_queue_.front().id);
    lgkm_count_ -= lgkm_queue_.front().counts;
    lgkm_queue_.pop_front();
  }
  drop_retired();
}

void Wave::carry_lds_over_barrier() {
  for (const Outstanding& op : operations_) {
    if (op.counters == 0) continue;
    for (const uint32_t offset : op.lds_offsets) {
      group.renew_lds(*this, offset, op.lds_bytes, op.lds_write);
    }
  }
}

}  // namespace gfx9emu
