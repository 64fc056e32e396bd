// SPDX-License-Identifier: Apache-2.0
// Gradients of weights, written from the sums of list entries.
#pragma once
#include <algorithm>
#include <cstdint>

#include "packed_lists.h"

namespace spdf {
namespace {

// Writes the rows of dw of a region: the sums of its entries over `copies`
// partial sums, and zero elsewhere. `only`, if not null, masks the entries.
void Scatter(const Lists& lists, int64_t region, const float* sums,
             int64_t copies, int64_t copy, const uint8_t* only, Element* dw) {
  const int64_t first = region * kRegionOutputs;
  const int64_t outputs = lists.End(region) - first;
  for (int64_t b = 0; b < lists.Blocks(); ++b) {
    const uint16_t* indices = lists.Indices(region, b);
    const uint32_t* starts = lists.Starts(region, b);
    const float* listed = sums + lists.First(region, b);
    const int64_t begin = b * lists.block;
    const int64_t terms = std::min(lists.block, lists.terms - begin);
    for (int64_t o = 0; o < outputs; ++o, ++starts) {
      const int64_t at = (first + o) * lists.terms + begin;
      alignas(64) float row[kMostTerms] = {0};
      const uint32_t end = lists.EndOf(starts[0], starts[1], indices);
      for (uint32_t p = starts[0]; p < end; ++p) {
        if (only && !only[at + indices[p]]) continue;
        float sum = listed[p];
        for (int64_t i = 1; i < copies; ++i) sum += listed[i * copy + p];
        row[indices[p]] = sum;
      }
      CopyPastCaches(row, terms, dw + at);
    }
  }
  simd::Fence();
}

// Writes the gradients of the values in the rows of a region.
void WritePacked(const Lists& lists, int64_t region, const float* sums,
                 int64_t copies, int64_t copy, const Ranked& w,
                 Element* dvalues) {
  const int64_t first = region * kRegionOutputs;
  const int64_t outputs = lists.End(region) - first;
  int64_t ranks[kRegionOutputs];
  for (int64_t o = 0; o < outputs; ++o) ranks[o] = w.Rank(first + o, 0);
  for (int64_t b = 0; b < lists.Blocks(); ++b) {
    const uint16_t* indices = lists.Indices(region, b);
    const uint32_t* starts = lists.Starts(region, b);
    const float* listed = sums + lists.First(region, b);
    for (int64_t o = 0; o < outputs; ++o, ++starts) {
      const uint32_t end = lists.EndOf(starts[0], starts[1], indices);
      Element* to = dvalues + ranks[o];
      for (int64_t p = starts[0]; p < end; p += kWidth) {
        const int n = static_cast<int>(std::min<int64_t>(kWidth, end - p));
        Vector sum = simd::LoadFirst(listed + p, n);
        for (int64_t i = 1; i < copies; ++i) {
          sum = simd::Add(sum, simd::LoadFirst(listed + i * copy + p, n));
        }
        simd::StoreFirst(to, sum, n);
        to += n;
      }
      ranks[o] += end - starts[0];
    }
  }
}

}  // namespace
}  // namespace spdf
