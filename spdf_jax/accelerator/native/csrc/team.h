// SPDX-License-Identifier: Apache-2.0
// Workers of the kernels on XLA's thread pool.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace spdf {

namespace ffi = xla::ffi;

// Threads that run the parallel loops of one product. The threads of the pool
// are scheduled once for all loops; the calling thread works too, so no loop
// depends on them.
class Team {
 public:
  explicit Team(ffi::ThreadPool& pool)
      : pool_(pool), size_(std::max<int64_t>(1, pool.num_threads())) {}
  ~Team() { state_->over = true; }

  int64_t size() const { return size_; }

  // Runs f(0) ... f(n - 1) and returns when all have finished.
  void Run(int64_t n, const std::function<void(int64_t)>& f) {
    if (size_ == 1 || (n <= 1 && !started_) || begun_ == kLoops) {
      for (int64_t i = 0; i < n; ++i) f(i);
      return;
    }
    Loop& loop = state_->loops[begun_++];
    loop.n = n;
    loop.f = &f;
    loop.open.store(true, std::memory_order_release);
    for (; started_ + 1 < size_; ++started_) {
      pool_.Schedule([state = state_] { state->Help(); });
    }
    loop.Work();
    while (loop.done.load(std::memory_order_acquire) < n) {
      std::this_thread::yield();
    }
  }

 private:
  static constexpr int64_t kLoops = 32;

  struct Loop {
    int64_t n = 0;
    const std::function<void(int64_t)>* f = nullptr;
    std::atomic<bool> open{false};
    std::atomic<int64_t> next{0}, done{0};

    void Work() {
      for (int64_t i; (i = next.fetch_add(1)) < n;) {
        (*f)(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };

  // Shared with helpers, which may start after the team is destroyed.
  struct State {
    Loop loops[kLoops];
    std::atomic<bool> over{false};

    void Help() {
      for (Loop& loop : loops) {
        while (!loop.open.load(std::memory_order_acquire)) {
          if (over) return;
          std::this_thread::yield();
        }
        loop.Work();
      }
    }
  };

  ffi::ThreadPool& pool_;
  const int64_t size_;
  int64_t started_ = 0, begun_ = 0;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

inline Workers OnPool(ffi::ThreadPool& pool) {
  auto team = std::make_shared<Team>(pool);
  return {team->size(),
          [team](int64_t n, const std::function<void(int64_t)>& f) {
            team->Run(n, f);
          }};
}

}  // namespace spdf
