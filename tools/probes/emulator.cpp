// The emulator inside this program: what a probe is to give, and what the issue model says of it.
#include <fstream>
#include <iterator>
#include <span>

#include "gfx9emu/emu.h"
#include "probes/machine.h"

namespace attn::probes {
namespace {

class Emulator final : public Machine {
 public:
  Emulator(const std::string& path, const gfx9emu::ModelSettings& settings) : settings_(settings) {
    std::ifstream in(path, std::ios::binary);
    const std::vector<char> file{std::istreambuf_iterator<char>(in), {}};
    std::string error = in ? "" : "cannot be read";
    if (error.empty())
      object_ = gfx9emu::CodeObject::load(std::as_bytes(std::span(file)), &memory_, &error);
    if (!error.empty()) throw tools::InputError(path + ": " + error);
  }

  tools::Json describe() const override {
    return {{"name", "gfx942, the emulator inside"}, {"arch", "gfx942"}};
  }

  Outcome launch(const LaunchSpec& spec, const std::vector<std::byte>& data) override {
    Outcome outcome;
    const gfx9emu::Kernel* kernel = object_->kernel(spec.kernel);
    if (!kernel) {
      outcome.error = "the code object has no kernel " + spec.kernel;
      return outcome;
    }
    std::vector<uint64_t> addresses;
    for (const BufferSpec& b : spec.buffers) {
      addresses.push_back(memory_.allocate(b.bytes));
      if (b.from >= 0)
        outcome.error = memory_.write(addresses.back(), std::span(data).subspan(b.from, b.bytes));
      else
        outcome.error = memory_.fill(addresses.back(), b.fill, b.bytes);
      if (!outcome.error.empty()) return outcome;
    }
    const auto dim = [](const uint32_t(&n)[3]) { return gfx9emu::Dim3{n[0], n[1], n[2]}; };
    gfx9emu::Options options;
    options.threads = 0;
    options.max_faults = 1 << 30;  // all that a workgroup does wrong are told
    options.trace = true;
    const gfx9emu::Report report = gfx9emu::launch(
        memory_, *kernel, dim(spec.grid), dim(spec.block), pack(spec, addresses), 0, options);
    for (const gfx9emu::Fault& f : report.faults) {
      outcome.found.push_back({{f.workgroup.x, f.workgroup.y, f.workgroup.z},
                               gfx9emu::fault_name(f.kind),
                               f.message,
                               f.where.instruction,
                               f.warning});
    }
    outcome.clock_reads =
        gfx9emu::run_model(gfx9emu::model_waves(object_->program(), report.traces), settings_)
            .clock_reads;
    for (size_t i = 0; i < spec.buffers.size(); ++i) {
      if (spec.buffers[i].read) {
        outcome.read.emplace_back(spec.buffers[i].bytes);
        outcome.error = memory_.read(addresses[i], outcome.read.back());
      }
      memory_.free(addresses[i]);
    }
    return outcome;
  }

 private:
  const gfx9emu::ModelSettings settings_;
  gfx9emu::Memory memory_;
  std::unique_ptr<gfx9emu::CodeObject> object_;
};

}  // namespace

std::unique_ptr<Machine> open_emulator(const std::string& object,
                                       const gfx9emu::ModelSettings& settings) {
  return std::make_unique<Emulator>(object, settings);
}

}  // namespace attn::probes
