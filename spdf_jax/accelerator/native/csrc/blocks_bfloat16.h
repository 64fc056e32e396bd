// SPDX-License-Identifier: Apache-2.0
// Blocks of bfloat16. Packed, the left factor of a product is [32 rows,
// 32 terms], the right one [2 halves of the columns, 16 pairs of terms,
// 16 columns, 2].
#pragma once
#include <cstdint>
#include <cstring>

#include "block_lists.h"
#include SPDF_SIMD

namespace spdf {
namespace {

using Element = Bfloat16;
using simd::Pairs;

constexpr int64_t kAhead = 256;  // Prefetch distance of rows.

// A block of 32 rows in registers.
struct Rows {
  Pairs row[kSide];

  Rows() = default;
  // Loads rows; those beyond the last are zero.
  Rows(const Element* from, int64_t stride, int64_t rows) {
    for (int64_t i = 0; i < kSide; ++i) {
      __builtin_prefetch(from + i * stride + kAhead, 0, 2);
      row[i] = i < rows ? _mm512_loadu_si512(from + i * stride)
                        : simd::NoPairs();
    }
  }
  // Pairs rows: [2 halves of the columns, 16 pairs of rows, 16 columns, 2].
  void Interleave() {
    alignas(64) uint16_t order[2][kSide];
    for (int i = 0; i < kSide; ++i) {
      order[0][i] = static_cast<uint16_t>(i / 2 + i % 2 * kSide);
      order[1][i] = order[0][i] + kSide / 2;
    }
    Rows pairs;
    for (int h = 0; h < 2; ++h) {
      const Pairs from = _mm512_load_si512(order[h]);
      for (int i = 0; i < kSide / 2; ++i) {
        pairs.row[h * kSide / 2 + i] =
            _mm512_permutex2var_epi16(row[2 * i], from, row[2 * i + 1]);
      }
    }
    *this = pairs;
  }
  // Transposes both halves of the rows, pair by pair.
  void Transpose() {
    simd::TransposePairs(row);
    simd::TransposePairs(row + kSide / 2);
  }
  void Store(Element* to) const { std::memcpy(to, row, sizeof row); }
};

// Rounds the sums of a row of a block and writes them.
void WriteRow(const float* sums, bool past_caches, Element* to) {
  const Pairs row =
      simd::Round(simd::Load(sums), simd::Load(sums + simd::kWidth));
  if (past_caches) {
    simd::StreamPairs(to, row);
  } else {
    _mm512_storeu_si512(to, row);
  }
}

}  // namespace
}  // namespace spdf
