// The module attn._attn. The package's Python files state what each function takes.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "call.h"

namespace attn::python {
namespace {

// ---- plans --------------------------------------------------------------------------------------

// The first difference that a caller can see between the problem of a call and that of its plan, as
// "q: batch is 2, the plan's 1"; "" if it is in something else, such as strides.
std::string difference(const attn_problem& is, const attn_problem& was) {
  std::string found;
  const auto compare = [&](const std::string& what, const auto& now, const auto& then) {
    if (found.empty() && now != then)
      found = what + " is " + std::to_string(now) + ", the plan's " + std::to_string(then);
  };
  const auto compare_types = [&](const std::string& what, attn_dtype now, attn_dtype then) {
    const auto name = [](attn_dtype type) {
      return type == ATTN_DTYPE_NONE ? "none" : find_type(type).name;
    };
    if (found.empty() && now != then)
      found = what + " is " + name(now) + ", the plan's " + name(then);
  };
  const auto compare_given = [&](const std::string& what, bool now, bool then) {
    if (found.empty() && now != then)
      found = what + (now ? " is given, the plan was made without"
                          : " is not given, the plan was made with it");
  };
  compare_types("q: type", is.q_type, was.q_type);
  compare("q: layout", int(is.q_layout), int(was.q_layout));
  compare("q: batch", is.batch, was.batch);
  compare("q: queries of a sequence", is.seqlen_q, was.seqlen_q);
  compare("q: tokens", is.total_q, was.total_q);
  compare("q: heads", is.heads_q, was.heads_q);
  compare("q: head_dim", is.head_dim, was.head_dim);
  compare("number of segments", is.num_segments, was.num_segments);
  for (int32_t i = 0; i < is.num_segments && found.empty(); ++i) {
    const attn_segment &a = is.segments[i], &b = was.segments[i];
    std::string at;
    if (is.num_segments > 1) at.append("[").append(std::to_string(i)).append("]");
    compare_types("k" + at + ": type", a.k_type, b.k_type);
    compare_types("v" + at + ": type", a.v_type, b.v_type);
    compare("k" + at + ": layout", int(a.layout), int(b.layout));
    compare("k" + at + ": heads", is.heads_kv, was.heads_kv);
    compare("v" + at + ": head_dim_v", is.head_dim_v, was.head_dim_v);
    compare("k" + at + ": pages", a.num_pages, b.num_pages);
    compare("k" + at + ": page_size", a.page_size, b.page_size);
    compare("block_table" + at + ": pages of a sequence", a.max_pages, b.max_pages);
    compare("k" + at + ": keys of a sequence", a.seqlen, b.seqlen);
    compare("k" + at + ": tokens", a.total, b.total);
    compare_given("seqlens_kv" + at, a.has_seqlens, b.has_seqlens);
    compare_given("lists" + at, a.list_size > 0, b.list_size > 0);
    compare("lists" + at + ": entries", a.list_size, b.list_size);
    compare_given("list_lengths" + at, a.has_list_lengths, b.has_list_lengths);
    compare_given("k_descale" + at, a.k_descale, b.k_descale);
    compare_given("v_descale" + at, a.v_descale, b.v_descale);
    compare_given("key_start" + at, a.has_key_start, b.has_key_start);
    compare_given("ready" + at, a.has_ready, b.has_ready);
  }
  for (const auto& [name, flag] : {std::pair{"sinks", ATTN_SINKS},
                                   {"alibi_slopes", ATTN_ALIBI},
                                   {"block_mask", ATTN_BLOCK_MASK},
                                   {"bias_slopes", ATTN_BIAS_SLOPES},
                                   {"query_start", ATTN_QUERY_POSITIONS},
                                   {"out_scale", ATTN_OUT_SCALE}})
    compare_given(name, is.flags & flag, was.flags & flag);
  compare_given("kv_begin", is.has_kv_begin, was.has_kv_begin);
  compare_given("causal_sequences", is.has_causal_sequences, was.has_causal_sequences);
  compare_given("q_descale", is.q_descale, was.q_descale);
  compare_types("bias: type", is.bias_type, was.bias_type);
  compare_types("out: type", is.out_type, was.out_type);
  return found;
}

struct PlanObject {
  explicit PlanObject(const Arguments& arguments) {
    const Call call(arguments);
    for (size_t i = 0; i < size_t(Name::count); ++i)  // the arrays are examples and not kept
      if (const auto name = Name(i); kind_of(name) != Kind::run) keep(name, arguments.find(name));
    const nb::int_ threads(call.threads());  // its calls are of the same context
    keep(Name::num_threads, threads);
    make(call);
  }
  nb::object run(Arguments arguments);

  std::shared_ptr<Compiled> compiled;

 private:
  void make(const Call& call) {
    const std::shared_ptr<context> owner = call.owner();
    std::string key = key_of(*owner, call.problem());
    const int now = forks();
    auto made = [&] {
      nb::gil_scoped_release release;
      return std::make_shared<Compiled>(owner, plan(*owner, call.problem()), std::move(key));
    }();
    compiled = std::move(made);
    made_at_ = now;
    made_for_ = call.problem();
    segments_.assign(made_for_.segments, made_for_.segments + made_for_.num_segments);
    made_for_.segments = segments_.data();
  }
  bool takes(const Call& call) const {
    return call.owner()->backend() == compiled->owner->backend() &&
           key_of(*compiled->owner, call.problem()) == compiled->key;
  }
  void keep(Name name, nb::handle value) {
    options_.set(name, value);
    kept_.push_back(nb::borrow(value));
  }
  Arguments options_;
  std::vector<nb::object> kept_;
  int made_at_ = 0;  // forks() of the process that made `compiled`
  attn_problem made_for_{};
  std::vector<attn_segment> segments_;  // of made_for_
};

nb::object PlanObject::run(Arguments arguments) {
  const bool forked = made_at_ != forks();
  if (forked && compiled->owner->threads() == 0)
    refuse(std::string("the plan of ") + attn_backend_string(compiled->owner->backend()) +
           " was made before a fork; accepted in this process: a plan that it made itself");
  arguments.complete(options_);
  Call call(arguments);
  if (!takes(call) || (!forked && call.owner() != compiled->owner)) {
    const std::string what = difference(call.problem(), made_for_);
    refuse("the arrays are not as those that the plan was made for" +
           (what.empty() ? what : ": " + what) +
           "; accepted: the same shapes, types, strides and device, and the same arguments given");
  }
  if (forked) make(call);  // the parent's would run, on one thread
  const std::shared_ptr<Compiled> kept = compiled;
  return call.run(*kept);
}

nb::object forward(const Arguments& arguments) {
  Call call(arguments);
  const std::shared_ptr<Compiled> compiled = cached(call.owner(), call.in_steps());
  return call.run(*compiled);
}

// As torch.nn.functional has it, of tensors with four dimensions; the mask is one that is added.
// `causal` counts from the top left, `lower_right` is causal from the other end. One head of k and
// v broadcasts to all of q, as PyTorch's does.
nb::object scaled_dot_product_attention(nb::handle query, nb::handle key, nb::handle value,
                                        nb::handle mask, nb::handle causal, nb::handle scale,
                                        nb::handle enable_gqa, nb::handle lower_right) {
  static const nb::handle automatic = nb::str("auto").release();
  Arguments arguments;
  arguments.set(Name::q, query);
  arguments.set(Name::k, key);
  arguments.set(Name::v, value);
  arguments.set(Name::attn_mask, mask);
  arguments.set(Name::causal_top_left, causal);
  arguments.set(Name::causal, lower_right);
  arguments.set(Name::scale, scale);
  arguments.set(Name::backend, automatic);
  Call call(arguments);
  const attn_problem& p = call.problem();
  if (p.heads_q != p.heads_kv && p.heads_kv != 1 && !boolean(enable_gqa, "enable_gqa"))
    refuse("enable_gqa is False with " + std::to_string(p.heads_q) + " heads of q and " +
           std::to_string(p.heads_kv) + " of k and v; accepted: True");
  const std::shared_ptr<Compiled> compiled = cached(call.owner(), p);
  return call.run(*compiled);
}

nb::object check_call(const Arguments& arguments) {
  Call call(arguments);
  const std::shared_ptr<Compiled> compiled = cached(call.owner(), call.in_steps());
  call.check(*compiled);
  return nb::none();
}

nb::object explain_call(const Arguments& arguments) {
  Call call(arguments);
  return nb::cast(explain(*call.owner(), call.in_steps()));  // the plan that a call makes
}

// attn.types().
nb::dict types_dict() {
  static constexpr const char* kinds[] = {"", "float", "fp8", "ggml", "codes", "cache"};
  nb::dict all;
  for (const ElementType& t : types()) {
    if (t.type == ATTN_DTYPE_NONE) continue;
    nb::dict row;
    row["dtype"] = t.in_bytes() ? "uint8" : t.numpy;
    row["kind"] = kinds[t.kind];
    row["block_elements"] = t.block_elements;
    row["block_bytes"] = t.block_bytes;
    row["has_scales"] = t.has_scales;
    row["output_only"] = t.output_only;
    row["scale_bytes"] = t.scale_bytes;
    row["scale_elements"] = t.scale_elements;
    all[t.name] = row;
  }
  return all;
}

// attn.InvalidArgument and its siblings, by status.
void raise(const std::exception_ptr& caught, void*) {
  try {
    std::rethrow_exception(caught);
  } catch (const error& e) {
    if (e.status() == ATTN_INTERRUPTED && raise_of_signal()) return;
    nb::object type = nb::module_::import_("attn._errors").attr("error_type")(int(e.status()));
    PyErr_SetString(type.ptr(), e.what());
  }
}

// ---- functions of forward()'s arguments ---------------------------------------------------------

// Python calls these without nanobind, which would look for each argument's name.

// The library's error, with forward()'s names of its arguments.
void raise_with_names(const error& e) {
  if (e.status() == ATTN_INTERRUPTED && raise_of_signal()) return;
  nb::object made =
      nb::module_::import_("attn._errors").attr("forward_error")(int(e.status()), e.what());
  PyErr_SetObject(made.type().ptr(), made.ptr());
}

// What `call` returns, or Python's error for what it throws.
template <class Called>
PyObject* guarded(Called&& call) {
  try {
    return nb::object(call()).release().ptr();
  } catch (nb::python_error& e) {
    e.restore();
  } catch (const nb::builtin_exception& e) {
    PyErr_SetString(
        e.type() == nb::exception_type::type_error ? PyExc_TypeError : PyExc_RuntimeError,
        e.what());
  } catch (const error& e) {
    raise_with_names(e);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

constexpr char forward_name[] = "forward", check_name[] = "check", explain_name[] = "explain",
               plan_name[] = "Plan";

template <auto call, const char* name, Kind last>
PyObject* function(PyObject*, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  return guarded([&] { return call(Arguments(name, last, values, size_t(count), names)); });
}

template <auto call, const char* name, Kind last>
PyMethodDef method(const char* documentation) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&function<call, name, last>)),
          METH_FASTCALL | METH_KEYWORDS, documentation};
}

// forward() with its documentation, which begins with the signature that Python shows.
nb::object make_forward(nb::handle module, const char* documentation) {
  static std::string text;
  text = documentation;
  static PyMethodDef made = method<forward, forward_name, Kind::problem>(text.c_str());
  made.ml_doc = text.c_str();
  return nb::steal(PyCFunction_NewEx(&made, nullptr, module.ptr()));
}

PyObject* call_plan(PyObject* self, PyObject* tuple, PyObject* dict) {
  return guarded([&] {
    if (!nb::inst_ready(self)) throw nb::type_error("the Plan was not initialised");
    return nb::inst_ptr<PlanObject>(self)->run(Arguments("plan", Kind::run, tuple, dict));
  });
}

}  // namespace

NB_MODULE(_attn, m) {
  nb::set_leak_warnings(false);
  nb::register_exception_translator(raise);
  set_main_thread(nb::cast<unsigned long>(
      nb::module_::import_("threading").attr("main_thread")().attr("ident")));
  static PyMethodDef functions[] = {method<check_call, check_name, Kind::execution>(nullptr),
                                    method<explain_call, explain_name, Kind::execution>(nullptr),
                                    {}};
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) nb::raise_python_error();
  m.def("make_forward", &make_forward);
  m.def("info", [] { return info(); });
  m.def("types", &types_dict);
  m.def("version", [] { return attn_version(); });
  m.def("launch_count", [](const char* kernel) { return attn_launch_count(kernel); });
  m.def("cache_counts", [] {
    const CacheCounts counts = cache_counts();
    return std::make_tuple(counts.plans, counts.hits, counts.misses, counts.workspaces,
                           counts.workspace_bytes);
  });
  m.def("cache_clear", &cache_clear);
  m.def("num_threads", &num_threads);
  m.def(
      "set_num_threads", [](nb::handle n) { set_num_threads(integer32(n, "threads")); },
      nb::arg().none());
  m.def("forget_everything", &forget_everything);
  const auto any = nb::arg().none();  // nanobind's own sentence for None names no argument
  m.def("sdpa", &scaled_dot_product_attention, any, any, any, any, any, any, any, any);
  m.def("merge", &merge, nb::arg(), any, any);
  m.def("quantize", &quantize, any, any, any, any, any, any);
  m.def("backward", &backward);
  m.def("kv_append", &kv_append);
  m.def("kv_roll", &kv_roll);

  static const PyType_Slot plan_slots[] = {{Py_tp_call, reinterpret_cast<void*>(&call_plan)}, {}};
  nb::class_<PlanObject>(m, "Plan", nb::type_slots(plan_slots))
      .def("__init__",
           [](PlanObject* self, const nb::args& tuple, const nb::kwargs& dict) {
             try {
               new (self)
                   PlanObject(Arguments(plan_name, Kind::execution, tuple.ptr(), dict.ptr()));
             } catch (const error& e) {
               raise_with_names(e);
               nb::raise_python_error();
             }
           })
      .def_prop_ro("kernel",
                   [](const PlanObject& p) { return std::string(p.compiled->made.kernel()); })
      .def_prop_ro(
          "backend",
          [](const PlanObject& p) { return attn_backend_string(p.compiled->owner->backend()); })
      .def_prop_ro("workspace", [](const PlanObject& p) { return p.compiled->made.workspace(); });

  add_block_masks(m);
}

}  // namespace attn::python
