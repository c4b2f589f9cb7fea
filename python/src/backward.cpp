// backward().
#include <cstring>
#include <string_view>

#include "call.h"

namespace attn::python {
namespace {

// forward()'s arguments that have gradients or change them; others are not backward()'s.
constexpr Name of_forward[] = {Name::q,
                               Name::k,
                               Name::v,
                               Name::causal,
                               Name::causal_top_left,
                               Name::window,
                               Name::scale,
                               Name::softcap,
                               Name::bias,
                               Name::bias_slopes,
                               Name::alibi_slopes,
                               Name::sinks,
                               Name::block_mask,
                               Name::seqlens_kv,
                               Name::kv_begin,
                               Name::cu_seqlens_q,
                               Name::cu_seqlens_kv,
                               Name::max_seqlen_q,
                               Name::backend};

Arguments arguments_of(const nb::dict& dict) {
  Arguments arguments;
  for (const Name name : of_forward) arguments.set(name, nb::handle(dict[text_of(name)]));
  return arguments;
}

class Backward : Call {
 public:
  explicit Backward(const nb::dict& dict) : Call(arguments_of(dict)), dict_(dict) {
    clear(&backward_);
    backward_.forward = &problem_;
    gradients_ = make<attn_backward_args>();
    gradients_.forward = &args_;
    if (segments_.size() != 1 || nb::isinstance<nb::list>(value("k")) ||
        nb::isinstance<nb::tuple>(value("k")))
      refuse("k is a list of segments; accepted for backward: one array");
    read_forward();
    read_d_out();
    read_wanted();
  }

  nb::object run() {
    const std::shared_ptr<Compiled> compiled = cached(owner_, backward_);
    launch(*compiled, [&](void* workspace, size_t bytes, void* stream) {
      return attn_run_backward(compiled->made.get(), &gradients_, workspace, bytes, stream);
    });
    nb::object results = nb::steal(PyTuple_New(Py_ssize_t(results_.size())));
    for (size_t i = 0; i < results_.size(); ++i)
      PyTuple_SetItem(results.ptr(), Py_ssize_t(i), nb::object(results_[i]).release().ptr());
    return results;
  }

 private:
  nb::object value(const char* name) const { return nb::object(dict_[name]); }
  bool packed() const { return problem_.q_layout == ATTN_PACKED; }
  Sizes out_shape() const {
    const attn_problem& p = problem_;
    return packed() ? Sizes{p.total_q, p.heads_q, p.head_dim_v}
                    : Sizes{p.batch, p.seqlen_q, p.heads_q, p.head_dim_v};
  }
  const char* out_form() const { return packed() ? "[total_q, Hq, Dv]" : "[B, Sq, Hq, Dv]"; }
  const Array& like_out(const char* name) {
    const Array& a = keep(reader_.next(value(name), name));
    const auto is_wide = [](const ElementType& t) { return t.kind == ATTN_KIND_FLOAT; };
    if (!is_wide(a.type))
      refuse(std::string(name) + " is " + a.type.name + "; accepted: " + names_of(is_wide));
    a.need_shape(out_shape(), out_form());
    return a;
  }
  const float* like_lse(const char* name) {
    const attn_problem& p = problem_;
    return static_cast<const float*>(
        vector_of(name, value(name), "f32",
                  packed() ? Sizes{p.heads_q, p.total_q} : Sizes{p.batch, p.heads_q, p.seqlen_q},
                  packed() ? "[Hq, total_q]" : "[B, Hq, Sq]"));
  }

  void read_forward() {
    const Array& out = like_out("out");
    problem_.out_type = out.type.type;
    problem_.out_stride = strides_of(out);
    args_.out = out.data();
    args_.lse = const_cast<float*>(like_lse("lse"));  // read alone
  }

  void read_d_out() {
    const Array& d_out = like_out("d_out");
    backward_.d_out_type = d_out.type.type;
    backward_.d_out_stride = strides_of(d_out);
    gradients_.d_out = d_out.data();
    if (!value("d_lse").is_none()) gradients_.d_lse = like_lse("d_lse");
  }

  // An array for a gradient: the caller's, or a new one.
  const Array& result(const char* name, const Array& of, const ElementType& type,
                      uint32_t gradient) {
    const bool add = boolean(dict_["accumulate"], "accumulate");
    nb::object given = value(name);
    if (given.is_none()) {
      if (add)
        refuse(std::string(name) +
               " is None; accepted with accumulate: the array that is added to");
      const Array& made = keep(reader_.empty(name, of.shape(), type));
      results_.push_back(made.source);
      return made;
    }
    const Array& a = keep(reader_.output(given, name, "None"));
    a.need_shape(of.shape(), ("the shape of " + of.name).c_str());
    if (!dict_["dtype"].is_none() && a.type.type != type.type)
      refuse(std::string(name) + " is " + a.type.name + "; accepted: " + type.name +
             " as dtype says");
    if (add) backward_.accumulate |= gradient;
    results_.push_back(given);
    return a;
  }

  // The last result, a sum over nothing, which no run writes.
  void clear_sum(const Array& a, uint32_t gradient) {
    if (a.empty() || backward_.accumulate & gradient) return;
    if (a.device.host() && a.contiguous()) {
      size_t bytes = size_t(a.type.block_bytes);
      for (const int64_t size : a.shape()) bytes *= size_t(size);
      std::memset(a.data(), 0, bytes);
    } else if (PyObject_SetItem(results_.back().ptr(), Py_Ellipsis, nb::int_(0).ptr()) != 0) {
      throw nb::python_error();
    }
  }

  void read_wanted() {
    const ElementType* type = &find_type(problem_.q_type);
    if (!value("dtype").is_none()) {
      type = find_type(value("dtype"));
      if (!type ||
          (type->type != problem_.q_type && type->type != ATTN_F32 && type->type != ATTN_F64))
        refuse("dtype is " + text_of(value("dtype")) +
               "; accepted: q's type, f32, f64 (reference)");
    }
    constexpr const char* accepted = "a tuple of q, k, v, bias, sinks";
    nb::object want = value("want");
    if (!nb::isinstance<nb::tuple>(want) && !nb::isinstance<nb::list>(want))
      refuse_type(want, "want", accepted);
    for (const nb::handle item : want) {
      const std::string name = text_of(item);
      const uint32_t gradient = name == "q"       ? ATTN_GRAD_Q
                                : name == "k"     ? ATTN_GRAD_K
                                : name == "v"     ? ATTN_GRAD_V
                                : name == "bias"  ? ATTN_GRAD_BIAS
                                : name == "sinks" ? ATTN_GRAD_SINKS
                                                  : 0;
      if (gradient == 0) refuse("want has " + name + "; accepted: q, k, v, bias, sinks");
      if (backward_.gradients & gradient) refuse("want has " + name + " twice; accepted: once");
      if (value(name.c_str()).is_none())
        refuse("want has " + name + "; accepted with " + name + " given");
      backward_.gradients |= gradient;
      take(name, gradient, *type);
    }
    if (backward_.gradients == 0) refuse(std::string("want is empty; accepted: ") + accepted);
    for (const auto& [name, gradient] : {std::pair{"dq", ATTN_GRAD_Q},
                                         {"dk", ATTN_GRAD_K},
                                         {"dv", ATTN_GRAD_V},
                                         {"d_bias", ATTN_GRAD_BIAS},
                                         {"d_sinks", ATTN_GRAD_SINKS}})
      if (!value(name).is_none() && !(backward_.gradients & gradient))
        refuse(std::string(name) + " is given; accepted: None, or its name in want");
  }

  const Array& input(const char* name) const {
    for (const auto& a : arrays_)
      if (a->name == name) return *a;
    refuse(std::string(name) + " is None; accepted: an array");
  }

  void take(const std::string& name, uint32_t gradient, const ElementType& type) {
    attn_backward_problem& b = backward_;
    if (name == "q" || name == "k" || name == "v") {
      const Array& a = result(("d" + name).c_str(), input(name.c_str()), type, gradient);
      attn_dtype& to = name == "q" ? b.dq_type : name == "k" ? b.dk_type : b.dv_type;
      attn_strides& stride = name == "q" ? b.dq_stride : name == "k" ? b.dk_stride : b.dv_stride;
      void*& data = name == "q" ? gradients_.dq : name == "k" ? gradients_.dk : gradients_.dv;
      to = a.type.type;
      stride = strides_of(a);
      data = a.data();
    } else if (name == "sinks") {
      const Array& a = result("d_sinks", input("sinks"), find_type("f32"), gradient);
      if (problem_.batch == 0) clear_sum(a, gradient);
      a.need_type("f32");
      a.need_contiguous();
      gradients_.d_sinks = static_cast<float*>(a.data());
    } else {
      const Array& bias = input("bias");
      const Array& a =
          result("d_bias", bias, value("dtype").is_none() ? bias.type : type, gradient);
      b.d_bias_type = a.type.type;
      gradients_.d_bias = a.data();
      if (problem_.batch == 0 || problem_.seqlen_q == 0 || segments_[0].seqlen == 0)
        clear_sum(a, gradient);
      // As read_bias: the stride of one element of one means nothing.
      const int64_t want[] = {problem_.batch, problem_.heads_q, problem_.seqlen_q,
                              segments_[0].seqlen};
      for (size_t i = 0; i < 4; ++i)
        b.d_bias_stride[i] = want[i] <= 1 ? 1 : a.size(i) == 1 ? 0 : a.tensor.stride(i);
    }
  }

  const nb::dict& dict_;
  attn_backward_problem backward_;
  attn_backward_args gradients_;
  std::vector<nb::object> results_;
};

}  // namespace

nb::object backward(const nb::dict& arguments) {
  return Backward(arguments).run();
}

}  // namespace attn::python
