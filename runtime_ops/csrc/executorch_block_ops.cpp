// The ops of block programs as ExecuTorch kernels; built as executorch_ops.cpp is.
#include "executorch_common.h"

#include <optional>

#include "attention.h"
#include "block_adam.h"
#include "block_linear.h"
#include "block_math.h"
#include "head_step.h"

namespace {

using Given = std::optional<Tensor>;

bool is_float(const Tensor& tensor, ssize_t dim = -1) { return is(tensor, ScalarType::Float, dim); }

bool same(const Tensor& a, const Tensor& b) {
  return is_float(a) && is_float(b) && a.numel() == b.numel();
}

const float* floats(const Tensor& tensor) { return tensor.const_data_ptr<float>(); }
const float* floats(const Given& tensor) { return tensor ? floats(*tensor) : nullptr; }

bool resize_like(const Tensor& like, Tensor& out) { return resize(like, like.dim(), {}, out); }

// A frozen matrix by its tensors; false if they do not belong together.
bool matrix_of(const Tensor& weight, const Given& scales, const Given& mins, ondevice::Matrix& w) {
  const bool two = weight.dim() == 2 && executorch::runtime::tensor_is_default_dim_order(weight);
  if (!two) return false;
  w = {ondevice::Matrix::kFloat, weight.const_data_ptr(), nullptr, nullptr, nullptr, weight.size(0), weight.size(1)};
  if (weight.scalar_type() == ScalarType::Float) return !scales && !mins;
  if (weight.scalar_type() == ScalarType::Char) {
    if (!scales || mins || !is_float(*scales, 1) || scales->size(0) != w.outputs) return false;
    w.kind = ondevice::Matrix::kInt8;
    w.scales = floats(scales);
    return true;
  }
  w.inputs *= 2;
  w.kind = ondevice::Matrix::kQ4;
  if (weight.scalar_type() != ScalarType::Byte || !scales || !mins || w.inputs % ondevice::kQ4Group) return false;
  for (const Given* part : {&scales, &mins}) {
    if (!is(**part, ScalarType::Half, 2) || (*part)->size(0) != w.outputs ||
        (*part)->size(1) != w.inputs / ondevice::kQ4Group) {
      return false;
    }
  }
  w.halves = static_cast<const uint16_t*>(scales->const_data_ptr());
  w.minima = static_cast<const uint16_t*>(mins->const_data_ptr());
  return true;
}

Tensor& block_linear_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& weight, const Given& scales,
                         const Given& mins, const Given& bias, const Given& h, const Given& b, const Given& into,
                         double scale, bool transposed, bool integers, Tensor& out) {
  ondevice::Matrix w;
  ONDEVICE_CHECK(matrix_of(weight, scales, mins, w), "block_linear's weight and scales do not belong together");
  ONDEVICE_CHECK(!integers || w.kind != ondevice::Matrix::kFloat, "products of integers need packed weights");
  const int64_t width = transposed ? w.inputs : w.outputs, length = transposed ? w.outputs : w.inputs;
  ONDEVICE_CHECK(is_float(x, 2) && x.size(1) == length, "block_linear takes float32 [rows, %" PRId64 "]", length);
  const int64_t rows = x.size(0);
  ONDEVICE_CHECK(!bias || (is_float(*bias, 1) && bias->size(0) == width), "block_linear's bias is of another width");
  ONDEVICE_CHECK(h.has_value() == b.has_value(), "block_linear takes both of LoRA's or none");
  ONDEVICE_CHECK(!h || (is_float(*h, 2) && is_float(*b, 2) && h->size(0) == rows && b->size(1) == width &&
                        b->size(0) == h->size(1)),
                 "LoRA's product does not fit block_linear's");
  ONDEVICE_CHECK(!into || (is_float(*into, 2) && into->size(0) == rows && into->size(1) == width),
                 "block_linear's sum is of another shape");
  ONDEVICE_CHECK(resize(x, 1, {width}, out), "block_linear's result does not fit its output");
  const ondevice::Added added{floats(bias), floats(h), floats(b), floats(into), h ? h->size(1) : 0,
                              static_cast<float>(scale)};
  float* y = out.mutable_data_ptr<float>();
  if (integers) {
    ondevice::block_linear_integers(floats(x), rows, w, transposed, added, y, Pool{});
  } else {
    ondevice::block_linear(floats(x), rows, w, transposed, added, y, Pool{});
  }
  return out;
}

Tensor& adapted_linear_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& weight, const Given& scales,
                           const Given& mins, const Given& bias, const Tensor& adapter, const Given& into, int64_t a,
                           int64_t b, int64_t rank, double scale, bool integers, Tensor& out) {
  ondevice::Matrix w;
  ONDEVICE_CHECK(matrix_of(weight, scales, mins, w), "adapted_linear's weight and scales do not belong together");
  ONDEVICE_CHECK(!integers || w.kind != ondevice::Matrix::kFloat, "products of integers need packed weights");
  ONDEVICE_CHECK(is_float(x, 2) && x.size(1) == w.inputs, "adapted_linear takes float32 [rows, %" PRId64 "]", w.inputs);
  ONDEVICE_CHECK(!bias || (is_float(*bias, 1) && bias->size(0) == w.outputs),
                 "adapted_linear's bias is of another width");
  ONDEVICE_CHECK(!into || (is_float(*into, 2) && into->size(0) == x.size(0) && into->size(1) == w.outputs),
                 "adapted_linear's sum is of another shape");
  ONDEVICE_CHECK(is_float(adapter, 1) && a >= 0 && b >= 0 && rank > 0 && a + rank * w.inputs <= adapter.size(0) &&
                     b + rank * w.outputs <= adapter.size(0),
                 "adapted_linear's A and B lie outside the adapter");
  ONDEVICE_CHECK(resize(x, 1, {w.outputs}, out), "adapted_linear's result does not fit its output");
  const ondevice::Added added{floats(bias), nullptr, nullptr, floats(into), rank, static_cast<float>(scale)};
  ondevice::adapted_linear(floats(x), x.size(0), w, floats(adapter) + a, floats(adapter) + b, added, integers,
                           out.mutable_data_ptr<float>(), Pool{});
  return out;
}

Tensor& narrow_linear_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& a, double scale, Tensor& out) {
  ONDEVICE_CHECK(is_float(x, 2) && is_float(a, 2) && x.size(1) == a.size(1), "narrow_linear takes x [N, d], a [r, d]");
  ONDEVICE_CHECK(resize(x, 1, {a.size(0)}, out), "narrow_linear's result does not fit its output");
  ondevice::narrow_linear(floats(x), x.size(0), x.size(1), floats(a), a.size(0), static_cast<float>(scale),
                          out.mutable_data_ptr<float>(), Pool{});
  return out;
}

Tensor& narrow_gradient_out(KernelRuntimeContext& context, const Tensor& left, const Tensor& right, double scale,
                            Tensor& out) {
  ONDEVICE_CHECK(is_float(left, 2) && is_float(right, 2) && left.size(0) == right.size(0),
                 "narrow_gradient takes [N, r] and [N, d]");
  ONDEVICE_CHECK(resize(left, 0, {left.size(1), right.size(1)}, out), "narrow_gradient's result does not fit");
  ondevice::narrow_gradient(floats(left), floats(right), left.size(0), left.size(1), right.size(1),
                            static_cast<float>(scale), out.mutable_data_ptr<float>(), Pool{});
  return out;
}

bool is_norm(const Tensor& x, const Tensor& weight) {
  return is_float(x, 2) && is_float(weight, 1) && x.size(1) == weight.size(0);
}

Tensor& rms_norm_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& weight, double eps, Tensor& out) {
  ONDEVICE_CHECK(is_norm(x, weight), "rms_norm takes x [N, d] and a weight [d]");
  ONDEVICE_CHECK(resize_like(x, out), "rms_norm's result does not fit its output");
  ondevice::rms_norm(floats(x), x.size(0), x.size(1), floats(weight), static_cast<float>(eps),
                     out.mutable_data_ptr<float>(), Pool{});
  return out;
}

Tensor& rms_norm_backward_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& weight, double eps,
                              const Tensor& gn, const Tensor& g, Tensor& out) {
  ONDEVICE_CHECK(is_norm(x, weight) && same(x, gn) && same(x, g), "rms_norm_backward's tensors differ in shape");
  ONDEVICE_CHECK(resize_like(x, out), "rms_norm_backward's result does not fit its output");
  ondevice::rms_norm_backward(floats(x), x.size(0), x.size(1), floats(weight), static_cast<float>(eps), floats(gn),
                              floats(g), out.mutable_data_ptr<float>(), Pool{});
  return out;
}

Tensor& rotate_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& cos, const Tensor& sin, double sign,
                   Tensor& out) {
  ONDEVICE_CHECK(is_float(x, 4) && is_float(cos, 2) && same(cos, sin) && cos.size(0) == x.size(1) &&
                     2 * cos.size(1) <= x.size(3),
                 "rotate takes x [B, T, heads, h], cos and sin [T, at most h / 2]");
  ONDEVICE_CHECK(resize_like(x, out), "rotate's result does not fit its output");
  ondevice::rotate(floats(x), x.size(0), x.size(1), x.size(2), x.size(3), floats(cos), floats(sin), cos.size(1),
                   static_cast<float>(sign), out.mutable_data_ptr<float>(), Pool{});
  return out;
}

Tensor& swiglu_out(KernelRuntimeContext& context, const Tensor& gate, const Tensor& up, Tensor& out) {
  ONDEVICE_CHECK(same(gate, up), "swiglu's tensors differ in shape");
  ONDEVICE_CHECK(resize_like(gate, out), "swiglu's result does not fit its output");
  ondevice::swiglu(floats(gate), floats(up), gate.numel(), out.mutable_data_ptr<float>(), Pool{});
  return out;
}

Tensor& swiglu_gate_out(KernelRuntimeContext& context, const Tensor& gate, const Tensor& up, const Tensor& g,
                        Tensor& out) {
  ONDEVICE_CHECK(same(gate, up) && same(gate, g), "swiglu_gate's tensors differ in shape");
  ONDEVICE_CHECK(resize_like(gate, out), "swiglu_gate's result does not fit its output");
  ondevice::swiglu_gate(floats(gate), floats(up), floats(g), gate.numel(), out.mutable_data_ptr<float>(), Pool{});
  return out;
}

bool heads_of(const Tensor& q, const Tensor& k, const Tensor& v, double scale, int64_t window, ondevice::Heads& heads) {
  if (!is_float(q, 4) || !is_float(k, 4) || !is_float(v, 4) || !same(k, v) || window < 0 || k.size(2) < 1) return false;
  for (int dim : {0, 1, 3}) {
    if (q.size(dim) != k.size(dim) || q.size(dim) != v.size(dim)) return false;
  }
  heads = {q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), static_cast<float>(scale), window};
  return scale > 0 && q.size(2) % k.size(2) == 0;
}

Tensor& attend_out(KernelRuntimeContext& context, const Tensor& q, const Tensor& k, const Tensor& v, double scale,
                   int64_t window, Tensor& out) {
  ondevice::Heads heads;
  ONDEVICE_CHECK(heads_of(q, k, v, scale, window, heads), "attend takes q [B, T, H, h], k and v [B, T, K, h]");
  ONDEVICE_CHECK(resize_like(q, out), "attend's result does not fit its output");
  ondevice::attend(floats(q), floats(k), floats(v), heads, out.mutable_data_ptr<float>(), Pool{});
  return out;
}

Tensor& attend_cached_out(KernelRuntimeContext& context, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& keys, const Tensor& values, const Tensor& start, double scale, Tensor& out) {
  ondevice::Heads heads;
  ONDEVICE_CHECK(heads_of(q, k, v, scale, 0, heads) && heads.rows == 1,
                 "attend_cached takes q [1, T, H, h], k and v [1, T, K, h]");
  ONDEVICE_CHECK(is_float(keys, 3) && is_float(values, 3) && keys.size(0) == heads.kv_heads &&
                     keys.size(1) == heads.width && values.size(0) == heads.kv_heads &&
                     values.size(2) == heads.width && values.size(1) == keys.size(2),
                 "attend_cached takes keys [K, h, C] and values [K, C, h]");
  ONDEVICE_CHECK(is(start, ScalarType::Long) && start.numel() == 1, "attend_cached takes a start int64 [1]");
  const int64_t read = start.const_data_ptr<int64_t>()[0], room = keys.size(2);
  ONDEVICE_CHECK(read >= 0 && read <= room, "%" PRId64 " tokens are not in a cache of %" PRId64, read, room);
  ONDEVICE_CHECK(resize_like(q, out), "attend_cached's result does not fit its output");
  ondevice::attend_cached(floats(q), floats(k), floats(v), floats(keys), floats(values), heads, room, read,
                          out.mutable_data_ptr<float>(), Pool{});
  return out;
}

Tensor& attend_backward_out(KernelRuntimeContext& context, const Tensor& g, const Tensor& q, const Tensor& k,
                            const Tensor& v, double scale, int64_t window, Tensor& out) {
  ondevice::Heads heads;
  ONDEVICE_CHECK(heads_of(q, k, v, scale, window, heads) && same(g, q), "attend_backward's tensors do not fit");
  const int64_t queries = q.numel(), keys = k.numel();
  ONDEVICE_CHECK(resize(q, 0, {queries + 2 * keys}, out), "attend_backward's result does not fit its output");
  float* gq = out.mutable_data_ptr<float>();
  ondevice::attend_backward(floats(g), floats(q), floats(k), floats(v), heads, gq, gq + queries, gq + queries + keys,
                            Pool{});
  return out;
}

Tensor& head_step_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& weight, const Given& scales,
                      const Tensor& labels, const Tensor& weights, bool integers, Tensor& out) {
  ondevice::Matrix head;
  ONDEVICE_CHECK(matrix_of(weight, scales, {}, head), "head_step's weight and scales do not belong together");
  ONDEVICE_CHECK(!integers || head.kind == ondevice::Matrix::kInt8, "products of integers need weights in 8 bits");
  ONDEVICE_CHECK(is_float(x, 2) && x.size(1) == head.inputs, "head_step takes float32 hidden states [N, d]");
  ONDEVICE_CHECK(is(labels, ScalarType::Long, 1) && is_float(weights, 1) && labels.size(0) == x.size(0) &&
                     weights.size(0) == x.size(0),
                 "head_step takes labels int64 [N] and weights float32 [N]");
  ONDEVICE_CHECK(resize(x, 1, {head.inputs + 1}, out), "head_step's result does not fit its output");
  const int64_t* label = labels.const_data_ptr<int64_t>();
  const int64_t bad = ondevice::head_step(floats(x), x.size(0), head, integers, label, floats(weights),
                                          out.mutable_data_ptr<float>(), Pool{});
  ONDEVICE_CHECK(bad < 0, "label %" PRId64 " lies outside the vocabulary", label[bad]);
  return out;
}

Tensor& block_adam_out(KernelRuntimeContext& context, const Tensor& value, const Tensor& gradient, const Tensor& first,
                       const Tensor& second, const Tensor& step, const Tensor& rate, double beta1, double beta2,
                       double eps, double decay, Tensor& out) {
  ONDEVICE_CHECK(is_float(value, 1) && same(value, gradient) && same(value, first) && same(value, second),
                 "block_adam's ranges differ in length");
  ONDEVICE_CHECK(is(step, ScalarType::Long) && step.numel() == 1 && is_float(rate) && rate.numel() == 1,
                 "block_adam takes a step int64 [1] and a rate float32 [1]");
  ONDEVICE_CHECK(resize(value, 0, {3, value.numel()}, out), "block_adam's result does not fit its output");
  const ondevice::Adam adam{floats(rate)[0],           static_cast<float>(beta1), static_cast<float>(beta2),
                            static_cast<float>(eps),   static_cast<float>(decay),
                            static_cast<float>(step.const_data_ptr<int64_t>()[0]) + 1.0f};
  ondevice::block_adam(floats(value), floats(gradient), floats(first), floats(second), value.numel(), adam,
                       out.mutable_data_ptr<float>(), Pool{});
  return out;
}

}  // namespace

EXECUTORCH_LIBRARY(ondevice, "block_linear.out", block_linear_out);
EXECUTORCH_LIBRARY(ondevice, "adapted_linear.out", adapted_linear_out);
EXECUTORCH_LIBRARY(ondevice, "narrow_linear.out", narrow_linear_out);
EXECUTORCH_LIBRARY(ondevice, "narrow_gradient.out", narrow_gradient_out);
EXECUTORCH_LIBRARY(ondevice, "rms_norm.out", rms_norm_out);
EXECUTORCH_LIBRARY(ondevice, "rms_norm_backward.out", rms_norm_backward_out);
EXECUTORCH_LIBRARY(ondevice, "rotate.out", rotate_out);
EXECUTORCH_LIBRARY(ondevice, "swiglu.out", swiglu_out);
EXECUTORCH_LIBRARY(ondevice, "swiglu_gate.out", swiglu_gate_out);
EXECUTORCH_LIBRARY(ondevice, "attend.out", attend_out);
EXECUTORCH_LIBRARY(ondevice, "attend_cached.out", attend_cached_out);
EXECUTORCH_LIBRARY(ondevice, "attend_backward.out", attend_backward_out);
EXECUTORCH_LIBRARY(ondevice, "head_step.out", head_step_out);
EXECUTORCH_LIBRARY(ondevice, "block_adam.out", block_adam_out);
