// Code objects that are not what they should be: an error sentence for each, and the silent failure
// that all this is about.
#include <random>

#include "gfx9/assemble.h"
#include "gfx9emu/decode.h"

using namespace gfx9emu;
using namespace gfx9emu::test;

namespace {

std::string load_error(std::vector<std::byte> file) {
  std::string error;
  Memory memory;
  const auto object = CodeObject::load(file, &memory, &error);
  CHECK((object == nullptr) == !error.empty());
  return error;
}

// With one byte changed.
std::string load_error(std::vector<std::byte> file, size_t at, int value) {
  file.at(at) = static_cast<std::byte>(value);
  return load_error(std::move(file));
}

const Source add_one = {"add_one",
                        "s_load_dwordx4 s[4:7], s[0:1], 0x0\n v_lshlrev_b32 v1, 2, v0\n"
                        "s_waitcnt lgkmcnt(0)\n global_load_dword v2, v1, s[6:7]\n"
                        "s_waitcnt vmcnt(0)\n v_add_u32 v2, 1, v2\n"
                        "global_store_dword v1, v2, s[4:5]\n",
                        ""};

}  // namespace

TEST_CASE("a descriptor says what the kernel gets") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  std::string error;
  const auto object = CodeObject::load(assemble({add_one}), nullptr, &error);
  INFO(error);
  REQUIRE(object);
  CHECK(object->kernel("nothing") == nullptr);
  const Kernel* k = object->kernel("add_one");
  REQUIRE(k);
  CHECK(k->descriptor.vgprs == 32);
  CHECK(k->descriptor.accum_offset == 16);
  CHECK(k->descriptor.sgprs == 26);
  CHECK(k->descriptor.lds_bytes == 1024);
  CHECK(k->descriptor.kernarg_bytes == 16);
  CHECK(k->descriptor.kernarg_ptr);
  CHECK(k->descriptor.workgroup_id_x);
  CHECK_FALSE(k->descriptor.workgroup_id_y);
  CHECK(k->descriptor.mode ==
        0x3f0);  // subnormals kept, DX10_CLAMP and IEEE as assemblers set them
  REQUIRE(k->args.size() == 2);
  CHECK(k->args[1].offset == 8);
  CHECK(k->args[1].value_kind == "global_buffer");
}

TEST_CASE("broken code objects are refused with a sentence") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  using attn::test::contains;
  const std::vector<std::byte> file = assemble({add_one});
  REQUIRE(load_error(file) == "");
  CHECK_THAT(load_error({}), contains("not an ELF file"));
  CHECK_THAT(load_error(file, 0, 'x'), contains("not an ELF file"));
  CHECK_THAT(load_error(file, 4, 1), contains("64-bit"));
  CHECK_THAT(load_error(file, 18, 62), contains("machine 62"));
  CHECK_THAT(load_error(file, 7, 0), contains("OS ABI"));
  CHECK_THAT(load_error(file, 48, 0x3f), contains("another processor"));
  CHECK_THAT(load_error(file, 16, 1), contains("not linked"));
  // A length that ends anywhere is an error or harmless, never more.
  for (size_t size = 0; size < file.size(); size += 7) {
    load_error(std::vector<std::byte>(file.begin(), file.begin() + static_cast<ptrdiff_t>(size)));
  }
  // So are bytes that are anything.
  std::mt19937_64 random(1);
  for (int i = 0; i < 2000; ++i) {
    auto changed = file;
    for (int k = 0; k < 4; ++k) {
      changed[random() % changed.size()] = static_cast<std::byte>(random());
    }
    load_error(changed);
  }
}

TEST_CASE("a descriptor that contradicts the metadata is refused") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  using attn::test::contains;
  const auto refused = [](const std::string& directives) {
    return load_error(assemble({{"k", "s_nop 0\n", directives}}));
  };
  CHECK_THAT(refused(".amdhsa_group_segment_fixed_size 2048\n"),
             contains(".group_segment_fixed_size is 1024, the descriptor says 2048"));
  CHECK_THAT(refused(".amdhsa_kernarg_size 24\n"), contains(".kernarg_segment_size is 16"));
  CHECK_THAT(refused(".amdhsa_private_segment_fixed_size 16\n"), contains("descriptor says 16"));
  CHECK_THAT(refused(".amdhsa_tg_split 1\n"), contains("tg_split"));
}

// Registers v0..v147 in a kernel that is given 48: on hardware this is garbage without a word.
TEST_CASE("registers beyond the allocation are a fault, not garbage") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  std::string body =
      "s_load_dwordx4 s[4:7], s[0:1], 0x0\n v_and_b32 v0, 0x3ff, v0\n v_lshlrev_b32 v1, 3, v0\n"
      "s_waitcnt lgkmcnt(0)\n global_load_dwordx2 v[2:3], v1, s[6:7]\n s_waitcnt vmcnt(0)\n"
      "v_mfma_f32_32x32x16_fp8_fp8 v[16:31], v[2:3], v[2:3], 0\n s_nop 15\n"
      "v_mov_b32 v147, v16\n v_lshlrev_b32 v1, 2, v0\n global_store_dword v1, v147, s[4:5]\n";
  const std::vector<std::byte> file =
      assemble({{"small", body, ".amdhsa_next_free_vgpr 48\n.amdhsa_accum_offset 48\n"},
                {"right", body, ".amdhsa_next_free_vgpr 148\n.amdhsa_accum_offset 148\n"}});
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(file, &memory, &error);
  REQUIRE(object);
  // Both operands are A = B: the ones of FP8.
  const std::vector<uint8_t> ones(512, 0x40);
  const uint64_t args[] = {memory.allocate(256, "out"), memory.allocate(512, "in")};
  memory.write(args[1], std::as_bytes(std::span(ones)));
  const auto run = [&](const char* name) {
    return launch(memory, *object->kernel(name), {1}, {64}, std::as_bytes(std::span(args)), 0, {});
  };
  for (const bool checks : {true, false}) {
    const Report report = launch(memory, *object->kernel("small"), {1}, {64},
                                 std::as_bytes(std::span(args)), 0, {.checks = checks});
    REQUIRE(report.faults.size() == 1);
    CHECK(report.faults[0].kind == FaultKind::RegisterRange);
    CHECK(report.faults[0].message == "v147 is outside the 48 arch VGPRs that the kernel has");
    CHECK(report.faults[0].where.instruction == "v_mov_b32_e32 v147, v16");
  }
  const Report report = run("right");
  INFO(faults_of(report));
  REQUIRE(report.ok());
  float out[64];
  memory.read(args[0], std::as_writable_bytes(std::span(out)));
  for (const float x : out) CHECK(x == 16.0f);
}

TEST_CASE("a load in another order: late data is seen where no wait covers it") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  // With checks off, the only sign of a missing wait is the result.
  Source s = add_one;
  s.body.erase(s.body.find("s_waitcnt vmcnt(0)\n"), 19);
  s.body.insert(0, "v_mov_b32 v2, 100\n");
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(assemble({s}), &memory, &error);
  REQUIRE(object);
  const uint64_t args[] = {memory.allocate(256), memory.allocate(256)};
  memory.fill(args[1], 0, 256);
  int late = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    REQUIRE(launch(memory, object->kernels()[0], {1}, {64}, std::as_bytes(std::span(args)), 0,
                   {.checks = false, .seed = seed})
                .ok());
    uint32_t out[64];
    memory.read(args[0], std::as_writable_bytes(std::span(out)));
    // In time; after the sum was stored; between the two, over the sum.
    REQUIRE((out[0] == 1 || out[0] == 101 || out[0] == 0));
    late += out[0] != 1;
  }
  CHECK(late > 10);
}

TEST_CASE("source lines come with faults") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  Source s{"k", "s_nop 0\n.loc 1 42 0\n v_not_b32 v2, v3\n", ""};
  s.body = ".file 1 \"somewhere/softmax.s\"\n.loc 1 7 0\n" + s.body;
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(assemble({s}), &memory, &error);
  REQUIRE(object);
  const uint64_t args[2] = {};
  const Report report =
      launch(memory, object->kernels()[0], {1}, {64}, std::as_bytes(std::span(args)), 0, {});
  REQUIRE(report.faults.size() == 1);
  CHECK(report.faults[0].where.source == "softmax.s:42");
  CHECK(report.faults[0].where.offset == 4);
}

TEST_CASE("counters and traces") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(assemble({add_one}), &memory, &error);
  REQUIRE(object);
  const uint64_t args[] = {memory.allocate(256), memory.allocate(256)};
  memory.fill(args[1], 0, 256);
  const Report report = launch(memory, object->kernels()[0], {3}, {64},
                               std::as_bytes(std::span(args)), 0, {.threads = 2, .trace = true});
  REQUIRE(report.ok());
  CHECK(report.counters.total() == 3 * 8);
  CHECK(report.counters.instructions[static_cast<int>(Class::Valu)] == 3 * 2);
  CHECK(report.counters.global_read_bytes == 3 * 256);
  CHECK(report.counters.global_written_bytes == 3 * 256);
  REQUIRE(report.waves.size() == 1);
  CHECK(report.waves[0].total() == 8);
  REQUIRE(report.traces.size() == 1);
  REQUIRE(report.traces[0].size() == 8);
  CHECK(object->program().insts[report.traces[0][3].inst].name == "global_load_dword");
  CHECK(report.traces[0][3].bytes == 256);
}

TEST_CASE("workgroups on several threads update memory atomically") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  const Source s = {"count",
                    "s_load_dwordx4 s[4:7], s[0:1], 0x0\n v_mov_b32 v1, 0\n v_mov_b32 v2, 1\n"
                    "s_waitcnt lgkmcnt(0)\n global_atomic_add v1, v2, s[4:5]\n",
                    ""};
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(assemble({s}), &memory, &error);
  REQUIRE(object);
  const uint64_t args[] = {memory.allocate(4), 0};
  memory.fill(args[0], 0, 4);
  REQUIRE(launch(memory, object->kernels()[0], {100}, {256}, std::as_bytes(std::span(args)), 0,
                 {.threads = 4})
              .ok());
  uint32_t sum = 0;
  memory.read(args[0], std::as_writable_bytes(std::span(&sum, 1)));
  CHECK(sum == 25600);
}

TEST_CASE("memory: bounds, definedness, host memory") {
  Memory memory;
  const uint64_t a = memory.allocate(100), b = memory.allocate(0);
  CHECK(a % 256 == 0);
  CHECK(b != 0);
  CHECK(memory.bytes_in_use() == 100);
  std::byte bytes[100] = {};
  CHECK(memory.write(a, bytes) == "");
  CHECK(memory.write(a + 1, bytes) != "");
  CHECK(memory.read(a + 100, std::span(bytes).first(0)) == "");
  CHECK(memory.read(a - 1, std::span(bytes).first(1)) != "");
  CHECK(memory.free(a) == "");
  CHECK(memory.free(a) != "");
  CHECK(memory.write(a, bytes) != "");
  CHECK(memory.allocate(100) != a);
  CHECK(memory.allocate(~uint64_t{0}) == 0);
  int host[4] = {1, 2, 3, 4};
  const uint64_t at = reinterpret_cast<uint64_t>(host);
  CHECK(memory.map_host(host, sizeof host) == "");
  CHECK(memory.map_host(host, sizeof host) != "");
  CHECK(memory.fill(at + 4, 0, 4) == "");
  CHECK(host[1] == 0);
  CHECK(memory.free(at) == "");
  CHECK(memory.map_host(host, sizeof host) == "");
}

TEST_CASE("any bytes decode to something, and never run past their end") {
  const Arch arch = GENERATE(Arch::Gfx942, Arch::Gfx950);
  if (!Decoder::knows(arch)) ATTN_SKIP("LLVM does not know gfx950");
  const Decoder decoder(arch);
  std::mt19937_64 random(2);
  int known = 0;
  for (int i = 0; i < 5000; ++i) {
    std::byte code[12];
    for (std::byte& b : code) b = static_cast<std::byte>(random());
    const size_t size = 4 * (1 + random() % 3);
    const Inst inst = decoder.decode(std::span(code).first(size), 0);
    CHECK(inst.size >= 4);
    CHECK(inst.size <= size);
    CHECK(!inst.text.empty());
    known += inst.run != nullptr;
  }
  CHECK(known > 500);
}

TEST_CASE("what is freed gives its memory back, and is remembered") {
  Memory memory;
  uint64_t last = 0;
  for (int i = 0; i < 10000; ++i) {
    last = memory.allocate(uint64_t{64} << 20);
    REQUIRE(last != 0);
    memory.fill(last, 1, 4096);
    REQUIRE(memory.free(last) == "");
  }
  CHECK(memory.bytes_in_use() == 0);
  CHECK(memory.explain(last + 5, 4).find("which was freed") != std::string::npos);
}

TEST_CASE("reserved SDWA selects are no instruction") {
  const uint32_t code[] = {0x2a0e1af9, 0x0605070d};  // v_xor_b32_sdwa with dst_sel 7
  const Inst inst = Decoder().decode(std::as_bytes(std::span(code)), 0);
  CHECK(inst.run == nullptr);
  CHECK(inst.size == 4);
  CHECK(inst.text == ".long 0x2a0e1af9");
}
