#include "attn/report.h"

#include <fstream>

#include "common/safetensors.h"

// report.html, by cmake/AttnEmbed.cmake.
extern "C" {
__attribute__((visibility("hidden"))) extern const char attn_image_report_html_begin[],
    attn_image_report_html_end[];
}

namespace attn::tools {

MeasuredRun read_run(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw InputError(path + ": cannot be read");
  Json json = Json::parse(file, nullptr, false);
  if (!json.is_object()) throw InputError(path + ": not a JSON object");
  return {path.substr(path.find_last_of('/') + 1), std::move(json)};
}

void write_report(const std::string& path, const std::vector<MeasuredRun>& runs) {
  Json list = Json::array();
  for (const MeasuredRun& run : runs) list.push_back({{"file", run.name}, {"json", run.json}});
  std::string data = list.dump(-1, ' ', true, Json::error_handler_t::replace);
  // The text of a script element may not contain its end tag.
  for (size_t at = 0; (at = data.find("</", at)) != std::string::npos; at += 3)
    data.insert(at + 1, "\\");
  std::string page(attn_image_report_html_begin, attn_image_report_html_end);
  const std::string place = "@RUNS@";
  page.replace(page.find(place), place.size(), data);
  need(write_file(path, {std::as_bytes(std::span(page.data(), page.size()))}));
}

}  // namespace attn::tools
