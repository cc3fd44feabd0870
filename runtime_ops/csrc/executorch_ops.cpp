// The ops as ExecuTorch kernels. Build with -std=c++17 -DC10_USING_CUSTOM_GENERATED_MACROS; with
// -DET_USE_THREADPOOL they share the runtime's thread pool. Static builds for phones link this file as it
// stands.
#include "executorch_common.h"

#include "cross_entropy.h"
#include "generator.h"
#include "q4_linear.h"
#include "q8_embedding.h"

namespace {

Tensor& draw(KernelRuntimeContext& context, ondevice::RangeFunction range, const Tensor& seed,
             const Tensor& step, int64_t tensor, int64_t queries, int64_t start, int64_t count, Tensor& out) {
  ONDEVICE_CHECK(is(seed, ScalarType::Long) && seed.numel() == 1, "the seed is not int64 [1]");
  ONDEVICE_CHECK(is(step, ScalarType::Long) && step.numel() == 1, "the step is not int64 [1]");
  ONDEVICE_CHECK(tensor >= 0 && queries >= 0 && start >= 0 && count >= 0, "a counter is negative");
  ONDEVICE_CHECK(resize(seed, 0, {queries, count}, out), "the noise does not fit its output");
  ondevice::generate(range, static_cast<uint64_t>(seed.const_data_ptr<int64_t>()[0]),
                     static_cast<uint64_t>(step.const_data_ptr<int64_t>()[0]), tensor, queries, start, count,
                     out.mutable_data_ptr<float>(), Pool{});
  return out;
}

Tensor& normal_out(KernelRuntimeContext& context, const Tensor& seed, const Tensor& step, int64_t tensor,
                   int64_t queries, int64_t start, int64_t count, Tensor& out) {
  return draw(context, ondevice::normal_range, seed, step, tensor, queries, start, count, out);
}

Tensor& rademacher_out(KernelRuntimeContext& context, const Tensor& seed, const Tensor& step, int64_t tensor,
                       int64_t queries, int64_t start, int64_t count, Tensor& out) {
  return draw(context, ondevice::rademacher_range, seed, step, tensor, queries, start, count, out);
}

Tensor& q4_linear_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& packed,
                      const Tensor& scales, const Tensor& mins, int64_t group, Tensor& out) {
  ONDEVICE_CHECK(is(x, ScalarType::Float) && x.dim() > 0, "q4_linear takes float32 activations");
  const int64_t inputs = x.size(x.dim() - 1);
  ONDEVICE_CHECK(group > 0 && inputs > 0 && inputs % group == 0 && inputs % 2 == 0,
                 "q4_linear has %" PRId64 " inputs, no even multiple of the group of %" PRId64, inputs,
                 group);
  ONDEVICE_CHECK(is(scales, ScalarType::Half, 2) && is(mins, ScalarType::Half, 2),
                 "q4_linear takes float16 scales");
  const int64_t outputs = scales.size(0),
                padded = (outputs + ondevice::kPanel - 1) / ondevice::kPanel * ondevice::kPanel;
  ONDEVICE_CHECK(
      scales.size(1) == inputs / group && mins.size(0) == outputs && mins.size(1) == inputs / group,
      "q4_linear's scales do not belong to its inputs");
  ONDEVICE_CHECK(is(packed, ScalarType::Byte, 2) && packed.size(0) == padded && packed.size(1) == inputs / 2,
                 "q4_linear's packed weight does not belong to its scales");
  ONDEVICE_CHECK(resize(x, x.dim() - 1, {outputs}, out), "q4_linear's result does not fit its output");
  const ondevice::Q4Weight weight{packed.const_data_ptr<uint8_t>(),
                                  static_cast<const uint16_t*>(scales.const_data_ptr()),
                                  static_cast<const uint16_t*>(mins.const_data_ptr()),
                                  outputs,
                                  inputs,
                                  group};
  ondevice::q4_linear(x.const_data_ptr<float>(), x.numel() / inputs, weight, out.mutable_data_ptr<float>(),
                      Pool{});
  return out;
}

bool is_q8(const Tensor& weight, const Tensor& scales) {
  return is(weight, ScalarType::Char, 2) && is(scales, ScalarType::Float, 1) &&
         scales.size(0) == weight.size(0);
}

Tensor& q8_embedding_out(KernelRuntimeContext& context, const Tensor& ids, const Tensor& weight,
                         const Tensor& scales, Tensor& out) {
  ONDEVICE_CHECK(is(ids, ScalarType::Long), "q8_embedding takes int64 ids");
  ONDEVICE_CHECK(is_q8(weight, scales), "q8_embedding takes int8 [V, d] and float32 scales [V]");
  ONDEVICE_CHECK(resize(ids, ids.dim(), {weight.size(1)}, out),
                 "q8_embedding's result does not fit its output");
  const int64_t bad = ondevice::q8_embedding(
      ids.const_data_ptr<int64_t>(), ids.numel(), weight.const_data_ptr<int8_t>(),
      scales.const_data_ptr<float>(), weight.size(0), weight.size(1), out.mutable_data_ptr<float>(), Pool{});
  ONDEVICE_CHECK(bad < 0, "token id %" PRId64 " lies outside the vocabulary",
                 ids.const_data_ptr<int64_t>()[bad]);
  return out;
}

template <typename Head>
Tensor& cross_entropy(KernelRuntimeContext& context, const Tensor& hidden, const Head& head,
                      const Tensor& weight, const Tensor& labels, Tensor& out) {
  ONDEVICE_CHECK(is(hidden, ScalarType::Float, 2) && hidden.size(1) == weight.size(1),
                 "cross-entropy takes float32 hidden states [N, d]");
  ONDEVICE_CHECK(is(labels, ScalarType::Long, 1) && labels.size(0) == hidden.size(0),
                 "cross-entropy takes int64 labels [N]");
  ONDEVICE_CHECK(resize(labels, 1, {}, out), "the losses do not fit their output");
  const int64_t* label = labels.const_data_ptr<int64_t>();
  const int64_t bad =
      ondevice::linear_cross_entropy(hidden.const_data_ptr<float>(), hidden.size(0), head, weight.size(0),
                                     label, out.mutable_data_ptr<float>(), Pool{});
  ONDEVICE_CHECK(bad < 0, "label %" PRId64 " lies outside the vocabulary", label[bad]);
  return out;
}

Tensor& linear_cross_entropy_out(KernelRuntimeContext& context, const Tensor& hidden, const Tensor& weight,
                                 const Tensor& labels, Tensor& out) {
  ONDEVICE_CHECK(is(weight, ScalarType::Float, 2), "linear_cross_entropy takes a float32 weight [V, d]");
  const ondevice::FloatHead head{weight.const_data_ptr<float>(), weight.size(1)};
  return cross_entropy(context, hidden, head, weight, labels, out);
}

Tensor& q8_linear_cross_entropy_out(KernelRuntimeContext& context, const Tensor& hidden, const Tensor& weight,
                                    const Tensor& scales, const Tensor& labels, Tensor& out) {
  ONDEVICE_CHECK(is_q8(weight, scales), "q8_linear_cross_entropy takes int8 [V, d] and float32 scales [V]");
  const ondevice::Q8Head head{weight.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(),
                              weight.size(1)};
  return cross_entropy(context, hidden, head, weight, labels, out);
}

}  // namespace

EXECUTORCH_LIBRARY(ondevice, "normal.out", normal_out);
EXECUTORCH_LIBRARY(ondevice, "rademacher.out", rademacher_out);
EXECUTORCH_LIBRARY(ondevice, "q4_linear.out", q4_linear_out);
EXECUTORCH_LIBRARY(ondevice, "q8_embedding.out", q8_embedding_out);
EXECUTORCH_LIBRARY(ondevice, "q8_linear_cross_entropy.out", q8_linear_cross_entropy_out);
EXECUTORCH_LIBRARY(ondevice, "linear_cross_entropy.out", linear_cross_entropy_out);
