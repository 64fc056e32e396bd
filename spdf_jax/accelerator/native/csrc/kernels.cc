// The products and the choice of masks, compiled once for every set of
// instructions: SPDF_KERNELS names the result, SPDF_SIMD the header of its
// vectors and SPDF_ELEMENT that of what they multiply.
//
// A weight that is kept adds a multiple of one row of tokens to another. Tokens
// are therefore laid out feature by feature, in tiles of as many tokens as
// registers hold, and weights as lists, ordered such that what they read next
// is in cache.
#include "kernels.h"

#include <algorithm>
#include <cstring>

#include "differentiate.h"
#include "multiply.h"
#include "packed_lists.h"
#include "topk.h"

namespace spdf {
namespace {

void Multiply(const Workers& workers, const Element* x,
              const Matrix<Element>& w, bool transpose, int64_t tokens,
              Element* y) {
  MultiplyListed(workers, x, transpose ? w.outputs : w.inputs,
                 transpose ? w.inputs : w.outputs,
                 IsSparse(w.mask, w.inputs * w.outputs), tokens, y,
                 [&](const Lists& lists, int64_t region) {
                   if (transpose) {
                     ListRows(lists, region, w.weights, w.mask, nullptr);
                   } else {
                     ListColumns(lists, region, w.weights, w.mask);
                   }
                 });
}

void MultiplyPacked(const Workers& workers, const Element* x,
                    const Packed<Element>& w, bool transpose, int64_t tokens,
                    Element* y) {
  const Ranked ranked(w);
  MultiplyListed(workers, x, transpose ? w.outputs : w.inputs,
                 transpose ? w.inputs : w.outputs, ranked.IsSparse(), tokens, y,
                 [&](const Lists& lists, int64_t region) {
                   (transpose ? ListPackedRows : ListPackedColumns)(
                       lists, region, ranked);
                 });
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
  DifferentiateListed<kWithDx>(
      workers, x, dy, w.inputs, w.outputs, IsSparse(grad_mask, size), tokens,
      dx,
      [&](const Lists& lists, int64_t region) {
        ListRows(lists, region, w.weights, kWithDx ? w.mask : nullptr,
                 same ? nullptr : grad_mask);
      },
      [&](const Lists& lists, int64_t region, const float* sums,
          int64_t copies, int64_t copy) {
        Scatter(lists, region, sums, copies, copy, same ? nullptr : grad_mask,
                dw);
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
  const Ranked ranked(w);
  std::fill(dvalues + (tokens ? ranked.Kept() : 0), dvalues + w.size,
            Element());
  if (tokens == 0) return;
  const auto list = [&](const Lists& lists, int64_t region) {
    ListPackedRows(lists, region, ranked);
  };
  const auto write = [&](const Lists& lists, int64_t region, const float* sums,
                         int64_t copies, int64_t copy) {
    WritePacked(lists, region, sums, copies, copy, ranked, dvalues);
  };
  (dx ? DifferentiateListed<true, decltype(list), decltype(write)>
      : DifferentiateListed<false, decltype(list), decltype(write)>)(
      workers, x, dy, w.inputs, w.outputs, ranked.IsSparse(), tokens, dx, list,
      write);
}

}  // namespace

extern const Kernels<Element> SPDF_KERNELS;
const Kernels<Element> SPDF_KERNELS = {SPDF_NAME, Multiply, Differentiate,
                                       MultiplyPacked, DifferentiatePacked,
                                       Select};

}  // namespace spdf
