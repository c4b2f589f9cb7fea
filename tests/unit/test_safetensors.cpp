// The safetensors reader and writer: round trips, and every way a file can be wrong.
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "../../tools/common/safetensors.h"
#include "../catch.h"

using namespace attn::tools;
namespace fs = std::filesystem;

namespace {

struct TempDir {
  fs::path path;
  TempDir() {
    std::string name = (fs::temp_directory_path() / "attn-test-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~TempDir() { fs::remove_all(path); }
  std::string operator/(const char* name) const { return (path / name).string(); }
};

std::string file_bytes(const std::string& header, size_t data, uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + std::string(data, '\1');
}

std::string file_bytes(const std::string& header, size_t data) {
  return file_bytes(header, data, header.size());
}

Result<TensorFile> parse(const std::string& bytes) {
  return parse_tensors(std::as_bytes(std::span(bytes.data(), bytes.size())), "in");
}

// What the sentence about this file says; "" if the file was taken.
std::string refusal(const std::string& bytes) {
  const auto file = parse(bytes);
  if (file) return "";
  CHECK(file.error().starts_with("in: "));
  CHECK(file.error().find('\n') == std::string::npos);
  return file.error();
}

std::string refusal(const std::string& header, size_t data) {
  return refusal(file_bytes(header, data));
}

bool has(const std::string& text, const std::string& part) {
  UNSCOPED_INFO(text);
  return text.find(part) != std::string::npos;
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"q":)" + entry(dtype, shape, offsets) + "}";
}

}  // namespace

TEST_CASE("safetensors: a written file reads back, every dtype") {
  const TempDir dir;
  TensorFile file;
  file.metadata = {{"k", "f8_e4m3fnuz"}, {"note", "caf\u00e9 \"x\"\n"}};
  for (const char* name : {"BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32",
                           "F64", "I64", "U64", "F8_E4M3", "F8_E5M2"}) {
    const auto dtype = dtype_from_name(name);
    REQUIRE(dtype);
    CHECK(dtype_name(*dtype) == name);
    Tensor tensor = make_tensor(*dtype, {3, 1, 5});
    for (size_t i = 0; i < tensor.bytes; ++i)
      tensor.as<uint8_t>()[i] = static_cast<uint8_t>(*dtype == Dtype::boolean ? i & 1 : i * 37);
    file.tensors[name] = tensor;
  }
  file.tensors["scalar"] = make_tensor(Dtype::f32, {});
  *file.tensors["scalar"].as<float>() = 2.5f;
  file.tensors["empty"] = make_tensor(Dtype::f32, {2, 0, 4});

  const std::string path = dir / "all.safetensors";
  REQUIRE(write_tensors(path, file));
  const auto back = read_tensors(path);
  REQUIRE(back);
  CHECK(back->metadata == file.metadata);
  REQUIRE(back->tensors.size() == file.tensors.size());
  for (const auto& [name, tensor] : file.tensors) {
    INFO(name);
    const Tensor* other = back->find(name);
    REQUIRE(other);
    CHECK(other->dtype == tensor.dtype);
    CHECK(other->shape == tensor.shape);
    REQUIRE(other->bytes == tensor.bytes);
    CHECK(std::memcmp(other->data.get(), tensor.data.get(), tensor.bytes) == 0);
    CHECK(reinterpret_cast<uintptr_t>(other->data.get()) % 64 == 0);
  }

  // The format itself, seen without our reader: the data starts at a multiple of 64.
  std::ifstream raw(path, std::ios::binary);
  uint64_t length = 0;
  raw.read(reinterpret_cast<char*>(&length), 8);
  CHECK((8 + length) % 64 == 0);
  CHECK(raw.get() == '{');
  CHECK(std::distance(fs::directory_iterator(dir.path), fs::directory_iterator()) == 1);
}

TEST_CASE("safetensors: a file from another writer") {
  // Tensors out of name order, unaligned data, metadata in between, trailing spaces.
  const std::string header = R"({"b":)" + entry("U8", "[3]", "[0,3]") +
                             R"(,"__metadata__":{"format":"pt"},"a":)" +
                             entry("F32", "[1,2]", "[3,11]") + "}   ";
  std::string bytes = file_bytes(header, 0) + std::string("\1\2\3", 3);
  const float values[] = {1.5f, -2.0f};
  bytes.append(reinterpret_cast<const char*>(values), 8);
  const auto file = parse(bytes);
  REQUIRE(file);
  CHECK(file->find("b")->as<uint8_t>()[2] == 3);
  CHECK(file->find("a")->as<float>()[1] == -2.0f);
  CHECK(file->metadata.at("format") == "pt");
  CHECK(file->find("c") == nullptr);
  CHECK(parse(file_bytes("{}", 0)));
}

TEST_CASE("safetensors: bad header lengths") {
  CHECK(has(refusal(""), "the file is 0 bytes"));
  CHECK(has(refusal("1234567"), "the file is 7 bytes"));
  CHECK(has(refusal(file_bytes("{}", 0, 3)), "header length 3 is over the 2 bytes"));
  CHECK(has(refusal(file_bytes("{}", 0, UINT64_MAX)), "18446744073709551615"));
  CHECK(has(refusal(file_bytes("{}", 0, UINT64_MAX - 7)), "header length"));
  CHECK(has(refusal(file_bytes("{}", 0, 100'000'001)), "not a safetensors file?"));
  CHECK(has(refusal(file_bytes("{}", 0, 0)), "header is not JSON"));
}

TEST_CASE("safetensors: bad JSON") {
  CHECK(has(refusal("not json", 0), "header is not JSON"));
  CHECK(has(refusal("{\"q\":", 0), "header is not JSON"));
  CHECK(has(refusal("{} {}", 0), "header is not JSON"));
  CHECK(has(refusal("{\"\xff\":1}", 0), "header is not JSON"));
  CHECK(has(refusal("[]", 0), "header is an array"));
  CHECK(has(refusal("3", 0), "a JSON object is expected"));
  CHECK(has(refusal("null", 0), "a JSON object is expected"));
  CHECK(has(refusal(R"({"q":3})", 0), "\"q\" is 3"));
  CHECK(has(refusal(R"({"q":1e999})", 0), "header is not JSON"));
  for (const char* open : {"[", "{\"a\":"}) {
    std::string deep;
    for (int i = 0; i < 1'000'000; ++i) deep += open;
    CHECK(refusal(deep, 0) != "");
    CHECK(refusal("{\"q\":" + deep, 0) != "");
    CHECK(refusal("{\"q\":{\"shape\":" + deep, 0) != "");
    CHECK(refusal("{\"__metadata__\":" + deep, 0) != "");
  }
}

TEST_CASE("safetensors: bad entries") {
  CHECK(refusal(one("F32", "[2,2]", "[0,16]"), 16) == "");
  CHECK(has(refusal(one("F4", "[2]", "[0,1]"), 1), "dtype \"F4\" is not one of BOOL U8"));
  CHECK(has(refusal(R"({"q":{"dtype":7}})", 0), "dtype is 7; a string"));
  CHECK(has(refusal(R"({"q":{"shape":[],"data_offsets":[0,4]}})", 4), "lacks dtype"));
  CHECK(has(refusal(R"({"q":{"dtype":"U8","data_offsets":[0,4]}})", 4), "lacks shape"));
  CHECK(has(refusal(R"({"q":{"dtype":"U8","shape":[4]}})", 4), "lacks data_offsets"));
  CHECK(has(refusal(R"({"q":{"dtype":"U8","shape":[4],"x":[0,4]}})", 4), "field \"x\""));
  CHECK(has(refusal(R"({"q":{"dtype":"U8","dtype":"I8"}})", 0), "dtype appears twice"));
  CHECK(has(refusal(one("U8", "[4]", "[0]"), 4), "lacks data_offsets [begin, end]"));
  CHECK(has(refusal(one("U8", "[4]", "[0,4,4]"), 4), "data_offsets holds 4"));
  CHECK(has(refusal(one("U8", "[4]", "[0,-4]"), 4), "data_offsets holds -4"));
  CHECK(has(refusal(one("U8", "[4]", "\"0\""), 4), "data_offsets is \"0\""));
  CHECK(has(refusal(one("U8", "[-4]", "[0,4]"), 4), "shape holds -4"));
  CHECK(has(refusal(one("U8", "[4.0]", "[0,4]"), 4), "shape holds \"4.0\""));
  CHECK(has(refusal(one("U8", "[[4]]", "[0,4]"), 4), "shape holds an array"));
  CHECK(has(refusal(one("U8", "[18446744073709551615]", "[0,4]"), 4), "shape holds 1844"));
  CHECK(has(refusal(one("U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,1]"), 1), "dimensions"));
  CHECK(has(refusal(R"({"__metadata__":{"k":3}})", 0), "key \"k\" is 3; a string"));
  CHECK(has(refusal(R"({"__metadata__":{"k":{"a":"b"}}})", 0), "key \"k\" is an object"));
  CHECK(has(refusal(R"({"__metadata__":{"k":"a","k":"b"}})", 0), "appears twice"));
  CHECK(has(refusal(R"({"__metadata__":{},"__metadata__":{}})", 0), "appears twice"));
  const std::string q = entry("U8", "[4]", "[0,4]");
  CHECK(has(refusal(R"({"q":)" + q + R"(,"q":)" + q + "}", 4), "\"q\" appears twice"));
  // A name that would break the line or flood it.
  CHECK(has(refusal("{\"a\\nb\":3}", 0), "\"a\\x0ab\" is 3"));
  CHECK(refusal("{\"" + std::string(100000, 'n') + "\":3}", 0).size() < 300);
}

TEST_CASE("safetensors: sizes and offsets that do not fit") {
  CHECK(has(refusal(one("F32", "[2,2]", "[0,15]"), 15),
            "span 15 bytes; shape [2, 2] of F32 needs 16"));
  CHECK(has(refusal(one("F32", "[2,2]", "[0,16]"), 15), "within the 15 bytes of data"));
  CHECK(has(refusal(one("F32", "[2,2]", "[16,0]"), 16), "[16, 0]"));
  CHECK(has(refusal(one("F32", "[2,2]", "[0,18446744073709551615]"), 16), "are not within"));
  // Products that wrap to the byte size.
  CHECK(has(refusal(one("U8", "[4294967296,4294967296]", "[0,0]"), 0), "larger than any file"));
  CHECK(has(refusal(one("F64", "[2305843009213693952]", "[0,0]"), 0), "larger than any file"));
  CHECK(has(refusal(one("U8", "[9223372036854775807,2]", "[0,0]"), 0), "larger than any file"));
  CHECK(refusal(one("F64", "[9223372036854775807,9223372036854775807,0]", "[0,0]"), 0) == "");
  const auto two = [](const char* a, const char* b) {
    return R"({"a":)" + entry("U8", "[4]", a) + R"(,"b":)" + entry("U8", "[4]", b) + "}";
  };
  CHECK(refusal(two("[0,4]", "[4,8]"), 8) == "");
  CHECK(refusal(two("[4,8]", "[0,4]"), 8) == "");
  CHECK(has(refusal(two("[0,4]", "[2,6]"), 6), "\"b\" begins at byte 2 of the data; 4 is"));
  CHECK(has(refusal(two("[0,4]", "[5,9]"), 9), "\"b\" begins at byte 5 of the data; 4 is"));
  CHECK(has(refusal(two("[0,4]", "[0,4]"), 4), "may not overlap"));
  CHECK(has(refusal(two("[1,5]", "[5,9]"), 9), "begins at byte 1 of the data; 0 is"));
  CHECK(has(refusal(two("[0,4]", "[4,8]"), 9), "the data is 9 bytes; the tensors use 8"));
  CHECK(has(refusal("{}", 3), "the data is 3 bytes; the tensors use 0"));
  CHECK(has(refusal(file_bytes(one("BOOL", "[1]", "[0,1]"), 0) + "\2"), "a BOOL holds 2"));
}

TEST_CASE("safetensors: every cut of a good file is refused") {
  const std::string good = file_bytes(one("F32", "[2,2]", "[0,16]"), 16);
  REQUIRE(parse(good));
  for (size_t n = 0; n < good.size(); ++n) CHECK_FALSE(parse(good.substr(0, n)));
  CHECK_FALSE(parse(good + "x"));
}

TEST_CASE("safetensors: paths that are no readable file") {
  const TempDir dir;
  const auto missing = read_tensors(dir / "absent.safetensors");
  REQUIRE_FALSE(missing);
  CHECK(has(missing.error(), "absent.safetensors: cannot open: No such file"));
  const auto directory = read_tensors(dir.path.string());
  REQUIRE_FALSE(directory);
  CHECK(has(directory.error(), "is a directory"));
  const std::string pipe = dir / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  const auto fifo = read_tensors(pipe);
  REQUIRE_FALSE(fifo);
  CHECK(has(fifo.error(), "is not a regular file"));
  std::ofstream(dir / "empty").close();
  CHECK_FALSE(read_tensors(dir / "empty"));
}

TEST_CASE("safetensors: a failed write leaves what was there") {
  const TempDir dir;
  TensorFile file;
  file.tensors["x"] = make_tensor(Dtype::u8, {1});
  *file.tensors["x"].as<uint8_t>() = 7;

  CHECK_FALSE(write_tensors(dir / "absent/out", file));
  CHECK_FALSE(write_tensors(dir.path.string(), file));
  CHECK_FALSE(write_tensors("/dev/null", file));
  CHECK(fs::is_character_file("/dev/null"));

  const std::string path = dir / "out";
  REQUIRE(write_tensors(path, file));
  file.tensors["\xff"] = make_tensor(Dtype::u8, {1});
  const auto bad_name = write_tensors(path, file);
  REQUIRE_FALSE(bad_name);
  CHECK(bad_name.error().find('\n') == std::string::npos);
  file.tensors.erase("\xff");
  file.tensors["x"].shape = {2};
  CHECK_FALSE(write_tensors(path, file));
  const auto kept = read_tensors(path);
  REQUIRE(kept);
  CHECK(*kept->find("x")->as<uint8_t>() == 7);

  // A link keeps pointing; what it points to is replaced.
  file.tensors["x"].shape = {1};
  *file.tensors["x"].as<uint8_t>() = 8;
  fs::create_symlink("out", dir / "link");
  REQUIRE(write_tensors(dir / "link", file));
  CHECK(fs::is_symlink(dir / "link"));
  CHECK(*read_tensors(path)->find("x")->as<uint8_t>() == 8);
  CHECK(std::distance(fs::directory_iterator(dir.path), fs::directory_iterator()) == 2);
}
