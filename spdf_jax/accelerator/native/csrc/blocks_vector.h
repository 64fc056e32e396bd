// SPDX-License-Identifier: Apache-2.0
// Products of blocks by vectors of pairs of bfloat16.
#pragma once
#include <cstring>

#include "blocks_bfloat16.h"

namespace spdf {
namespace {

struct BlockProducts {
  // Computes the sum of the products of n blocks, or adds it to `sums`
  // [32, 32]. The left blocks are those of the indices, or the first n.
  void Add(const Bfloat16* left, const int32_t* indices, const Bfloat16* right,
           int64_t n, bool first, float* sums) const {
    constexpr int kRows = 8;  // Rows whose sums stay in registers.
    for (int row = 0; row < kSide; row += kRows, sums += kRows * kSide) {
      simd::Vector sum[kRows][2];
      for (int r = 0; r < kRows; ++r) {
        for (int h = 0; h < 2; ++h) {
          sum[r][h] = first ? simd::Zero()
                            : simd::Load(sums + r * kSide + h * simd::kWidth);
        }
      }
      for (int64_t i = 0; i < n; ++i) {
        const Bfloat16* rows =
            left + (indices ? indices[i] : i) * kBlock + row * kSide;
        const Bfloat16* columns = right + i * kBlock;
        for (int pair = 0; pair < kSide / 2; ++pair) {
          const auto low = simd::LoadPairs(columns + pair * kSide);
          const auto high =
              simd::LoadPairs(columns + kBlock / 2 + pair * kSide);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            int32_t bits;
            std::memcpy(&bits, rows + r * kSide + 2 * pair, sizeof bits);
            const auto value = _mm512_set1_epi32(bits);
            sum[r][0] = simd::AddProducts(value, low, sum[r][0]);
            sum[r][1] = simd::AddProducts(value, high, sum[r][1]);
          }
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int h = 0; h < 2; ++h) {
          simd::Store(sums + r * kSide + h * simd::kWidth, sum[r][h]);
        }
      }
    }
  }
};

}  // namespace
}  // namespace spdf
