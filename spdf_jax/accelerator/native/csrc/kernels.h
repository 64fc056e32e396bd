// SPDX-License-Identifier: Apache-2.0
// Interface of the sparse matrix products, for one instruction set.
#pragma once
#include <cstdint>
#include <functional>

namespace spdf {

// Calls f(0) ... f(n - 1) in any order, possibly concurrently.
using ParallelFor =
    std::function<void(int64_t n, const std::function<void(int64_t)>& f)>;

struct Workers {
  int64_t number;
  ParallelFor parallel_for;
};

// A bfloat16: the upper half of a float.
struct Bfloat16 {
  uint16_t bits;
};

// A masked matrix; weights off the mask do not affect results.
template <typename Element>
struct Matrix {
  const Element* weights;  // [inputs, outputs]
  const uint8_t* mask;     // [inputs, outputs], nonzero where a weight is kept.
  int64_t inputs;
  int64_t outputs;
};

// A matrix stored as the values of its kept entries and the bits of its mask.
template <typename Element>
struct Packed {
  const Element* values;  // [size], in row-major order.
  const uint8_t* bits;    // [inputs, ceil(outputs / 8)], the lowest bit first.
  int64_t size;           // Values after those of kept entries are not read.
  int64_t inputs;
  int64_t outputs;
};

// A matrix stored as lists of its kept entries, by output.
template <typename Value>
struct ListedMatrix {
  const Value* values;      // [size]
  const uint16_t* indices;  // [size], inputs of the values; below `inputs`.
  const int32_t* starts;    // [outputs + 1], first entry of every output.
  int64_t size;             // At least 8 more than the end of the last list.
  int64_t inputs;
  int64_t outputs;
};

// Kernels for one type of elements. Sums are floats; results are rounded once.
template <typename Element>
struct Kernels {
  const char* name;

  // y[tokens, outputs] = x[tokens, inputs] @ (mask * weights), or
  // y[tokens, inputs] = x[tokens, outputs] @ (mask * weights)^T.
  void (*multiply)(const Workers& workers, const Element* x,
                   const Matrix<Element>& w, bool transpose, int64_t tokens,
                   Element* y);

  // dx = dy @ (mask * weights)^T; dw = grad_mask * (x^T @ dy), zero elsewhere.
  // If dx is null, it is not computed, and weights and mask are not read.
  void (*differentiate)(const Workers& workers, const Element* x,
                        const Element* dy, const Matrix<Element>& w,
                        const uint8_t* grad_mask, int64_t tokens, Element* dx,
                        Element* dw);

  // The same for a packed matrix; dvalues[size] is padded with zeros. Throws
  // std::length_error if more than `size` entries are kept.
  void (*multiply_packed)(const Workers& workers, const Element* x,
                          const Packed<Element>& w, bool transpose,
                          int64_t tokens, Element* y);
  void (*differentiate_packed)(const Workers& workers, const Element* x,
                               const Element* dy, const Packed<Element>& w,
                               int64_t tokens, Element* dx, Element* dvalues);

  // y[tokens, outputs] = x[tokens, inputs] @ w, of floats whatever the type of
  // elements. Throws std::length_error if the starts are invalid.
  void (*multiply_listed)(const Workers& workers, const float* x,
                          const ListedMatrix<float>& w, int64_t tokens,
                          float* y);
  void (*multiply_listed_bfloat16)(const Workers& workers, const float* x,
                                   const ListedMatrix<Bfloat16>& w,
                                   int64_t tokens, float* y);
};

extern const Kernels<float> kPortable;
#if defined(__x86_64__)
extern const Kernels<float> kAvx2;
extern const Kernels<float> kAvx512;
// Those that multiply block masks by blocks, and leave others to the above.
extern const Kernels<float> kAvx2blocks;
extern const Kernels<float> kAvx512blocks;
// Weak, because it is missing if the compiler does not support AVX-512 BF16.
extern const Kernels<Bfloat16> kAvx512bf16 __attribute__((weak));
// Those of block masks, by vectors and by the tiles of AMX; weak likewise.
extern const Kernels<Bfloat16> kAvx512bf16blocks __attribute__((weak));
extern const Kernels<Bfloat16> kAmx __attribute__((weak));
#endif

}  // namespace spdf
