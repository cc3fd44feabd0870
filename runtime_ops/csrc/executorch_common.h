// What the ExecuTorch kernels share: checks of tensors, the runtime's threads.
#pragma once

#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

namespace {

using executorch::aten::ArrayRef;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

// Refuses a call with a message (a string literal and its values) in the runtime's log.
#define ONDEVICE_CHECK(condition, ...)       \
  if (!(condition)) {                        \
    ET_LOG(Error, "ondevice: " __VA_ARGS__); \
    context.fail(Error::InvalidArgument);    \
    return out;                              \
  }

struct Pool {
  template <typename F>
  void operator()(int64_t tasks, const F& f) const {
    if (tasks > 0) executorch::extension::parallel_for(0, tasks, 1, f);
  }
};

inline bool is(const Tensor& tensor, ScalarType type, ssize_t dim = -1) {
  return tensor.scalar_type() == type && (dim < 0 || tensor.dim() == dim) &&
         executorch::runtime::tensor_is_default_dim_order(tensor);
}

// Gives `out` the leading sizes of `like` and the given last sizes.
inline bool resize(const Tensor& like, ssize_t leading, std::initializer_list<int64_t> last, Tensor& out) {
  constexpr size_t kLimit = executorch::runtime::kTensorDimensionLimit;
  SizesType sizes[kLimit];
  size_t dims = 0;
  if (static_cast<size_t>(leading) + last.size() > kLimit) return false;
  for (ssize_t i = 0; i < leading; ++i) sizes[dims++] = like.size(i);
  for (int64_t size : last) sizes[dims++] = static_cast<SizesType>(size);
  return is(out, ScalarType::Float) &&
         executorch::runtime::resize_tensor(out, ArrayRef<SizesType>(sizes, dims)) == Error::Ok;
}

}  // namespace
