// A toy server: continuous batching over paged K/V caches, on a decoder of random weights. The twin
// of serve.py.
//
// Sequences come and go. A step takes the next token of each running sequence and up to --chunk
// tokens of prompts: kv_append writes their keys and values into pages, forward attends over the
// pages. The rest of the model is plain loops. On cuda the two calls of a layer are captured once
// as a CUDA graph for either shape of a step, and replayed as lengths and pages change on the
// device.
// --check compares every token with what the model gives for the whole sequence, without caches and
// without libattn.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <attn/attn.hpp>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int heads = 8, heads_kv = 2, head_dim = 32, vocab = 256;
constexpr int dim = heads * head_dim, dim_kv = heads_kv * head_dim;

using Floats = std::vector<float>;  // rows, one after the other
using Ints = std::vector<int32_t>;

// ---- the model ----------------------------------------------------------------------------------

struct Matrix {
  int rows, columns;
  Floats values;
};

Floats operator*(const Floats& x, const Matrix& w) {
  const size_t n = x.size() / w.rows;
  Floats y(n * w.columns);
  for (size_t row = 0; row < n; ++row)
    for (int i = 0; i < w.rows; ++i)
      for (int j = 0; j < w.columns; ++j)
        y[row * w.columns + j] += x[row * w.rows + i] * w.values[size_t(i) * w.columns + j];
  return y;
}

void operator+=(Floats& x, const Floats& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

Floats norm(Floats x) {
  for (size_t row = 0; row < x.size(); row += dim) {
    float squares = 0;
    for (int i = 0; i < dim; ++i) squares += x[row + i] * x[row + i];
    for (int i = 0; i < dim; ++i) x[row + i] /= std::sqrt(squares / dim + 1e-6f);
  }
  return x;
}

// q [tokens, heads, head_dim], k and v [tokens, heads_kv, head_dim] -> as q
using Attend = std::function<Floats(int layer, Floats q, Floats k, Floats v)>;

struct Model {
  struct Layer {
    Matrix q, k, v, out, up, down;
  };
  Matrix embedding, head;
  std::vector<Layer> layers;

  Model(int num_layers, std::mt19937& random) {
    const auto matrix = [&](int rows, int columns, float scale) {
      std::normal_distribution<float> normal(0, scale);
      Matrix made{rows, columns, Floats(size_t(rows) * columns)};
      for (float& x : made.values) x = normal(random);
      return made;
    };
    const auto weights = [&](int rows, int columns) {
      return matrix(rows, columns, 1 / std::sqrt(float(rows)));
    };
    embedding = matrix(vocab, dim, 1);
    head = weights(dim, vocab);
    for (int i = 0; i < num_layers; ++i)
      layers.push_back({weights(dim, dim), weights(dim, dim_kv), weights(dim, dim_kv),
                        weights(dim, dim), weights(dim, 2 * dim), weights(2 * dim, dim)});
  }

  // [tokens, dim]
  Floats hidden(const Ints& tokens, const Attend& attend) const {
    Floats x;
    for (const int32_t token : tokens) {
      const float* row = &embedding.values[size_t(token) * dim];
      x.insert(x.end(), row, row + dim);
    }
    for (size_t i = 0; i < layers.size(); ++i) {
      const Layer& layer = layers[i];
      const Floats y = norm(x);
      x += attend(int(i), y * layer.q, y * layer.k, y * layer.v) * layer.out;
      Floats inner = norm(x) * layer.up;
      for (float& value : inner) value = std::max(value, 0.0f);
      x += inner * layer.down;
    }
    return norm(x);
  }
};

// cos and sin [positions, head_dim / 2]
void rotary_tables(int positions, Floats& cos, Floats& sin) {
  for (int p = 0; p < positions; ++p)
    for (int i = 0; i < head_dim / 2; ++i) {
      const double angle = p * std::pow(10000.0, -2.0 * i / head_dim);
      cos.push_back(float(std::cos(angle)));
      sin.push_back(float(std::sin(angle)));
    }
}

// ---- the server ---------------------------------------------------------------------------------

struct Options {
  std::map<std::string, int> numbers = {{"--sequences", 64}, {"--tokens", 32}, {"--prompt", 64},
                                        {"--batch", 16},     {"--chunk", 64},  {"--layers", 2},
                                        {"--page-size", 16}, {"--pages", 0},   {"--seed", 1}};
  attn_backend backend = ATTN_BACKEND_CPU;
  bool check = false;
  int operator[](const char* name) const { return numbers.at(name); }
};

// The free pages of a pool, and those that each slot of the batch holds.
struct Pages {
  int page_size, max_pages;
  Ints free, held, block_table;

  Pages(int num_pages, int page_size, int slots, int max_pages)
      : page_size(page_size),
        max_pages(max_pages),
        held(slots),
        block_table(size_t(slots) * max_pages) {
    for (int page = 0; page < num_pages; ++page) free.push_back(page);
  }
  // Makes room for `tokens` tokens in all; false if too few pages are free.
  bool reserve(int slot, int tokens) {
    const int needed = (tokens + page_size - 1) / page_size;
    if (needed - held[slot] > int(free.size())) return false;
    for (; held[slot] < needed; ++held[slot]) {
      block_table[slot * max_pages + held[slot]] = free.back();
      free.pop_back();
    }
    return true;
  }
  void release(int slot) {
    const auto row = block_table.begin() + slot * max_pages;
    free.insert(free.end(), row, row + held[slot]);
    held[slot] = 0;
  }
};

struct Sequence {
  int number;     // in the order of arrival
  Ints tokens;    // the prompt and what was generated
  size_t prompt;  // tokens that came with it
  size_t end;     // tokens when it is finished
  size_t cached = 0;
};

// An array in the backend's memory, of f32 or bf16, that is written and read as floats.
class Array {
 public:
  Array(const attn::context& context, attn_dtype type, size_t elements)
      : type_(type), buffer_(context, elements * (type == ATTN_F32 ? 4 : 2)) {}
  void* data() const { return buffer_.data(); }
  void put(const Floats& x) {
    if (type_ == ATTN_F32) return buffer_.copy_in(x.data(), 4 * x.size());
    std::vector<uint16_t> rounded;
    for (const float value : x) {
      const auto bits = std::bit_cast<uint32_t>(value);
      rounded.push_back(uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
    }
    buffer_.copy_in(rounded.data(), 2 * rounded.size());
  }
  Floats get(size_t elements) const {
    Floats x(elements);
    if (type_ == ATTN_F32) {
      buffer_.copy_out(x.data(), 4 * elements);
      return x;
    }
    std::vector<uint16_t> stored(elements);
    buffer_.copy_out(stored.data(), 2 * elements);
    for (size_t i = 0; i < elements; ++i) x[i] = std::bit_cast<float>(uint32_t(stored[i]) << 16);
    return x;
  }

 private:
  attn_dtype type_;
  attn::buffer buffer_;
};

attn::buffer ints(const attn::context& context, const Ints& values) {
  attn::buffer made(context, 4 * values.size());
  made.copy_in(values.data(), 4 * values.size());
  return made;
}

// What is needed of the CUDA driver, which is opened at run time as libattn does.
class Cuda {
 public:
  // The device's primary context, which attn::context takes too, and a stream.
  Cuda() : library_(dlopen("libcuda.so.1", RTLD_NOW)) {
    if (!library_) throw std::runtime_error(dlerror());
    call<int (*)(unsigned)>("cuInit", 0u);
    call<int (*)(void**, int)>("cuDevicePrimaryCtxRetain", &context_, 0);
    call<int (*)(void*)>("cuCtxSetCurrent", context_);
    call<int (*)(void**, unsigned)>("cuStreamCreate", &stream_, 1u);  // CU_STREAM_NON_BLOCKING
  }
  Cuda(const Cuda&) = delete;
  void* stream() const { return stream_; }

  // What `launch` launches on stream(), as a graph that lives as long as the program.
  void* capture(const std::function<void()>& launch) const {
    void *graph = nullptr, *ready = nullptr;
    call<int (*)(void*, int)>("cuStreamBeginCapture_v2", stream_, 0);
    launch();
    call<int (*)(void*, void**)>("cuStreamEndCapture", stream_, &graph);
    call<int (*)(void**, void*, unsigned long long)>("cuGraphInstantiateWithFlags", &ready, graph,
                                                     0ull);
    return ready;
  }
  void replay(void* graph) const { call<int (*)(void*, void*)>("cuGraphLaunch", graph, stream_); }

 private:
  template <class Function, class... Arguments>
  void call(const char* name, Arguments... arguments) const {
    const auto function = reinterpret_cast<Function>(dlsym(library_, name));
    if (!function) throw std::runtime_error(std::string("libcuda.so.1 has no ") + name);
    if (const int error = function(arguments...))
      throw std::runtime_error(std::string(name) + ": error " + std::to_string(error));
  }
  void* library_;
  void *context_ = nullptr, *stream_ = nullptr;
};

// The plans of a step: up to `rows` tokens, of a sequence up to `longest`. What lies behind the
// last token belongs to no sequence.
struct Shape {
  attn::plan append, forward;
  attn::buffer workspace;
  std::map<int, void*> graphs;  // on cuda: of each layer

  Shape(const attn::context& context, const attn_segment& cache, int batch, int rows, int longest)
      : append(context, append_problem(cache, batch, rows, longest)),
        forward(context, forward_problem(cache, batch, rows, longest)),
        workspace(forward.make_workspace(context)) {}

  static attn_kv_append_problem append_problem(const attn_segment& cache, int batch, int rows,
                                               int longest) {
    auto problem = attn::make<attn_kv_append_problem>();
    problem.batch = batch;
    problem.heads_q = heads;
    problem.heads_kv = heads_kv;
    problem.head_dim = problem.rotary_dim = head_dim;
    problem.new_layout = ATTN_PACKED;
    problem.total_new = rows;
    problem.seqlen_new = longest;
    problem.new_type = cache.k_type;
    problem.segment = cache;
    problem.advance_seqlens = 1;
    problem.rotary_positions = cache.max_pages * cache.page_size;
    return problem;
  }
  static attn_problem forward_problem(const attn_segment& cache, int batch, int rows, int longest) {
    auto problem = attn::make<attn_problem>();
    problem.batch = batch;
    problem.heads_q = heads;
    problem.heads_kv = heads_kv;
    problem.head_dim = head_dim;
    problem.q_layout = ATTN_PACKED;
    problem.total_q = rows;
    problem.seqlen_q = longest;
    problem.q_type = cache.k_type;
    problem.flags = ATTN_CAUSAL;
    problem.num_segments = 1;
    problem.segments = &cache;
    return problem;
  }
};

class Server {
 public:
  std::deque<Sequence*> waiting;
  std::map<int, Sequence*> running;  // by slot
  int steps = 0, preempted = 0;

  Server(const Model& model, const Options& options, int max_pages, int num_pages)
      : model_(model),
        layers_(int(model.layers.size())),
        batch_(options["--batch"]),
        chunk_(options["--chunk"]),
        pages_(num_pages, options["--page-size"], batch_, max_pages),
        cuda_(options.backend == ATTN_BACKEND_CUDA ? std::make_unique<Cuda>() : nullptr),
        context_(options.backend),
        type_(options.backend == ATTN_BACKEND_CPU ? ATTN_F32 : ATTN_BF16),
        single_(context_, cache(num_pages), batch_, batch_, 1),
        mixed_(context_, cache(num_pages), batch_, batch_ + chunk_, chunk_),
        q_(context_, type_, size_t(batch_ + chunk_) * dim),
        k_(context_, type_, size_t(batch_ + chunk_) * dim_kv),
        v_(context_, type_, size_t(batch_ + chunk_) * dim_kv),
        out_(context_, type_, size_t(batch_ + chunk_) * dim),
        cos_(context_, ATTN_F32, size_t(max_pages) * pages_.page_size * head_dim / 2),
        sin_(context_, ATTN_F32, size_t(max_pages) * pages_.page_size * head_dim / 2),
        block_table_(ints(context_, pages_.block_table)),
        cu_seqlens_(ints(context_, Ints(batch_ + 1))),
        seqlens_(ints(context_, Ints(layers_ * batch_))) {
    Floats cos, sin;
    rotary_tables(max_pages * pages_.page_size, cos, sin);
    cos_.put(cos);
    sin_.put(sin);
    const size_t elements = size_t(num_pages) * pages_.page_size * dim_kv;
    for (int i = 0; i < layers_; ++i) {
      k_pages_.emplace_back(context_, type_, elements);
      v_pages_.emplace_back(context_, type_, elements);
    }
  }

  void step() {
    admit();
    const Ints counts = choose();
    Ints cu_seqlens(1), tokens;
    for (int slot = 0; slot < batch_; ++slot) {
      if (counts[slot] > 0) {
        const auto next = running[slot]->tokens.begin() + running[slot]->cached;
        tokens.insert(tokens.end(), next, next + counts[slot]);
      }
      cu_seqlens.push_back(int(tokens.size()));
    }
    cu_seqlens_.copy_in(cu_seqlens.data(), 4 * cu_seqlens.size());
    block_table_.copy_in(pages_.block_table.data(), 4 * pages_.block_table.size());
    Shape& shape = *std::max_element(counts.begin(), counts.end()) == 1 ? single_ : mixed_;

    const Floats hidden = model_.hidden(tokens, [&](int layer, Floats q, Floats k, Floats v) {
      return attend(shape, layer, q, k, v);
    });
    for (int slot = 0; slot < batch_; ++slot) {
      if (counts[slot] == 0) continue;
      Sequence& sequence = *running[slot];
      sequence.cached += counts[slot];
      if (sequence.cached < sequence.tokens.size()) continue;
      const auto last = hidden.begin() + int64_t(cu_seqlens[slot + 1]) * dim;
      const Floats logits = Floats(last - dim, last) * model_.head;
      sequence.tokens.push_back(
          int(std::max_element(logits.begin(), logits.end()) - logits.begin()));
      if (sequence.tokens.size() == sequence.end) leave(slot);
    }
    ++steps;
  }

 private:
  attn_segment cache(int num_pages) const {
    auto segment = attn::make<attn_segment>();
    segment.k_type = segment.v_type = type_;
    segment.layout = ATTN_PAGED;
    segment.has_seqlens = 1;
    segment.num_pages = num_pages;
    segment.page_size = pages_.page_size;
    segment.max_pages = pages_.max_pages;
    return segment;
  }

  void admit() {
    for (int slot = 0; slot < batch_ && !waiting.empty(); ++slot) {
      if (running.count(slot)) continue;
      if (!pages_.reserve(slot, int(waiting.front()->tokens.size()))) return;
      running[slot] = waiting.front();
      waiting.pop_front();
    }
  }

  void leave(int slot) {
    const int32_t none = 0;
    for (int i = 0; i < layers_; ++i)
      attn::check(attn_copy_in(context_.get(), seqlens(i) + slot, &none, sizeof none, nullptr));
    pages_.release(slot);
    running.erase(slot);
  }

  // Its pages are for older sequences; it comes back with all of its tokens as a prompt.
  void preempt(int slot) {
    running[slot]->cached = 0;
    waiting.push_front(running[slot]);
    leave(slot);
    ++preempted;
  }

  // How many tokens of each slot the step takes. Oldest sequences first, so that these always get
  // on.
  Ints choose() {
    std::map<int, int> slots;  // by age
    for (const auto& [slot, sequence] : running) slots[sequence->number] = slot;
    Ints counts(batch_);
    int room = chunk_;
    for (auto it = slots.begin(); it != slots.end(); ++it) {
      const int slot = it->second;
      while (running.count(slot) && !pages_.reserve(slot, int(running[slot]->tokens.size()))) {
        preempt(slots.rbegin()->second);
        slots.erase(std::prev(slots.end()));
      }
      if (!running.count(slot)) break;  // it was the youngest
      const int pending = int(running[slot]->tokens.size() - running[slot]->cached);
      counts[slot] = pending == 1 ? 1 : std::min(pending, room);
      if (pending > 1) room -= counts[slot];
    }
    return counts;
  }

  Floats attend(Shape& shape, int layer, const Floats& q, const Floats& k, const Floats& v) {
    q_.put(q);
    k_.put(k);
    v_.put(v);
    if (cuda_) {
      if (!shape.graphs.count(layer))
        shape.graphs[layer] = cuda_->capture([&] { launch(shape, layer, cuda_->stream()); });
      cuda_->replay(shape.graphs[layer]);
      context_.synchronize(cuda_->stream());
    } else {
      launch(shape, layer, nullptr);
    }
    return out_.get(q.size());
  }

  // Arrays stay where they are, so that what is captured holds for every step.
  void launch(const Shape& shape, int layer, void* stream) const {
    auto append = attn::make<attn_kv_append_args>();
    append.k_new = k_.data();
    append.v_new = v_.data();
    append.q = append.q_out = q_.data();
    append.cu_seqlens_new = static_cast<const int32_t*>(cu_seqlens_.data());
    append.cache = attn::make<attn_segment_args>();
    append.cache.k = k_pages_[layer].data();
    append.cache.v = v_pages_[layer].data();
    append.cache.seqlens = append.seqlens_out = seqlens(layer);
    append.cache.block_table = static_cast<const int32_t*>(block_table_.data());
    append.rotary_cos = static_cast<const float*>(cos_.data());
    append.rotary_sin = static_cast<const float*>(sin_.data());
    shape.append.run(append, stream);

    auto args = attn::make<attn_args>();
    args.q = q_.data();
    args.out = out_.data();
    args.cu_seqlens_q = append.cu_seqlens_new;
    args.num_segments = 1;
    args.segments = &append.cache;
    shape.forward.run(args, shape.workspace, stream);
  }

  // Each layer's append advances its own.
  int32_t* seqlens(int layer) const {
    return static_cast<int32_t*>(seqlens_.data()) + layer * batch_;
  }

  const Model& model_;
  int layers_, batch_, chunk_;
  Pages pages_;
  std::unique_ptr<Cuda> cuda_;  // before the context, which takes the one that is current
  attn::context context_;
  attn_dtype type_;
  Shape single_, mixed_;  // one token of each sequence; prompts too
  Array q_, k_, v_, out_, cos_, sin_;
  attn::buffer block_table_, cu_seqlens_, seqlens_;
  std::vector<Array> k_pages_, v_pages_;  // of each layer
};

// ---- without cache ------------------------------------------------------------------------------

Floats causal_attention(Floats q, Floats k, const Floats& v) {
  const int tokens = int(q.size() / dim), half = head_dim / 2;
  Floats cos, sin;
  rotary_tables(tokens, cos, sin);
  for (Floats* x : {&q, &k})
    for (size_t i = 0; i < x->size(); i += head_dim) {
      const size_t position = i / (x->size() / tokens);
      for (int pair = 0; pair < half; ++pair) {
        float &a = (*x)[i + pair], &b = (*x)[i + pair + half];
        const float c = cos[position * half + pair], s = sin[position * half + pair], first = a;
        a = first * c - b * s;
        b = first * s + b * c;
      }
    }
  Floats out(q.size()), p(tokens);
  for (int i = 0; i < tokens; ++i)
    for (int h = 0; h < heads; ++h) {
      const int h_kv = h / (heads / heads_kv);
      const float* qi = &q[size_t(i) * dim + h * head_dim];
      float largest = -INFINITY, sum = 0;
      for (int j = 0; j <= i; ++j) {
        p[j] = 0;
        for (int d = 0; d < head_dim; ++d) p[j] += qi[d] * k[j * dim_kv + h_kv * head_dim + d];
        p[j] /= std::sqrt(float(head_dim));
        largest = std::max(largest, p[j]);
      }
      for (int j = 0; j <= i; ++j) sum += p[j] = std::exp(p[j] - largest);
      for (int j = 0; j <= i; ++j)
        for (int d = 0; d < head_dim; ++d)
          out[size_t(i) * dim + h * head_dim + d] +=
              p[j] / sum * v[j * dim_kv + h_kv * head_dim + d];
    }
  return out;
}

// Of the tokens generated, how many a run without cache would not choose; logits closer than `tie`
// may change places. All at once: under a causal mask the logits are those of a run that starts
// anew for each token.
int wrong_tokens(const Model& model, const Sequence& sequence, float tie) {
  const Ints inputs(sequence.tokens.begin(), sequence.tokens.end() - 1);
  const Floats logits = model.hidden(inputs, [](int, Floats q, Floats k, Floats v) {
    return causal_attention(std::move(q), std::move(k), v);
  }) * model.head;
  int wrong = 0;
  for (size_t i = sequence.prompt; i < sequence.tokens.size(); ++i) {
    const float* row = &logits[(i - 1) * vocab];
    wrong += !(row[sequence.tokens[i]] >= *std::max_element(row, row + vocab) - tie);
  }
  return wrong;
}

// ---- the program --------------------------------------------------------------------------------

void progress(size_t done, size_t total) {
  if (!isatty(STDERR_FILENO)) return;
  const std::string bar(40 * done / total, '#');
  std::fprintf(stderr, "\r[%-40s] %zu/%zu sequences%s", bar.c_str(), done, total,
               done < total ? "" : "\n");
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    const auto number = options.numbers.find(name);
    if (name == "--check") {
      options.check = true;
    } else if (number != options.numbers.end() && value.size() < 9 &&
               value.find_first_not_of("0123456789") == value.npos &&
               std::atoi(value.c_str()) > 0) {
      number->second = std::atoi(argv[++i]);
    } else if (name == "--backend" && (value == "cpu" || value == "cuda")) {
      options.backend = argv[++i] == std::string("cpu") ? ATTN_BACKEND_CPU : ATTN_BACKEND_CUDA;
    } else {
      std::printf("usage: serve [--check] [--backend cpu|cuda] and, each with a number,");
      for (const auto& [known, standard] : Options().numbers)
        std::printf(" %s (%d)", known.c_str(), standard);
      std::printf("\n");
      std::exit(name == "--help" ? 0 : 2);
    }
  }
  return options;
}

int run(const Options& options) {
  std::mt19937 random(options["--seed"]);
  const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(1, most)(random); };
  const Model model(options["--layers"], random);
  std::vector<Sequence> sequences;
  for (int number = 0; number < options["--sequences"]; ++number) {
    Ints prompt(up_to(options["--prompt"]));
    for (int32_t& token : prompt) token = up_to(vocab) - 1;
    const size_t length = prompt.size();
    sequences.push_back({number, std::move(prompt), length, length + up_to(options["--tokens"])});
  }

  const int page_size = options["--page-size"];
  const int max_pages = (options["--prompt"] + options["--tokens"] + page_size - 1) / page_size;
  // By default half of what the batch could need; one sequence must fit.
  const int pages = options["--pages"] ? options["--pages"] : options["--batch"] * max_pages / 2;
  Server server(model, options, max_pages, std::max(pages, max_pages));
  for (Sequence& sequence : sequences) server.waiting.push_back(&sequence);
  const auto start = std::chrono::steady_clock::now();
  while (!server.waiting.empty() || !server.running.empty()) {
    server.step();
    progress(sequences.size() - server.waiting.size() - server.running.size(), sequences.size());
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;

  size_t generated = 0;
  for (const Sequence& sequence : sequences) generated += sequence.tokens.size() - sequence.prompt;
  std::printf("%zu sequences, %zu tokens in %.2f s: %.0f tokens/s; %d steps, %d preempted\n",
              sequences.size(), generated, elapsed.count(), generated / elapsed.count(),
              server.steps, server.preempted);
  if (!options.check) return 0;
  int wrong = 0;
  for (const Sequence& sequence : sequences)
    wrong +=
        wrong_tokens(model, sequence, options.backend == ATTN_BACKEND_CPU ? 1e-4f : 0.1f);  // bf16
  std::printf("%zu of %zu tokens as without cache\n", generated - wrong, generated);
  return wrong ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const std::runtime_error& error) {  // attn::error is one
    std::fprintf(stderr, "serve: %s\n", error.what());
    return 1;
  }
}
