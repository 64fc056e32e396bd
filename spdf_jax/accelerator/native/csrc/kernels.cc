// SPDX-License-Identifier: Apache-2.0
// The products, compiled once for every instruction set: SPDF_KERNELS is the
// name of the resulting variable, SPDF_SIMD the header of its vectors and
// SPDF_ELEMENT the header of its element type.
//
// A kept weight adds a multiple of one feature of all tokens to another
// feature. Tokens are therefore transposed to rows of features, in tiles of as
// many tokens as fit into registers, and weights are listed in an order that
// keeps the rows to be read in cache.
#include "kernels.h"

#include <algorithm>
#include <cstring>

#include "differentiate.h"
#include "listed.h"
#include "multiply.h"
#include "packed_lists.h"

namespace spdf {
namespace {

void Multiply(const Workers& workers, const Element* x,
              const Matrix<Element>& w, bool transpose, int64_t tokens,
              Element* y) {
  const Masked matrix = {w.weights, w.mask, nullptr, w.inputs, w.outputs};
  MultiplyListed(workers, x, matrix, transpose, tokens, y);
}

void MultiplyPacked(const Workers& workers, const Element* x,
                    const Packed<Element>& w, bool transpose, int64_t tokens,
                    Element* y) {
  MultiplyListed(workers, x, Ranked(w), transpose, tokens, y);
}

template <bool kWithDx>
void DifferentiateAll(const Workers& workers, const Element* x,
                      const Element* dy, const Matrix<Element>& w,
                      const uint8_t* grad_mask, int64_t tokens, Element* dx,
                      Element* dw) {
  const int64_t size = w.inputs * w.outputs;
  if (tokens == 0) {
    std::memset(dw, 0, size * sizeof(Element));
    return;
  }
  const bool same = kWithDx && (w.mask == grad_mask ||
                                !std::memcmp(w.mask, grad_mask, size));
  const uint8_t* only = same ? nullptr : grad_mask;
  const Masked matrix = {w.weights, kWithDx ? w.mask : nullptr, only, w.inputs,
                         w.outputs};
  DifferentiateListed<kWithDx>(
      workers, x, dy, matrix, tokens, dx,
      [&](const Lists& lists, int64_t region, const float* sums,
          int64_t copies, int64_t copy) {
        Scatter(lists, region, sums, copies, copy, only, dw);
      });
}

void Differentiate(const Workers& workers, const Element* x, const Element* dy,
                   const Matrix<Element>& w, const uint8_t* grad_mask,
                   int64_t tokens, Element* dx, Element* dw) {
  (dx ? DifferentiateAll<true> : DifferentiateAll<false>)(
      workers, x, dy, w, grad_mask, tokens, dx, dw);
}

void DifferentiatePacked(const Workers& workers, const Element* x,
                         const Element* dy, const Packed<Element>& w,
                         int64_t tokens, Element* dx, Element* dvalues) {
  const Ranked matrix(w);
  std::fill(dvalues + (tokens ? matrix.Kept() : 0), dvalues + w.size,
            Element());
  if (tokens == 0) return;
  const auto write = [&](const Lists& lists, int64_t region, const float* sums,
                         int64_t copies, int64_t copy) {
    WritePacked(lists, region, sums, copies, copy, matrix, dvalues);
  };
  (dx ? DifferentiateListed<true, Ranked, decltype(write)>
      : DifferentiateListed<false, Ranked, decltype(write)>)(
      workers, x, dy, matrix, tokens, dx, write);
}

}  // namespace

extern const Kernels<Element> SPDF_KERNELS;
const Kernels<Element> SPDF_KERNELS = {SPDF_NAME, Multiply, Differentiate,
                                       MultiplyPacked, DifferentiatePacked,
                                       MultiplyListedMatrix<float>,
                                       MultiplyListedMatrix<Bfloat16>};

}  // namespace spdf
