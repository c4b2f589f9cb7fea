// Running cases on the backends that are present: memory, plans, launches, and what must not
// change.
#pragma once
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../catch.h"
#include "attn/attn.h"
#include "catalog/catalog.h"
#include "core/dtype.h"
#include "forward_case.h"

namespace attn::test {

// A context, or the reason why there is none.
class Backend {
 public:
  // Without a device: the one that attn_context_options.has_device = 0 means.
  // `compute_units`: of the emulated device; 0: as many as usual.
  explicit Backend(attn_backend backend, int threads = 0, std::optional<int> device = {},
                   int compute_units = 0);
  ~Backend();
  Backend(const Backend&) = delete;
  attn_context* context = nullptr;
  std::string reason;
};
// One per backend of the catalog, made on first use. Kernels of hip run on the emulator where there
// is no AMD device.
Backend& backend_of(attn_backend backend);
// Whether the kernel runs on the emulator, where shapes had better be small.
bool emulated(const Kernel& kernel);
// How the emulator runs kernels.
struct EmulatorOptions {
  // Waves and loads come in a random order of this seed; 0: of that of ATTN_EMU_SEED, by default
  // in the usual order.
  uint64_t order = 0;
  // check_case() runs kernels whose work is spread over the device's compute units on this many; 0:
  // it draws the number.
  int compute_units = 0;
  bool races_allowed = false;  // waves of a launch may race in device memory
};
// While it lives, the emulator runs kernels so.
class Emulated {
 public:
  explicit Emulated(const EmulatorOptions& options);
  ~Emulated();
  Emulated(const Emulated&) = delete;

 private:
  EmulatorOptions before_;
};
// What share() has to know of where a kernel runs.
struct Place {
  bool emulated, devices_here;  // devices_here: forward kernels run on a device
  bool sanitized = test::sanitized;
};
Place place_of(const Kernel& kernel);

// Whether the kernel computes the case of the test. By its number a case is one of those that a
// sanitizer or a machine without a device leaves; among them emulated kernels take turns, each
// beginning where a hash of the test's and its name says. By cost an emulated kernel computes, with
// q of 16 bits, one case in two, one in ten where another kernel does the same work, and none above
// 200 tiles; with q in fp8 all, or one in five. Kernels of few queries compute all. Under
// sanitizers, where it is the emulator's own memory that is looked at, it is half of that, if cases
// have numbers. Cases without numbers have hashes instead, which scatter where a test has few of
// them. A constant that is added to a test's numbers shifts its turns.
bool share(std::string_view test, const Kernel& kernel, const Case& c, const Place& place);
inline bool share(const Kernel& kernel, const Case& c) {  // of the test that runs
  return share(current_test(), kernel, c, place_of(kernel));
}
// Those of the kernels that compute it.
std::vector<const Kernel*> sharing(std::vector<const Kernel*> kernels, const Case& c);

// The kernels of an operation that can run here, in the catalog's order. Those that cannot are
// printed once per process with the reason and counted as skips. With the environment's
// ATTN_KERNELS_PART of 2/3 they are those of hosts and the second of three parts of devices'
// (tests/device/conformance.py).
std::vector<const Kernel*> kernels_here(Op op, bool with_reference);

// Copies of host buffers in a backend's memory. Guards travel along.
class Arena {
 public:
  explicit Arena(attn_context* context) : context_(context) {}
  ~Arena();
  // The address of the buffer's data in the backend's memory; NULL if the buffer is not given.
  void* add(const Buffer& buffer);
  // Other contents of the same size for what add() has returned.
  void replace(void* address, const Buffer& buffer);
  // Zeroed-by-nobody memory for a workspace.
  void* workspace(size_t bytes);
  // Fetches what `address` holds now, guards included.
  Buffer fetch(const Buffer& shape, void* address) const;
  // Of what all buffers but `output` were given.
  uint64_t digest(const void* output) const;
  // "" if every buffer in the arena but those in `outputs` is as it was added.
  std::string check_unchanged(const std::vector<void*>& outputs) const;

 private:
  struct Item {
    void* memory;
    const Buffer* source;
    void* data;
  };
  attn_context* context_;
  std::vector<Item> items_;
  std::vector<void*> workspaces_;
};

// The address that a call gets of a tensor in a buffer at `data`.
inline void* address_of(void* data, const View& view) {
  return data ? static_cast<char*>(data) + dtype_bytes(view.type, view.offset) : nullptr;
}

// Rows in the order batch entry, query, head; only rows that exist.
struct Outputs {
  std::string error;  // what went wrong: a status and its sentence, or memory that was written
  attn_status status = ATTN_OK;
  std::vector<double> out;          // [rows, Dv]
  std::vector<double> lse;          // [rows]
  std::vector<unsigned char> bits;  // out as stored, row by row
};

// What of the case's problem does not depend on where tensors lie.
attn_problem problem_of(const Case& c);

// A case made ready on one kernel: plan, memory, arguments.
class Forward {
 public:
  // `c` and `data` are to live as long as the object or until the next fill(). kernel null: the
  // plan chooses.
  Forward(Backend& backend, const Case& c, const Data& data, const char* kernel,
          attn_dtype out_type, bool want_lse = true);
  // Other contents for the memory of the arguments, and poison in out and lse. The case may differ
  // in its lengths, its seed and its values.
  void fill(const Case& c, const Data& data);
  // False if something has failed, which read() then tells. Does not wait.
  bool launch(void* stream);
  // Waits for the default stream and reads the result.
  Outputs read();
  // What the plan was made of and what runs get.
  const attn_problem& problem() const { return problem_; }
  const attn_args& args() const { return args_; }

 private:
  struct Destroy {
    void operator()(attn_plan* plan) const { attn_plan_destroy(plan); }
  };
  bool check(const char* call, attn_status status);
  // Of a stand-in, which computes nothing: the reference's.
  Outputs answer_of_stand_in() const;
  // Where the buffer of out begins.
  void* out_data() const;

  Backend& backend_;
  const Case* case_;
  const Data* data_ = nullptr;
  const char* kernel_;
  attn_dtype out_type_;
  int64_t total_q_ = 0;
  View out_view_;
  Buffer out_, lse_;
  Outputs result_;
  std::vector<attn_segment> segments_;
  attn_problem problem_{};
  std::unique_ptr<attn_plan, Destroy> plan_;
  Arena arena_;
  std::vector<attn_segment_args> segment_args_;
  attn_args args_{};
  size_t workspace_bytes_ = 0;
  void* workspace_ = nullptr;
};

// Runs the case on one kernel and reads the result back. Fails if the kernel's launch count has not
// risen, if an input or a guard changed, or if bytes of out and lse that belong to no row were
// written.
Outputs run_forward(Backend& backend, const Case& c, const Data& data, const char* kernel,
                    attn_dtype out_type, bool want_lse = true);

// How far a score may be off by what each instruction over 32 of head_dim cuts off of it.
double cut_off(const Case& c, const Data& data, const Kernel& kernel);
// The largest difference of an element of out or lse; equal infinities have none, a NaN's is
// infinite.
double largest_difference(const Outputs& a, const Outputs& b);
// Of CUDA's kernels, which then has few of them (tests/device/mutants.py); null: the library's.
const char* kernel_file();
// Whether the environment's ATTN_STAND_IN puts tests/mock in the place of a CUDA driver: plans and
// launches are those of an H100 with every kernel, answers of forward kernels are the reference's.
// It shows which problems kernels take, where no device is. Only reference and CUDA kernels run.
bool stand_in();
// Whether the kernel has declined the case, which reference and cpu never may.
bool declined(const Kernel& kernel, const Outputs& outputs);
// f32 if the kernel takes it, else f16, else bf16, else f8_e4m3fnuz; NONE if it takes none of them.
attn_dtype float_type_of(const Kernel& kernel);
// A type that the kernel takes for all K and V beside q of q_type: that, or fp8 where it is for
// others.
attn_dtype kv_type_of(const Kernel& kernel, attn_dtype q_type);

// A causal case on the kernel, with what it demands, head dimensions of 64 or the least it takes,
// and K and V of one segment, in pages of 64, of a type it takes. Its sequences are still to be
// said.
Case small_case(const Kernel& kernel, const std::string& name, attn_layout layout,
                int64_t capacity);

// Whether the kernel's results for a sequence are stated for K and V rounded to the type of
// weights.
bool rounds_kv_of(const Kernel& kernel, int64_t queries, int64_t group);

// The float64 reference's answer.
Outputs reference_answer(const Case& c, const Data& data);

// "" or what differs first: positions of non-finite values, an element, or lse. `kernel` decides
// how its numbers may be rounded.
std::string compare(const Case& c, const Data& data, const Kernel& kernel, const Outputs& got,
                    const Outputs& want);

// How far an answer is from the reference's, over the elements that are finite there.
struct Distance {
  double max = 0, mean = 0;
};
Distance distance(const Outputs& got, const Outputs& want);

// "", or that the largest error is more than twice that of the same computation with the weights
// and out rounded as kernels on matrix units must round them (rounded_formula), and more than that
// beside the rounding of out.
std::string compare_with_rounded(const Case& c, const Data& data, const Outputs& got,
                                 const Outputs& want, const Outputs& rounded,
                                 double score_error = 0);

// x as `type` has it, and half the distance between neighbours there: the most that changes it by.
double rounded(attn_dtype type, double x);
double half_ulp(attn_dtype type, double x);
// Of float32: devices divide by the sum with a reciprocal that may be that much off.
bool within_a_step(double x, double want);

// Makes the data, runs every kernel that takes the case and compares. Kernels that decline must
// have a reason in the catalog. Returns how many ran, and in `taken` which. With the environment
// variable ATTN_CASE only the case of that name runs. The emulated device has 1, 2, 5, 13 or the
// usual number of compute units, by a hash of the case's name.
int check_case(const Case& c, const std::vector<const Kernel*>& kernels,
               std::vector<const Kernel*>* taken = nullptr);

// Two heads of 64.
inline Case small(const char* name, int64_t sq, int64_t skv) {
  Case c;
  c.name = name;
  c.heads_q = 2;
  c.heads_kv = 2;
  c.head_dim = c.head_dim_v = 64;
  c.seqlen_q = sq;
  SegmentCase s;
  s.capacity = skv;
  c.segments = {s};
  return c;
}

// The case with fewer K/V heads where the kernel takes other heads_q / heads_kv only; as it is if
// heads_q is not among their multiples.
inline Case with_heads_for(const Kernel& kernel, Case c) {
  const int64_t multiple = kernel.limits.group.multiple;
  if (c.heads_q / c.heads_kv % multiple != 0 && c.heads_q % multiple == 0)
    c.heads_kv = c.heads_q / multiple;
  return c;
}

// Calls check(kernel, case, data, outputs) for every kernel and every type of q, k and v among
// these that it takes; edit(case, data) changes the data before. The case is with_heads_for the
// kernel.
template <class Edit, class Check>
void on_every_kernel(const Case& of_f32, Edit&& edit, Check&& check,
                     std::initializer_list<attn_dtype> types = {ATTN_F32, ATTN_F16, ATTN_BF16,
                                                                ATTN_F8_E4M3FNUZ}) {
  for (attn_dtype type : types) {
    Case c = with_type(of_f32, type);
    c.thinning.emulated = Thinning::no_other;
    Data data = make_data(c);
    edit(c, data);
    int ran = 0;
    for (const Kernel* kernel : kernels_here(Op::forward, true)) {
      if (const Case fits = with_heads_for(*kernel, with_type(of_f32, type));
          fits.heads_kv != c.heads_kv) {
        c.heads_kv = fits.heads_kv;
        data = make_data(c);
        edit(c, data);
      }
      if (!share(*kernel, c)) continue;
      const Outputs got =
          run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " " << describe(c));
      REQUIRE(got.error == "");
      check(*kernel, c, data, got);
      ++ran;
    }
    CHECK(ran > 0);
  }
}
template <class Check>
void on_every_kernel(const Case& c, Check&& check) {
  on_every_kernel(c, [](const Case&, Data&) {}, check);
}

// Runs the kernel's plan `times` times with one workspace, and requires equal bits. How often it
// ran: 0 if it declines.
int repeat(const Kernel& kernel, const Case& c, const Data& data, int times);

// Runs a case whose answer is exact in every step with out in f32: it is the reference's, bit for
// bit, unless the kernel declines.
void check_exact(const Case& c, const Kernel& kernel);

}  // namespace attn::test
