// Sparse matrix products over kept weights, for one processor's instructions.
#pragma once
#include <cstdint>
#include <functional>

namespace spdf {

// Calls f(0) ... f(n - 1), in any order, some at the same time.
using ParallelFor =
    std::function<void(int64_t n, const std::function<void(int64_t)>& f)>;

struct Workers {
  int64_t number;
  ParallelFor parallel_for;
};

// The upper half of a float.
struct Bfloat16 {
  uint16_t bits;
};

// A matrix of which the entries off the mask are never read into a product.
template <typename Element>
struct Matrix {
  const Element* weights;  // [inputs, outputs]
  const uint8_t* mask;   // Of that shape; not zero: kept.
  int64_t inputs;
  int64_t outputs;
};

// A matrix of which only what is kept is stored.
template <typename Element>
struct Packed {
  const Element* values;  // Of the kept entries, row by row.
  const uint8_t* bits;  // [inputs, ceil(outputs / 8)], the lowest bit first.
  int64_t size;         // Room for values; those after the last one are unread.
  int64_t inputs;
  int64_t outputs;
};

// Sums are floats, whatever the elements; results are rounded once.
template <typename Element>
struct Kernels {
  const char* name;

  // y[tokens, outputs] = x[tokens, inputs] @ (mask * weights), or
  // y[tokens, inputs] = x[tokens, outputs] @ (mask * weights)^T.
  void (*multiply)(const Workers& workers, const Element* x,
                   const Matrix<Element>& w, bool transpose, int64_t tokens,
                   Element* y);

  // dx = dy @ (mask * weights)^T; dw = grad_mask * (x^T @ dy), zero elsewhere.
  // Without dx (a null pointer) weights and mask are not read.
  void (*differentiate)(const Workers& workers, const Element* x,
                        const Element* dy, const Matrix<Element>& w,
                        const uint8_t* grad_mask, int64_t tokens, Element* dx,
                        Element* dw);

  // The same of a packed matrix; dvalues[size] is zero after the last value.
  // Throws where more is kept than there is room for.
  void (*multiply_packed)(const Workers& workers, const Element* x,
                          const Packed<Element>& w, bool transpose,
                          int64_t tokens, Element* y);
  void (*differentiate_packed)(const Workers& workers, const Element* x,
                               const Element* dy, const Packed<Element>& w,
                               int64_t tokens, Element* dx, Element* dvalues);
};

extern const Kernels<float> kPortable;
#if defined(__x86_64__)
extern const Kernels<float> kAvx2;
extern const Kernels<float> kAvx512;
// Not there where the compiler does not know the instructions.
extern const Kernels<Bfloat16> kAvx512bf16 __attribute__((weak));
#endif

}  // namespace spdf
