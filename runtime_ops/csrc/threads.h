// Runs tasks on threads that end with the call.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#define EXPORT __attribute__((visibility("default")))

namespace {

struct Threads {
  int64_t threads;
  template <typename F>
  void operator()(int64_t tasks, const F& f) const {
    const int64_t workers = tasks < threads ? tasks : threads;
    if (workers <= 1) {
      if (tasks > 0) f(0, tasks);
      return;
    }
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      for (int64_t task; (task = next.fetch_add(1)) < tasks;) f(task, task + 1);
    };
    std::vector<std::thread> others;
    for (int64_t i = 1; i < workers; ++i) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
  }
};

}  // namespace
