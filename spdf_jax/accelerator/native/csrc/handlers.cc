// XLA custom calls: buffers in, kernels on XLA's thread pool, buffers out.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <thread>

#include "dispatch.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Booleans = ffi::Buffer<ffi::PRED>;
using PackedBits = ffi::Buffer<ffi::U8>;
using Result = ffi::ResultBuffer<ffi::F32>;

const spdf::Kernels& Kernels() {
  static const spdf::Kernels* kernels =
      spdf::FindKernels(std::getenv("SPDF_NATIVE_KERNELS"));
  return kernels ? *kernels : *spdf::FindKernels();
}

// Threads that go through the loops of one product together: those of the pool
// are woken once, and what none of them has begun the calling thread does.
class Team {
 public:
  explicit Team(ffi::ThreadPool& pool)
      : pool_(pool), size_(std::max<int64_t>(1, pool.num_threads())) {}
  ~Team() { state_->over = true; }

  int64_t size() const { return size_; }

  // Runs f(0) ... f(n - 1) and returns when all are done.
  void Run(int64_t n, const std::function<void(int64_t)>& f) {
    if (size_ == 1 || (n == 1 && !started_) || begun_ == kLoops) {
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
  static constexpr int64_t kLoops = 4;

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

  // Helpers may come when all is over, and the team is gone.
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

spdf::Workers OnPool(ffi::ThreadPool& pool) {
  auto team = std::make_shared<Team>(pool);
  return {team->size(),
          [team](int64_t n, const std::function<void(int64_t)>& f) {
            team->Run(n, f);
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

// A stack of packed matrices: bits [*stack, inputs, bytes], values
// [*stack, size].
struct PackedStack {
  int64_t number = 1, inputs, outputs, bytes, size;
  const float* values;
  const uint8_t* bits;

  PackedStack(const float* values, int64_t count, const PackedBits& bits,
              int64_t columns)
      : outputs(columns), values(values), bits(bits.typed_data()) {
    const auto shape = bits.dimensions();
    inputs = shape[shape.size() - 2];
    bytes = shape[shape.size() - 1];
    for (size_t i = 0; i + 2 < shape.size(); ++i) number *= shape[i];
    size = number ? count / number : 0;
  }
  spdf::Packed operator[](int64_t i) const {
    return {values ? values + i * size : nullptr, bits + i * inputs * bytes,
            size, inputs, outputs};
  }
};

ffi::Error PackedMatmul(ffi::ThreadPool pool, Floats x, Floats values,
                        PackedBits bits, Result y, bool transpose,
                        int64_t columns) {
  return Guarded([&] {
    const PackedStack stack(values.typed_data(), values.element_count(), bits,
                            columns);
    const int64_t features = transpose ? stack.outputs : stack.inputs;
    const int64_t results = transpose ? stack.inputs : stack.outputs;
    const int64_t tokens = x.element_count() / (stack.number * features);
    for (int64_t i = 0; i < stack.number; ++i) {
      Kernels().multiply_packed(
          OnPool(pool), x.typed_data() + i * tokens * features, stack[i],
          transpose, tokens, y->typed_data() + i * tokens * results);
    }
  });
}

// dx is null where only the gradient of the values is wanted.
void DifferentiatePacked(ffi::ThreadPool& pool, const Floats& x,
                         const Floats& dy, const PackedStack& stack, float* dx,
                         float* dvalues) {
  const int64_t tokens = x.element_count() / (stack.number * stack.inputs);
  for (int64_t i = 0; i < stack.number; ++i) {
    Kernels().differentiate_packed(
        OnPool(pool), x.typed_data() + i * tokens * stack.inputs,
        dy.typed_data() + i * tokens * stack.outputs, stack[i], tokens,
        dx ? dx + i * tokens * stack.inputs : nullptr,
        dvalues + i * stack.size);
  }
}

ffi::Error PackedBackward(ffi::ThreadPool pool, Floats x, Floats dy,
                          Floats values, PackedBits bits, Result dx, Result dvalues,
                          int64_t columns) {
  return Guarded([&] {
    const PackedStack stack(values.typed_data(), values.element_count(), bits,
                            columns);
    DifferentiatePacked(pool, x, dy, stack, dx->typed_data(),
                        dvalues->typed_data());
  });
}

ffi::Error PackedGradient(ffi::ThreadPool pool, Floats x, Floats dy,
                          PackedBits bits, Result dvalues, int64_t columns) {
  return Guarded([&] {
    const PackedStack stack(nullptr, dvalues->element_count(), bits, columns);
    DifferentiatePacked(pool, x, dy, stack, nullptr, dvalues->typed_data());
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_packed_matmul, PackedMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<PackedBits>()
                                  .Ret<Floats>()
                                  .Attr<bool>("transpose")
                                  .Attr<int64_t>("columns"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_packed_backward, PackedBackward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<PackedBits>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("columns"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_packed_gradient, PackedGradient,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<PackedBits>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("columns"));
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
