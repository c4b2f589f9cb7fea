#include "gfx9emu/lines.h"

#include <algorithm>
#include <cstring>

namespace gfx9emu {
namespace {

// Reads that run past the end give 0 and mark the reader as failed.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  uint64_t fixed(int size) {
    if (bytes_.size() - at_ < static_cast<size_t>(size)) return fail();
    uint64_t x = 0;
    std::memcpy(&x, bytes_.data() + at_, static_cast<size_t>(size));
    at_ += static_cast<size_t>(size);
    return x;
  }
  uint8_t u8() { return static_cast<uint8_t>(fixed(1)); }
  uint64_t uleb() {
    uint64_t x = 0;
    for (int shift = 0;; shift += 7) {
      const uint8_t b = u8();
      if (shift < 64) x |= uint64_t{b & 127u} << shift;
      if (!(b & 128) || failed_) return x;
    }
  }
  int64_t sleb() {
    uint64_t x = 0;
    int shift = 0;
    uint8_t b;
    do {
      b = u8();
      if (shift < 64) x |= uint64_t{b & 127u} << shift;
      shift += 7;
    } while (b & 128 && !failed_);
    if (shift < 64 && b & 64) x |= ~uint64_t{0} << shift;
    return static_cast<int64_t>(x);
  }
  std::string string() {
    std::string s;
    while (!failed_) {
      const char c = static_cast<char>(u8());
      if (c == '\0') break;
      s += c;
    }
    return s;
  }
  void skip(uint64_t n) {
    if (bytes_.size() - at_ < n) {
      fail();
    } else {
      at_ += n;
    }
  }
  void seek(size_t at) { at_ = std::min(at, bytes_.size()); }
  size_t at() const { return at_; }
  bool failed() const { return failed_; }

 private:
  uint64_t fail() {
    failed_ = true;
    at_ = bytes_.size();
    return 0;
  }
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
  bool failed_ = false;
};

std::string string_at(std::span<const std::byte> table, uint64_t offset) {
  if (offset >= table.size()) return "";
  return Reader(table.subspan(offset)).string();
}

std::string base_name(const std::string& path) {
  return path.substr(path.find_last_of('/') + 1);
}

enum : uint64_t {
  form_block = 0x09,
  form_data1 = 0x0b,
  form_data2 = 0x05,
  form_data4 = 0x06,
  form_data8 = 0x07,
  form_data16 = 0x1e,
  form_string = 0x08,
  form_strp = 0x0e,
  form_line_strp = 0x1f,
  form_udata = 0x0f,
};

// One unit of the line program, versions 4 and 5, 32-bit DWARF.
class Unit {
 public:
  Unit(Reader& in, std::span<const std::byte> line_strings, std::span<const std::byte> strings,
       LineTable& out)
      : in_(in), line_strings_(line_strings), strings_(strings), out_(out) {}

  void read() {
    const uint64_t length = in_.fixed(4);
    const size_t end = in_.at() + length;
    if (length >= 0xfffffff0) {
      in_.seek(static_cast<size_t>(-1));
      return;
    }
    version_ = static_cast<int>(in_.fixed(2));
    if (version_ >= 4 && version_ <= 5) {
      read_header();
      while (in_.at() < end && !in_.failed()) step();
    }
    in_.seek(end);
  }

 private:
  void read_header() {
    if (version_ == 5) in_.skip(2);  // address size, segment selector size
    const uint64_t header_length = in_.fixed(4);
    const size_t program = in_.at() + header_length;
    min_length_ = in_.u8();
    in_.skip(2);  // operations per instruction, default is_stmt
    line_base_ = static_cast<int8_t>(in_.u8());
    line_range_ = in_.u8();
    opcode_base_ = in_.u8();
    for (int i = 1; i < opcode_base_; ++i) operands_.push_back(in_.u8());
    first_file_ = static_cast<uint32_t>(out_.files.size());
    if (version_ == 5) {
      read_entries(false);
      read_entries(true);
    } else {
      while (!in_.failed() && !in_.string().empty()) {
      }
      out_.files.emplace_back();  // file numbers begin at 1
      while (!in_.failed()) {
        const std::string name = in_.string();
        if (name.empty()) break;
        for (int i = 0; i < 3; ++i) in_.uleb();
        out_.files.push_back(base_name(name));
      }
    }
    in_.seek(program);
  }

  void read_entries(bool files) {
    std::vector<std::pair<uint64_t, uint64_t>> format;
    for (int i = in_.u8(); i > 0; --i) {
      const uint64_t content = in_.uleb();
      format.emplace_back(content, in_.uleb());
    }
    const uint64_t count = in_.uleb();
    for (uint64_t i = 0; i < count && !in_.failed() && !format.empty(); ++i) {
      std::string path;
      for (const auto& [content, form] : format) {
        std::string text;
        switch (form) {
          case form_string:
            text = in_.string();
            break;
          case form_line_strp:
            text = string_at(line_strings_, in_.fixed(4));
            break;
          case form_strp:
            text = string_at(strings_, in_.fixed(4));
            break;
          case form_udata:
            in_.uleb();
            break;
          case form_data1:
            in_.skip(1);
            break;
          case form_data2:
            in_.skip(2);
            break;
          case form_data4:
            in_.skip(4);
            break;
          case form_data8:
            in_.skip(8);
            break;
          case form_data16:
            in_.skip(16);
            break;
          case form_block:
            in_.skip(in_.uleb());
            break;
          default:
            in_.seek(static_cast<size_t>(-1));
            return;
        }
        if (content == 1) path = text;
      }
      if (files) out_.files.push_back(base_name(path));
    }
  }

  void emit(bool end_of_sequence) {
    out_.lines.push_back({address_, first_file_ + file_, end_of_sequence ? 0 : line_});
  }
  void advance(uint64_t operations) { address_ += operations * min_length_; }
  void reset() {
    address_ = 0;
    file_ = 1;
    line_ = 1;
  }

  void step() {
    const uint8_t opcode = in_.u8();
    if (opcode >= opcode_base_) {
      if (line_range_ == 0) return;
      const int adjusted = opcode - opcode_base_;
      advance(static_cast<uint64_t>(adjusted / line_range_));
      line_ += static_cast<uint32_t>(line_base_ + adjusted % line_range_);
      emit(false);
      return;
    }
    switch (opcode) {
      case 0: {  // extended
        const uint64_t length = in_.uleb();
        const size_t end = in_.at() + length;
        const uint8_t extended = length > 0 ? in_.u8() : 0;
        if (extended == 1) {
          emit(true);
          reset();
        } else if (extended == 2 && length == 9) {
          address_ = in_.fixed(8);
        }
        in_.seek(end);
        break;
      }
      case 1:
        emit(false);
        break;
      case 2:
        advance(in_.uleb());
        break;
      case 3:
        line_ += static_cast<uint32_t>(in_.sleb());
        break;
      case 4:
        file_ = static_cast<uint32_t>(in_.uleb());
        break;
      case 8:
        if (line_range_ != 0) advance(static_cast<uint64_t>((255 - opcode_base_) / line_range_));
        break;
      case 9:
        address_ += in_.fixed(2);
        break;
      default:
        for (int i = opcode <= operands_.size() ? operands_[opcode - 1] : 0; i > 0; --i) in_.uleb();
    }
  }

  Reader& in_;
  std::span<const std::byte> line_strings_, strings_;
  LineTable& out_;
  int version_ = 0, line_base_ = 0, line_range_ = 0, opcode_base_ = 0;
  uint64_t min_length_ = 1;
  std::vector<uint8_t> operands_;
  uint32_t first_file_ = 0;
  uint64_t address_ = 0;
  uint32_t file_ = 1, line_ = 1;
};

}  // namespace

LineTable read_line_table(std::span<const std::byte> debug_line,
                          std::span<const std::byte> debug_line_str,
                          std::span<const std::byte> debug_str) {
  LineTable table;
  Reader in(debug_line);
  while (in.at() < debug_line.size() && !in.failed()) {
    Unit(in, debug_line_str, debug_str, table).read();
  }
  std::stable_sort(table.lines.begin(), table.lines.end(),
                   [](const Line& a, const Line& b) { return a.offset < b.offset; });
  return table;
}

std::string LineTable::find(uint64_t offset) const {
  const auto after =
      std::upper_bound(lines.begin(), lines.end(), offset,
                       [](uint64_t value, const Line& line) { return value < line.offset; });
  if (after == lines.begin()) return "";
  const Line& line = *(after - 1);
  if (line.line == 0 || line.file >= files.size()) return "";
  return files[line.file] + ":" + std::to_string(line.line);
}

}  // namespace gfx9emu
