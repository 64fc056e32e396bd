// SPDX-License-Identifier: Apache-2.0
// XLA FFI handlers, which call the kernels on XLA's thread pool.
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <type_traits>

#include "dispatch.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Numbers = ffi::AnyBuffer;  // All float32 or all bfloat16.
using Booleans = ffi::Buffer<ffi::PRED>;
using PackedBits = ffi::Buffer<ffi::U8>;
using Floats = ffi::Buffer<ffi::F32>;
using Indices = ffi::Buffer<ffi::U16>;
using Starts = ffi::Buffer<ffi::S32>;
using Result = ffi::Result<Numbers>;
using spdf::OnPool;

// Returns the kernels of SPDF_NATIVE_KERNELS, or the best ones, or null.
template <typename Element>
const spdf::Kernels<Element>* FindKernels() {
  const char* name = std::getenv("SPDF_NATIVE_KERNELS");
  if (name != nullptr && !spdf::FindKernels<float>(name)) name = nullptr;
  return spdf::FindKernels<Element>(name);
}

template <typename Element>
const spdf::Kernels<Element>& Kernels() {
  static const spdf::Kernels<Element>* kernels = FindKernels<Element>();
  if (kernels == nullptr) throw std::runtime_error("no kernels of this type");
  return *kernels;
}

// The shape of a stack of matrices, that of a mask [*stack, inputs, outputs].
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

template <typename Element>
Element* Data(const Numbers& numbers) {
  return static_cast<Element*>(numbers.untyped_data());
}

// Returns the memory of a result. The allocator maps large results anew at
// every call, and the operating system zeroes each page at its first use, so
// huge pages are requested to reduce the number of page faults.
template <typename Element>
Element* Room(Result& result) {
  Element* data = Data<Element>(*result);
#ifdef MADV_HUGEPAGE
  constexpr size_t kMapped = 32 << 20;  // Largest size that glibc reuses.
  constexpr uintptr_t kPage = 2 << 20;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t end = (begin + result->size_bytes()) / kPage * kPage;
  if (result->size_bytes() >= kMapped) {
    madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
  }
#endif
  return data;
}

template <typename F>
ffi::Error Try(F f) {
  try {
    f();
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

// Calls f with a value of the element type of x.
template <typename F>
ffi::Error ForElements(const Numbers& x, F f) {
  return Try([&] {
    if (x.element_type() == ffi::F32) {
      f(float());
    } else if (x.element_type() == ffi::BF16) {
      f(spdf::Bfloat16());
    } else {
      throw std::invalid_argument("operands are float32 or bfloat16");
    }
  });
}

template <typename Buffer>
uint8_t* Bytes(const Buffer& mask) {
  return static_cast<uint8_t*>(mask.untyped_data());
}

ffi::Error SparseMatmul(ffi::ThreadPool pool, Numbers x, Numbers w,
                        Booleans mask, Result y, bool transpose) {
  return ForElements(x, [&](auto element) {
    using Element = decltype(element);
    const Stack stack(mask);
    const int64_t features = transpose ? stack.outputs : stack.inputs;
    const int64_t results = transpose ? stack.inputs : stack.outputs;
    const int64_t tokens = x.element_count() / (stack.number * features);
    for (int64_t i = 0; i < stack.number; ++i) {
      const spdf::Matrix<Element> matrix = {
          Data<Element>(w) + i * stack.Size(), Bytes(mask) + i * stack.Size(),
          stack.inputs, stack.outputs};
      Kernels<Element>().multiply(
          OnPool(pool), Data<Element>(x) + i * tokens * features, matrix,
          transpose, tokens, Room<Element>(y) + i * tokens * results);
    }
  });
}

ffi::Error Backward(ffi::ThreadPool pool, Numbers x, Numbers dy, Numbers w,
                    Booleans mask, Booleans grad_mask, Result dx, Result dw) {
  return ForElements(x, [&](auto element) {
    using Element = decltype(element);
    const Stack stack(mask);
    const int64_t tokens = x.element_count() / (stack.number * stack.inputs);
    for (int64_t i = 0; i < stack.number; ++i) {
      const spdf::Matrix<Element> matrix = {
          Data<Element>(w) + i * stack.Size(), Bytes(mask) + i * stack.Size(),
          stack.inputs, stack.outputs};
      Kernels<Element>().differentiate(
          OnPool(pool), Data<Element>(x) + i * tokens * stack.inputs,
          Data<Element>(dy) + i * tokens * stack.outputs, matrix,
          Bytes(grad_mask) + i * stack.Size(), tokens,
          Room<Element>(dx) + i * tokens * stack.inputs,
          Room<Element>(dw) + i * stack.Size());
    }
  });
}

ffi::Error SampledMatmul(ffi::ThreadPool pool, Numbers x, Numbers dy,
                         Booleans mask, Result dw) {
  return ForElements(x, [&](auto element) {
    using Element = decltype(element);
    const Stack stack(mask);
    const int64_t tokens = x.element_count() / (stack.number * stack.inputs);
    const spdf::Matrix<Element> matrix = {nullptr, nullptr, stack.inputs,
                                          stack.outputs};
    for (int64_t i = 0; i < stack.number; ++i) {
      Kernels<Element>().differentiate(
          OnPool(pool), Data<Element>(x) + i * tokens * stack.inputs,
          Data<Element>(dy) + i * tokens * stack.outputs, matrix,
          Bytes(mask) + i * stack.Size(), tokens, nullptr,
          Room<Element>(dw) + i * stack.Size());
    }
  });
}

// A stack of packed matrices: bits [*stack, inputs, bytes], values
// [*stack, size].
template <typename Element>
struct PackedStack {
  int64_t number = 1, inputs, outputs, bytes, size;
  const Element* values;
  const uint8_t* bits;

  PackedStack(const Element* values, int64_t count, const PackedBits& bits,
              int64_t columns)
      : outputs(columns), values(values), bits(bits.typed_data()) {
    const auto shape = bits.dimensions();
    inputs = shape[shape.size() - 2];
    bytes = shape[shape.size() - 1];
    for (size_t i = 0; i + 2 < shape.size(); ++i) number *= shape[i];
    size = number ? count / number : 0;
  }
  spdf::Packed<Element> operator[](int64_t i) const {
    return {values ? values + i * size : nullptr, bits + i * inputs * bytes,
            size, inputs, outputs};
  }
};

ffi::Error PackedMatmul(ffi::ThreadPool pool, Numbers x, Numbers values,
                        PackedBits bits, Result y, bool transpose,
                        int64_t columns) {
  return ForElements(x, [&](auto element) {
    using Element = decltype(element);
    const PackedStack<Element> stack(Data<Element>(values),
                                     values.element_count(), bits, columns);
    const int64_t features = transpose ? stack.outputs : stack.inputs;
    const int64_t results = transpose ? stack.inputs : stack.outputs;
    const int64_t tokens = x.element_count() / (stack.number * features);
    for (int64_t i = 0; i < stack.number; ++i) {
      Kernels<Element>().multiply_packed(
          OnPool(pool), Data<Element>(x) + i * tokens * features, stack[i],
          transpose, tokens, Room<Element>(y) + i * tokens * results);
    }
  });
}

// If dx is null, only the gradient of the values is computed.
template <typename Element>
void DifferentiatePacked(ffi::ThreadPool& pool, const Numbers& x,
                         const Numbers& dy, const PackedStack<Element>& stack,
                         Element* dx, Element* dvalues) {
  const int64_t tokens = x.element_count() / (stack.number * stack.inputs);
  for (int64_t i = 0; i < stack.number; ++i) {
    Kernels<Element>().differentiate_packed(
        OnPool(pool), Data<Element>(x) + i * tokens * stack.inputs,
        Data<Element>(dy) + i * tokens * stack.outputs, stack[i], tokens,
        dx ? dx + i * tokens * stack.inputs : nullptr,
        dvalues + i * stack.size);
  }
}

ffi::Error PackedBackward(ffi::ThreadPool pool, Numbers x, Numbers dy,
                          Numbers values, PackedBits bits, Result dx,
                          Result dvalues, int64_t columns) {
  return ForElements(x, [&](auto element) {
    using Element = decltype(element);
    const PackedStack<Element> stack(Data<Element>(values),
                                     values.element_count(), bits, columns);
    DifferentiatePacked(pool, x, dy, stack, Room<Element>(dx),
                        Room<Element>(dvalues));
  });
}

ffi::Error PackedGradient(ffi::ThreadPool pool, Numbers x, Numbers dy,
                          PackedBits bits, Result dvalues, int64_t columns) {
  return ForElements(x, [&](auto element) {
    using Element = decltype(element);
    const PackedStack<Element> stack(nullptr, dvalues->element_count(), bits,
                                     columns);
    DifferentiatePacked<Element>(pool, x, dy, stack, nullptr,
                                 Room<Element>(dvalues));
  });
}

template <typename Value, typename F>
void MultiplyListed(ffi::ThreadPool& pool, const Floats& x,
                    const Numbers& values, const Indices& indices,
                    const Starts& starts, ffi::Result<Floats>& y, F multiply) {
  const auto shape = x.dimensions();
  const int64_t inputs = shape[shape.size() - 1];
  const int64_t outputs = starts.element_count() - 1;
  const spdf::ListedMatrix<Value> w = {
      Data<Value>(values), indices.typed_data(), starts.typed_data(),
      static_cast<int64_t>(values.element_count()), inputs, outputs};
  multiply(OnPool(pool), x.typed_data(), w, x.element_count() / inputs,
           y->typed_data());
}

ffi::Error ListedMatmul(ffi::ThreadPool pool, Floats x, Numbers values,
                        Indices indices, Starts starts,
                        ffi::Result<Floats> y) {
  return ForElements(values, [&](auto value) {
    using Value = decltype(value);
    const auto& kernels = Kernels<float>();
    if constexpr (std::is_same_v<Value, float>) {
      MultiplyListed<Value>(pool, x, values, indices, starts, y,
                            kernels.multiply_listed);
    } else {
      MultiplyListed<Value>(pool, x, values, indices, starts, y,
                            kernels.multiply_listed_bfloat16);
    }
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_packed_matmul, PackedMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<PackedBits>()
                                  .Ret<Numbers>()
                                  .Attr<bool>("transpose")
                                  .Attr<int64_t>("columns"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_packed_backward, PackedBackward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<PackedBits>()
                                  .Ret<Numbers>()
                                  .Ret<Numbers>()
                                  .Attr<int64_t>("columns"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_packed_gradient, PackedGradient,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<PackedBits>()
                                  .Ret<Numbers>()
                                  .Attr<int64_t>("columns"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_listed_matmul, ListedMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Numbers>()
                                  .Arg<Indices>()
                                  .Arg<Starts>()
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_sparse_matmul, SparseMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Booleans>()
                                  .Ret<Numbers>()
                                  .Attr<bool>("transpose"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_sparse_matmul_backward, Backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Booleans>()
                                  .Arg<Booleans>()
                                  .Ret<Numbers>()
                                  .Ret<Numbers>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(spdf_sampled_matmul, SampledMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Booleans>()
                                  .Ret<Numbers>());

extern "C" const char* spdf_kernels() { return Kernels<float>().name; }

// Returns null if there are no kernels for bfloat16.
extern "C" const char* spdf_bfloat16_kernels() {
  const auto* kernels = FindKernels<spdf::Bfloat16>();
  return kernels ? kernels->name : nullptr;
}

extern "C" const char* spdf_matrix_unit() { return spdf::MatrixUnit(); }
