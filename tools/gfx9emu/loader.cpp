// ELF, kernel descriptors and the metadata note.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "gfx9emu/code_object.h"
#include "gfx9emu/decode.h"

namespace gfx9emu {
namespace {

// The parts of ELF64 that are needed, by its own names.
struct Ehdr {
  uint8_t ident[16];
  uint16_t type, machine;
  uint32_t version;
  uint64_t entry, phoff, shoff;
  uint32_t flags;
  uint16_t ehsize, phentsize, phnum, shentsize, shnum, shstrndx;
};
struct Phdr {
  uint32_t type, flags;
  uint64_t offset, vaddr, paddr, filesz, memsz, align;
};
struct Shdr {
  uint32_t name, type;
  uint64_t flags, addr, offset, size;
  uint32_t link, info;
  uint64_t addralign, entsize;
};
struct Sym {
  uint32_t name;
  uint8_t info, other;
  uint16_t shndx;
  uint64_t value, size;
};
struct Rela {
  uint64_t offset, info;
  int64_t addend;
};
static_assert(sizeof(Ehdr) == 64 && sizeof(Phdr) == 56 && sizeof(Shdr) == 64 && sizeof(Sym) == 24);

constexpr uint16_t em_amdgpu = 224;
constexpr uint8_t osabi_amdgpu_hsa = 64;
constexpr uint32_t mach_mask = 0xff;
constexpr uint32_t pt_load = 1, pt_note = 4, pf_x = 1;
constexpr uint32_t sht_rela = 4, sht_dynsym = 11, sht_nobits = 8;
constexpr uint32_t nt_amdgpu_metadata = 32;
constexpr uint64_t max_image = uint64_t{1} << 28;
constexpr uint32_t max_scratch = 1 << 18, max_kernarg = 1 << 16;
constexpr int max_depth = 32;  // of the metadata

std::string number(uint64_t n) {
  return std::to_string(n);
}

uint32_t bits(uint32_t word, int high, int low) {
  return word >> low & ((high - low == 31 ? 0u : 1u << (high - low + 1)) - 1);
}

// Reads MessagePack only to see how deep it nests: the library's reader calls itself for each
// level.
struct Depth : nlohmann::json_sax<nlohmann::json> {
  int depth = 0;

  bool enter() { return ++depth <= max_depth; }
  bool leave() {
    --depth;
    return true;
  }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return enter(); }
  bool key(string_t&) override { return true; }
  bool end_object() override { return leave(); }
  bool start_array(size_t) override { return enter(); }
  bool end_array() override { return leave(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }
};

}  // namespace

class Loader {
 public:
  Loader(std::span<const std::byte> file, CodeObject& object) : file_(file), object_(object) {}

  // "" or what is wrong.
  std::string load() {
    for (const auto step : {&Loader::read_header, &Loader::read_segments, &Loader::read_metadata,
                            &Loader::read_symbols, &Loader::read_kernels, &Loader::decode}) {
      std::string error = (this->*step)();
      if (!error.empty()) return error;
    }
    read_lines();
    return "";
  }

  std::string place(Memory& memory) {
    object_.address_ = memory.allocate(object_.image_.size(), "the code object");
    if (object_.address_ == 0) return "no memory for the code object";
    object_.memory_ = &memory;
    const std::string error = relocate();
    if (!error.empty()) return error;
    return memory.write(object_.address_, object_.image_);
  }

 private:
  template <class T>
  std::optional<T> at(uint64_t offset) const {
    if (offset > file_.size() || file_.size() - offset < sizeof(T)) return {};
    T value;
    std::memcpy(&value, file_.data() + offset, sizeof(T));
    return value;
  }
  std::span<const std::byte> range(uint64_t offset, uint64_t size) const {
    if (offset > file_.size() || file_.size() - offset < size) return {};
    return file_.subspan(offset, size);
  }
  // Texts of the file become part of sentences, which are one line.
  static std::string printable(std::string s) {
    for (char& c : s)
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
    return s;
  }
  std::string text_at(std::span<const std::byte> strings, uint64_t offset) const {
    std::string s;
    for (uint64_t i = offset; i < strings.size() && strings[i] != std::byte{0}; ++i) {
      s += static_cast<char>(strings[i]);
    }
    return printable(s);
  }

  const char* arch_name() const { return facts_of(object_.arch_).name; }

  std::string read_header() {
    const auto header = at<Ehdr>(0);
    if (!header || std::memcmp(header->ident, "\177ELF", 4) != 0) return "not an ELF file";
    header_ = *header;
    if (header_.ident[4] != 2 || header_.ident[5] != 1) {
      return "not a 64-bit little-endian ELF file";
    }
    if (header_.machine != em_amdgpu) {
      return "made for ELF machine " + number(header_.machine) + ", not for AMDGPU (224)";
    }
    if (header_.ident[7] != osabi_amdgpu_hsa) {
      return "its OS ABI is " + number(header_.ident[7]) + ", not amdhsa (64)";
    }
    if (header_.ident[8] < 2) {
      return "its code object version is older than 4";
    }
    const uint32_t mach = header_.flags & mach_mask;
    if (mach == facts_of(Arch::Gfx950).mach) object_.arch_ = Arch::Gfx950;
    if (mach != facts_of(object_.arch_).mach) {
      char flags[16];
      std::snprintf(flags, sizeof flags, "0x%x", mach);
      return std::string("made for another processor: machine ") + flags +
             " in its flags, gfx942 is 0x4c, gfx950 0x4f";
    }
    if (!Decoder::knows(object_.arch_)) {
      return std::string("made for ") + arch_name() + ", which LLVM " + number(GFX9EMU_LLVM) +
             " does not know; this emulator needs LLVM 20 or newer for it";
    }
    // EF_AMDGPU_FEATURE_XNACK_V4 and _SRAMECC_V4: 0 unsupported, 1 any, 2 off, 3 on.
    constexpr Setting settings[] = {Setting::Any, Setting::Any, Setting::Off, Setting::On};
    object_.xnack_ = settings[header_.flags >> 8 & 3];
    object_.sramecc_ = settings[header_.flags >> 10 & 3];
    if (header_.type != 3)
      return "not linked: its ELF type is " + number(header_.type) + ", not 3 (shared object)";
    return "";
  }

  std::string read_segments() {
    if (header_.phentsize != sizeof(Phdr)) return "its program headers have a foreign size";
    uint64_t end = 0;
    for (int i = 0; i < header_.phnum; ++i) {
      const auto p = at<Phdr>(header_.phoff + uint64_t(i) * sizeof(Phdr));
      if (!p) return "truncated in its program headers";
      segments_.push_back(*p);
      if (p->type != pt_load) continue;
      if (p->memsz > max_image || p->vaddr > max_image || p->filesz > p->memsz) {
        return "a segment that is larger than 256 MiB, or larger in the file than in memory";
      }
      if (range(p->offset, p->filesz).size() != p->filesz) return "truncated in a segment";
      end = std::max(end, p->vaddr + p->memsz);
    }
    if (end == 0) return "nothing to load";
    object_.image_.resize(end);
    for (const Phdr& p : segments_) {
      if (p.type != pt_load) continue;
      const auto bytes = range(p.offset, p.filesz);
      if (!bytes.empty()) std::memcpy(object_.image_.data() + p.vaddr, bytes.data(), bytes.size());
    }
    return "";
  }

  std::string read_metadata() {
    for (const Phdr& p : segments_) {
      if (p.type != pt_note) continue;
      uint64_t offset = p.offset;
      const uint64_t end = p.offset + p.filesz;
      while (offset < end) {
        const auto note = at<std::array<uint32_t, 3>>(offset);
        if (!note) return "truncated in its notes";
        const auto [name_size, size, type] = *note;
        const uint64_t name = offset + 12;
        const uint64_t body = name + (uint64_t{name_size} + 3) / 4 * 4;
        if (type == nt_amdgpu_metadata && text_at(range(name, name_size), 0) == "AMDGPU") {
          const auto bytes = range(body, size);
          if (bytes.size() != size || size == 0) return "truncated in its metadata";
          const auto* first = reinterpret_cast<const uint8_t*>(bytes.data());
          Depth depth;
          if (!nlohmann::json::sax_parse(first, first + size, &depth,
                                         nlohmann::json::input_format_t::msgpack)) {
            return "its metadata is not MessagePack, or nests too deep";
          }
          metadata_ = nlohmann::json::from_msgpack(first, first + size, true, false);
          if (metadata_.is_discarded() || !metadata_.is_object()) {
            return "its metadata is not MessagePack";
          }
          return "";
        }
        offset = body + (uint64_t{size} + 3) / 4 * 4;
      }
    }
    return "no AMDGPU metadata note";
  }

  std::string read_symbols() {
    if (header_.shnum != 0 && header_.shentsize != sizeof(Shdr)) {
      return "its section headers have a foreign size";
    }
    for (int i = 0; i < header_.shnum; ++i) {
      const auto s = at<Shdr>(header_.shoff + uint64_t(i) * sizeof(Shdr));
      if (!s) return "truncated in its section headers";
      sections_.push_back(*s);
    }
    for (const Shdr& s : sections_) {
      if (s.type != sht_dynsym) continue;
      if (s.link >= sections_.size()) return "its symbols have no names";
      const auto strings = range(sections_[s.link].offset, sections_[s.link].size);
      if (range(s.offset, s.size).size() != s.size) return "truncated in its symbols";
      for (uint64_t i = 0; i + sizeof(Sym) <= s.size; i += sizeof(Sym)) {
        const Sym symbol = *at<Sym>(s.offset + i);
        symbols_.push_back({text_at(strings, symbol.name), symbol.value, symbol.size});
        const bool is_object = (symbol.info & 15) == 1;
        const std::string& name = symbols_.back().name;
        if (is_object && symbol.shndx != 0 && !name.ends_with(".kd")) {
          object_.variables_.push_back(symbols_.back());
        }
      }
    }
    return "";
  }

  // A field of the metadata; `fallback` where it is absent or of another type.
  static uint64_t integer(const nlohmann::json& map, const char* key, uint64_t fallback = 0) {
    const auto found = map.find(key);
    return found != map.end() && found->is_number_integer() ? found->get<uint64_t>() : fallback;
  }
  static std::string string(const nlohmann::json& map, const char* key) {
    const auto found = map.find(key);
    return found != map.end() && found->is_string() ? printable(found->get<std::string>()) : "";
  }

  std::string read_kernels() {
    const auto kernels = metadata_.find("amdhsa.kernels");
    if (kernels == metadata_.end() || !kernels->is_array()) {
      return "its metadata has no amdhsa.kernels";
    }
    const std::string target = string(metadata_, "amdhsa.target");
    if (!target.empty() && target.find(arch_name()) == target.npos) {
      return "its metadata is for " + target + ", not for " + arch_name();
    }
    for (const auto& entry : *kernels) {
      if (!entry.is_object()) return "its metadata has a kernel that is not a map";
      Kernel kernel;
      kernel.name = string(entry, ".name");
      kernel.object = &object_;
      if (kernel.name.empty()) return "its metadata has a kernel with no .name";
      const std::string error = read_kernel(entry, kernel);
      if (!error.empty()) return "kernel " + kernel.name + ": " + error;
      object_.kernels_.push_back(std::move(kernel));
    }
    if (object_.kernels_.empty()) return "it has no kernels";
    return "";
  }

  std::string read_kernel(const nlohmann::json& entry, Kernel& kernel) {
    const std::string symbol_name = string(entry, ".symbol");
    if (symbol_name.empty()) return "the metadata names no .symbol";
    const auto symbol = std::find_if(symbols_.begin(), symbols_.end(),
                                     [&](const Symbol& s) { return s.name == symbol_name; });
    if (symbol == symbols_.end()) return "no symbol " + symbol_name;
    const std::string error = read_descriptor(symbol->offset, kernel);
    if (!error.empty()) return error;
    Descriptor& d = kernel.descriptor;

    const uint64_t kernarg_bytes = integer(entry, ".kernarg_segment_size");
    if (kernarg_bytes > max_kernarg) return too_much_kernarg(kernarg_bytes);
    kernel.kernarg_bytes = static_cast<uint32_t>(kernarg_bytes);
    if (d.kernarg_bytes == 0) d.kernarg_bytes = kernel.kernarg_bytes;  // 0: not said
    kernel.max_workgroup_size =
        static_cast<uint32_t>(integer(entry, ".max_flat_workgroup_size", 1024));
    kernel.vgpr_count = static_cast<uint32_t>(integer(entry, ".vgpr_count"));
    kernel.agpr_count = static_cast<uint32_t>(integer(entry, ".agpr_count"));
    kernel.sgpr_count = static_cast<uint32_t>(integer(entry, ".sgpr_count"));
    const auto same = [&](const char* key, uint64_t described) -> std::string {
      const uint64_t said = integer(entry, key);
      if (said == described) return "";
      return std::string("the metadata's ") + key + " is " + number(said) +
             ", the descriptor says " + number(described);
    };
    for (const std::string& contradiction : {same(".group_segment_fixed_size", d.lds_bytes),
                                             same(".private_segment_fixed_size", d.scratch_bytes),
                                             same(".kernarg_segment_size", d.kernarg_bytes)}) {
      if (!contradiction.empty()) return contradiction;
    }
    if (const uint64_t lanes = integer(entry, ".wavefront_size", 64); lanes != 64) {
      return "a wavefront of " + number(lanes) + ", " + arch_name() + " has 64";
    }
    const auto args = entry.find(".args");
    if (args == entry.end()) return "";
    if (!args->is_array()) return ".args is not an array";
    for (const auto& a : *args) {
      if (!a.is_object()) return "an argument that is not a map";
      KernelArg arg;
      arg.name = string(a, ".name");
      arg.value_kind = string(a, ".value_kind");
      const uint64_t offset = integer(a, ".offset"), size = integer(a, ".size");
      if (offset > kernel.kernarg_bytes || size > kernel.kernarg_bytes - offset) {
        return "argument " + (arg.name.empty() ? number(kernel.args.size()) : arg.name) +
               " lies outside the kernarg segment of " + number(kernel.kernarg_bytes) + " bytes";
      }
      arg.offset = static_cast<uint32_t>(offset);
      arg.size = static_cast<uint32_t>(size);
      kernel.args.push_back(std::move(arg));
    }
    return "";
  }

  static std::string too_much_kernarg(uint64_t bytes) {
    return number(bytes) + " bytes of kernel arguments, at most " + number(max_kernarg) +
           " are possible";
  }

  std::string read_descriptor(uint64_t offset, Kernel& kernel) {
    const std::vector<std::byte>& image = object_.image_;
    if (offset > image.size() || image.size() - offset < 64) {
      return "its descriptor lies outside the image";
    }
    if (offset % 64 != 0) return "its descriptor is not aligned to 64 bytes";
    uint32_t word[16];
    std::memcpy(word, image.data() + offset, 64);
    Descriptor& d = kernel.descriptor;
    d.lds_bytes = word[0];
    d.scratch_bytes = word[1];
    d.kernarg_bytes = word[2];
    std::memcpy(&d.entry_offset, &word[4], 8);
    const uint32_t rsrc3 = word[11], rsrc1 = word[12], rsrc2 = word[13], properties = word[14];
    for (const int reserved : {3, 6, 7, 8, 9, 10, 15}) {
      if (word[reserved] != 0) return "reserved bytes of its descriptor are not 0";
    }
    d.accum_offset = (bits(rsrc3, 5, 0) + 1) * 4;
    if (rsrc3 >> 16 & 1) return "tg_split is not supported";
    d.vgprs = (bits(rsrc1, 5, 0) + 1) * 8;
    d.sgprs = (bits(rsrc1, 9, 6) / 2 + 1) * 16 - 6;
    if (d.sgprs > 102) d.sgprs = 102;
    d.mode = bits(rsrc1, 19, 12) | bits(rsrc1, 21, 21) << 8 | bits(rsrc1, 23, 23) << 9 |
             bits(rsrc1, 26, 26) << 23;
    d.scratch = rsrc2 & 1;
    d.user_sgprs = bits(rsrc2, 5, 1);
    d.workgroup_id_x = rsrc2 >> 7 & 1;
    d.workgroup_id_y = rsrc2 >> 8 & 1;
    d.workgroup_id_z = rsrc2 >> 9 & 1;
    d.workgroup_info = rsrc2 >> 10 & 1;
    d.workitem_id_vgprs = bits(rsrc2, 12, 11);
    if (properties & 1)
      return std::string("a private segment buffer, which ") + arch_name() + " has not";
    d.dispatch_ptr = properties >> 1 & 1;
    d.queue_ptr = properties >> 2 & 1;
    d.kernarg_ptr = properties >> 3 & 1;
    d.dispatch_id = properties >> 4 & 1;
    d.flat_scratch_init = properties >> 5 & 1;
    d.private_segment_size = properties >> 6 & 1;
    if (properties >> 10 & 1) return std::string("wave32, which ") + arch_name() + " has not";
    d.dynamic_stack = properties >> 11 & 1;
    d.kernarg_preload_dwords = static_cast<uint8_t>(bits(properties, 22, 16));
    d.kernarg_preload_offset = static_cast<uint8_t>(bits(properties, 31, 23) & 0xff);
    if (d.flat_scratch_init)
      return std::string("flat_scratch_init, which ") + arch_name() + " has not";
    if (d.accum_offset > d.vgprs) {
      // Legal where no AGPR is used; the arch VGPRs end with the allocation then.
      d.accum_offset = d.vgprs;
    }
    const uint32_t wanted = 2u * d.dispatch_ptr + 2u * d.queue_ptr + 2u * d.kernarg_ptr +
                            2u * d.dispatch_id + d.kernarg_preload_dwords + d.private_segment_size;
    if (d.user_sgprs < wanted) {
      return "its " + number(d.user_sgprs) + " user SGPRs are fewer than the " + number(wanted) +
             " that its descriptor enables";
    }
    if (const uint32_t most = facts_of(object_.arch_).lds_bytes; d.lds_bytes > most) {
      return number(d.lds_bytes) + " bytes of LDS, there are " + number(most);
    }
    if (d.scratch_bytes > max_scratch) {
      return number(d.scratch_bytes) + " bytes of scratch for each work item, at most " +
             number(max_scratch) + " are possible";
    }
    if (d.kernarg_bytes > max_kernarg) return too_much_kernarg(d.kernarg_bytes);
    if (d.workitem_id_vgprs > 2) return "work item ids of more than 3 dimensions";
    const uint64_t entry = offset + static_cast<uint64_t>(d.entry_offset);
    if (entry % 256 != 0) return "its entry is not aligned to 256 bytes";
    if (entry >= image.size()) return "its entry lies outside the image";
    kernel.entry = entry;
    return "";
  }

  std::string decode() {
    thread_local const Decoder gfx942;
    thread_local std::unique_ptr<const Decoder> gfx950;
    if (object_.arch_ == Arch::Gfx950 && !gfx950) {
      gfx950 = std::make_unique<Decoder>(Arch::Gfx950);
    }
    const Decoder& decoder = object_.arch_ == Arch::Gfx950 ? *gfx950 : gfx942;
    for (const Phdr& p : segments_) {
      if (p.type != pt_load || !(p.flags & pf_x)) continue;
      const auto code = std::span<const std::byte>(object_.image_).subspan(p.vaddr, p.filesz);
      object_.program_ = decoder.decode_all(code, p.vaddr);
      break;
    }
    const D16 other_half = object_.sramecc_ == Setting::Off  ? D16::Keeps
                           : object_.sramecc_ == Setting::On ? D16::Clears
                                                             : D16::Undefines;
    for (Inst& inst : object_.program_.insts) set_other_half(inst, other_half);
    for (const Kernel& k : object_.kernels_) {
      if (object_.program_.find(k.entry) < 0) return "kernel " + k.name + ": its entry is not code";
    }
    return "";
  }

  void read_lines() {
    for (const Shdr& s : sections_) {
      if (header_.shstrndx >= sections_.size()) return;
      const Shdr& names = sections_[header_.shstrndx];
      const std::string name = text_at(range(names.offset, names.size), s.name);
      if (name == ".debug_line") debug_line_ = range(s.offset, s.size);
      if (name == ".debug_line_str") debug_line_str_ = range(s.offset, s.size);
      if (name == ".debug_str") debug_str_ = range(s.offset, s.size);
    }
    object_.lines_ = read_line_table(debug_line_, debug_line_str_, debug_str_);
  }

  std::string relocate() {
    for (const Shdr& s : sections_) {
      if (s.type != sht_rela || !(s.flags & 2)) continue;
      for (uint64_t i = 0; i + sizeof(Rela) <= s.size; i += sizeof(Rela)) {
        const auto r = at<Rela>(s.offset + i);
        if (!r) return "truncated in its relocations";
        const uint32_t type = static_cast<uint32_t>(r->info);
        const uint64_t index = r->info >> 32;
        constexpr uint32_t abs64 = 3, relative64 = 13;
        uint64_t value = object_.address_ + static_cast<uint64_t>(r->addend);
        if (type == abs64) {
          if (index >= symbols_.size()) return "a relocation of no symbol";
          value += symbols_[index].offset;
        } else if (type != relative64) {
          return "relocation type " + number(type) + " is not known";
        }
        if (r->offset > object_.image_.size() || object_.image_.size() - r->offset < 8) {
          return "a relocation outside the image";
        }
        std::memcpy(object_.image_.data() + r->offset, &value, 8);
      }
    }
    return "";
  }

  std::span<const std::byte> file_;
  CodeObject& object_;
  Ehdr header_{};
  std::vector<Phdr> segments_;
  std::vector<Shdr> sections_;
  std::vector<Symbol> symbols_;
  nlohmann::json metadata_;
  std::span<const std::byte> debug_line_, debug_line_str_, debug_str_;
};

std::unique_ptr<CodeObject> CodeObject::load(std::span<const std::byte> file, Memory* memory,
                                             std::string* error) {
  std::unique_ptr<CodeObject> object(new CodeObject);
  Loader loader(file, *object);
  std::string problem = loader.load();
  if (problem.empty() && memory) problem = loader.place(*memory);
  if (!problem.empty()) {
    if (error) *error = "code object: " + problem;
    return nullptr;
  }
  if (error) error->clear();
  return object;
}

CodeObject::~CodeObject() {
  if (memory_) memory_->free(address_);
}

const Kernel* CodeObject::kernel(std::string_view name) const {
  for (const Kernel& k : kernels_) {
    if (k.name == name) return &k;
  }
  return nullptr;
}

}  // namespace gfx9emu
