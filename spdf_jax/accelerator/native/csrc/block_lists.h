// SPDX-License-Identifier: Apache-2.0
// Block masks: detection, lists of the kept blocks, and their places in memory.
#pragma once
#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace spdf {
namespace {

constexpr int64_t kSide = 32;  // Rows and columns of a block.
constexpr int64_t kBlock = kSide * kSide;

// Where the weights of a block are: its first one, and the stride of its rows.
struct Place {
  int64_t first, stride;
};

// A mask of whole blocks of a matrix, whose size is counted in blocks. The kept
// blocks are numbered along the rows.
struct BlockMask {
  int64_t rows = 0, columns = 0;
  bool packed = false;          // Only the kept weights are in memory.
  std::vector<int32_t> number;  // [rows, columns]; -1 where pruned.
  std::vector<int32_t> starts;  // [rows + 1], first number of every row.

  int64_t Kept() const { return starts[rows]; }
  int64_t Stored() const { return packed ? Kept() : rows * columns; }
  int32_t Number(int64_t r, int64_t c) const { return number[r * columns + c]; }
  Place Find(int64_t r, int64_t c) const {
    if (!packed) return {(r * columns * kSide + c) * kSide, columns * kSide};
    const int64_t before = Number(r, c) - starts[r];
    return {starts[r] * kBlock + before * kSide,
            (starts[r + 1] - starts[r]) * kSide};
  }
};

// Returns whether a mask consists of whole blocks, and lists them: `read(row,
// c)` returns the bits of a row of entries in the c-th column of blocks. Stops
// at the first block that is not whole.
template <typename Read>
bool FindBlocks(const Workers& workers, int64_t inputs, int64_t outputs,
                const Read& read, BlockMask* mask) {
  if (inputs % kSide || outputs % kSide) return false;
  mask->rows = inputs / kSide;
  mask->columns = outputs / kSide;
  mask->number.resize(mask->rows * mask->columns);
  std::atomic<bool> whole{true};
  const auto read_row = [&](int64_t r) {
    int32_t* kept = mask->number.data() + r * mask->columns;
    for (int64_t i = 0; i < kSide && whole; ++i) {
      for (int64_t c = 0; c < mask->columns; ++c) {
        const auto bits = static_cast<int32_t>(read(r * kSide + i, c));
        if (i == 0) kept[c] = bits;
        if (bits != kept[c] || (bits != 0 && bits != -1)) {
          whole = false;
          return;
        }
      }
    }
  };
  // Starts no threads for a mask without blocks.
  read_row(0);
  if (!whole) return false;
  workers.parallel_for(mask->rows - 1, [&](int64_t r) { read_row(r + 1); });
  if (!whole) return false;
  int32_t numbered = 0;
  for (int64_t i = 0; i < mask->rows * mask->columns; ++i) {
    if (i % mask->columns == 0) mask->starts.push_back(numbered);
    mask->number[i] = mask->number[i] ? numbered++ : -1;
  }
  mask->starts.push_back(numbered);
  return true;
}

bool FindBlocks(const Workers& workers, int64_t inputs, int64_t outputs,
                const uint8_t* bytes, BlockMask* mask) {
  const auto read = [&](int64_t row, int64_t c) {
    const __m256i entries = _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(bytes + row * outputs + c * kSide));
    return ~_mm256_movemask_epi8(
        _mm256_cmpeq_epi8(entries, _mm256_setzero_si256()));
  };
  return FindBlocks(workers, inputs, outputs, read, mask);
}

// The same for a packed mask.
bool FindPackedBlocks(const Workers& workers, int64_t inputs, int64_t outputs,
                      const uint8_t* bits, BlockMask* mask) {
  mask->packed = true;
  const auto read = [&](int64_t row, int64_t c) {
    uint32_t entries;
    std::memcpy(&entries, bits + (row * outputs + c * kSide) / 8,
                sizeof entries);
    return entries;
  };
  return FindBlocks(workers, inputs, outputs, read, mask);
}

// The terms of the sums of a product: for every column of blocks, its rows, or
// for every row, its columns.
struct Terms {
  std::vector<int32_t> starts{0};  // First term of every sum, and the end.
  std::vector<int32_t> terms;

  Terms() = default;
  Terms(const BlockMask& mask, bool transpose) {
    const int64_t sums = transpose ? mask.rows : mask.columns;
    const int64_t all = transpose ? mask.columns : mask.rows;
    for (int64_t s = 0; s < sums; ++s) {
      for (int64_t t = 0; t < all; ++t) {
        const int32_t number = transpose ? mask.Number(s, t)
                                         : mask.Number(t, s);
        if (number >= 0) terms.push_back(static_cast<int32_t>(t));
      }
      starts.push_back(static_cast<int32_t>(terms.size()));
    }
  }
};

}  // namespace
}  // namespace spdf
