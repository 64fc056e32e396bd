// XLA custom calls: buffers in, kernels on XLA's thread pool, buffers out.
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>

#include "dispatch.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Booleans = ffi::Buffer<ffi::PRED>;
using Result = ffi::ResultBuffer<ffi::F32>;

const spdf::Kernels& Kernels() {
  static const spdf::Kernels* kernels =
      spdf::FindKernels(std::getenv("SPDF_NATIVE_KERNELS"));
  return kernels ? *kernels : *spdf::FindKernels();
}

// Runs f(0) ... f(n - 1) on the pool and the calling thread, which returns when
// all are done; it does all that no thread of the pool has begun.
void ParallelFor(ffi::ThreadPool& pool, int64_t n,
                 const std::function<void(int64_t)>& f) {
  const int64_t helpers = std::min<int64_t>(n, pool.num_threads()) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  // Helpers may start when all is done, and this function has returned.
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto state = std::make_shared<State>();
  auto work = [state, n, f = &f] {
    for (int64_t i; (i = state->next.fetch_add(1)) < n;) {
      (*f)(i);
      if (state->done.fetch_add(1) + 1 == n) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->all_done.notify_all();
      }
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done.load() == n; });
}

spdf::Workers OnPool(ffi::ThreadPool& pool) {
  return {std::max<int64_t>(1, pool.num_threads()),
          [&pool](int64_t n, const std::function<void(int64_t)>& f) {
            ParallelFor(pool, n, f);
          }};
}

// A stack of matrices, as a mask [*stack, inputs, outputs] has it.
struct Stack {
  int64_t number = 1, inputs, outputs;

  explicit Stack(const Booleans& mask) {
    const auto shape = mask.dimensions();
    inputs = shape[shape.size() - 2];
    outputs = shape[shape.size() - 1];
    for (size_t i = 0; i + 2 < shape.size(); ++i) number *= shape[i];
  }
  int64_t Size() const { return inputs * outputs; }
};

template <typename F>
ffi::Error Guarded(F f) {
  try {
    f();
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

const uint8_t* Bytes(const Booleans& mask) {
  return static_cast<const uint8_t*>(mask.untyped_data());
}

ffi::Error SparseMatmul(ffi::ThreadPool pool, Floats x, Floats w,
                        Booleans mask, Result y, bool transpose) {
  return Guarded([&] {
    const Stack stack(mask);
    const int64_t features = transpose ? stack.outputs : stack.inputs;
    const int64_t results = transpose ? stack.inputs : stack.outputs;
    const int64_t tokens = x.element_count() / (stack.number * features);
    for (int64_t i = 0; i < stack.number; ++i) {
      const spdf::Matrix matrix = {w.typed_data() + i * stack.Size(),
                                   Bytes(mask) + i * stack.Size(),
                                   stack.inputs, stack.outputs};
      Kernels().multiply(OnPool(pool), x.typed_data() + i * tokens * features,
                         matrix, transpose, tokens,
                         y->typed_data() + i * tokens * results);
    }
  });
}

ffi::Error Backward(ffi::ThreadPool pool, Floats x, Floats dy, Floats w,
                    Booleans mask, Booleans grad_mask, Result dx, Result dw) {
  return Guarded([&] {
    const Stack stack(mask);
    const int64_t tokens = x.element_count() / (stack.number * stack.inputs);
    for (int64_t i = 0; i < stack.number; ++i) {
      const spdf::Matrix matrix = {w.typed_data() + i * stack.Size(),
                                   Bytes(mask) + i * stack.Size(),
                                   stack.inputs, stack.outputs};
      Kernels().differentiate(
          OnPool(pool), x.typed_data() + i * tokens * stack.inputs,
          dy.typed_data() + i * tokens * stack.outputs, matrix,
          Bytes(grad_mask) + i * stack.Size(), tokens,
          dx->typed_data() + i * tokens * stack.inputs,
          dw->typed_data() + i * stack.Size());
    }
  });
}

ffi::Error SampledMatmul(ffi::ThreadPool pool, Floats x, Floats dy,
                         Booleans mask, Result dw) {
  return Guarded([&] {
    const Stack stack(mask);
    const int64_t tokens = x.element_count() / (stack.number * stack.inputs);
    for (int64_t i = 0; i < stack.number; ++i) {
      const spdf::Matrix matrix = {nullptr, nullptr, stack.inputs,
                                   stack.outputs};
      Kernels().differentiate(OnPool(pool),
                              x.typed_data() + i * tokens * stack.inputs,
                              dy.typed_data() + i * tokens * stack.outputs,
                              matrix, Bytes(mask) + i * stack.Size(), tokens,
                              nullptr, dw->typed_data() + i * stack.Size());
    }
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_sparse_matmul, SparseMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Booleans>()
                                  .Ret<Floats>()
                                  .Attr<bool>("transpose"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_sparse_matmul_backward, Backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Booleans>()
                                  .Arg<Booleans>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_sampled_matmul, SampledMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Booleans>()
                                  .Ret<Floats>());

extern "C" const char* spdf_kernels() { return Kernels().name; }
