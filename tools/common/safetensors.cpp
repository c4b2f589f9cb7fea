#include "safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>

namespace attn::tools {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr uint64_t kMaxHeader = 100'000'000;
constexpr size_t kAlign = 64;
constexpr std::string_view kMetadata = "__metadata__";

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  size_t bytes;
};

constexpr DtypeRow kDtypes[] = {
    {Dtype::boolean, "BOOL", 1}, {Dtype::u8, "U8", 1},           {Dtype::i8, "I8", 1},
    {Dtype::i16, "I16", 2},      {Dtype::u16, "U16", 2},         {Dtype::f16, "F16", 2},
    {Dtype::bf16, "BF16", 2},    {Dtype::i32, "I32", 4},         {Dtype::u32, "U32", 4},
    {Dtype::f32, "F32", 4},      {Dtype::f64, "F64", 8},         {Dtype::i64, "I64", 8},
    {Dtype::u64, "U64", 8},      {Dtype::f8_e4m3, "F8_E4M3", 1}, {Dtype::f8_e5m2, "F8_E5M2", 1},
};

std::string accepted_dtypes() {
  std::string text;
  for (const DtypeRow& row : kDtypes) {
    if (!text.empty()) text += ' ';
    text += row.name;
  }
  return text;
}

struct Entry {
  Dtype dtype = Dtype::f32;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;
  bool has_dtype = false, has_shape = false;
  int offsets = -1;  // -1: field not seen
};

// Takes the header apart as nlohmann's parser meets it: no tree is built, so depth and duplicate
// names are seen here, and the first wrong token ends the parse with `problem` set.
class HeaderReader {
 public:
  using number_integer_t = nlohmann::json::number_integer_t;
  using number_unsigned_t = nlohmann::json::number_unsigned_t;
  using number_float_t = nlohmann::json::number_float_t;
  using string_t = nlohmann::json::string_t;
  using binary_t = nlohmann::json::binary_t;

  std::map<std::string, Entry, std::less<>> entries;
  std::map<std::string, std::string, std::less<>> metadata;
  std::string problem;

  bool null() { return unexpected("null"); }
  bool boolean(bool value) { return unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) { return unexpected(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) { return unexpected(quote(text)); }
  bool binary(binary_t&) { return unexpected("binary"); }

  bool number_unsigned(number_unsigned_t value) {
    if (place_ == Place::shape) {
      if (value > static_cast<uint64_t>(INT64_MAX)) return unexpected(std::to_string(value));
      if (entry_->shape.size() == kMaxDims)
        return fail("tensor " + quote(name_) + ": more than " + std::to_string(kMaxDims) +
                    " dimensions");
      entry_->shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ == Place::offsets && entry_->offsets < 2) {
      (entry_->offsets == 0 ? entry_->begin : entry_->end) = value;
      ++entry_->offsets;
      return true;
    }
    return unexpected(std::to_string(value));
  }

  bool string(string_t& value) {
    if (place_ == Place::metadata) {
      metadata[key_] = value;
      return true;
    }
    if (place_ == Place::entry && key_ == "dtype") {
      const auto dtype = dtype_from_name(value);
      if (!dtype)
        return fail("tensor " + quote(name_) + ": dtype " + quote(value) + " is not one of " +
                    accepted_dtypes());
      entry_->dtype = *dtype;
      entry_->has_dtype = true;
      return true;
    }
    return unexpected(quote(value));
  }

  bool start_object(size_t) {
    if (place_ == Place::outside) {
      place_ = Place::root;
      return true;
    }
    if (place_ != Place::root) return unexpected("an object");
    if (name_ == kMetadata) {
      place_ = Place::metadata;
      return true;
    }
    entry_ = &entries[name_];
    place_ = Place::entry;
    return true;
  }

  bool end_object() {
    if (place_ == Place::entry) {
      if (!entry_->has_dtype) return missing("dtype");
      if (!entry_->has_shape) return missing("shape");
      if (entry_->offsets != 2) return missing("data_offsets [begin, end]");
    }
    place_ = place_ == Place::root ? Place::outside : Place::root;
    return true;
  }

  bool key(string_t& value) {
    if (place_ == Place::root) {
      name_ = value;
      if (name_ == kMetadata ? std::exchange(has_metadata_, true) : entries.contains(name_))
        return fail("tensor " + quote(name_) + " appears twice; a name may be used once");
      return true;
    }
    key_ = value;
    if (place_ == Place::metadata) {
      if (metadata.contains(key_))
        return fail("__metadata__ key " + quote(key_) + " appears twice; it may be used once");
      return true;
    }
    const bool again = (key_ == "dtype" && entry_->has_dtype) ||
                       (key_ == "shape" && entry_->has_shape) ||
                       (key_ == "data_offsets" && entry_->offsets >= 0);
    if (again) return fail("tensor " + quote(name_) + ": " + key_ + " appears twice");
    if (key_ != "dtype" && key_ != "shape" && key_ != "data_offsets")
      return fail("tensor " + quote(name_) + ": field " + quote(key_) +
                  " is not one of dtype shape data_offsets");
    return true;
  }

  bool start_array(size_t) {
    if (place_ == Place::entry && key_ == "shape") {
      place_ = Place::shape;
      entry_->has_shape = true;
      return true;
    }
    if (place_ == Place::entry && key_ == "data_offsets") {
      place_ = Place::offsets;
      entry_->offsets = 0;
      return true;
    }
    return unexpected("an array");
  }

  bool end_array() {
    place_ = Place::entry;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    return fail("header is not JSON (at byte " + std::to_string(position) + " of it)");
  }

 private:
  enum class Place { outside, root, metadata, entry, shape, offsets };
  static constexpr size_t kMaxDims = 16;

  bool fail(std::string text) {
    problem = std::move(text);
    return false;
  }

  bool missing(const char* field) { return fail("tensor " + quote(name_) + " lacks " + field); }

  bool unexpected(const std::string& what) {
    switch (place_) {
      case Place::outside:
        return fail("header is " + what + "; a JSON object is expected");
      case Place::root:
        return fail("tensor " + quote(name_) + " is " + what +
                    "; an object with dtype, shape and data_offsets is expected");
      case Place::metadata:
        return fail("__metadata__ key " + quote(key_) + " is " + what + "; a string is expected");
      case Place::entry:
        return fail("tensor " + quote(name_) + ": " + key_ + " is " + what +
                    (key_ == "dtype" ? "; a string is expected" : "; an array is expected"));
      case Place::shape:
        return fail("tensor " + quote(name_) + ": shape holds " + what +
                    "; integers from 0 to 2^63-1 are expected");
      case Place::offsets:
        return fail("tensor " + quote(name_) + ": data_offsets holds " + what +
                    "; two integers from 0 up are expected");
    }
    return false;
  }

  Place place_ = Place::outside;
  std::string name_, key_;
  Entry* entry_ = nullptr;
  bool has_metadata_ = false;
};

std::string errno_text() {
  return std::strerror(errno);
}

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }
  int close() { return ::close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};

bool read_at(int fd, uint64_t offset, std::byte* to, uint64_t count) {
  while (count > 0) {
    const ssize_t got =
        ::pread(fd, to, std::min<uint64_t>(count, 1 << 30), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = EIO;  // the file shrank
    if (got <= 0) return false;
    to += got;
    offset += static_cast<uint64_t>(got);
    count -= static_cast<uint64_t>(got);
  }
  return true;
}

bool write_all(int fd, const void* data, size_t count) {
  auto* from = static_cast<const std::byte*>(data);
  while (count > 0) {
    const ssize_t put = ::write(fd, from, std::min<size_t>(count, 1 << 30));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    from += put;
    count -= static_cast<size_t>(put);
  }
  return true;
}

// Checks the entries against each other and against the bytes after the header.
std::string check_layout(const std::map<std::string, Entry, std::less<>>& entries,
                         uint64_t data_bytes) {
  struct Span {
    uint64_t begin, end;
    const std::string* name;
  };
  std::vector<Span> spans;
  for (const auto& [name, entry] : entries) {
    const std::string who = "tensor " + quote(name);
    const std::string range =
        "data_offsets [" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) + "]";
    if (entry.begin > entry.end || entry.end > data_bytes)
      return who + ": " + range + " are not within the " + std::to_string(data_bytes) +
             " bytes of data in the file";
    const auto count = element_count(entry.shape);
    const uint64_t size = dtype_bytes(entry.dtype);
    const uint64_t bytes = entry.end - entry.begin;
    if (!count || static_cast<uint64_t>(*count) > UINT64_MAX / size ||
        static_cast<uint64_t>(*count) * size != bytes)
      return who + ": " + range + " span " + std::to_string(bytes) + " bytes; shape " +
             shape_text(entry.shape) + " of " + std::string(dtype_name(entry.dtype)) +
             (count && static_cast<uint64_t>(*count) <= UINT64_MAX / size
                  ? " needs " + std::to_string(static_cast<uint64_t>(*count) * size)
                  : " is larger than any file");
    spans.push_back({entry.begin, entry.end, &name});
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  uint64_t at = 0;
  for (const Span& span : spans) {
    if (span.begin != at)
      return "tensor " + quote(*span.name) + " begins at byte " + std::to_string(span.begin) +
             " of the data; " + std::to_string(at) +
             " is expected (tensors may not overlap or leave gaps)";
    at = span.end;
  }
  if (at != data_bytes)
    return "the data is " + std::to_string(data_bytes) + " bytes; the tensors use " +
           std::to_string(at);
  return {};
}

// `fetch(offset, to, count)` reads from the file; the range was checked against `file_bytes`.
template <class Fetch>
Result<TensorFile> parse_with(std::string label, uint64_t file_bytes, Fetch fetch) try {
  const auto fail = [&](const std::string& text) { return Error{label + ": " + text}; };
  if (file_bytes < 8)
    return fail("the file is " + std::to_string(file_bytes) +
                " bytes; a safetensors file has at least 8");
  uint64_t header_bytes = 0;
  if (!fetch(0, reinterpret_cast<std::byte*>(&header_bytes), 8))
    return fail("cannot read: " + errno_text());
  if (header_bytes > kMaxHeader || header_bytes > file_bytes - 8)
    return fail("header length " + std::to_string(header_bytes) + " is over the " +
                std::to_string(std::min(kMaxHeader, file_bytes - 8)) + " bytes that can follow" +
                (header_bytes > kMaxHeader ? " (not a safetensors file?)" : " (truncated?)"));
  std::string header(header_bytes, '\0');
  if (!fetch(8, reinterpret_cast<std::byte*>(header.data()), header_bytes))
    return fail("cannot read: " + errno_text());

  HeaderReader reader;
  if (!nlohmann::json::sax_parse(header, &reader)) return fail(reader.problem);
  const uint64_t data_bytes = file_bytes - 8 - header_bytes;
  if (std::string problem = check_layout(reader.entries, data_bytes); !problem.empty())
    return fail(problem);

  TensorFile file;
  for (auto& [name, entry] : reader.entries) {
    Tensor tensor = make_tensor(entry.dtype, std::move(entry.shape));
    if (!fetch(8 + header_bytes + entry.begin, tensor.data.get(), tensor.bytes))
      return fail("cannot read: " + errno_text());
    if (tensor.dtype == Dtype::boolean)
      for (size_t i = 0; i < tensor.bytes; ++i)
        if (tensor.as<uint8_t>()[i] > 1)
          return fail("tensor " + quote(name) + ": a BOOL holds " +
                      std::to_string(tensor.as<uint8_t>()[i]) + "; 0 and 1 are accepted");
    file.tensors.emplace(name, std::move(tensor));
  }
  file.metadata = std::move(reader.metadata);
  file.label = std::move(label);
  return file;
} catch (const std::bad_alloc&) {
  return Error{label + ": not enough memory to hold the file (" + std::to_string(file_bytes) +
               " bytes)"};
} catch (const std::exception& e) {
  return Error{label + ": " + e.what()};
}

Result<std::string> make_header(const TensorFile& file,
                                const std::vector<const std::string*>& order) try {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!file.metadata.empty())
    for (const auto& [key, value] : file.metadata) header[std::string(kMetadata)][key] = value;
  uint64_t at = 0;
  for (const std::string* name : order) {
    const Tensor& tensor = file.tensors.find(*name)->second;
    header[*name] = {{"dtype", dtype_name(tensor.dtype)},
                     {"shape", tensor.shape},
                     {"data_offsets", {at, at + tensor.bytes}}};
    at += tensor.bytes;
  }
  std::string text = header.dump();
  text.append((kAlign - (8 + text.size()) % kAlign) % kAlign, ' ');
  return text;
} catch (const std::exception& e) {  // a name that is not UTF-8
  return Error{std::string("cannot write the header: ") + e.what()};
}

}  // namespace

std::string_view dtype_name(Dtype dtype) {
  return kDtypes[static_cast<size_t>(dtype)].name;
}

size_t dtype_bytes(Dtype dtype) {
  return kDtypes[static_cast<size_t>(dtype)].bytes;
}

std::optional<Dtype> dtype_from_name(std::string_view name) {
  for (const DtypeRow& row : kDtypes)
    if (row.name == name) return row.dtype;
  return std::nullopt;
}

std::optional<int64_t> element_count(std::span<const int64_t> shape) {
  constexpr int64_t limit = int64_t{1} << 62;
  if (std::any_of(shape.begin(), shape.end(), [](int64_t dim) { return dim < 0; }))
    return std::nullopt;
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t count = 1;
  for (const int64_t dim : shape) {
    if (dim > limit / count) return std::nullopt;
    count *= dim;
  }
  return count;
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string quote(std::string_view name) {
  constexpr size_t limit = 80;
  constexpr char hex[] = "0123456789abcdef";
  std::string text = "\"";
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    const bool starts_character = (byte & 0xc0) != 0x80;
    if (text.size() > limit && starts_character) return text + "\"...";
    if (byte < 0x20 || byte == 0x7f) {
      text += {'\\', 'x', hex[byte >> 4], hex[byte & 15]};
    } else {
      text += c;
    }
  }
  return text + "\"";
}

Bytes allocate_bytes(size_t count) {
  constexpr auto align = std::align_val_t(kAlign);
  auto* block = static_cast<std::byte*>(::operator new(count ? count : 1, align));
  return Bytes(block, [](std::byte* p) { ::operator delete(p, align); });
}

Tensor make_tensor(Dtype dtype, std::vector<int64_t> shape) {
  Tensor tensor;
  const auto count = element_count(shape);
  if (!count || static_cast<uint64_t>(*count) > SIZE_MAX / dtype_bytes(dtype))
    throw std::bad_alloc();
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.bytes = static_cast<size_t>(*count) * dtype_bytes(dtype);
  tensor.data = allocate_bytes(tensor.bytes);
  return tensor;
}

const Tensor* TensorFile::find(std::string_view name) const {
  const auto at = tensors.find(name);
  return at == tensors.end() ? nullptr : &at->second;
}

Result<TensorFile> parse_tensors(std::span<const std::byte> file, std::string label) {
  return parse_with(std::move(label), file.size(),
                    [&](uint64_t offset, std::byte* to, uint64_t count) {
                      if (count) std::memcpy(to, file.data() + offset, count);
                      return true;
                    });
}

Result<TensorFile> read_tensors(const std::string& path) {
  // O_NONBLOCK: opening a pipe nobody writes to must not hang before the check below.
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info{};
  if (file.fd() < 0 || ::fstat(file.fd(), &info) != 0)
    return Error{path + ": cannot open: " + errno_text()};
  if (!S_ISREG(info.st_mode))
    return Error{path + (S_ISDIR(info.st_mode) ? ": is a directory" : ": is not a regular file") +
                 std::string("; a safetensors file is expected")};
  return parse_with(path, static_cast<uint64_t>(info.st_size),
                    [&](uint64_t offset, std::byte* to, uint64_t count) {
                      return read_at(file.fd(), offset, to, count);
                    });
}

Status write_file(const std::string& path, const std::vector<std::span<const std::byte>>& parts) {
  const auto fail = [&](const std::string& text) { return Error{path + ": " + text}; };

  // A link is followed and a device refused, so that the rename replaces only a regular file.
  std::string target = path;
  std::error_code ec;
  if (const auto real = std::filesystem::canonical(path, ec); !ec) {
    target = real.string();
    if (!std::filesystem::is_regular_file(real, ec))
      return fail("cannot write: it exists and is not a regular file");
  }

  const std::string temporary = target + ".tmp-" + std::to_string(::getpid());
  File out(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (out.fd() < 0) return fail("cannot create " + temporary + ": " + errno_text());
  bool written = true;
  for (const auto& part : parts) written = written && write_all(out.fd(), part.data(), part.size());
  written = written && ::fsync(out.fd()) == 0 && out.close() == 0 &&
            ::rename(temporary.c_str(), target.c_str()) == 0;
  if (!written) {
    const std::string why = errno_text();
    ::unlink(temporary.c_str());
    return fail("cannot write: " + why);
  }
  return Done{};
}

Status write_tensors(const std::string& path, const TensorFile& file) {
  // Widest elements first keeps every tensor aligned to its element.
  std::vector<const std::string*> order;
  for (const auto& [name, tensor] : file.tensors) {
    const auto count = element_count(tensor.shape);
    if (!count || static_cast<uint64_t>(*count) * dtype_bytes(tensor.dtype) != tensor.bytes)
      return Error{path + ": tensor " + quote(name) + ": shape and size disagree"};
    order.push_back(&name);
  }
  std::stable_sort(order.begin(), order.end(), [&](const std::string* a, const std::string* b) {
    return dtype_bytes(file.tensors.find(*a)->second.dtype) >
           dtype_bytes(file.tensors.find(*b)->second.dtype);
  });
  const auto header = make_header(file, order);
  if (!header) return Error{path + ": " + header.error()};

  const uint64_t header_bytes = header->size();
  std::vector<std::span<const std::byte>> parts = {
      std::as_bytes(std::span(&header_bytes, 1)),
      std::as_bytes(std::span(header->data(), header->size()))};
  for (const std::string* name : order) {
    const Tensor& tensor = file.tensors.find(*name)->second;
    parts.emplace_back(tensor.data.get(), tensor.bytes);
  }
  return write_file(path, parts);
}

}  // namespace attn::tools
