// Times every kernel of the ExecuTorch runtime in this process: each entry of its registry is replaced by one that
// measures. Methods that are loaded afterwards call these. CPU time is of the whole process, so that threads that a
// kernel wakes, and that spin, are counted with it.
#include <executorch/runtime/kernel/operator_registry.h>

#include <cstdint>
#include <ctime>
#include <utility>

namespace {

using executorch::runtime::Kernel;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::OpFunction;

constexpr size_t kSlots = 2048;
OpFunction original[kSlots];
const char* names[kSlots];
int64_t figures[kSlots][3];  // calls; nanoseconds of the process's CPU and of this thread's
size_t count = 0;

int64_t now(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

template <size_t Slot, typename... Arguments>
void timed(KernelRuntimeContext& context, Arguments... arguments) {
  const int64_t all = now(CLOCK_PROCESS_CPUTIME_ID), own = now(CLOCK_THREAD_CPUTIME_ID);
  original[Slot](context, arguments...);
  figures[Slot][0] += 1;
  figures[Slot][1] += now(CLOCK_PROCESS_CPUTIME_ID) - all;
  figures[Slot][2] += now(CLOCK_THREAD_CPUTIME_ID) - own;
}

template <size_t... Slots>
void replace(std::index_sequence<Slots...>) {
  static const OpFunction all[] = {&timed<Slots>...};
  for (const Kernel& kernel : executorch::runtime::get_registered_kernels()) {
    if (count == kSlots) break;
    Kernel& entry = const_cast<Kernel&>(kernel);
    original[count] = entry.op_;
    names[count] = entry.name_;
    entry.op_ = all[count++];
  }
}

}  // namespace

extern "C" {

// Replaces the registry's entries; returns their number.
int64_t profiler_begin() {
  if (count == 0) replace(std::make_index_sequence<kSlots>{});
  return static_cast<int64_t>(count);
}

const char* profiler_name(int64_t slot) { return names[slot]; }

// Calls, nanoseconds of the process and of the calling thread.
int64_t profiler_figure(int64_t slot, int64_t which) { return figures[slot][which]; }
}
