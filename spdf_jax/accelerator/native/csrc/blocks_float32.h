// SPDX-License-Identifier: Apache-2.0
// Blocks of floats and their products by vectors. Packed, both factors of a
// product are row-major: [32 rows, 32 terms] and [32 terms, 32 columns].
#pragma once
#include <cstdint>
#include <cstring>

#include "block_lists.h"
#include SPDF_SIMD

namespace spdf {
namespace {

using Element = float;
using simd::kWidth;
using simd::Vector;

constexpr int64_t kAhead = 128;  // Prefetch distance of rows.

// A block of 32 rows.
struct Rows {
  alignas(64) float row[kSide][kSide];

  // Loads rows; those beyond the last are zero.
  Rows(const float* from, int64_t stride, int64_t rows) {
    for (int64_t i = 0; i < kSide; ++i) {
      __builtin_prefetch(from + i * stride + kAhead, 0, 2);
      if (i < rows) {
        std::memcpy(row[i], from + i * stride, sizeof row[i]);
      } else {
        std::memset(row[i], 0, sizeof row[i]);
      }
    }
  }
  void Interleave() {}  // Floats are multiplied one by one, not in pairs.
  void Transpose() {
    for (int64_t i = 0; i < kSide; i += kWidth) {
      for (int64_t j = 0; j <= i; j += kWidth) {
        Vector below[kWidth], above[kWidth];
        for (int k = 0; k < kWidth; ++k) {
          below[k] = simd::Load(row[i + k] + j);
          above[k] = simd::Load(row[j + k] + i);
        }
        simd::Transpose(below);
        simd::Transpose(above);
        for (int k = 0; k < kWidth; ++k) {
          simd::Store(row[j + k] + i, below[k]);
          simd::Store(row[i + k] + j, above[k]);
        }
      }
    }
  }
  void Store(float* to) const { std::memcpy(to, row, sizeof row); }
};

void WriteRow(const float* sums, bool past_caches, float* to) {
  if (!past_caches) {
    std::memcpy(to, sums, kSide * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < kSide; i += kWidth) {
    simd::Stream(to + i, simd::Load(sums + i));
  }
}

struct BlockProducts {
  // Computes the sum of the products of n blocks, or adds it to `sums`
  // [32, 32]. The left blocks are those of the indices, or the first n.
  void Add(const float* left, const int32_t* indices, const float* right,
           int64_t n, bool first, float* sums) const {
    constexpr int kVectors = kSide / kWidth;
    constexpr int kRows = kWidth == 16 ? 8 : 2;  // Whose sums fit registers.
    for (int row = 0; row < kSide; row += kRows, sums += kRows * kSide) {
      Vector sum[kRows][kVectors];
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] = first ? simd::Zero()
                            : simd::Load(sums + r * kSide + v * kWidth);
        }
      }
      for (int64_t i = 0; i < n; ++i) {
        const float* rows =
            left + (indices ? indices[i] : i) * kBlock + row * kSide;
        const float* columns = right + i * kBlock;
        for (int term = 0; term < kSide; ++term, columns += kSide) {
          Vector column[kVectors];
          for (int v = 0; v < kVectors; ++v) {
            column[v] = simd::Load(columns + v * kWidth);
          }
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const Vector value = simd::BroadcastLoad(rows + r * kSide + term);
            for (int v = 0; v < kVectors; ++v) {
              sum[r][v] = simd::MultiplyAdd(value, column[v], sum[r][v]);
            }
          }
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          simd::Store(sums + r * kSide + v * kWidth, sum[r][v]);
        }
      }
    }
  }
};

}  // namespace
}  // namespace spdf
