// attn info: backends, devices, kernels.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>

#include "attn/common.h"

namespace attn::tools {
namespace {

std::string joined(const Json& list) {
  std::string text;
  for (const Json& item : list) text += (text.empty() ? "" : " ") + item.get<std::string>();
  return text;
}

// Where it runs, of what is here: " (hip 1, hip-emu 0)".
std::string place(const Json& info, const Json& kernel) {
  constexpr const char* nowhere = " (not on this machine)";
  if (kernel.contains("runs_here")) return kernel["runs_here"].get<bool>() ? "" : nowhere;
  std::string places;
  for (const Json& backend : info["backends"])
    for (const Json& device : backend.value("devices", Json::array())) {
      const Json& names = device["kernels"];
      if (std::find(names.begin(), names.end(), kernel["name"]) == names.end()) continue;
      places += (places.empty() ? "" : ", ") + backend["name"].get<std::string>() + " " +
                std::to_string(device["device"].get<int>());
    }
  return places.empty() ? nowhere : " (" + places + ")";
}

// Why a backend is absent, without its name, which is printed before it.
std::string without_name(const std::string& reason, const std::string& name) {
  const std::string start = name + ": ";
  return reason.compare(0, start.size(), start) == 0 ? reason.substr(start.size()) : reason;
}

void print(const Json& info) {
  std::printf("libattn %s\n\nbackends\n", info["version"].get<std::string>().c_str());
  for (const Json& backend : info["backends"]) {
    const std::string name = backend["name"], reason = backend["reason"];
    std::printf("  %-10s %s", name.c_str(), backend["available"] ? "available" : "absent: ");
    std::printf("%s", without_name(reason, name).c_str());
    if (backend.value("emulated", false) && backend["available"])
      std::printf(", emulated: no hardware");
    if (backend.contains("isa")) std::printf(" (%s)", joined(backend["isa"]).c_str());
    std::printf("\n");
    if (!backend.contains("devices")) continue;
    for (const Json& device : backend["devices"]) {
      std::printf("    %d: %s, %s, %d multiprocessors, %.1f GiB, %zu kernels\n",
                  device["device"].get<int>(), device["name"].get<std::string>().c_str(),
                  device["arch"].get<std::string>().c_str(), device["multiprocessors"].get<int>(),
                  device["memory_bytes"].get<double>() / (1 << 30), device["kernels"].size());
      const std::string passed = device["passed_by"];
      if (!passed.empty() && !backend.value("emulated", false))
        std::printf("       passed by: %s\n", passed.c_str());
    }
  }
  const std::string taken = info["auto"]["backend"];
  std::printf("  %-10s %s", "auto", taken.c_str());
  if (taken != "cpu") std::printf(", device %d", info["auto"]["device"].get<int>());
  std::printf("\n");
  std::printf("\nkernels\n");
  size_t width = 0;
  for (const Json& kernel : info["kernels"])
    width = std::max(width, kernel["name"].get_ref<const std::string&>().size());
  for (const Json& kernel : info["kernels"]) {
    const std::string name = kernel["name"], op = kernel["op"], backend = kernel["backend"];
    std::printf("  %-*s %-9s %-10s ", int(width), name.c_str(), op.c_str(), backend.c_str());
    if (!kernel["in_build"].get<bool>()) {
      std::printf("not in this build: its toolchain was absent\n");
      continue;
    }
    const char* to = op == "kv_append" || op == "kv_roll" ? "kv" : "out";
    std::printf("%s: %s -> %s%s\n", joined(kernel["arch"]).c_str(), joined(kernel["in"]).c_str(),
                joined(kernel[to]).c_str(), place(info, kernel).c_str());
  }
}

}  // namespace

void add_info(CLI::App& app, int&) {
  auto* command = app.add_subcommand("info", "Show backends, devices and kernels");
  auto as_json = std::make_shared<bool>(false);
  add_json(*command, *as_json);
  command->callback([as_json] {
    const Json info = Json::parse(attn::info());
    if (*as_json) {
      std::cout << info.dump(2) << "\n";
    } else {
      print(info);
    }
  });
}

}  // namespace attn::tools
