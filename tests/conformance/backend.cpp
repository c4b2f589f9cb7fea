#include "backend.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

#include "../catch.h"
#include "api/handles.h"
#include "core/dtype.h"
#include "cpu/host_kernel.h"
#include "formula.h"
#include "gfx9emu/runtime/hipemu.h"

namespace attn::test {
namespace {

constexpr const char* stand_in_library = ATTN_MOCK_DIR "/cuda_12.so";

std::string failed(const char* call, attn_status status) {
  return std::string(call) + ": " + attn_status_string(status) + ": " + attn_last_error();
}

void skip_once(const std::string& reason) {
  static std::set<std::string> said;
  if (!said.insert(reason).second) return;
  ++skip_count;
  std::cout << "SKIP: " << reason << std::endl;
}

// Launches of a forward kernel with the largest head_dim and head_dim_v that it takes.
uint64_t& launches_at_largest(const Kernel& kernel) {
  static std::map<std::string, uint64_t> all;
  return all[kernel.name];
}

// Code of the kernel for the device here, if there is one.
const Image* image_here(const Kernel& kernel) {
  const attn_context* context = kernel.recipe ? backend_of(kernel.backend).context : nullptr;
  const Image* image = nullptr;
  if (context) (void)find_image(image_of(kernel), context->context->driver->device().arch, &image);
  return image;
}

// How often each kernel that runs on the devices here was launched, in whole and at its limits.
std::map<std::string, uint64_t> launches_here() {
  std::map<std::string, uint64_t> found;
  for (const Kernel& kernel : catalog()) {
    if (!image_here(kernel)) continue;
    found[kernel.name] = launch_count(kernel);
    if (kernel.op == Op::forward)
      found[join(kernel.name, " with its largest head_dim, ", kernel.limits.head_dim.max, " and ",
                 kernel.limits.head_dim_v.max)] = launches_at_largest(kernel);
  }
  return found;
}

// Whether each was, and prints it.
bool every_kernel_ran() {
  bool all = true;
  for (const auto& [what, launches] : launches_here()) {
    std::cout << "launched: " << what << " " << launches << std::endl;
    if (launches > 0) continue;
    std::cout << "FAILED: no test has launched " << what << std::endl;
    all = false;
  }
  return all;
}

// With ATTN_LAUNCHES=FILE each test case adds a line for each kernel that it launched: launches,
// kernel and test, between tabs; the first one also those that there are (tests/shard.py).
void write_launches(const std::string& test) {
  static const char* path = std::getenv("ATTN_LAUNCHES");
  if (!path) return;
  static std::map<std::string, uint64_t> before;
  const bool first = before.empty();
  std::map<std::string, uint64_t> now = launches_here();
  for (const Kernel& kernel : catalog())
    if (launch_count(kernel) > 0) now[kernel.name] = launch_count(kernel);  // of hosts too
  std::ofstream file(path, std::ios::app);
  for (const auto& [what, launches] : now) {
    const uint64_t more = launches - before[what];
    if (more > 0 || first) file << more << '\t' << what << '\t' << test << '\n';
  }
  before = now;
}

const bool registered = [] {
  after_all = every_kernel_ran;
  after_case = write_launches;
  return true;
}();

}  // namespace

const char* kernel_file() {
  return std::getenv("ATTN_KERNEL_FILE");
}
bool stand_in() {
  static const bool wanted = std::getenv("ATTN_STAND_IN");
  return wanted;
}

namespace {

EmulatorOptions emulator;

void configure([[maybe_unused]] const EmulatorOptions& wanted) {
#ifdef ATTN_HIPEMU
  static void* library = dlopen(ATTN_HIPEMU, RTLD_NOW | RTLD_LOCAL);
  if (!library) return;  // attn_context_create says why
  const char* usual = std::getenv("ATTN_EMU_SEED");
  attn_emu_options options{};
  options.seed = wanted.order == 0 && usual ? std::strtoull(usual, nullptr, 10) : wanted.order;
  options.compute_units = wanted.compute_units;
  options.memory_model_off = wanted.races_allowed;
  reinterpret_cast<decltype(&attn_emu_configure)>(dlsym(library, "attn_emu_configure"))(&options);
#endif
}

}  // namespace

Emulated::Emulated(const EmulatorOptions& options) : before_(emulator) {
  configure(emulator = options);
}
Emulated::~Emulated() {
  configure(emulator = before_);
}

Backend::Backend(attn_backend backend, int threads, std::optional<int> device, int compute_units) {
  attn_context_options options{};
  options.struct_size = sizeof options;
  options.cpu_threads = threads;
  options.has_device = device.has_value();
  options.device = device.value_or(0);
  if (backend == ATTN_BACKEND_CUDA) options.kernel_file = kernel_file();
  if (backend == ATTN_BACKEND_CUDA && stand_in()) {
    options.driver_path = stand_in_library;
    options.kernel_file = "all kernels";
  }
  if (backend == ATTN_BACKEND_HIP_EMU) {
    EmulatorOptions with_units = emulator;
    with_units.compute_units = compute_units;
    configure(with_units);
  }
  const attn_status status = attn_context_create(backend, &options, &context);
  if (status != ATTN_OK) reason = failed("attn_context_create", status);
  if (backend == ATTN_BACKEND_HIP_EMU) configure(emulator);
}
Backend::~Backend() {
  if (stand_in()) return;  // when the program ends, the stand-in's own variables may have ended
  attn_context_destroy(context);
}

Backend& backend_of(attn_backend backend) {
  static std::map<attn_backend, std::unique_ptr<Backend>> all;
  std::unique_ptr<Backend>& entry = all[backend];
  if (entry) return *entry;
  entry = std::make_unique<Backend>(backend);
  if (backend == ATTN_BACKEND_HIP && !entry->context) {
    auto emulator = std::make_unique<Backend>(ATTN_BACKEND_HIP_EMU);
    if (emulator->context)
      entry = std::move(emulator);
    else
      entry->reason += "; " + emulator->reason;
  }
  return *entry;
}

bool emulated(const Kernel& kernel) {
  const attn_context* context = backend_of(kernel.backend).context;
  return context && attn_context_backend(context) == ATTN_BACKEND_HIP_EMU;
}

Place place_of(const Kernel& kernel) {
  static const bool devices = [] {
    const auto kernels = kernels_here(Op::forward, false);
    return std::any_of(kernels.begin(), kernels.end(),
                       [](const Kernel* kernel) { return !kernel->host && !emulated(*kernel); });
  }();
  return {emulated(kernel), devices};
}

namespace {

bool is_of_few_queries(const Kernel& kernel) {
  return kernel.limits.seqlen_q.max < 256;
}

// Whether the kernel has softcap and ALiBi, a bias, or descales of segments and blocks, the case
// none of these, and a kernel without them does the same work.
bool another_does_the_same(const Kernel& kernel, const Case& c) {
  if (is_of_few_queries(kernel)) return false;
  const uint32_t features = kernel.limits.features;
  if (features & feature_bias) return c.bias_type == ATTN_DTYPE_NONE;
  if (features & feature_descale_block)
    return c.segments.size() == 1 && c.segments[0].k_descale != ATTN_DESCALE_BLOCK &&
           c.segments[0].v_descale != ATTN_DESCALE_BLOCK;
  return features & feature_softcap && c.softcap == 0 && !c.has(ATTN_ALIBI);
}

// Tiles of 256 queries and 64 keys.
int64_t tiles_of(const Case& c) {
  return c.batch * c.heads_q * ((c.seqlen_q + 255) / 256) * ((c.capacity() + 63) / 64);
}

// Of an emulated kernel: of so many cases it computes one; 0: none.
uint64_t one_in(const Kernel& kernel, const Case& c, bool sanitized) {
  const bool the_same = another_does_the_same(kernel, c);
  const uint64_t half = sanitized && c.thinning.number && c.thinning.sanitized == 1 ? 2 : 1;
  switch (c.thinning.emulated) {
    case Thinning::all:
      return half;
    case Thinning::no_other:
      return the_same ? 0 : half;
    case Thinning::fifth:
      return sanitized ? std::max(sanitized_one_in, c.thinning.sanitized) : 5;
    case Thinning::by_cost:
      break;
  }
  if (is_of_few_queries(kernel)) return 1;
  if (dtype_is_fp8(c.q_type)) return the_same ? 5 : half;
  if (tiles_of(c) > 200) return 0;
  return (the_same ? 10 : 2) * (sanitized ? 5 : 1);
}

}  // namespace

bool share(std::string_view test, const Kernel& kernel, const Case& c, const Place& place) {
  const Thinning& thin = c.thinning;
  uint64_t n = thin.number ? *thin.number : hash_of_names({test, describe(c)});
  if (!place.emulated || thin.emulated != Thinning::fifth) {
    if (place.sanitized && !in_turn(n, thin.sanitized)) return false;
    if (!place.devices_here && !in_turn(n, thin.without_device)) return false;
    if (!place.emulated) return true;
  }
  const uint64_t of_kernel = one_in(kernel, c, place.sanitized);
  return of_kernel > 0 && in_turn(n, of_kernel, hash_of_names({test, kernel.name}));
}

std::vector<const Kernel*> sharing(std::vector<const Kernel*> kernels, const Case& c) {
  std::erase_if(kernels, [&](const Kernel* kernel) { return !share(*kernel, c); });
  return kernels;
}

// Whether the n-th kernel of a device is of this process's part (ATTN_KERNELS_PART).
static bool in_part(uint64_t n) {
  struct Part {
    uint64_t number, count;
  };
  static const Part part = [] {
    Part of = {1, 1};
    if (const char* text = std::getenv("ATTN_KERNELS_PART")) {
      std::istringstream stream(text);
      char slash = 0;
      if (!(stream >> of.number >> slash >> of.count) || slash != '/' || of.number < 1 ||
          of.number > of.count)
        throw std::runtime_error(std::string("ATTN_KERNELS_PART is ") + text + ", not as 1/3");
    }
    return of;
  }();
  return n % part.count == part.number - 1;
}

std::vector<const Kernel*> kernels_here(Op op, bool with_reference) {
  std::vector<const Kernel*> found;
  uint64_t of_devices = 0;
  for (const Kernel& kernel : catalog()) {
    if (kernel.op != op) continue;
    if (kernel.recipe && !in_part(of_devices++)) continue;
    if (kernel.backend == ATTN_BACKEND_REFERENCE && !with_reference) continue;
    const bool answered = kernel.backend == ATTN_BACKEND_REFERENCE ||
                          (kernel.backend == ATTN_BACKEND_CUDA && op == Op::forward);
    if (stand_in() && !answered) continue;
    const Backend& backend = backend_of(kernel.backend);
    const bool on_host =
        kernel.backend == ATTN_BACKEND_REFERENCE || kernel.backend == ATTN_BACKEND_CPU;
    if (!backend.context) {
      skip_once(std::string(kernel.name) + ": " + backend.reason);
    } else if (on_host && !kernel.host) {
      skip_once(std::string(kernel.name) + ": not in this build");
    } else if (on_host && !kernel.host->runs_here()) {
      skip_once(std::string(kernel.name) + ": this processor has no " + kernel.host->isa);
    } else if (kernel.backend == ATTN_BACKEND_HIP && !image_here(kernel)) {
      continue;  // of another AMD device; attn-tests.gfx950 runs on one
    } else {
      found.push_back(&kernel);
    }
  }
  return found;
}

Arena::~Arena() {
  for (const Item& item : items_) attn_free(context_, item.memory);
  for (void* memory : workspaces_) attn_free(context_, memory);
}

void* Arena::add(const Buffer& buffer) {
  if (!buffer.given) return nullptr;
  void* memory = nullptr;
  if (attn_alloc(context_, buffer.bytes.size(), &memory) != ATTN_OK) return nullptr;
  void* data = static_cast<char*>(memory) + Buffer::guard;
  items_.push_back({memory, &buffer, data});
  replace(data, buffer);
  return data;
}

void Arena::replace(void* address, const Buffer& buffer) {
  for (Item& item : items_) {
    if (item.data != address) continue;
    item.source = &buffer;
    attn_copy_in(context_, item.memory, buffer.bytes.data(), buffer.bytes.size(), nullptr);
  }
}

void* Arena::workspace(size_t bytes) {
  void* memory = nullptr;
  if (bytes == 0 || attn_alloc(context_, bytes, &memory) != ATTN_OK) return nullptr;
  workspaces_.push_back(memory);
  return memory;
}

Buffer Arena::fetch(const Buffer& shape, void* address) const {
  Buffer copy = shape;
  if (address) {
    attn_copy_out(context_, copy.bytes.data(), static_cast<char*>(address) - Buffer::guard,
                  copy.bytes.size(), nullptr);
  }
  return copy;
}

std::string Arena::check_unchanged(const std::vector<void*>& outputs) const {
  for (size_t n = 0; n < items_.size(); ++n) {
    if (std::find(outputs.begin(), outputs.end(), items_[n].data) != outputs.end()) continue;
    const Buffer now = fetch(*items_[n].source, items_[n].data);
    if (now.bytes != items_[n].source->bytes) {
      return "input number " + std::to_string(n) + " or a guard of it was written";
    }
  }
  return "";
}

uint64_t Arena::digest(const void* output) const {
  uint64_t number = 0;
  for (const Item& item : items_) {
    if (item.data == output) continue;
    const auto& bytes = item.source->bytes;
    number = hash(number, std::hash<std::string_view>()(
                              {reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
  }
  return number;
}

attn_problem problem_of(const Case& c) {
  attn_problem p{};
  p.struct_size = sizeof p;
  p.batch = c.batch;
  p.heads_q = c.heads_q;
  p.heads_kv = c.heads_kv;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.seqlen_q = c.seqlen_q;
  p.q_type = c.q_type;
  p.out_type = c.out_type;
  p.q_descale = c.q_descale;
  p.scale = c.scale;
  p.softcap = c.softcap;
  p.flags = c.flags;
  p.window_left = c.window_left;
  p.window_right = c.window_right;
  p.bias_type = c.bias_type;
  p.fixed_split = c.fixed_split;
  p.max_sms = c.max_sms;
  p.tree_keys = c.tree_keys;
  p.has_kv_begin = !c.kv_begin.empty();
  return p;
}

Forward::Forward(Backend& backend, const Case& c, const Data& data, const char* kernel,
                 attn_dtype out_type, bool want_lse)
    : backend_(backend), case_(&c), kernel_(kernel), out_type_(out_type), arena_(backend.context) {
  const bool packed = !c.lengths_q.empty();
  for (int32_t n : c.lengths_q) total_q_ += n;
  if (packed) total_q_ += c.tokens_of_nobody;

  int64_t elements;
  out_view_ = arrange_view(out_type, c.out_arrange, packed ? 1 : c.batch,
                           packed ? total_q_ : c.seqlen_q, c.heads_q, c.head_dim_v, &elements);
  out_ = Buffer(size_t(dtype_bytes(out_type, elements)), poison_of(out_type));
  if (want_lse)
    lse_ = Buffer(size_t(c.heads_q * (packed ? total_q_ : c.batch * c.seqlen_q)) * 4, 0xff);

  for (size_t n = 0; n < c.segments.size(); ++n) {
    const SegmentCase& s = c.segments[n];
    const SegmentData& from = data.segments[n];
    attn_segment to{};
    to.struct_size = sizeof to;
    to.k_type = s.k_type;
    to.v_type = s.v_type;
    to.layout = s.layout;
    to.v_in_k = c.v_in_k;
    to.has_seqlens = s.layout != ATTN_PACKED && !s.lengths.empty();
    to.seqlen = s.capacity;
    to.shared = s.keys == Keys::shared;
    if (!s.key_start.empty()) {
      to.has_key_start = 1;
      to.key_interleave = s.key_interleave;
      to.key_ranks = int32_t(s.key_ranks);
      to.key_rank = int32_t(s.key_rank);
    }
    if (s.layout == ATTN_PACKED) to.total = from.total;
    if (s.layout == ATTN_PAGED) {
      to.num_pages = from.num_pages;
      to.page_size = s.page_size;
      to.max_pages = int32_t(from.max_pages);
    }
    to.k_stride = from.k_view.given;
    to.v_stride = from.v_view.given;
    to.k_scale_stride = from.k_scale_view.given;
    to.v_scale_stride = from.v_scale_view.given;
    to.k_descale = s.k_descale;
    to.v_descale = s.v_descale;
    to.descale_block_keys = s.k_descale == ATTN_DESCALE_BLOCK || s.v_descale == ATTN_DESCALE_BLOCK
                                ? s.descale_block_keys
                                : 0;
    segments_.push_back(to);
  }
  attn_problem& p = problem_ = problem_of(c);
  p.total_q = packed ? total_q_ + c.more_tokens : 0;
  p.q_layout = packed ? ATTN_PACKED : ATTN_PADDED;
  p.out_type = out_type;
  p.q_stride = data.q_view.given;
  p.out_stride = out_view_.given;
  p.num_segments = int32_t(segments_.size());
  p.segments = segments_.data();
  if (out_type == ATTN_F64) p.flags &= ~uint32_t(ATTN_OUT_SCALE);
  std::copy_n(data.bias_stride, 4, p.bias_stride);
  if (c.has(ATTN_BLOCK_MASK)) {
    p.block_q = c.block_q;
    p.block_k = c.block_k;
    p.mask_batch = c.mask_per_batch ? c.batch : 1;
    p.mask_heads = c.mask_per_head ? c.heads_q : 1;
    p.mask_partials = data.num_partials;
  }
  p.kernel = kernel;
  if (dtype_is_fp8(c.q_type))  // all that runs on other fp8 kernels runs on those of this flag
    p.flags |= find_kernel(kernel)->limits.demands & ATTN_FP8_PRECISE;

  attn_plan* plan = nullptr;
  if (!check("attn_plan_create", attn_plan_create(backend.context, &p, &plan))) return;
  plan_.reset(plan);
  kernel_ = attn_plan_kernel(plan);
  segment_args_.resize(segments_.size());
  for (attn_segment_args& s : segment_args_) s.struct_size = sizeof s;
  args_.struct_size = sizeof args_;
  args_.num_segments = p.num_segments;
  if (packed && c.more_tokens > 0) args_.total_q = total_q_;
  args_.segments = segment_args_.data();
  workspace_bytes_ = attn_plan_workspace(plan);
  workspace_ = arena_.workspace(workspace_bytes_);
  if (!check("attn_workspace_init",
             attn_workspace_init(plan, workspace_, workspace_bytes_, nullptr)))
    return;
  fill(c, data);
}

bool Forward::check(const char* call, attn_status status) {
  if (status == ATTN_OK) return true;
  result_.status = status;
  result_.error = failed(call, status);
  return false;
}

void Forward::fill(const Case& c, const Data& data) {
  if (!result_.error.empty()) return;
  case_ = &c;
  data_ = &data;
  // `offset`: bytes from the buffer's data to the address.
  const auto put = [&](auto& address, const Buffer& buffer, int64_t offset = 0) {
    using Pointer = std::remove_reference_t<decltype(address)>;
    if (address) {
      const void* at = address;
      arena_.replace(static_cast<char*>(const_cast<void*>(at)) - offset, buffer);
    } else if (void* data = arena_.add(buffer)) {
      address = static_cast<Pointer>(static_cast<void*>(static_cast<char*>(data) + offset));
    }
  };
  const auto first = [](const View& view) { return dtype_bytes(view.type, view.offset); };
  for (size_t n = 0; n < c.segments.size(); ++n) {
    const SegmentData& from = data.segments[n];
    attn_segment_args& to = segment_args_[n];
    put(to.k, from.k, first(from.k_view));
    if (from.v.given)
      put(to.v, from.v, first(from.v_view));
    else if (!c.v_in_k)
      to.v = static_cast<const char*>(to.k) + first(from.v_view);
    put(to.seqlens, from.seqlens);
    put(to.cu_seqlens, from.cu_seqlens);
    put(to.key_start, from.key_start);
    put(to.block_table, from.block_table);
    put(to.k_descale, from.k_descale);
    put(to.v_descale, from.v_descale);
    put(to.k_scale, from.k_scale, first(from.k_scale_view));
    put(to.v_scale, from.v_scale, first(from.v_scale_view));
  }
  put(args_.q, data.q, first(data.q_view));
  put(args_.out, out_, first(out_view_));
  put(args_.lse, lse_);
  put(args_.cu_seqlens_q, data.cu_seqlens_q);
  put(args_.bias, data.bias, dtype_bytes(c.bias_type, c.bias_first));
  put(args_.bias_slopes, data.bias_slopes);
  put(args_.alibi_slopes, data.slopes);
  put(args_.sinks, data.sinks);
  put(args_.q_descale, data.q_descale);
  if (c.has(ATTN_OUT_SCALE) && out_type_ != ATTN_F64) put(args_.out_scale, data.out_scale);
  put(args_.block_kinds, data.kinds);
  put(args_.block_index, data.index);
  put(args_.block_bits, data.bits);
  put(args_.tree, data.tree);
  put(args_.kv_begin, data.kv_begin);
  put(args_.query_start, data.query_start);
}

void* Forward::out_data() const {
  return static_cast<char*>(args_.out) - dtype_bytes(out_type_, out_view_.offset);
}

bool Forward::launch(void* stream) {
  if (!result_.error.empty()) return false;
  const uint64_t launches = attn_launch_count(kernel_);
  if (!check("attn_run", attn_run(plan_.get(), &args_, workspace_, workspace_bytes_, stream)))
    return false;
  if (attn_launch_count(kernel_) > launches) {
    const Kernel& kernel = *find_kernel(kernel_);
    launches_at_largest(kernel) += case_->head_dim == kernel.limits.head_dim.max &&
                                   case_->head_dim_v == kernel.limits.head_dim_v.max;
    return true;
  }
  result_.error = std::string(kernel_) + " was not launched";
  return false;
}

Outputs Forward::read() {
  if (!result_.error.empty()) return result_;
  if (!check("attn_synchronize", attn_synchronize(backend_.context, nullptr))) return result_;
  Outputs result;
  result.error = arena_.check_unchanged({out_data(), args_.lse});
  if (!result.error.empty()) return result;
  if (stand_in() && attn_context_backend(backend_.context) == ATTN_BACKEND_CUDA)
    return answer_of_stand_in();

  // Takes the rows out and leaves poison, so that whatever is not poison then was written wrongly.
  Buffer now = arena_.fetch(out_, out_data());
  Buffer lse_now = arena_.fetch(lse_, args_.lse);
  const Case& c = *case_;
  const bool packed = !c.lengths_q.empty();
  int64_t first = 0;
  const size_t row_bytes = size_t(dtype_bytes(out_type_, c.head_dim_v));
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t i = 0; i < c.queries(b); ++i) {
      for (int64_t h = 0; h < c.heads_q; ++h) {
        const int64_t at = packed ? out_view_.at(0, first + i, h) : out_view_.at(b, i, h);
        const size_t old = result.out.size();
        result.out.resize(old + size_t(c.head_dim_v));
        decode_row(out_type_, now.data(), at, c.head_dim_v, &result.out[old]);
        unsigned char* row = now.data() + dtype_bytes(out_type_, at);
        result.bits.insert(result.bits.end(), row, row + row_bytes);
        std::memset(row, out_.poison, row_bytes);
        if (!lse_.given) continue;
        const int64_t lse_at =
            packed ? h * total_q_ + first + i : (b * c.heads_q + h) * c.seqlen_q + i;
        result.lse.push_back(lse_now.as<float>()[lse_at]);
        std::memset(&lse_now.as<float>()[lse_at], lse_.poison, 4);
      }
    }
    first += c.queries(b);
  }
  // Rows of nobody.
  const std::vector<unsigned char> zeros(row_bytes, 0);
  for (int64_t row = first; row < total_q_; ++row) {
    for (int64_t h = 0; h < c.heads_q; ++h) {
      unsigned char* at = now.data() + dtype_bytes(out_type_, out_view_.at(0, row, h));
      if (std::memcmp(at, zeros.data(), row_bytes) != 0)
        result.error = "out: row " + std::to_string(row) + " of nobody is not 0";
      std::memset(at, out_.poison, row_bytes);
      if (!lse_.given) continue;
      float& lse = lse_now.as<float>()[h * total_q_ + row];
      if (lse != -std::numeric_limits<float>::infinity())
        result.error = "lse: row " + std::to_string(row) + " of nobody is not -inf";
      std::memset(&lse, lse_.poison, 4);
    }
  }
  if (now.bytes != out_.bytes) result.error = "out: bytes outside its rows were written";
  if (lse_now.bytes != lse_.bytes) result.error = "lse: bytes outside its rows were written";
  return result;
}

Outputs Forward::answer_of_stand_in() const {
  static std::string last;  // of kernels that are asked one after the other
  static Outputs answer;
  const std::string asked = describe(*case_) + " " + dtype_name(out_type_) + " " +
                            std::to_string(lse_.given) + " " +
                            std::to_string(arena_.digest(out_data()));
  if (asked != last)
    answer = run_forward(backend_of(ATTN_BACKEND_REFERENCE), *case_, *data_, "reference", out_type_,
                         lse_.given);
  last = asked;
  return answer;
}

Outputs run_forward(Backend& backend, const Case& c, const Data& data, const char* kernel,
                    attn_dtype out_type, bool want_lse) {
  Forward forward(backend, c, data, kernel, out_type, want_lse);
  forward.launch(nullptr);
  return forward.read();
}

double largest_difference(const Outputs& a, const Outputs& b) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  double largest = 0;
  const auto look_at = [&](const std::vector<double>& x, const std::vector<double>& y) {
    if (x.size() != y.size()) largest = infinity;
    for (size_t n = 0; n < std::min(x.size(), y.size()); ++n) {
      if (x[n] == y[n]) continue;
      const double difference = std::abs(x[n] - y[n]);
      largest = std::max(largest, std::isnan(difference) ? infinity : difference);
    }
  };
  look_at(a.out, b.out);
  look_at(a.lse, b.lse);
  return largest;
}

bool declined(const Kernel& kernel, const Outputs& outputs) {
  return !kernel.host && outputs.status == ATTN_UNSUPPORTED;
}

int repeat(const Kernel& kernel, const Case& c, const Data& data, int times) {
  Forward forward(backend_of(kernel.backend), c, data, kernel.name, c.out_type);
  Outputs first;
  for (int n = 0; n < times; ++n) {
    INFO(kernel.name << " run " << n);
    forward.fill(c, data);
    forward.launch(nullptr);
    const Outputs got = forward.read();
    if (declined(kernel, got)) return n;
    REQUIRE(got.error == "");
    if (n == 0) first = got;
    REQUIRE(got.bits == first.bits);
    REQUIRE(got.lse == first.lse);
  }
  return times;
}

attn_dtype float_type_of(const Kernel& kernel) {
  for (attn_dtype type : {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8_E4M3FNUZ}) {
    if (kernel.limits.in_types & type_bit(type)) return type;
  }
  return ATTN_DTYPE_NONE;
}

attn_dtype kv_type_of(const Kernel& kernel, attn_dtype q_type) {
  const bool as_q = kernel.limits.kv_types & type_bit(q_type) && !kernel.numerics.rounds_kv;
  return as_q ? q_type : ATTN_F8_E4M3FN;
}

Case small_case(const Kernel& kernel, const std::string& name, attn_layout layout,
                int64_t capacity) {
  const attn_dtype found = float_type_of(kernel),
                   type = found == ATTN_DTYPE_NONE ? ATTN_F8_E4M3FN : found;
  const auto dim = [](const Sizes& of) { return of.multiple > 64 ? of.multiple : int64_t{64}; };
  Case c;
  c.name = name;
  c.thinning = on_all_kernels;
  c.heads_q = 4;
  c.heads_kv = 2;
  c.head_dim = dim(kernel.limits.head_dim);
  c.head_dim_v = dim(kernel.limits.head_dim_v);
  c.v_in_k = kernel.limits.demanded_features & feature_v_in_k;
  c.q_type = type;
  c.out_type = ATTN_F32;
  SegmentCase keys;
  keys.layout = layout;
  keys.page_size = 64;
  keys.k_type = keys.v_type = kv_type_of(kernel, type);
  for (const attn_dtype other : {ATTN_F8_E5M2, ATTN_Q8_0, ATTN_Q4_0})
    if (!(kernel.limits.kv_types & type_bit(keys.k_type)) &&
        kernel.limits.kv_types & type_bit(other))
      keys.k_type = keys.v_type = other;
  keys.capacity = capacity;
  c.segments = {keys};
  c.flags = ATTN_CAUSAL | kernel.limits.demands;
  return c;
}

Outputs reference_answer(const Case& c, const Data& data) {
  return run_forward(backend_of(ATTN_BACKEND_REFERENCE), c, data, "reference", ATTN_F64);
}

double rounded(attn_dtype type, double x) {
  unsigned char bytes[8];
  encode_element(type, bytes, 0, x, false);
  return decode_element(type, bytes, 0);
}

double half_ulp(attn_dtype type, double x) {
  int fraction_bits = 23, lowest = -126;
  switch (type) {
    case ATTN_F64:
      fraction_bits = 52, lowest = -1022;
      break;
    case ATTN_F16:
      fraction_bits = 10, lowest = -14;
      break;
    case ATTN_BF16:
      fraction_bits = 7, lowest = -126;
      break;
    case ATTN_F8_E4M3FN:
      fraction_bits = 3, lowest = -6;
      break;
    case ATTN_F8_E5M2:
      fraction_bits = 2, lowest = -14;
      break;
    case ATTN_F8_E4M3FNUZ:
      fraction_bits = 3, lowest = -7;
      break;
    default:
      break;
  }
  const int exponent = x == 0 ? lowest : std::max(std::ilogb(x), lowest);
  return std::ldexp(0.5, exponent - fraction_bits);
}
bool within_a_step(double x, double want) {
  return std::abs(x - want) <= 2 * half_ulp(ATTN_F32, want);
}

// Float32 arithmetic at sigma 1 stays below 2e-6; larger values and scores lose in proportion.
static double float32_error(const Data& data) {
  return 2e-6 * std::max(1.0, data.v_max / 5) * std::max(1.0, data.logit_bound / 10);
}

Distance distance(const Outputs& got, const Outputs& want) {
  Distance result;
  size_t count = 0;
  for (size_t n = 0; n < want.out.size(); ++n) {
    if (!std::isfinite(want.out[n])) continue;
    const double error = std::abs(got.out[n] - want.out[n]);
    result.max = error <= result.max ? result.max : error;  // NaN comes through
    result.mean += error;
    ++count;
  }
  result.mean /= double(std::max<size_t>(count, 1));
  return result;
}

double cut_off(const Case& c, const Data& data, const Kernel& kernel) {
  if (kernel.numerics.sum_bits == 0) return 0;
  return data.logit_bound * double(c.head_dim) / 32 * std::ldexp(1, -kernel.numerics.sum_bits);
}

std::string compare_with_rounded(const Case& c, const Data& data, const Outputs& got,
                                 const Outputs& want, const Outputs& rounded, double score_error) {
  const double error = distance(got, want).max,
               allowed = distance(rounded, want).max + score_error * data.v_max;
  if (error <= 2 * allowed + float32_error(data)) return "";
  // Where out's steps become twice as large a sum that is as good as the other's may be rounded to
  // the far side.
  double beyond_rounding = 0;
  for (size_t n = 0; n < want.out.size(); ++n) {
    if (!std::isfinite(want.out[n])) continue;
    const double x = std::abs(got.out[n] - want.out[n]) - half_ulp(c.out_type, got.out[n]);
    beyond_rounding = x <= beyond_rounding ? beyond_rounding : x;
  }
  if (beyond_rounding <= allowed) return "";
  std::ostringstream text;
  text << "out: the largest error is " << error << ", and " << allowed << " with weights as of "
       << dtype_name(c.q_type) << " and out in " << dtype_name(c.out_type)
       << " but all else in float64";
  return text.str();
}

// Whether the kernel's results are stated for K and V rounded to the type of weights, and that
// changes any.
static bool rounds_kv(const Case& c, const Kernel& kernel) {
  return kernel.numerics.rounds_kv &&
         std::any_of(c.segments.begin(), c.segments.end(), [](const SegmentCase& s) {
           const auto scaled = [](attn_dtype type) {
             return dtype_is_ggml(type) || dtype_has_scales(type);
           };
           return s.k_descale != ATTN_DESCALE_NONE || s.v_descale != ATTN_DESCALE_NONE ||
                  scaled(s.k_type) || scaled(s.v_type);
         });
}
bool rounds_kv_of(const Kernel& kernel, int64_t queries, int64_t group) {
  // Sequences that one row tile holds are decode_sm90_fp8_*_r16's.
  const bool mixed = std::string(kernel.name).ends_with("_dequantised_mixed");
  return kernel.numerics.rounds_kv && !(mixed && queries <= 16 / group);
}
// By way of float32, as the product of code and descale is.
static Data with_rounded_kv(const Case& c, Data data, const Kernel& kernel) {
  const size_t of_sequence = size_t(c.heads_kv * data.most_keys);
  for (auto* rows : {&data.k_real, &data.v_real})
    for (size_t at = 0; at < rows->size(); ++at)
      if (rounds_kv_of(kernel, c.queries(int64_t(at / of_sequence)), c.heads_q / c.heads_kv))
        for (double& x : (*rows)[at]) x = rounded(kernel.numerics.weights, double(float(x)));
  return data;
}

std::string compare(const Case& c, const Data& data, const Kernel& kernel, const Outputs& got,
                    const Outputs& want) {
  if (rounds_kv(c, kernel)) {
    const Data rounded = with_rounded_kv(c, data, kernel);
    Kernel exact = kernel;
    exact.numerics.rounds_kv = false;
    return compare(c, rounded, exact, got, formula(c, rounded));
  }
  const double out_scale = c.has(ATTN_OUT_SCALE) ? data.out_scale.as<float>()[0] : 1;
  const double range = dtype_is_fp8(c.out_type) ? type_info(c.out_type).max_finite
                                                : std::numeric_limits<double>::infinity();
  // Sums of more than 256 products lose more.
  const double longer = std::max(1.0, double(c.head_dim) / 256);
  double arithmetic = float32_error(data) * longer;
  double lse_bound = 2e-6 * std::max(1.0, data.logit_bound / 4) * longer;
  // softcap' <= 1, lse' <= 1: a small q k passes on what its partial sums lose, 2^-24 |q| |k|.
  if (c.softcap > 0 && std::isfinite(data.dot_bound))
    lse_bound += half_ulp(ATTN_F32, data.dot_bound);
  // Matrix units take P in q's type, and split-invariant and fp8 kernels sum it as rounded.
  const bool on_host =
      kernel.backend == ATTN_BACKEND_REFERENCE || kernel.backend == ATTN_BACKEND_CPU;
  if (!on_host) {
    arithmetic += 2 * half_ulp(c.q_type, 1) * data.v_max;
    if (c.has(ATTN_SPLIT_INVARIANT) || dtype_is_fp8(c.q_type))
      lse_bound += 1.1 * half_ulp(c.q_type, 1);
    lse_bound += cut_off(c, data, kernel);
  }

  const auto where = [&](size_t row) {
    for (int64_t b = 0; b < c.batch; ++b) {
      const size_t rows = size_t(c.queries(b) * c.heads_q);
      if (row < rows) {
        return " at b " + std::to_string(b) + " i " + std::to_string(row / size_t(c.heads_q)) +
               " h " + std::to_string(row % size_t(c.heads_q));
      }
      row -= rows;
    }
    return std::string();
  };
  std::ostringstream text;
  text.precision(9);
  if (got.out.size() != want.out.size()) return "out has another number of rows";
  double dot = 0, got2 = 0, want2 = 0;
  for (size_t n = 0; n < want.out.size(); ++n) {
    const double expected = std::clamp(want.out[n] * out_scale, -range, range);
    const double bound = 2 * half_ulp(c.out_type, expected) * (c.out_type == ATTN_F32 ? 0 : 1) +
                         arithmetic * out_scale;
    const bool finite = std::isfinite(expected);
    if (finite != std::isfinite(got.out[n]) ||
        (finite && std::abs(got.out[n] - expected) > bound)) {
      const size_t dim = size_t(c.head_dim_v);
      text << "out is " << got.out[n] << ", expected " << expected << " +- " << bound
           << where(n / dim) << " d " << n % dim;
      return text.str();
    }
    if (!finite) continue;
    dot += got.out[n] * expected;
    got2 += got.out[n] * got.out[n];
    want2 += expected * expected;
  }
  const double coarse = dtype_is_fp8(c.out_type)             ? 2e-2
                        : !on_host && dtype_is_fp8(c.q_type) ? 5e-3
                                                             : 1e-4;
  if (want2 > 0 && dot < (1 - coarse) * std::sqrt(got2 * want2)) {
    text << "out: cosine to the expected is " << dot / std::sqrt(got2 * want2);
    return text.str();
  }
  for (size_t n = 0; n < got.lse.size(); ++n) {
    const double expected = want.lse[n];
    const bool finite = std::isfinite(expected);
    const double bound = lse_bound + 2 * half_ulp(ATTN_F32, finite ? expected : 0);
    const bool same_infinity =
        got.lse[n] == expected || (std::isnan(got.lse[n]) && std::isnan(expected));
    if (finite ? !(std::abs(got.lse[n] - expected) <= bound) : !same_infinity) {
      text << "lse is " << got.lse[n] << ", expected " << expected << " +- " << bound << where(n);
      return text.str();
    }
  }
  return "";
}

void check_exact(const Case& c, const Kernel& kernel) {
  const Data data = make_data(c);
  const Outputs got = run_forward(backend_of(kernel.backend), c, data, kernel.name, ATTN_F32);
  if (declined(kernel, got)) return;
  INFO(kernel.name << " " << describe(c));
  REQUIRE(got.error == "");
  const Outputs want = reference_answer(c, data);
  size_t wrong = 0;
  for (size_t n = 0; n < want.out.size(); ++n) wrong += float(want.out[n]) != float(got.out[n]);
  CHECK(wrong == 0);
}

namespace {

bool is_spread_over_units(const Kernel& kernel) {
  return emulated(kernel) && is_of_few_queries(kernel);
}

// A context has the number of units that the device had when it was made, and keeps its modules.
Backend& backend_with_units(int compute_units) {
  static std::map<int, std::unique_ptr<Backend>> all;
  constexpr size_t kept = 5;
  if (all.size() > kept && !all.count(compute_units)) all.erase(std::prev(all.end()));
  std::unique_ptr<Backend>& entry = all[compute_units];
  if (!entry)
    entry = std::make_unique<Backend>(ATTN_BACKEND_HIP_EMU, 0, std::nullopt, compute_units);
  return *entry;
}

int units_for(const Case& c) {
  constexpr int counts[] = {304, 1, 2, 5, 13};
  return emulator.compute_units > 0 ? emulator.compute_units
                                    : counts[hash_of_names({c.name}) % std::size(counts)];
}

}  // namespace

int check_case(const Case& c, const std::vector<const Kernel*>& kernels,
               std::vector<const Kernel*>* taken) {
  const char* only = std::getenv("ATTN_CASE");
  if (only && c.name != only) return 0;
  INFO(describe(c));
  INFO("again: ATTN_CASE='" << c.name << "' attn-tests \"" << current_test() << "\"");
  const std::vector<const Kernel*> of_case = sharing(kernels, c);
  if (of_case.empty()) return 0;
  const Data data = make_data(c);
  const Outputs want = reference_answer(c, data);
  if (!want.error.empty()) {
    FAIL_CHECK("reference: " << want.error);
    return 0;
  }
  int ran = 0;
  std::map<Rounding, Outputs> rounded;
  for (const Kernel* kernel : of_case) {
    const int units = is_spread_over_units(*kernel) ? units_for(c) : 0;
    INFO("kernel " << kernel->name << (units ? ", compute units: " + std::to_string(units) : ""));
    Backend& backend = units ? backend_with_units(units) : backend_of(kernel->backend);
    const Outputs got = run_forward(backend, c, data, kernel->name, c.out_type);
    if (declined(*kernel, got)) continue;
    ++ran;
    if (taken) taken->push_back(kernel);
    std::string error = got.error.empty() ? compare(c, data, *kernel, got, want) : got.error;
    // The largest of few errors scatters too much.
    // rounded_formula knows no out_scale.
    if (error.empty() && kernel->recipe && c.q_type != ATTN_F32 && want.out.size() >= 1000 &&
        !c.has(ATTN_OUT_SCALE)) {
      const Rounding as = rounding_of(c, kernel->numerics);
      if (rounds_kv(c, *kernel)) {
        const Data stated = with_rounded_kv(c, data, *kernel);
        error = compare_with_rounded(c, stated, got, formula(c, stated),
                                     rounded_formula(c, stated, as));
      } else {
        Outputs& as_rounded = rounded[as];
        if (as_rounded.out.empty()) as_rounded = rounded_formula(c, data, as);
        // Some of what is cut off is of the other sign.
        error = compare_with_rounded(c, data, got, want, as_rounded, cut_off(c, data, *kernel) / 4);
      }
    }
    if (error.empty())
      SUCCEED();
    else
      FAIL_CHECK(error);
  }
  return ran;
}

}  // namespace attn::test
