// attn-probe-run: executes the launches of a probe on a device, or on the emulator that says what
// they are to give. tools/silicon makes the jobs and compares.
#include <fstream>
#include <iostream>
#include <iterator>

#include "attn/common.h"
#include "probes/machine.h"
#include "probes/rules.h"

using namespace attn::tools;
using namespace attn::probes;

namespace {

struct Options {
  bool rules = false;
  std::string job, out, backend = "hip", library, constants;
  int device = 0;
};

gfx9emu::ModelSettings model_settings(const std::string& path) {
  gfx9emu::ModelSettings settings;
  if (path.empty()) return settings;
  std::ifstream in(path);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in) throw InputError(path + ": cannot be read");
  std::vector<std::string> taken;
  const std::string error = gfx9emu::load_constants(text, settings, taken);
  if (!error.empty()) throw InputError(path + ": " + error);
  return settings;
}

std::unique_ptr<Machine> open(const Options& o, const std::string& object) {
  if (o.backend == "emulator") return open_emulator(object, model_settings(o.constants));
  return open_device(object, o.backend == "hip-emu", o.library, o.device);
}

// A line for each launch, which a launch that ends the program does not take along.
void run_job(const Options& o) {
  const Job job = read_job(o.job);
  const std::unique_ptr<Machine> machine = open(o, job.object);
  std::ofstream out(o.out, std::ios::binary);
  if (!out) throw InputError(o.out + ": cannot be written");
  std::cout << Json{{"device", machine->describe()}}.dump() << std::endl;
  for (size_t i = 0; i < job.launches.size(); ++i) {
    const Outcome outcome = machine->launch(job.launches[i], job.data);
    Json line = {{"launch", i}, {"milliseconds", outcome.milliseconds}};
    if (!outcome.error.empty()) line["error"] = outcome.error;
    for (const auto& bytes : outcome.read) {
      line["read"].push_back({{"at", int64_t{out.tellp()}}, {"bytes", bytes.size()}});
      out.write(reinterpret_cast<const char*>(bytes.data()),
                static_cast<std::streamsize>(bytes.size()));
    }
    for (const Outcome::Found& f : outcome.found) {
      line["found"].push_back({{"workgroup", f.workgroup},
                               {"kind", f.kind},
                               {"message", f.message},
                               {"instruction", f.instruction},
                               {"warning", f.warning}});
    }
    if (!outcome.clock_reads.empty()) line["clock_reads"] = outcome.clock_reads;
    if (!out.flush()) throw InputError(o.out + ": cannot be written");
    std::cout << line.dump() << std::endl;
  }
}

int body(int argc, char** argv) {
  CLI::App app("Executes the launches of a probe, for tools/silicon");
  Options o;
  app.add_flag("--rules", o.rules, "print the emulator's tables as JSON");
  app.add_option("job", o.job, "launches as JSON (job.h); without one, the device is described")
      ->type_name("JOB.json");
  app.add_option("--out", o.out, "where what launches leave goes")->type_name("FILE");
  app.add_option("--backend", o.backend, "emulator: the one inside, which says what it finds")
      ->check(CLI::IsMember({"hip", "hip-emu", "emulator"}));
  app.add_option("--driver", o.library, "HIP library to open")->type_name("FILE");
  app.add_option("--device", o.device)->type_name("N");
  app.add_option("--constants", o.constants, "of the issue model, for --backend emulator")
      ->type_name("REPORT.json");
  if (const auto code = parse_command_line(app, argc, argv)) return *code;
  if (o.rules) {
    std::cout << emulator_rules().dump(1) << std::endl;
  } else if (!o.job.empty()) {
    if (o.out.empty()) throw InputError("--out is needed with a job");
    run_job(o);
  } else if (o.backend == "emulator") {
    throw InputError("a job is needed with --backend emulator");
  } else {
    std::cout << Json{{"device", open(o, "")->describe()}}.dump() << std::endl;
  }
  return exit_done;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("attn-probe-run", body, argc, argv);
}
